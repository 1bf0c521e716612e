"""Tables in the layout of a published experiment, with its authors' figures beside ours.

The layout and the authors' figures are in the preset that repeats the experiment: hvdtrain/config/presets/NAME.toml.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from hvdtrain.config import recipes
from hvdtrain.config.run_config import lr_factor
from hvdtrain.errors import UsageError
from hvdtrain.report.columns import COLUMNS, MEANS, TRAINED, Setting, format_figure
from hvdtrain.report.fairness import format_value
from hvdtrain.report.results import Row, format_range, result_rows, spread
from hvdtrain.report.table import Cell, Table
from hvdtrain.runs.fields import field_value
from hvdtrain.runs.read import Kind, Run, finished_by_kind

# Options of a preset that a manifest records under the same name. The table says where ours differ from the preset's.
_COMPARED_OPTIONS = (
    "model", "dataset", "pretrained", "width", "dropout", "image_size", "augment", "optimizer", "momentum",
    "weight_decay", "nesterov",
)  # fmt: skip
_EVALUATION_FIGURES = ("train_loss", "train_accuracy", "val_loss", "val_accuracy")


@dataclass(frozen=True)
class Layout:
    """What a table shows.

    Attributes:
        name: of its files.
        title: stands above it.
        row_is: what a row stands for: a `run`, a `figure`, an `epoch`, or a value of a column of results.csv such as
            `global_batch`.
        figures: columns of results.csv; where a row is an epoch, fields of the runs' evaluations and `epoch_s`.
        notes: what to know about the reference.
        reference: the authors' runs by name, each as a record for each row: figures, and the row's epoch or value.
        options: what the authors did, as options of `hvdtrain compare`.
    """

    name: str
    title: str
    row_is: str
    figures: Sequence[str]
    notes: Sequence[str] = ()
    reference: dict[str, list[dict[str, float]]] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)


def load_layout(preset_name: str) -> Layout:
    """The table of the experiment that a preset repeats. UsageError where there is no such preset, or no table."""
    preset = recipes.load("presets", preset_name)
    if not (table := preset.get("table")):
        raise UsageError(f"preset {preset_name} repeats no published experiment: there is no table to stand beside")
    return Layout(
        preset_name, f"Beside {preset['reference']}", table["down"], table["figures"], [table["note"]],
        table["reference"], preset["options"],
    )  # fmt: skip


@dataclass(frozen=True)
class _Series:
    """Figures of one kind of run, or of one of the authors' runs: cells by row (None: it has only one), then by figure.

    A row is identified by its epoch or its value of the column that `Layout.row_is` names.
    """

    label: str
    cells: dict[Any, dict[str, Cell]]


def build_table(layout: Layout, runs: Sequence[Run]) -> Table:
    """The table of the finished runs; repeats as means and ranges. UsageError where none has finished."""
    finished = [run for members in finished_by_kind(runs).values() for run in members]
    if not finished:
        raise UsageError("no finished run to put beside the reference")
    ours = _own_series(layout, finished)
    theirs = [
        _Series(f"reference: {label}", {r.get(layout.row_is): _cells(layout, [r]) for r in records})
        for label, records in layout.reference.items()
    ]
    series = ours + theirs
    figures = [f for f in layout.figures if any(cells[f].text for s in series for cells in s.cells.values())]
    headings = {name: (COLUMNS | TRAINED)[name].heading for name in figures}
    notes = [*layout.notes, *_differences(layout, finished), _repeats(finished)]
    columns: list[tuple[str, str]]
    if layout.row_is == "figure":
        columns = [("", s.label) for s in series]
        rows = [(headings[f], [s.cells[None][f] for s in series]) for f in figures]
        return Table(layout.name, layout.title, notes, "", columns, rows)
    if layout.row_is == "run":
        columns = [("", headings[f]) for f in figures]
        rows = [(s.label, [s.cells[None][f] for f in figures]) for s in series]
        return Table(layout.name, layout.title, notes, "run", columns, rows)
    columns = [(s.label, headings[f]) for s in series for f in figures]
    keys = sorted({key for s in series for key in s.cells if key is not None})
    rows = [(format_value(key), [s.cells.get(key, {}).get(f, Cell()) for s in series for f in figures]) for key in keys]
    corner = COLUMNS[layout.row_is].heading if layout.row_is in COLUMNS else layout.row_is
    return Table(layout.name, layout.title, notes, corner, columns, rows)


def _own_series(layout: Layout, runs: Sequence[Run]) -> list[_Series]:
    """Our runs, by model, global batch, learning rate and who was made slow, then by kind in display order."""
    found: dict[tuple[str, int, float, str, Kind], dict[Any, list[dict[str, Any]]]] = {}
    for row, run in zip(result_rows(runs), runs, strict=True):
        batch, lr = (0 if layout.row_is == name else row[name] or 0 for name in ("global_batch", "lr"))
        records = found.setdefault((row["model"] or "", batch, lr, field_value(run, "slow.asked"), run.kind), {})
        for key, figures in _records(layout, row, run):
            records.setdefault(key, []).append(figures)
    ordered = sorted(found, key=lambda own: (*own[:3], own[3] != "none", own[3], own[4].order))
    models, slows = {model for model, *_ in ordered}, {slow for *_, slow, _ in ordered}
    series = []
    for identity in ordered:
        model, batch, _, slow, kind = identity
        alike = (model, slow, kind)
        has_several_batches = len({other[1] for other in ordered if (other[0], *other[3:]) == alike}) > 1
        names_batch = has_several_batches and layout.row_is != "run"  # a row of a run has it as a figure
        words = [model] * (len(models) > 1) + [kind.label] + [f"batch {batch}"] * names_batch
        words += [f"slow: {slow}"] * (len(slows) > 1)
        cells = {key: _cells(layout, records) for key, records in found[identity].items()}
        series.append(_Series(", ".join(words), cells))
    return series


def _records(layout: Layout, row: Row, run: Run) -> Iterator[tuple[Any, dict[str, Any]]]:
    """What a run contributes to the table: (row, figures), where the row is an epoch, a column's value or None."""
    if layout.row_is != "epoch":
        yield row.get(layout.row_is), row
        return
    seconds_before = samples_before = 0.0
    train_samples = field_value(run, "train_samples")
    for evaluation in run.summary.evaluations:
        figures = {name: getattr(evaluation, name) for name in _EVALUATION_FIGURES}
        # The last epoch may have ended midway: its time is that of a whole one.
        epochs = (evaluation.samples - samples_before) / train_samples if train_samples else None
        epoch_s = (evaluation.train_s - seconds_before) / epochs if epochs else None
        yield evaluation.epoch, figures | {"epoch_s": epoch_s}
        seconds_before, samples_before = evaluation.train_s, evaluation.samples


def _cells(layout: Layout, records: Sequence[dict[str, Any]]) -> dict[str, Cell]:
    cells = {}
    for name in layout.figures:
        found = spread([record.get(name) for record in records], name)
        cells[name] = (
            Cell(_format(name, found.mean), found.mean, format_range(name, found, _format)) if found else Cell()
        )
    return cells


def _format(name: str, value: float) -> str:
    """As publications do: accuracies and losses with four digits."""
    if math.isnan(value):
        return "diverged"
    if name.endswith("accuracy"):
        return f"{value:.2%}"
    return f"{value:.4f}" if name.endswith("loss") else format_figure(name, value)


def _repeats(runs: Sequence[Run]) -> str:
    count = Counter((run.kind, Setting.of(run)) for run in runs)
    low, high = min(count.values()), max(count.values())
    if high == 1:
        return "One run each."
    return f"{high if low == high else f'{low} to {high}'} runs each, with their range: {MEANS}."


def _differences(layout: Layout, runs: Sequence[Run]) -> list[str]:
    """A note on the options in which our runs differ from the authors', if there are any."""
    differences = []
    own_options = [_options(row, run, layout.options) for row, run in zip(result_rows(runs), runs, strict=True)]
    for option, theirs in layout.options.items():
        theirs = theirs if isinstance(theirs, list) else [theirs]
        ours = {format_value(options[option]): options[option] for options in own_options if option in options}
        if any(value not in theirs for value in ours.values()):
            differences.append(f"{option} {', '.join(ours)} ({', '.join(map(format_value, theirs))})")
    if not differences:
        return []
    return [f"These runs are not as the preset has them, which stands in brackets: {'; '.join(differences)}."]


def _options(row: Row, run: Run, preset: dict[str, Any]) -> dict[str, Any]:
    """What a run did, as options of `hvdtrain compare`; batch and learning rate are given as the preset gives them."""
    options = {option: field_value(run, option) for option in _COMPARED_OPTIONS}
    workers, lr, batch = run.kind.workers, row["lr"], row["global_batch"]
    if workers > 1:  # one worker is every comparison's baseline, and no difference
        options["workers"] = workers
    if batch:
        options["batch_size"] = round(batch / workers) if preset.get("per_worker") else batch
    if lr:
        options["lr"] = float(f"{lr / lr_factor(preset.get('lr_scaling', 'none'), workers):.4g}")
    options["schedule"] = str(field_value(run, "schedule")).split(" ")[0]
    if epochs := row["epochs"]:
        options["epochs"] = round(epochs) if abs(epochs - round(epochs)) < 0.005 else float(f"{epochs:.2g}")
    return options
