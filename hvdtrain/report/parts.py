"""A grid of runs in parts: runs of a part may be compared; between parts what the grid spans differs, and no more."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hvdtrain.report.fairness import SPANNED, check_grid, show, value
from hvdtrain.report.runs import Run

_TITLES = {"model": "{}", "global_batch": "global batch {}", "lr": "learning rate {}"}
_NAMES = {"model": "{}", "global_batch": "b{}", "lr": "lr{}"}


@dataclass(frozen=True)
class Part:
    """Finished runs of one model, global batch and learning rate.

    Attributes:
        title: what sets it apart from the other parts, for a person: `vgg16, global batch 64`.
        name: the same for a folder, `vgg16-b64`; empty where there is one part only.
    """

    title: str
    name: str
    runs: list[Run]


def parted(runs: Sequence[Run]) -> list[Part]:
    """The finished runs in parts: by model, then by global batch, then by learning rate.

    Raises:
        UsageError: they differ in more than a grid spans; the field is named.
    """
    parts: dict[tuple[Any, ...], list[Run]] = {}
    for run in runs:
        if run.done:
            parts.setdefault(tuple(_told(value(run, field)) for field in SPANNED), []).append(run)
    if len(parts) < 2:
        return [Part("", "", members) for members in parts.values()]
    check_grid(runs)
    keys = sorted(parts, key=lambda key: (key[0] or "", key[1] or 0, key[2] or 0))
    shared = Counter(key[:2] for key in keys)
    made = []
    for key in keys:
        told = [
            (field, show(part))
            for i, (field, part) in enumerate(zip(SPANNED, key, strict=True))
            if len({other[i] for other in keys}) > 1
        ]
        title = ", ".join(_TITLES[field].format(text) for field, text in told)
        # The learning rate follows from the batch, unless two parts have the same batch.
        short = [(field, text) for field, text in told if field != "lr" or shared[key[:2]] > 1]
        name = "-".join(_NAMES[field].format(text.replace(",", "")) for field, text in short)
        name = "".join(c if c.isalnum() or c in "-._" else "_" for c in name).strip(".")  # no path, and not hidden
        made.append(Part(title, name or "_", parts[key]))
    return made


def _told(part: Any) -> Any:
    """A value as it sets parts apart: a learning rate in four digits, which is how it is told."""
    return float(f"{part:.4g}") if isinstance(part, float) else part
