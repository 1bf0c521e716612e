"""The contenders of a comparison: which kinds of runs are compared, and their repeats in pairs.

Runs of the same repeat share the seed, and with it the initial weights and the order of samples.
Two of them make a pair if they ran in the same stretch of work: a machine is not the same a week
later.
"""

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from operator import attrgetter
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

from hvdtrain.base.modes import ONE_MACHINE, RING, SERVERS
from hvdtrain.reporting.measures import SPEED, Measure, Rate, differences, only_trainings
from hvdtrain.reporting.rule import LOOKS, Differences
from hvdtrain.runs.fields import ran_alike
from hvdtrain.runs.read import Kind, Run, finished_by_kind

# A longer pause between two runs, in seconds, ends a stretch of work.
PAUSE_S = 600.0
Figure = Callable[[Run], float | None]
speed: Figure = attrgetter("summary.samples_per_s")


class Margins(NamedTuple):
    """The smallest differences that matter.

    Attributes:
        speed: as a share.
        accuracy: in absolute terms.
    """

    speed: float = 0.05
    accuracy: float = 0.01


DEFAULT = Margins()


@dataclass(frozen=True)
class Contenders:
    """The finished runs of a comparison by kind.

    Attributes:
        by_kind: the runs of each kind.
        stretches: the number of the stretch of work of each run, by the run's folder.
        measure: what decides between kinds.
    """

    by_kind: dict[Kind, list[Run]]
    stretches: dict[Path, int]
    measure: Measure = SPEED

    @classmethod
    def of(cls, runs: Sequence[Run], measure: Measure = SPEED) -> "Contenders":
        """Returns the contenders of these runs."""
        by_kind = finished_by_kind(runs)
        finished = list(itertools.chain.from_iterable(by_kind.values()))
        return cls(by_kind, _stretches(finished), measure)

    def counted(self, kind: Kind) -> list[Run]:
        """Returns the runs of a kind that the measure is about."""
        return self.measure.counted(self.by_kind[kind])

    def log_ratios(self, one: Kind, other: Kind) -> Differences:
        """Returns the logarithm of the ratio of rates, for each repeat that both kinds have.

        Speeds are those of sprints. If one kind has no sprints, they are those of trainings.
        """
        runs = self.counted(one)
        other_runs = self.counted(other)
        are_sprints = any(run.manifest.sprint for run in runs)
        are_others_sprints = any(run.manifest.sprint for run in other_runs)
        if are_sprints != are_others_sprints:
            runs = only_trainings(self.by_kind[one])
            other_runs = only_trainings(self.by_kind[other])
        rates = self._rate_by_repeat(runs)
        other_rates = self._rate_by_repeat(other_runs)
        common = sorted(rates.keys() & other_rates.keys())
        return differences((rates[key], other_rates[key]) for key in common)

    def _rate_by_repeat(self, runs: Sequence[Run]) -> dict[tuple[int, int], Rate]:
        """Returns the mean rate of runs by repeat and stretch of work."""
        rates: dict[tuple[int, int], list[Rate]] = {}
        for run in runs:
            rate = self.measure.rate(run)
            if rate:
                key = (run.manifest.repeat, self.stretches[run.folder])
                rates.setdefault(key, []).append(rate)
        means = {}
        for key, alike in rates.items():
            mean = fmean(rate.per_s for rate in alike)
            means[key] = Rate(mean, any(rate.is_at_most for rate in alike))
        return means


def _began(run: Run) -> float:
    """Returns when a run began, in seconds since 1970; 0 if that is not known."""
    with contextlib.suppress(ValueError):
        return datetime.fromisoformat(run.manifest.started or "").timestamp()
    return 0.0


def duration_s(run: Run) -> float:
    """Returns the seconds of set-up and training that a run has recorded."""
    return (run.summary.wall_s or 0.0) + (run.summary.setup_s or 0.0)


def _stretches(runs: Sequence[Run]) -> dict[Path, int]:
    """Returns the number of each run's stretch of work. A new stretch begins after a pause."""
    stretches = {}
    number = 0
    end = math.inf
    for run in sorted(runs, key=_began):
        began = _began(run)
        if began > end + PAUSE_S:
            number += 1
        stretches[run.folder] = number
        # Evaluations, which are not in the duration, take time too.
        ends = began + 2 * duration_s(run)
        end = max(end, ends) if math.isfinite(end) else max(0.0, ends)
    return stretches


def seconds_per_run(runs: Sequence[Run]) -> float:
    """Returns the seconds from the start of a run to the start of the next.

    That is what a run takes with all around it. Pauses are left out.
    """
    starts = sorted(filter(None, map(_began, runs)))
    duration = fmean(map(duration_s, runs))
    between = [later - earlier for earlier, later in itertools.pairwise(starts)]
    without_pauses = [seconds for seconds in between if seconds <= 2 * duration + PAUSE_S]
    usual = median(without_pauses) if without_pauses else 0.0
    return max(usual, duration)


class Sides(NamedTuple):
    """The kinds that are compared.

    Attributes:
        rings, servers, machines: the kinds of each family.
        left_out: kinds with too few repeats beside the others.
    """

    rings: list[Kind]
    servers: list[Kind]
    machines: list[Kind]
    left_out: list[Kind]

    @property
    def distributed(self) -> list[Kind]:
        return [*self.rings, *self.servers]


def choose_sides(contenders: Contenders, without: Sequence[Kind] = ()) -> Sides:
    """Returns the kinds that are compared, of equal size.

    These are the kinds on the largest number of workers that both rings and servers have. If there
    is no such number, they are those of the largest number of processes that both have. Of one
    family alone, they are those on its largest number of workers.

    Args:
        contenders: the finished runs.
        without: kinds that are not to be compared.
    """
    able = []
    for kind, runs in contenders.by_kind.items():
        if kind not in without and any(map(contenders.measure.rate, runs)):
            able.append(kind)
    rings = [kind for kind in able if kind.family == RING]
    servers = [kind for kind in able if kind.family == SERVERS]
    machines = [kind for kind in able if kind.family == ONE_MACHINE]
    rings, servers = _of_equal_size(contenders.by_kind, rings, servers)
    return _with_enough_repeats(contenders, Sides(rings, servers, machines, []))


def _of_equal_size(
    by_kind: Mapping[Kind, Sequence[Run]], rings: list[Kind], servers: list[Kind]
) -> tuple[list[Kind], list[Kind]]:
    """Returns the rings and servers on equally many workers, else on equally many processes."""
    has_both = bool(rings and servers)
    for servers_count in (False, True):
        size = {}
        for kind in (*rings, *servers):
            size[kind] = kind.workers + (kind.servers if servers_count else 0)
        for first in sorted(rings or servers, key=lambda kind: -size[kind]):
            alike = []
            for kind in size:
                if size[kind] == size[first] and ran_alike(by_kind[kind], by_kind[first]):
                    alike.append(kind)
            equal_rings = [kind for kind in alike if kind in rings]
            equal_servers = [kind for kind in alike if kind in servers]
            if (equal_rings and equal_servers) or not has_both:
                return equal_rings, equal_servers
    return rings[:1], []


def _with_enough_repeats(contenders: Contenders, sides: Sides) -> Sides:
    """Leaves out the kinds that share too few repeats with each of their opponents.

    A first look takes LOOKS[0] repeats. If no kind has as many, the most that one has are enough.
    """
    shared = {}
    for kind, opponents in _opponents(sides):
        repeats = [len(contenders.log_ratios(kind, opponent).values) for opponent in opponents]
        shared[kind] = max(repeats, default=0)
    enough = min(LOOKS[0], max(shared.values(), default=0))
    few = [kind for kind, repeats in shared.items() if repeats < enough]
    return Sides(
        [kind for kind in sides.rings if kind not in few],
        [kind for kind in sides.servers if kind not in few],
        [kind for kind in sides.machines if kind not in few],
        few,
    )


def _opponents(sides: Sides) -> Iterator[tuple[Kind, list[Kind]]]:
    """Yields each kind with the kinds of all other groups.

    Rings, servers and machines are a group each. If there is one distributed family, each of its
    kinds is a group.
    """
    if sides.rings and sides.servers:
        groups = [sides.rings, sides.servers, sides.machines]
    else:
        groups = [[kind] for kind in sides.distributed]
        groups.append(sides.machines)
    for group in groups:
        others = [other for other in groups if other != group]
        opponents = list(itertools.chain.from_iterable(others))
        for kind in group:
            yield kind, opponents
