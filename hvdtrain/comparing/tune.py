"""`compare --tune`: both sides at their best, each found in the same time by sprints that do not count in the answer.

Successive halving (Jamieson and Talwalkar, 2016, arXiv:1502.07943): all settings sprint, the faster half sprints again
for twice as long, until one is left or the time is over.
"""

import contextlib
import dataclasses
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct, ValidationError, convert, to_builtins

from hvdtrain import modes
from hvdtrain.comparing.forecast import Record
from hvdtrain.comparing.grid import Axes, Planned
from hvdtrain.config.option_types import EQUAL
from hvdtrain.config.run_config import RunConfig
from hvdtrain.errors import UsageError
from hvdtrain.formatting import three_digits
from hvdtrain.launch.hosts import Host, allocate
from hvdtrain.runs.read import grouped

FIRST_SPRINT_S = 1.0
SPACE: Mapping[str, Sequence[Any]] = {"bucket_mb": (1.0, 4.0, 16.0), "wait_for": ("layer", "step")}
SPACE_HERE: Mapping[str, Sequence[Any]] = {"ring_transport": ("gloo", "mpi")}  # over hosts the launcher decides
LISTED = 5  # settings of a side in a report
Sprint = Callable[[Sequence[Planned], str], Mapping[str, float]]


class Tuned(Struct):
    """How a side was tuned.

    Attributes:
        taken: the contender that entered the comparison.
        settings: how many there were to draw from.
        tried: their samples/s in their last sprint, by contender, the best first.
    """

    taken: str
    settings: int
    rounds: int
    tried: dict[str, float]


def widen(axes: Axes, hosts: Sequence[Host] = (), given: Collection[str] = ()) -> Axes:
    """The same with all that a side can be set to, as far as nothing was asked for: SPACE, and of a ring all rings,
    which compute the same. On one machine also SPACE_HERE, and as many servers as workers; over hosts as many of them
    as make no host fuller than it is with one, or all workers had fewer threads.

    Args:
        given: options that stand on the command line, which are not varied, also where they are as by default.

    Raises:
        UsageError: there is nothing to tune.
    """
    space = SPACE if hosts else {**SPACE, **SPACE_HERE}
    more = min(_most_servers(hosts, workers) for workers in axes.workers) if hosts else EQUAL
    families = {modes.declared(name).family for name in axes.modes}
    if families == {modes.ONE_MACHINE}:
        raise UsageError("--tune is of rings and servers: name one of them in --modes")
    rings = [name for name in modes.names() if modes.declared(name).family == modes.RING]
    options = {
        name: values if name in given or list(values) != [getattr(RunConfig, name)] else space.get(name, values)
        for name, values in axes.options.items()
    }
    every_ring = modes.RING in families and "modes" not in given
    is_one_server = list(axes.servers) == [1] and "servers" not in given
    return dataclasses.replace(
        axes,
        modes=list(dict.fromkeys([*axes.modes, *(rings if every_ring else ())])),
        servers=list(dict.fromkeys([1, more])) if is_one_server else axes.servers,
        options=options,
    )


def _most_servers(hosts: Sequence[Host], workers: int) -> int:
    fullest = {n: max(host.slots for host in allocate(hosts, workers, n)) for n in range(1, workers + 1)}
    return max(servers for servers, slots in fullest.items() if slots == fullest[1])


def sides(contenders: Sequence[Planned]) -> dict[str, list[Planned]]:
    """Rings, and servers, on each task and number of workers, by name."""
    distributed = [run for run in contenders if run.family != modes.ONE_MACHINE]
    return grouped(distributed, lambda run: run.side)


def search(contenders: Sequence[Planned], record: Record, seconds: float, sprint: Sprint) -> None:
    """Find the fastest of each side, and write down in the record what was tried; sides that were tuned before stay.

    Args:
        seconds: that all of it may take, an equal part for each side.
        sprint: does runs, in a folder of that name; their samples/s, by contender.
    """
    rivals = sides(contenders)
    for name, settings in rivals.items():
        if name not in record.tuned:
            record.tuned[name] = to_builtins(_halve(settings, record, seconds / len(rivals), sprint))
            record.save()


def tuned(contenders: Sequence[Planned], record: Record) -> list[Planned]:
    """One machine, and what was found of each side; the first of a side that was not tuned yet."""
    best = []
    for name, settings in sides(contenders).items():
        taken = record.tuned.get(name, {}).get("taken")
        best.append(next((run for run in settings if run.contender == taken), settings[0]))
    return [*(run for run in contenders if run.family == modes.ONE_MACHINE), *best]


def _halve(settings: Sequence[Planned], record: Record, seconds: float, sprint: Sprint) -> Tuned:
    draw = random.Random(settings[0].config.seed)
    left, length_s, spent, tried = list(settings), FIRST_SPRINT_S, 0.0, dict[str, float]()

    def costs(runs: Sequence[Planned]) -> float:
        return sum(record.seconds(run.sprint(length_s)) for run in runs)

    while len(left) > 1 and 2 * costs(left) > seconds:  # all later rounds together take no longer than the first
        left.pop(draw.randrange(len(left)))
    rounds = 0
    while not rounds or (len(left) > 1 and spent + costs(left) <= seconds):
        spent, rounds = spent + costs(left), rounds + 1
        speeds = sprint([run.sprint(length_s) for run in draw.sample(left, len(left))], f"tuning/{rounds}")
        tried |= speeds
        left = sorted(left, key=lambda run: -speeds.get(run.contender, 0.0))[: max(1, len(left) // 2)]
        length_s *= 2
    best_first = sorted(tried.items(), key=lambda pair: -pair[1])
    return Tuned(left[0].contender, len(settings), rounds, dict(best_first))


def told(folder: Path) -> dict[str, list[str]]:
    """What a report says of the tuning of this comparison, by title; nothing where none was."""
    found: dict[str, Tuned] = {}
    with contextlib.suppress(ValidationError):
        found = convert(Record(folder).tuned, dict[str, Tuned])
    lines = []
    for side, of in found.items():
        speeds = [f"{name} {three_digits(speed)}" for name, speed in list(of.tried.items())[:LISTED]]
        lines.append(
            f"{side}: {of.taken}, best in {of.rounds} rounds of sprints that began with {len(of.tried)} of "
            f"{of.settings} settings; samples/s: {', '.join(speeds)}"
        )
    return {f"What was tuned: {', '.join(found)}": lines} if found else {}
