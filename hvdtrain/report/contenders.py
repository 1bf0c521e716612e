"""Who is compared with whom: the kinds of runs that stand for an answer, and their repeats in pairs.

Runs of the same repeat share the seed, and with it initial weights and the order of samples. Two of them make a pair
where they ran in the same stretch of work: a machine is not the same a week later.
"""

import contextlib
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from operator import attrgetter
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

from hvdtrain.modes import ONE_MACHINE, RING, SERVERS
from hvdtrain.report.rule import LOOKS
from hvdtrain.runs.fields import ran_alike
from hvdtrain.runs.read import Kind, Run, finished_by_kind

PAUSE_S = 600.0  # a longer one between two runs ends a stretch of work
ByKind = Mapping[Kind, Sequence[Run]]
Figure = Callable[[Run], float | None]
speed: Figure = attrgetter("summary.samples_per_s")


class Margins(NamedTuple):
    """What counts as a difference: of speed as a share, of accuracy in absolute terms."""

    speed: float = 0.05
    accuracy: float = 0.01


DEFAULT = Margins()


def whole(runs: Sequence[Run]) -> list[Run]:
    """The trainings among them, which sprints are not."""
    return [run for run in runs if not run.manifest.sprint]


def timed(runs: Sequence[Run]) -> list[Run]:
    """The runs that tell how fast a kind is: sprints where there are any."""
    return [run for run in runs if run.manifest.sprint] or list(runs)


@dataclass(frozen=True)
class Field:
    """The finished runs of a comparison, and in which stretch of work each was."""

    by_kind: dict[Kind, list[Run]]
    stretches: dict[Path, int]

    @classmethod
    def of(cls, runs: Sequence[Run]) -> "Field":
        by_kind = finished_by_kind(runs)
        return cls(by_kind, _stretches([run for members in by_kind.values() for run in members]))

    def log_ratios(self, one: Kind, other: Kind) -> list[float]:
        """The logarithm of the ratio of speeds, in each repeat that both have; of sprints, or where one of
        them has none, of trainings.
        """
        sides = [timed(self.by_kind[kind]) for kind in (one, other)]
        if len({bool(side[0].manifest.sprint) for side in sides}) > 1:
            sides = [whole(self.by_kind[kind]) for kind in (one, other)]
        first, second = (self._speed_by_repeat(side) for side in sides)
        return [math.log(first[key] / second[key]) for key in sorted(first.keys() & second.keys())]

    def _speed_by_repeat(self, runs: Sequence[Run]) -> dict[tuple[int, int], float]:
        speeds: dict[tuple[int, int], list[float]] = {}
        for run in runs:
            if value := speed(run):
                speeds.setdefault((run.manifest.repeat, self.stretches[run.folder]), []).append(value)
        return {key: fmean(values) for key, values in speeds.items()}


def _began(run: Run) -> float:
    """In seconds since 1970, 0 where nobody knows."""
    with contextlib.suppress(ValueError):
        return datetime.fromisoformat(run.manifest.started or "").timestamp()
    return 0.0


def lasted_s(run: Run) -> float:
    """Seconds that a run took, as far as it says so itself."""
    return (run.summary.wall_s or 0.0) + (run.summary.setup_s or 0.0)


def _stretches(runs: Sequence[Run]) -> dict[Path, int]:
    """A number for each run's stretch of work: a new one begins after a pause."""
    stretches, number, end = {}, 0, math.inf
    for run in sorted(runs, key=_began):
        number += _began(run) > end + PAUSE_S
        stretches[run.folder] = number
        end = max(end if end < math.inf else 0.0, _began(run) + 2 * lasted_s(run))  # evaluations take time too
    return stretches


def mean_time_s(runs: Sequence[Run]) -> float:
    """Seconds from the start of a run to that of the next: what one takes with all around it, but not with a pause."""
    starts, lasted = sorted(filter(None, map(_began, runs))), fmean(map(lasted_s, runs))
    between = [b - a for a, b in itertools.pairwise(starts) if b - a <= 2 * lasted + PAUSE_S]
    return max(median(between) if between else 0.0, lasted)


class Sides(NamedTuple):
    """Rings, servers and single machines that are compared, and those that have too few repeats beside the others."""

    rings: list[Kind]
    servers: list[Kind]
    machines: list[Kind]
    left_out: list[Kind]

    @property
    def distributed(self) -> list[Kind]:
        return [*self.rings, *self.servers]


def sides(field: Field, without: Sequence[Kind] = ()) -> Sides:
    """Those on the largest number of workers that both families have, else of processes; of one family alone, all on
    the largest number that it has.

    Args:
        without: kinds that are not to be compared.
    """
    able = [kind for kind, runs in field.by_kind.items() if any(map(speed, runs)) and kind not in without]
    rings, servers, machines = ([k for k in able if k.family == family] for family in (RING, SERVERS, ONE_MACHINE))
    rings, servers = _on_equal_terms(field.by_kind, rings, servers)
    return _with_enough(field, Sides(rings, servers, machines, []))


def _on_equal_terms(by_kind: ByKind, rings: list[Kind], servers: list[Kind]) -> tuple[list[Kind], list[Kind]]:
    """Of workers if there is such a pair, else of processes, servers included."""
    for with_servers in (0, 1):
        size = {kind: kind.workers + with_servers * kind.servers for kind in (*rings, *servers)}
        for first in sorted(rings or servers, key=lambda kind: -size[kind]):
            same = [k for k in size if size[k] == size[first] and ran_alike(by_kind[k], by_kind[first])]
            alike = [k for k in same if k in rings], [k for k in same if k in servers]
            if all(alike) or not (rings and servers):
                return alike
    return rings[:1], []


def _with_enough(field: Field, of: Sides) -> Sides:
    """Without those that are not beside any of the others in as many repeats as a first look takes."""
    is_two = bool(of.rings and of.servers)
    groups = [of.rings, of.servers, of.machines] if is_two else [*([kind] for kind in of.distributed), of.machines]
    pairs = {
        kind: max((len(field.log_ratios(kind, o)) for others in groups if others != side for o in others), default=0)
        for side in groups
        for kind in side
    }
    least = min(LOOKS[0], max(pairs.values(), default=0))
    few = [kind for kind, number in pairs.items() if number < least]
    rings, servers, machines = ([kind for kind in kinds if kind not in few] for kinds in of[:3])
    return Sides(rings, servers, machines, few)
