"""A scenario to its outcome."""

from hvdtrain.plan.ring import RingJob
from hvdtrain.plan.scenario import SERVER_MODES, Outcome, Scenario
from hvdtrain.plan.servers import MOST_PIECES, ServerJob

STEPS = 3


def make_job(
    scenario: Scenario, steps: int = STEPS, seed: int = 0, most_pieces: int = MOST_PIECES, trace: bool = False
) -> RingJob | ServerJob:
    """What simulates it. The same arguments give the same outcome."""
    if scenario.mode in SERVER_MODES:
        return ServerJob(scenario, steps, seed, most_pieces, trace)
    return RingJob(scenario, steps, seed, trace)


def simulate(scenario: Scenario, steps: int = STEPS, seed: int = 0, most_pieces: int = MOST_PIECES) -> Outcome:
    return make_job(scenario, steps, seed, most_pieces).run()
