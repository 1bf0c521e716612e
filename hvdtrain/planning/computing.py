"""What workers compute, and how much longer than usual: jitter, and workers that are slow at random."""

import math
import random
from functools import partial
from statistics import NormalDist

from hvdtrain.planning.engine import Clock, Processors, Wait
from hvdtrain.planning.scenario import Scenario


class Computing:
    """Computing of workers that are alike, on the cores of their hosts or on GPUs.

    Args:
        times: how many workers.
        among: how many workers wait for the slowest of them, whose pace it is.

    Attributes:
        pace: a factor of all computing.
    """

    def __init__(
        self, scenario: Scenario, clock: Clock, cores: Processors, times: int, draw: random.Random, among: int
    ) -> None:
        self.scenario, self.clock, self.cores, self.times = scenario, clock, cores, times
        self.draw, self.among = draw, among
        self.pace = 1.0
        self.due = draw.random()  # slow steps

    def begin_step(self, factor: float) -> None:
        """Draw the pace of a step of workers that are slower than others by a factor.

        Jitter is lognormal. Steps that are slow at random come evenly from the drawn first one on, so that a few steps
        have their share of them.
        """
        jitter, slow = self.scenario.jitter, self.scenario.slow
        slowest = (self.draw.random() or 0.5) ** (1 / self.among)
        normal = NormalDist().inv_cdf(min(max(slowest, 1e-9), 1 - 1e-9))
        self.pace = factor * math.exp(jitter * normal)
        self.due += 1 - (1 - slow.random_share) ** self.among
        if self.due >= 1:
            self.due -= 1
            self.pace *= slow.random_factor

    def __call__(self, seconds: float) -> Wait:
        """So many seconds at the usual pace."""
        if self.scenario.on_processor:
            return partial(self.cores.work, seconds * self.pace, self.times * self.scenario.threads)
        return partial(self.clock.after, seconds * self.pace)
