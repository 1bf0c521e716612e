"""Option values with units: what a cluster is, in the words people use."""

import math
import re
from typing import Any

import click

from hvdtrain.numerics.slowdown import Rule, parse
from hvdtrain.plan.scenario import Slow

_BANDWIDTH = {"kbit": 1e-6, "mbit": 1e-3, "gbit": 1.0, "tbit": 1e3}
_TIME = {"us": 1.0, "ms": 1e3, "s": 1e6}
MOST_WORKERS = 4096


class Bandwidths(click.ParamType):
    """`100mbit,1gbit` as Gbit/s."""

    name = "rates"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[float]:
        if isinstance(value, list):
            return value
        found = []
        for word in value.split(","):
            match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]+)(?:/s)?", word.strip().lower())
            rate = float(match[1]) * _BANDWIDTH.get(match[2], 0) if match else 0.0
            if re.fullmatch(r"[\d.]+", word.strip()):
                self.fail(f"'{word}' has no unit: write {word.strip()}gbit or {word.strip()}mbit", param, ctx)
            if not 1e-6 <= rate <= 1e5:
                self.fail(f"'{word}' is not a bandwidth such as 100mbit, 1gbit or 25gbit", param, ctx)
            found.append(rate)
        return list(dict.fromkeys(found))


class Latency(click.ParamType):
    """`50us` as microseconds."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(us|ms|s)", str(value).strip())
        latency = float(match[1]) * _TIME[match[2]] if match else math.inf
        if latency > 10e6:
            self.fail(f"'{value}' is not a latency such as 50us or 2ms", param, ctx)
        return latency


class Counts(click.ParamType):
    """`2,8,64` or `1-1024`, which is 1, 2, 4 … 1024; with `equal` for servers, as many as workers."""

    name = "numbers"

    def __init__(self, equal: bool = False) -> None:
        self.equal = equal

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[int | str]:
        if isinstance(value, list):
            return value
        found: list[int | str] = []
        for word in (word.strip() for word in value.split(",")):
            if self.equal and word == "equal":
                found.append(word)
                continue
            match = re.fullmatch(r"(\d{1,7})(?:-(\d{1,7}))?", word)
            first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
            if not 1 <= first <= last <= MOST_WORKERS:
                also = " or equal" if self.equal else ""
                self.fail(f"'{word}' is not a number from 1 to {MOST_WORKERS}, a range 1-1024{also}", param, ctx)
            while first < last:
                found.append(first)
                first *= 2
            found.append(last)
        return list(dict.fromkeys(found))


class Stragglers(click.ParamType):
    """`1:4x`, `random:6x:p=0.1`, several joined by `+`."""

    name = "slow"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Slow:
        if isinstance(value, Slow):
            return value
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
