"""Slowing workers down on purpose: what `--slow` means, and how long a worker sleeps.

A worker that is to compute f times as long sleeps (f - 1) times the seconds that it has just
computed, between forward and backward. The slowdown is exact and seeded. The worker's core is free
for others meanwhile, so that a few cores can stand for many machines. Gradients come late, as from
a slow machine, while the threads that carry messages stay as fast as they were.
"""

import math
import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass

from hvdtrain.base.errors import UsageError

FORMS = (
    "1:4x (worker 1 computes four times as long), all:4x (every worker does), 1:4x@20s-40s, "
    "1:4x@step200-400, random:6x:p=0.1 (any worker at any step), jitter:lognormal:0.2, several "
    "joined by +, or none"
)
WHOLE = "[0-9]{1,9}"
NUMBER = r"([0-9]{1,99}(?:\.[0-9]+)?|\.[0-9]+)"
# The largest factor. With more, other workers would give up waiting.
MOST_TIMES = 1000
# The largest sigma of jitter. A draw is hardly ever beyond 3 sigma: e to the 6 is a factor of 400.
MOST_SIGMA = 2.0


@dataclass(frozen=True)
class Rule:
    """A term of --slow.

    Attributes:
        worker: the worker that it slows down; None for all.
        factor: how many times as long computing takes.
        probability: the probability with which the factor applies at a step.
        seconds: the seconds of training between which the factor applies.
        steps: the first and the last step of the job at which the factor applies.
        sigma: of a random factor exp(sigma |z|) with normal z. It is never below 1, since no worker
            can be made faster.
    """

    worker: int | None = None
    factor: float = 1.0
    probability: float = 1.0
    seconds: tuple[float, float] = (0, math.inf)
    steps: tuple[int, float] = (0, math.inf)
    sigma: float = 0.0

    @property
    def slows_all(self) -> bool:
        """Whether it makes all workers equally slow, all the time."""
        return self == Rule(factor=self.factor)


_FIXED = re.compile(
    rf"({WHOLE}|all):{NUMBER}x(?:@{NUMBER}s-{NUMBER}s|@step({WHOLE})-({WHOLE}))?",
)
_RANDOM = re.compile(rf"random:{NUMBER}x:p={NUMBER}")
_JITTER = re.compile(rf"jitter:lognormal:{NUMBER}")


def parse(text: str) -> list[Rule]:
    """Returns the rules of a value of --slow; none for `none`.

    Raises:
        UsageError: a term has none of the FORMS, or a number is out of range.
    """
    if text in ("", "none"):
        return []
    return [_parse_term(term.strip(), text) for term in text.split("+")]


def _match_term(term: str) -> Rule | None:
    if match := _FIXED.fullmatch(term):
        worker, factor, begin_s, end_s, first, last = match.groups()
        return Rule(
            None if worker == "all" else int(worker),
            float(factor),
            seconds=(float(begin_s), float(end_s)) if begin_s else Rule.seconds,
            steps=(int(first), int(last)) if first else Rule.steps,
        )
    if match := _RANDOM.fullmatch(term):
        return Rule(factor=float(match[1]), probability=float(match[2]))
    if match := _JITTER.fullmatch(term):
        return Rule(sigma=float(match[1]))
    return None


def _parse_term(term: str, text: str) -> Rule:
    rule = _match_term(term)
    if rule is None:
        raise UsageError(f"--slow {text}: '{term}' is none of {FORMS}")
    if rule.factor < 1:
        raise UsageError(
            f"--slow {text}: a factor below 1 would make a worker faster than it is; 1x is its own "
            "speed"
        )
    if rule.factor > MOST_TIMES or rule.sigma > MOST_SIGMA:
        raise UsageError(
            f"--slow {text}: '{term}' is more than a factor of {MOST_TIMES}, or a jitter of "
            f"{MOST_SIGMA:g}"
        )
    if rule.probability > 1:
        raise UsageError(f"--slow {text}: p={rule.probability:g} is not a probability, from 0 to 1")
    begin_s, end_s = rule.seconds
    first, last = rule.steps
    if begin_s >= end_s or first > last or last < 1:
        raise UsageError(f"--slow {text}: '{term}' ends before it begins")
    return rule


def slowed_workers(text: str) -> set[int]:
    """Returns the workers that --slow names."""
    return {rule.worker for rule in parse(text) if rule.worker is not None}


def is_uneven(text: str) -> bool:
    """Returns whether --slow makes some workers slower than others, or has an unknown form."""
    try:
        return not all(rule.slows_all for rule in parse(text))
    except UsageError:
        return True


def factor_of_all(text: str) -> float:
    """Returns the factor by which all workers are slowed down all the time."""
    return math.prod(rule.factor for rule in parse(text) if rule.slows_all)


def among_workers(text: str, workers: int) -> str:
    """Returns the terms of --slow without those about workers that a smaller job does not have."""
    terms = [term for term in text.split("+") if max(slowed_workers(term), default=0) < workers]
    return "+".join(terms) or "none"


class Slowdown:
    """Slows one worker down.

    Random numbers depend on the seed, the worker and the step of the job alone, so that they are
    the same in every mode, and after a restart.

    Args:
        text: the value of --slow.
        worker: the worker's number.

    Attributes:
        computed_s, slept_s: seconds in all, also before a restart.
    """

    def __init__(
        self,
        text: str,
        worker: int,
        seed: int,
        sleep: Callable[[float], None] = time.sleep,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.rules = [rule for rule in parse(text) if rule.worker in (None, worker)]
        self.worker = worker
        self.seed = seed
        self.sleep = sleep
        self.now = now
        self.computed_s = self.slept_s = 0.0
        # Seconds still to sleep. Negative after the system let the worker sleep for longer.
        self._owed_s = 0.0

    def factor(self, step: int, elapsed_s: float) -> float:
        """Returns how many times as long this worker computes in a step.

        Args:
            step: the job's step.
            elapsed_s: seconds of training so far.
        """
        factor = 1.0
        numbers = random.Random(f"{self.seed} {self.worker} {step}")
        for rule in self.rules:
            is_drawn = rule.probability == 1 or numbers.random() < rule.probability
            if rule.sigma:
                factor *= math.exp(rule.sigma * abs(numbers.gauss(0, 1)))
            first, last = rule.steps
            begin_s, end_s = rule.seconds
            if is_drawn and first <= step <= last and begin_s <= elapsed_s < end_s:
                factor *= rule.factor
        return factor

    def slow(self, step: int, elapsed_s: float, computed_s: float) -> float:
        """Sleeps as long as is due after some computing, and returns the seconds slept.

        Args:
            computed_s: seconds that the worker has computed since the last call.
        """
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
        """Returns how many times as long this worker has computed, over all its steps."""
        return 1 + self.slept_s / self.computed_s if self.computed_s else 1.0
