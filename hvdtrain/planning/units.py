"""Types of options that take values with units: a cluster in the words that people use."""

import re
from typing import Any

import click

from hvdtrain.base.config.option_types import EQUAL, WithUnit
from hvdtrain.base.numerics.slowdown import Rule, parse
from hvdtrain.planning.scenario import Stragglers

MOST_WORKERS = 4096
# in Gbit/s
BANDWIDTH = WithUnit(
    "bandwidth",
    {"kbit": 1e-6, "mbit": 1e-3, "gbit": 1.0, "tbit": 1e3},
    1e5,
    "100mbit, 1gbit or 25gbit",
)
# in microseconds
LATENCY = WithUnit("latency", {"us": 1.0, "ms": 1e3, "s": 1e6}, 10e6, "50us or 2ms")


class Counts(click.ParamType):
    """`2,8,64` or `1-1024`, which is 1, 2, 4 … 1024.

    Args:
        equal: whether `equal` is allowed: as many servers as workers.
    """

    name = "numbers"

    def __init__(self, equal: bool = False) -> None:
        self.equal = equal

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> list[int | str]:
        counts: list[int | str] = []
        for word in value.split(","):
            word = word.strip()
            if self.equal and word == EQUAL:
                counts.append(word)
                continue
            doublings = _doublings(word)
            if not doublings:
                equal = " or equal" if self.equal else ""
                self.fail(
                    f"'{word}' is not a number from 1 to {MOST_WORKERS}, a range 1-1024{equal}",
                    param,
                    ctx,
                )
            counts += doublings
        return list(dict.fromkeys(counts))


def _doublings(word: str) -> list[int]:
    """Returns the number, or the first of a range, its doublings below the last, and the last.

    Empty where the word is neither, or not within 1 and MOST_WORKERS.
    """
    match = re.fullmatch(r"(\d{1,7})(?:-(\d{1,7}))?", word)
    if not match:
        return []
    first = int(match[1])
    last = int(match[2] or first)
    if not 1 <= first <= last <= MOST_WORKERS:
        return []
    counts = []
    while first < last:
        counts.append(first)
        first *= 2
    return [*counts, last]


class SlowRules(click.ParamType):
    """`1:4x`, `random:6x:p=0.1`, or several joined by `+`."""

    name = "slow"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Stragglers:
        rules = parse(value)
        of_all_workers = [rule for rule in rules if rule.worker is None]
        if len(of_all_workers) > 1 or not all(map(_is_constant, rules)):
            known = "1:4x (worker 1 four times as slow), and beside it all:4x or random:6x:p=0.1"
            self.fail(f"'{value}': a plan knows {known}", param, ctx)
        workers: dict[int, float] = {}
        for rule in rules:
            if rule.worker is not None:
                workers[rule.worker] = workers.get(rule.worker, 1.0) * rule.factor
        if not of_all_workers:
            return Stragglers(workers)
        [rule] = of_all_workers
        return Stragglers(workers, rule.factor, rule.probability)


def _is_constant(rule: Rule) -> bool:
    """Returns whether a rule holds at all times and steps alike, without jitter."""
    return (rule.seconds, rule.steps, rule.sigma) == (Rule.seconds, Rule.steps, 0.0)
