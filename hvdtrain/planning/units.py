"""Option values with units: what a cluster is, in the words people use."""

import re
from typing import Any

import click

from hvdtrain.config.option_types import EQUAL, Measure
from hvdtrain.numerics.slowdown import Rule, parse
from hvdtrain.planning.scenario import Slow

MOST_WORKERS = 4096
BANDWIDTH = Measure(
    "bandwidth", {"kbit": 1e-6, "mbit": 1e-3, "gbit": 1.0, "tbit": 1e3}, 1e5, "100mbit, 1gbit or 25gbit"
)  # in Gbit/s
LATENCY = Measure("latency", {"us": 1.0, "ms": 1e3, "s": 1e6}, 10e6, "50us or 2ms")  # in microseconds


class Counts(click.ParamType):
    """`2,8,64` or `1-1024`, which is 1, 2, 4 … 1024; with `equal` for servers, as many as workers."""

    name = "numbers"

    def __init__(self, equal: bool = False) -> None:
        self.equal = equal

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[int | str]:
        counts: list[int | str] = []
        for word in (word.strip() for word in value.split(",")):
            if self.equal and word == EQUAL:
                counts.append(word)
                continue
            match = re.fullmatch(r"(\d{1,7})(?:-(\d{1,7}))?", word)
            first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
            if not 1 <= first <= last <= MOST_WORKERS:
                equal = " or equal" if self.equal else ""
                self.fail(f"'{word}' is not a number from 1 to {MOST_WORKERS}, a range 1-1024{equal}", param, ctx)
            while first < last:
                counts.append(first)
                first *= 2
            counts.append(last)
        return list(dict.fromkeys(counts))


class Stragglers(click.ParamType):
    """`1:4x`, `random:6x:p=0.1`, several joined by `+`."""

    name = "slow"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Slow:
        rules = parse(value)
        drawn = [rule for rule in rules if rule.worker is None]
        fixed = all((rule.seconds, rule.steps, rule.sigma) == (Rule.seconds, Rule.steps, 0.0) for rule in rules)
        if len(drawn) > 1 or not fixed:
            known = "1:4x (worker 1 four times as slow), and beside it all:4x or random:6x:p=0.1"
            self.fail(f"'{value}': a plan knows {known}", param, ctx)
        workers: dict[int, float] = {}
        for rule in rules:
            if rule.worker is not None:
                workers[rule.worker] = workers.get(rule.worker, 1.0) * rule.factor
        return Slow(workers, drawn[0].factor, drawn[0].probability) if drawn else Slow(workers)
