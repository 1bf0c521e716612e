"""How much longer than usual computing takes: jitter, and workers that are slow at random."""

import math
import random
from statistics import NormalDist

from hvdtrain.plan.scenario import Scenario


class Pace:
    """A factor of computing for each step: of the slowest of so many workers. Jitter is lognormal and drawn. Steps that
    are slow at random come evenly from the drawn first one on, so that a few steps have their share of them.
    """

    def __init__(self, scenario: Scenario, draw: random.Random, workers: int) -> None:
        self.jitter, self.slow, self.draw, self.workers = scenario.jitter, scenario.slow, draw, workers
        self.due = draw.random()  # slow steps

    def next(self) -> float:
        slowest = (self.draw.random() or 0.5) ** (1 / self.workers)
        pace = math.exp(self.jitter * NormalDist().inv_cdf(min(max(slowest, 1e-9), 1 - 1e-9))) if self.jitter else 1.0
        self.due += 1 - (1 - self.slow.random_share) ** self.workers
        if self.due < 1:
            return pace
        self.due -= 1
        return pace * self.slow.random_factor
