"""A scenario to its outcome."""

import math

from hvdtrain.planning.layout import FINE, Detail
from hvdtrain.planning.ring import Ring
from hvdtrain.planning.scenario import BUCKET_BYTES, Outcome, Scenario
from hvdtrain.planning.servers import Servers

STEPS, STEPS_ASYNCHRONOUS, STEPS_RING = 3, 4, 10  # rings cost little
STEPS_STRAGGLERS = 40  # where workers are slow at random: a seed moves a prediction by 5 % at most
BUCKETS = 100  # in all steps together: which of several is next on a link is drawn, and of few it would show


def simulate(scenario: Scenario, steps: int = 0, seed: int = 0, detail: Detail = FINE) -> Outcome:
    """Simulate so many steps, or enough of them. The same arguments give the same outcome."""
    of_mode = f"{seed} {scenario.mode}"  # what is slow at random in one mode is not in another
    if not scenario.servers:
        enough = 2 * STEPS_STRAGGLERS if scenario.slow.random_share else STEPS_RING
        return Ring(scenario, steps or enough, of_mode, detail).run()
    buckets = max(scenario.servers, scenario.bytes / BUCKET_BYTES)
    enough = max(STEPS, min(detail.steps, math.ceil(BUCKETS / buckets)))
    if not scenario.in_lockstep:
        enough = STEPS_ASYNCHRONOUS
    if scenario.slow.random_share:
        enough = STEPS_STRAGGLERS
    return Servers(scenario, steps or enough, of_mode, detail).run()
