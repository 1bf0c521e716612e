"""The time that it takes to reach the target accuracy, also where not every training gets there."""

import math
from collections.abc import Sequence
from typing import Any

from hvdtrain.report.contenders import whole
from hvdtrain.runs.read import Run

RESAMPLED = 2000


def _spent(run: Run) -> tuple[float, bool]:
    """Seconds of training until it reached the target, or until its end; and whether it did."""
    reached = run.summary.time_to_target_s
    return (run.summary.wall_s or 0.0, False) if reached is None else (reached, True)


def expected_time(runs: Sequence[Run]) -> dict[str, Any]:
    """All time spent over the trainings that got there, the expected running time of COCO's benchmarks; seconds are
    None where none did.
    """
    spent = [_spent(run) for run in whole(runs)]
    reached = sum(got for _, got in spent)
    seconds = sum(seconds for seconds, _ in spent) / reached if reached else None
    return {"seconds": seconds, "reached": reached, "n": len(spent)}


def ratio_of_times(runs: Sequence[Run], others: Sequence[Run]) -> dict[str, Any] | None:
    """The ratio of expected times over the repeats that both have, with a 95 % interval of a bootstrap over these
    pairs; its ends are None where they are infinite. None where one of them never got there.
    """
    import numpy as np

    first, second = ({run.repeat: _spent(run) for run in whole(own)} for own in (runs, others))
    repeats = sorted(first.keys() & second.keys())
    pairs = np.array([[first[repeat], second[repeat]] for repeat in repeats], dtype=float)  # [n, side, (s, reached)]
    if not repeats or not pairs[:, :, 1].sum(0).all():
        return None
    drawn = np.random.default_rng(0).integers(0, len(repeats), (RESAMPLED, len(repeats)))
    with np.errstate(divide="ignore", invalid="ignore"):
        total = np.concatenate([pairs.sum(0)[None], pairs[drawn].sum(1)])
        each = total[:, :, 0] / total[:, :, 1]
        ratios = each[:, 0] / each[:, 1]
    low, high = np.nanquantile(ratios[1:], [0.025, 0.975], method="nearest") if len(repeats) > 1 else (math.nan,) * 2
    ends = [float(end) if math.isfinite(end) else None for end in (low, high)]
    return {"ratio": float(ratios[0]), "ci_low": ends[0], "ci_high": ends[1], "n": len(repeats)}
