"""The folder of an evaluation: whether it may be written, figures as JSON, and tables as CSV."""

import csv
import json
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdtrain.config.untrusted import read_json
from hvdtrain.data.storage import atomic_folder, locked
from hvdtrain.errors import UsageError

if TYPE_CHECKING:
    from hvdtrain.evaluate.predictions import Predictions

MAKER = "hvdtrain evaluate"
FIGURES, PICTURE, CONFUSION, MISTAKES = "evaluation.json", "evaluation.png", "confusion.csv", "mistakes.csv"


def check_out(out: Path) -> None:
    """UsageError unless the folder is new or empty, or holds an earlier evaluation and nothing else, and may be
    written: a run may be somebody else's.
    """
    there = next(path for path in (out.absolute(), *out.absolute().parents) if path.exists())
    if not os.access(there, os.W_OK, effective_ids=True):
        raise UsageError(f"cannot write in {there}: name a folder of your own with --out")
    try:
        names = set(os.listdir(out))
    except FileNotFoundError:
        return
    except OSError as error:
        raise UsageError(f"--out {out} cannot be used: {error.strerror}") from None
    if names and not _is_evaluation(out):
        raise UsageError(f"--out {out} holds something else: name another folder")
    if foreign := sorted(names - {FIGURES, PICTURE, CONFUSION, MISTAKES}):
        raise UsageError(f"--out {out} holds what no evaluation has put there ({', '.join(foreign[:5])}): move it")


def _is_evaluation(out: Path) -> bool:
    try:
        return read_json(out / FIGURES)["made_by"] == MAKER
    except (OSError, ValueError, KeyError, TypeError):
        return False


def figures(predictions: "Predictions", **about: str | bool | None) -> dict[str, Any]:
    """The content of evaluation.json. The loss is None where it is not finite, top5 with fewer than six classes.

    Args:
        about: further fields.
    """
    loss = predictions.loss if math.isfinite(predictions.loss) else None
    return {
        "made_by": MAKER, **about, "images": len(predictions.labels),
        "loss": loss, "top1": predictions.top1, "top5": predictions.top5,
        "classes": list(predictions.classes), "confusion": predictions.confusion.tolist(),
    }  # fmt: skip


def write(out: Path, predictions: "Predictions", figures: dict[str, Any], title: str) -> None:
    """Write the folder, completely or not at all, and replace an earlier evaluation.

    Raises:
        UsageError: the folder holds something else.
    """
    from hvdtrain.evaluate.picture import draw

    with locked(out):
        check_out(out)
        with atomic_folder(out) as folder:
            (folder / FIGURES).write_text(json.dumps(figures) + "\n")
            classes = predictions.classes
            counts = zip(classes, predictions.confusion.tolist(), strict=True)
            _write_csv(folder / CONFUSION, [["true", *classes], *([name, *row] for name, row in counts)])
            rows = [
                [predictions.name(i), classes[predictions.labels[i]], classes[predictions.predicted[i]],
                 f"{predictions.confidence[i]:.4f}"]
                for i in predictions.mistakes
            ]  # fmt: skip
            _write_csv(folder / MISTAKES, [["image", "true", "predicted", "confidence"], *rows])
            draw(predictions, title, folder / PICTURE)


def _write_csv(path: Path, rows: list[list[Any]]) -> None:
    with path.open("x", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows(rows)
