"""Whether steps or samples made the difference between the contenders of a comparison, and which of
its runs are explained.
"""

from pathlib import Path
from statistics import fmean
from typing import Any

from hvdtrain.base import modes
from hvdtrain.base.errors import UsageError
from hvdtrain.reporting import figures, steps_and_samples
from hvdtrain.reporting.comparisons import split_into_comparisons
from hvdtrain.reporting.contenders import DEFAULT
from hvdtrain.runs.read import Kind, Run, find_runs


def is_comparison(folder: Path) -> bool:
    """Returns whether a folder is one of `hvdtrain compare`, and no run folder."""
    return (folder / "runs").is_dir() and not (folder / "manifest.json").exists()


def parts_of_differences(folder: Path) -> list[dict[str, Any]]:
    """Returns why contenders took longer to the target than the one that took least.

    Args:
        folder: of a comparison. If it is several, each has its own.

    Returns:
        The parts of the ratio of times, as `steps_and_samples` in verdict.json, for each contender
        but the fastest.

    Empty where no two contenders' trainings reached their target.
    """
    rows = []
    for compared in split_into_comparisons(find_runs([folder])):
        trained = _by_time({kind: runs for kind, runs in compared.by_kind.items() if kind.family})
        for kind, runs in trained[1:]:
            fastest, fastest_runs = trained[0]
            parts = steps_and_samples.parts(runs, fastest_runs)
            if parts:
                labels = compared.label(kind), compared.label(fastest)
                rows.append(parts.data(*labels, DEFAULT.speed))
    return rows


def fastest_of_sides(folder: Path) -> list[Path]:
    """Returns a run of the fastest ring and of the fastest servers of a comparison.

    It is the run of middle speed of the kind with most samples a second, by the mean.

    Raises:
        UsageError: no run of either has finished.
    """
    found = []
    for compared in split_into_comparisons(find_runs([folder])):
        for side in (modes.RING, modes.SERVERS):
            by_speed = []
            for kind, runs in compared.by_kind.items():
                timed = [run for run in runs if kind.family == side and run.summary.samples_per_s]
                timed.sort(key=_speed)
                if timed:
                    by_speed.append((fmean(map(_speed, timed)), timed[(len(timed) - 1) // 2]))
            if by_speed:
                _, run = max(by_speed, key=lambda of_kind: of_kind[0])
                found.append(run.folder)
    if not found:
        raise UsageError(f"{folder} has no finished run of a ring or of servers to explain")
    return found


def _speed(run: Run) -> float:
    return run.summary.samples_per_s or 0.0


def _by_time(by_kind: dict[Kind, list[Run]]) -> list[tuple[Kind, list[Run]]]:
    """Returns kinds of which some training reached the target, the soonest first."""
    means = {}
    for kind, runs in by_kind.items():
        if any(reach.is_reached for reach in figures.reaches(runs)):
            means[kind] = figures.time_to_target(runs)["mean"]
    return [(kind, by_kind[kind]) for kind in sorted(means, key=means.__getitem__)]
