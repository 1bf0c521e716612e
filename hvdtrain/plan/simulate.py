"""A scenario to its outcome."""

from hvdtrain.plan.layout import FINE, Detail
from hvdtrain.plan.ring import RingJob
from hvdtrain.plan.scenario import SERVER_MODES, Outcome, Scenario
from hvdtrain.plan.servers import ServerJob

STEPS = 3


def make_job(
    scenario: Scenario, steps: int = STEPS, seed: int = 0, detail: Detail = FINE, trace: bool = False
) -> RingJob | ServerJob:
    """What simulates it. The same arguments give the same outcome."""
    if scenario.mode in SERVER_MODES:
        return ServerJob(scenario, steps, seed, detail, trace)
    return RingJob(scenario, steps, seed, trace)


def simulate(scenario: Scenario, steps: int = STEPS, seed: int = 0, detail: Detail = FINE) -> Outcome:
    return make_job(scenario, steps, seed, detail).run()
