"""Whether steps or samples made the difference between the contenders of a comparison."""

from pathlib import Path
from typing import Any

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

    Raises:
        UsageError: there are no trainings of two contenders that reached their target.
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
    if not rows:
        raise UsageError(
            f"{folder} has no trainings of two contenders that reached their target: "
            f"explain one of the runs in {folder / 'runs'}"
        )
    return rows


def _by_time(by_kind: dict[Kind, list[Run]]) -> list[tuple[Kind, list[Run]]]:
    """Returns kinds of which some training reached the target, the soonest first."""
    means = {}
    for kind, runs in by_kind.items():
        if any(reach.is_reached for reach in figures.reaches(runs)):
            means[kind] = figures.time_to_target(runs)["mean"]
    return [(kind, by_kind[kind]) for kind in sorted(means, key=means.__getitem__)]
