"""Splits the runs of a grid into comparisons.

Runs of one comparison may be compared with each other; between comparisons differs what a grid varies, and no more.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from hvdtrain.numerics.slowdown import is_uneven
from hvdtrain.report.fairness import GRID_FIELDS, check_grid, format_value
from hvdtrain.report.results import result_rows, spread
from hvdtrain.runs.fields import field_value
from hvdtrain.runs.read import Kind, Run

_TITLES = {"model": "{}", "global_batch": "global batch {}", "lr": "learning rate {}", "slow.asked": "slow: {}"}
_NAMES = {"model": "{}", "global_batch": "b{}", "lr": "lr{}", "slow.asked": "slow-{}"}


@dataclass(frozen=True)
class Comparison:
    """Finished runs of one model, global batch, learning rate and --slow.

    Attributes:
        title: what distinguishes it from the other comparisons, for people: `vgg16, global batch 64`.
        name: the same for a folder, `vgg16-b64`; empty where there is only one comparison.
    """

    title: str
    name: str
    runs: list[Run]


def split_into_comparisons(runs: Sequence[Run]) -> list[Comparison]:
    """The finished runs by model, then by global batch, then by learning rate, then by who was made slow.

    Raises:
        UsageError: they differ in more than a grid varies; the field is named.
    """
    groups: dict[tuple[Any, ...], list[Run]] = {}
    for run in runs:
        if run.is_finished:
            groups.setdefault(tuple(_rounded(field_value(run, field)) for field in GRID_FIELDS), []).append(run)
    if len(groups) < 2:
        return [Comparison("", "", members) for members in groups.values()]
    check_grid(runs)
    keys = sorted(groups, key=lambda key: (key[0] or "", key[1] or 0, key[2] or 0, key[3] != "none", key[3]))
    with_same_batch = Counter(key[:2] for key in {key[:3] for key in keys})
    comparisons = []
    for key in keys:
        varying = [
            (field, format_value(value))
            for i, (field, value) in enumerate(zip(GRID_FIELDS, key, strict=True))
            if len({other[i] for other in keys}) > 1
        ]
        title = ", ".join(_TITLES[field].format(text) for field, text in varying)
        # The learning rate follows from the batch, unless two comparisons have the same batch.
        short = [(field, text) for field, text in varying if field != "lr" or with_same_batch[key[:2]] > 1]
        name = "-".join(_NAMES[field].format(text.replace(",", "")) for field, text in short)
        name = "".join(c if c.isalnum() or c in "-._" else "_" for c in name).strip(".")  # no path, and not hidden
        comparisons.append(Comparison(title, name or "_", groups[key]))
    return comparisons


def _rounded(value: Any) -> Any:
    """A learning rate to four digits, as it is written: rates that read the same are of one comparison."""
    return float(f"{value:.4g}") if isinstance(value, float) else value


def epoch_times(runs: Sequence[Run]) -> dict[tuple[str, int], dict[Kind, list[float]]]:
    """Seconds of training of an epoch, by model and global batch, then by kind: of each repeat. Where workers of some
    runs alone were made slow, of the other runs.
    """
    found: dict[tuple[str, int], dict[Kind, list[float]]] = {}
    slow = min((field_value(run, "slow.asked") for run in runs), key=is_uneven, default="none")
    for row in result_rows([run for run in runs if field_value(run, "slow.asked") == slow]):
        if row["epoch_s"] and row["global_batch"]:
            kinds = found.setdefault((row["model"] or "", row["global_batch"]), {})
            kinds.setdefault(Kind.of_row(row), []).append(row["epoch_s"])
    return dict(sorted(found.items()))


def one_worker(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """For each model that ran with several batches: which kind of run has the shortest epoch with each, on average.

    `until` is the largest batch up to which that is one worker. No verdict: the repeats may be few.
    """
    times, found = epoch_times(runs), []
    models = sorted({model for model, _ in times})
    for model in models:
        fastest: dict[int, Kind] = {}
        for (own, batch), kinds in times.items():
            if own == model and len({kind.workers > 1 for kind in kinds}) == 2:
                means = {kind: mean.mean for kind, values in kinds.items() if (mean := spread(values, "epoch_s"))}
                fastest[batch] = min(means, key=lambda kind: means[kind])
        if len(fastest) < 2:
            continue
        phases = [(kind, [batch for batch, _ in batches]) for kind, batches in groupby(fastest.items(), lambda i: i[1])]
        told = [
            f"{'one worker' if kind.workers == 1 else kind.label} with a global batch of {' and '.join(map(str, own))}"
            for kind, own in phases
        ]
        alone = [own for kind, own in phases if kind.workers == 1]
        found.append({
            "model": model,
            "fastest": {str(batch): kind.label for batch, kind in fastest.items()},
            "until": max(alone[0]) if len(alone) == 1 and phases[0][0].workers == 1 else None,
            "words": f"The shortest epochs{f' of {model}' if len(models) > 1 else ''}, on average: {', '.join(told)}.",
        })  # fmt: skip
    return found
