"""The folder of an evaluation: figures as JSON, and tables as CSV."""

import json
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdtrain.base.config.untrusted import parse_json, read_whole
from hvdtrain.base.errors import UsageError
from hvdtrain.data.storage import atomic_folder, check_replaceable, locked
from hvdtrain.reporting.table import csv_text

if TYPE_CHECKING:
    from hvdtrain.tools.evaluate.predictions import Predictions

MAKER = "hvdtrain evaluate"
FIGURES = "evaluation.json"
CONFUSION = "confusion.csv"
MISTAKES = "mistakes.csv"


def check_out(out: Path) -> None:
    """Checks that an evaluation may be written to a folder.

    Raises:
        UsageError: The folder has anything but an earlier evaluation, or cannot be written: a run
            may be another user's.
    """
    existing = next(path for path in (out.absolute(), *out.absolute().parents) if path.exists())
    if not os.access(existing, os.W_OK, effective_ids=True):
        raise UsageError(f"cannot write in {existing}: name another folder with --out")
    try:
        is_evaluation = parse_json(read_whole(out / FIGURES))["made_by"] == MAKER
    except (OSError, ValueError, KeyError, TypeError):
        is_evaluation = False
    check_replaceable(out, {FIGURES, CONFUSION, MISTAKES}, is_evaluation, MAKER)


def write(out: Path, predictions: "Predictions", facts: dict[str, str | bool | None]) -> None:
    """Writes the folder, completely or not at all. Replaces an earlier evaluation.

    In evaluation.json the loss is null if it is not finite, and top5 with fewer than six classes.

    Args:
        out: The folder.
        predictions: The predictions.
        facts: Further fields of evaluation.json.

    Raises:
        UsageError: The folder has anything but an earlier evaluation.
    """
    classes = predictions.classes
    counts = _confusion(predictions)
    figures = facts | {
        "made_by": MAKER,
        "images": len(predictions.labels),
        "top1": predictions.top1,
        "top5": predictions.top5,
        "loss": predictions.loss if math.isfinite(predictions.loss) else None,
        "classes": classes,
        "confusion": counts,
    }
    with locked(out):
        check_out(out)
        with atomic_folder(out) as folder:
            (folder / FIGURES).write_text(json.dumps(figures) + "\n", encoding="utf-8")
            matrix = [[name, *row] for name, row in zip(classes, counts, strict=True)]
            _write_table(folder / CONFUSION, ["true", *classes], matrix)
            mistakes = [
                [
                    predictions.name(i),
                    classes[predictions.labels[i]],
                    classes[predictions.predicted[i]],
                    f"{predictions.confidence[i]:.4f}",
                ]
                for i in predictions.mistakes
            ]
            _write_table(folder / MISTAKES, ["image", "true", "predicted", "confidence"], mistakes)


def _confusion(predictions: "Predictions") -> list[list[int]]:
    """Returns how many images of each class (rows) were taken for each (columns).

    scikit-learn counts them too, and takes a second to be imported.
    """
    import numpy as np

    size = len(predictions.classes)
    pairs = predictions.labels * size + predictions.predicted
    counts: list[list[int]] = np.bincount(pairs, minlength=size * size).reshape(size, size).tolist()
    return counts


def _write_table(path: Path, header: list[str], rows: list[list[Any]]) -> None:
    with path.open("x", newline="", encoding="utf-8") as file:
        file.write(csv_text(header, rows))
