"""An evaluation as files: whose folder it is, figures as JSON, and tables as CSV."""

import csv
import json
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdtrain.data.place import appearing, locked
from hvdtrain.errors import UsageError

if TYPE_CHECKING:
    from hvdtrain.evaluate.answers import Answers

MAKER = "hvdtrain evaluate"
FIGURES, PICTURE, CONFUSION, MISTAKES = "evaluation.json", "evaluation.png", "confusion.csv", "mistakes.csv"


def check_out(out: Path) -> None:
    """UsageError unless the folder is free, or holds an earlier evaluation and nothing else."""
    try:
        held = set(os.listdir(out))
    except FileNotFoundError:
        return
    except OSError as error:
        raise UsageError(f"--out {out} cannot be used: {error.strerror}") from None
    if held and not _is_ours(out):
        raise UsageError(f"--out {out} holds something else: name another folder")
    if strangers := sorted(held - {FIGURES, PICTURE, CONFUSION, MISTAKES}):
        raise UsageError(f"--out {out} holds what no evaluation has put there ({', '.join(strangers[:5])}): move it")


def _is_ours(out: Path) -> bool:
    try:
        return json.loads((out / FIGURES).read_text())["made_by"] == MAKER
    except (OSError, ValueError, KeyError, TypeError):
        return False


def figures(answers: "Answers", **about: str) -> dict[str, Any]:
    """What can be said in numbers. The loss is None where the model gives none; top5 with fewer than six classes."""
    return {
        "made_by": MAKER, **about, "images": len(answers.labels),
        "loss": answers.loss if math.isfinite(answers.loss) else None, "top1": answers.top1, "top5": answers.top5,
        "classes": list(answers.classes), "confusion": answers.confusion.tolist(),
    }  # fmt: skip


def write(out: Path, answers: "Answers", found: dict[str, Any], title: str) -> None:
    """Make the folder, whole or not at all, in place of an earlier evaluation. UsageError where it is not one."""
    from hvdtrain.evaluate.picture import draw

    with locked(out):
        check_out(out)
        with appearing(out) as folder:
            (folder / FIGURES).write_text(json.dumps(found) + "\n")
            counts = zip(answers.classes, answers.confusion.tolist(), strict=True)
            _write_csv(folder / CONFUSION, [["true", *answers.classes], *([name, *row] for name, row in counts)])
            rows = [
                [answers.name(i), answers.classes[answers.labels[i]], answers.classes[answers.predicted[i]],
                 f"{answers.confidence[i]:.4f}"]
                for i in answers.mistakes
            ]  # fmt: skip
            _write_csv(folder / MISTAKES, [["image", "true", "predicted", "confidence"], *rows])
            draw(answers, title, folder / PICTURE)


def _write_csv(path: Path, rows: list[list[Any]]) -> None:
    with path.open("x", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows(rows)
