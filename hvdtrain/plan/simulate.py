"""A scenario to its outcome."""

import math

from hvdtrain.plan.layout import FINE, Detail
from hvdtrain.plan.ring import RingJob
from hvdtrain.plan.scenario import Outcome, Scenario
from hvdtrain.plan.servers import ServerJob

STEPS, STEPS_ASYNCHRONOUS, MOST_STEPS = 3, 4, 12
STEPS_STRAGGLERS = 20  # where workers are slow at random
BUCKETS = 100  # in all steps together: which of several is next on a link is drawn, and of few it would show


def simulate(scenario: Scenario, steps: int = 0, seed: int = 0, detail: Detail = FINE) -> Outcome:
    """Simulate so many steps, or enough of them. The same arguments give the same outcome."""
    steps = steps or _enough_steps(scenario)
    of_mode = f"{seed} {scenario.mode}"  # what is slow at random in one mode is not in another
    if scenario.servers:
        return ServerJob(scenario, steps, of_mode, detail).run()
    return RingJob(scenario, steps, of_mode).run()


def _enough_steps(scenario: Scenario) -> int:
    if scenario.slow.random_share:
        return STEPS_STRAGGLERS if scenario.servers else 2 * STEPS_STRAGGLERS  # rings cost little
    if not scenario.servers:
        return STEPS
    if scenario.mode != "ps-sync":
        return STEPS_ASYNCHRONOUS
    buckets = max(scenario.servers, scenario.bytes / scenario.bucket_bytes)
    return max(STEPS, min(MOST_STEPS, math.ceil(BUCKETS / buckets)))
