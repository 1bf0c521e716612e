"""Tables laid out as an experiment's authors laid out theirs, with their figures beside ours.

What a table looks like, and the figures, stand in the preset that repeats the experiment: hvdtrain/presets/NAME.toml.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from hvdtrain import recipes
from hvdtrain.config import lr_factor
from hvdtrain.errors import UsageError
from hvdtrain.report.cells import HEADINGS, MORE_HEADINGS, figure, spread_text
from hvdtrain.report.fairness import SPANNED, show, value
from hvdtrain.report.runs import Kind, Run, grouped
from hvdtrain.report.table import Cell, Table
from hvdtrain.report.tables import Row, results, spread

# Options of a preset that a manifest records under the same name: where ours differ, the table says so.
_COMPARED = (
    "model", "dataset", "pretrained", "width", "dropout", "image_size", "augment", "optimizer", "momentum",
    "weight_decay", "nesterov",
)  # fmt: skip
_EPOCH = ("train_loss", "train_accuracy", "val_loss", "val_accuracy")


@dataclass(frozen=True)
class Layout:
    """What a table shows.

    Attributes:
        name: of its files.
        title: what stands above it.
        down: what a row is: `run`, `figure`, `epoch`, or a column of results.csv such as `global_batch`.
        figures: columns of results.csv; where a row is an epoch, columns of the runs' evaluations and `epoch_s`.
        notes: what to know about the reference.
        reference: for each of its runs, a record a row: the value of `down`, where it is one, and figures.
        options: what its authors did, as options of `hvdtrain compare`.
    """

    name: str
    title: str
    down: str
    figures: Sequence[str]
    notes: Sequence[str] = ()
    reference: dict[str, list[dict[str, float]]] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)


OVERVIEW = Layout("overview", "All runs", "run", ("global_batch", "lr", *HEADINGS))


def layout(name: str) -> Layout:
    """The table of the experiment that the preset repeats. UsageError where there is no such preset."""
    preset = recipes.load("presets", name)
    told = preset["table"]
    return Layout(
        name, f"Beside {preset['reference']}", told["down"], told["figures"], [told["note"]],
        told["reference"], preset["options"],
    )  # fmt: skip


@dataclass(frozen=True)
class _Series:
    """Figures of the repeats of one kind of run, or of the reference: by the value of `down`, then by name."""

    label: str
    cells: dict[Any, dict[str, Cell]]


def build(layout: Layout, runs: Sequence[Run]) -> Table:
    """The table of the finished runs; repeats as medians and ranges. UsageError where none has finished."""
    done = [run for members in grouped(runs).values() for run in members]
    if not done:
        raise UsageError("no finished run to put beside the reference")
    ours = _ours(layout, done)
    theirs = [
        _Series(f"reference: {label}", {r.get(layout.down): _cells(layout, [r]) for r in records})
        for label, records in layout.reference.items()
    ]
    series = ours + theirs
    shown = [f for f in layout.figures if any(cells[f].text for s in series for cells in s.cells.values())]
    headings = {name: (HEADINGS | MORE_HEADINGS)[name] for name in shown}
    notes = [*layout.notes, *_differences(layout, done)]
    notes.append(_repeats(done))
    columns: list[tuple[str, str]]
    if layout.down == "figure":
        columns = [("", s.label) for s in series]
        rows = [(headings[f], [s.cells[None][f] for s in series]) for f in shown]
        return Table(layout.name, layout.title, notes, "", columns, rows)
    if layout.down == "run":
        columns = [("", headings[f]) for f in shown]
        rows = [(s.label, [s.cells[None][f] for f in shown]) for s in series]
        return Table(layout.name, layout.title, notes, "run", columns, rows)
    columns = [(s.label, headings[f]) for s in series for f in shown]
    keys = sorted({key for s in series for key in s.cells if key is not None})
    rows = [(show(key), [s.cells.get(key, {}).get(f, Cell()) for s in series for f in shown]) for key in keys]
    return Table(layout.name, layout.title, notes, MORE_HEADINGS.get(layout.down, layout.down), columns, rows)


def _ours(layout: Layout, runs: Sequence[Run]) -> list[_Series]:
    """Our runs, by model, global batch and learning rate, then kinds in display order."""
    found: dict[tuple[str, int, float, Kind], dict[Any, list[dict[str, Any]]]] = {}
    for row, run in zip(results(runs), runs, strict=True):
        batch, lr = (0 if layout.down == name else row[name] or 0 for name in ("global_batch", "lr"))
        members = found.setdefault((row["model"] or "", batch, lr, run.kind), {})
        for key, figures in _records(layout, row, run):
            members.setdefault(key, []).append(figures)
    ordered = sorted(found, key=lambda identity: (*identity[:3], identity[3].order))
    models = {model for model, *_ in ordered}
    series = []
    for identity in ordered:
        model, batch, _, kind = identity
        several = len({other[1] for other in ordered if other[0] == model and other[3] == kind}) > 1
        several = several and layout.down != "run"  # its row says it
        words = [model] * (len(models) > 1) + [kind.label] + [f"batch {batch}"] * several
        cells = {key: _cells(layout, members) for key, members in found[identity].items()}
        series.append(_Series(", ".join(words), cells))
    return series


def _records(layout: Layout, row: Row, run: Run) -> Iterator[tuple[Any, dict[str, Any]]]:
    """What a run has to say: the value of `down`, and the figures there."""
    if layout.down != "epoch":
        yield row.get(layout.down), row
        return
    before = samples = 0.0
    train = value(run, "train_samples")
    for evaluation in run.summary.get("evaluations") or []:
        figures = {name: evaluation.get(name) for name in _EPOCH}
        # Of a whole one: the last may have ended midway.
        part = (evaluation["samples"] - samples) / train if train else None
        yield evaluation.get("epoch"), figures | {"epoch_s": (evaluation["train_s"] - before) / part if part else None}
        before, samples = evaluation["train_s"], evaluation["samples"]


def _cells(layout: Layout, members: Sequence[dict[str, Any]]) -> dict[str, Cell]:
    cells = {}
    for name in layout.figures:
        found = spread([member.get(name) for member in members])
        cells[name] = (
            Cell(_shown(name, found.median), found.median, spread_text(name, found, _shown)) if found else Cell()
        )
    return cells


def _shown(name: str, value: float) -> str:
    """As the references have it: accuracies and losses with four digits."""
    if math.isnan(value):
        return "diverged"
    if name.endswith("accuracy"):
        return f"{value:.2%}"
    return f"{value:.4f}" if name.endswith("loss") else figure(name, value)


def _repeats(runs: Sequence[Run]) -> str:
    count = Counter((run.kind, *(show(value(run, field)) for field in SPANNED)) for run in runs)
    low, high = min(count.values()), max(count.values())
    if high == 1:
        return "One run each."
    return f"Medians of {high if low == high else f'{low} to {high}'} runs each, with their range."


def _differences(layout: Layout, runs: Sequence[Run]) -> list[str]:
    told = []
    done = [_options(row, run, layout.options) for row, run in zip(results(runs), runs, strict=True)]
    for option, theirs in layout.options.items():
        theirs = theirs if isinstance(theirs, list) else [theirs]
        ours = {show(options[option]): options[option] for options in done if option in options}
        if any(this not in theirs for this in ours.values()):
            told.append(f"{option} {', '.join(ours)} ({', '.join(map(show, theirs))})")
    return [f"These runs are not as the preset has them, which stands in brackets: {'; '.join(told)}."] if told else []


def _options(row: Row, run: Run, theirs: dict[str, Any]) -> dict[str, Any]:
    """What a run did, as options of `hvdtrain compare` beside a preset's: a batch is a worker's if that has it so."""
    told = {option: value(run, option) for option in _COMPARED}
    workers, lr, batch = run.kind.workers, row["lr"], row["global_batch"]
    if workers > 1:  # a run of one is in every comparison
        told["workers"] = workers
    if batch:
        told["batch_size"] = round(batch / workers) if theirs.get("per_worker") else batch
    if lr:
        told["lr"] = float(f"{lr / lr_factor(theirs.get('lr_scaling', 'none'), workers):.4g}")
    told["schedule"] = str(value(run, "schedule")).split(" ")[0]
    if epochs := row["epochs"]:
        told["epochs"] = round(epochs) if abs(epochs - round(epochs)) < 0.005 else float(f"{epochs:.2g}")
    return told
