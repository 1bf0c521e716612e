"""The folder of an evaluation: whether it may be written, figures as JSON, and tables as CSV."""

import csv
import json
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING

from hvdtrain.config.untrusted import parse_json, read_whole
from hvdtrain.data.storage import atomic_folder, check_replaceable, locked
from hvdtrain.errors import UsageError

if TYPE_CHECKING:
    from hvdtrain.evaluate.predictions import Predictions

MAKER = "hvdtrain evaluate"
FIGURES, CONFUSION, MISTAKES = "evaluation.json", "confusion.csv", "mistakes.csv"


def check_out(out: Path) -> None:
    """UsageError unless the folder is new or empty, or holds an earlier evaluation and nothing else, and may be
    written: a run may be somebody else's.
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
    """Write the folder, completely or not at all, and replace an earlier evaluation. In evaluation.json the loss is
    None where it is not finite, top5 with fewer than six classes.

    Args:
        facts: further fields of evaluation.json.

    Raises:
        UsageError: the folder holds something else.
    """
    from sklearn.metrics import confusion_matrix

    classes = predictions.classes
    counts = confusion_matrix(predictions.labels, predictions.predicted, labels=range(len(classes))).tolist()
    figures = facts | {
        "made_by": MAKER, "images": len(predictions.labels), "top1": predictions.top1, "top5": predictions.top5,
        "loss": predictions.loss if math.isfinite(predictions.loss) else None, "classes": classes, "confusion": counts,
    }  # fmt: skip
    with locked(out):
        check_out(out)
        with atomic_folder(out) as folder:
            (folder / FIGURES).write_text(json.dumps(figures) + "\n")
            matrix = [[name, *row] for name, row in zip(classes, counts, strict=True)]
            mistakes = [
                [predictions.name(i), classes[predictions.labels[i]], classes[predictions.predicted[i]],
                 f"{predictions.confidence[i]:.4f}"]
                for i in predictions.mistakes
            ]  # fmt: skip
            for name, header, rows in (
                (CONFUSION, ["true", *classes], matrix),
                (MISTAKES, ["image", "true", "predicted", "confidence"], mistakes),
            ):
                with (folder / name).open("x", newline="", encoding="utf-8") as file:
                    csv.writer(file, lineterminator="\n").writerows([header, *rows])
