"""Workers that are made slow on purpose: what `--slow` means, and when a worker sleeps how long.

A worker that is to compute f times as long sleeps (f - 1) times what it has just computed, between forward and
backward: exact, seeded, and its core is free for the others meanwhile, so that a few cores can stand for many machines.
Its gradients come late, as those of a slow machine do; the threads that carry its messages stay as fast as they were.
"""

import math
import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass

from hvdtrain.errors import UsageError

FORMS = (
    "1:4x (worker 1 computes four times as long), all:4x (every worker does), 1:4x@20s-40s, 1:4x@step200-400, "
    "random:6x:p=0.1 (any worker at any step), jitter:lognormal:0.2, several joined by +, or none"
)
NUMBER = r"([0-9]+(?:\.[0-9]+)?|\.[0-9]+)"
MOST_TIMES = 1000  # as slow: the others would give up waiting
MOST_SIGMA = 2.0  # a draw is hardly ever beyond three times this: e to the 6 is 400 times as slow


@dataclass(frozen=True)
class Rule:
    """One of the terms of --slow.

    Attributes:
        worker: the one that it is about, or None: all.
        factor: how many times as long computing takes where the rule holds.
        probability: with which it holds at a step.
        seconds, steps: from when to when it holds: seconds of training, steps of the job, the first one included.
        sigma: of a factor that is e to the |z| sigma, with z normal: never below 1, since nobody can be made faster.
    """

    worker: int | None = None
    factor: float = 1.0
    probability: float = 1.0
    seconds: tuple[float, float] = (0, math.inf)
    steps: tuple[int, float] = (0, math.inf)
    sigma: float = 0.0

    @property
    def slows_all(self) -> bool:
        """Whether it makes every worker as slow as every other, all the time."""
        return self == Rule(factor=self.factor)


def parse(text: str) -> list[Rule]:
    """The rules of a value of --slow; none of `none`.

    Raises:
        UsageError: it has none of the FORMS, or a factor is below 1.
    """
    return [] if text in ("", "none") else [_parse_term(term.strip(), text) for term in text.split("+")]


def _parse_term(term: str, text: str) -> Rule:
    rule = None
    if match := re.fullmatch(rf"([0-9]+|all):{NUMBER}x(?:@{NUMBER}s-{NUMBER}s|@step([0-9]+)-([0-9]+))?", term):
        worker, factor, begin_s, end_s, first, last = match.groups()
        rule = Rule(
            None if worker == "all" else int(worker), float(factor),
            seconds=(float(begin_s), float(end_s)) if begin_s else Rule.seconds,
            steps=(int(first), int(last)) if first else Rule.steps,
        )  # fmt: skip
    elif match := re.fullmatch(rf"random:{NUMBER}x:p={NUMBER}", term):
        rule = Rule(factor=float(match[1]), probability=float(match[2]))
    elif match := re.fullmatch(rf"jitter:lognormal:{NUMBER}", term):
        rule = Rule(sigma=float(match[1]))
    if rule is None:
        raise UsageError(f"--slow {text}: '{term}' is none of {FORMS}")
    if rule.factor < 1:
        raise UsageError(f"--slow {text}: a factor below 1 would make a worker faster than it is; 1x is its own speed")
    if rule.factor > MOST_TIMES or rule.sigma > MOST_SIGMA:
        raise UsageError(
            f"--slow {text}: '{term}' is more than a factor of {MOST_TIMES}, or a jitter of {MOST_SIGMA:g}"
        )
    if rule.probability > 1:
        raise UsageError(f"--slow {text}: p={rule.probability:g} is not a probability, from 0 to 1")
    if rule.seconds[0] >= rule.seconds[1] or rule.steps[0] > rule.steps[1] or rule.steps[1] < 1:
        raise UsageError(f"--slow {text}: '{term}' ends before it begins")
    return rule


def slowed_workers(text: str) -> set[int]:
    """The workers that --slow names."""
    return {rule.worker for rule in parse(text) if rule.worker is not None}


def is_uneven(text: str) -> bool:
    """Whether --slow makes some workers slower than others, or has no form that is known."""
    try:
        return not all(rule.slows_all for rule in parse(text))
    except UsageError:
        return True


def factor_of_all(text: str) -> float:
    """How many times as long as they can all workers compute, all the time."""
    return math.prod(rule.factor for rule in parse(text) if rule.slows_all)


def among_workers(text: str, workers: int) -> str:
    """What of --slow is about so many workers."""
    terms = [term for term in text.split("+") if max(slowed_workers(term), default=0) < workers]
    return "+".join(terms) or "none"


class Slowdown:
    """What slows one worker down.

    What is drawn depends on the seed, the worker and the step of the job, so that it is the same in every mode, and
    after a restart.

    Args:
        text: the value of --slow.
        worker: this one.

    Attributes:
        computed_s, slept_s: in all, also before training was stopped and went on.
    """

    def __init__(
        self, text: str, worker: int, seed: int, sleep: Callable[[float], None] = time.sleep,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:  # fmt: skip
        self.rules = [rule for rule in parse(text) if rule.worker in (None, worker)]
        self.worker, self.seed, self.sleep, self.now = worker, seed, sleep, now
        self.computed_s = self.slept_s = 0.0
        self._owed_s = 0.0  # of what was to be slept; below 0 where the system let it sleep for longer

    def factor(self, step: int, elapsed_s: float) -> float:
        """How many times as long this worker computes in a step.

        Args:
            step: of the job.
            elapsed_s: seconds of training so far.
        """
        factor = 1.0
        numbers = random.Random(f"{self.seed} {self.worker} {step}")
        for rule in self.rules:
            holds = rule.probability == 1 or numbers.random() < rule.probability
            if rule.sigma:
                factor *= math.exp(rule.sigma * abs(numbers.gauss(0, 1)))
            if holds and rule.steps[0] <= step <= rule.steps[1] and rule.seconds[0] <= elapsed_s < rule.seconds[1]:
                factor *= rule.factor
        return factor

    def slow(self, step: int, elapsed_s: float, computed_s: float) -> float:
        """Sleep as is due after so many seconds of computing; returns the seconds that it slept."""
        if not self.rules:
            return 0.0
        self.computed_s += computed_s
        self._owed_s += (self.factor(step, elapsed_s) - 1) * computed_s
        if self._owed_s <= 0:
            return 0.0
        began = self.now()
        self.sleep(self._owed_s)
        slept = self.now() - began
        self._owed_s -= slept
        self.slept_s += slept
        return slept

    def achieved(self) -> float:
        """How many times as long this worker has computed, over all its steps."""
        return 1 + self.slept_s / self.computed_s if self.computed_s else 1.0
