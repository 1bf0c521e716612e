"""Tables with the figures of a published experiment beside ours.

The preset that repeats the experiment, hvdtrain/base/config/presets/NAME.toml, has what its authors
measured. The preset's `table` has:

- `figures`: the columns of the table, named as in results.csv.
- `down`: what else distinguishes rows. This is `epoch`, if the figures are of each epoch's
  evaluation, or a column of results.csv such as `global_batch`. `run` and `figure` stand for
  nothing.
- `reference`: the authors' runs by name, each with a record for each row.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hvdtrain.base.config import recipes
from hvdtrain.base.errors import UsageError
from hvdtrain.reporting.columns import COLUMNS, MEANS, TRAINED, Setting, format_figure
from hvdtrain.reporting.fairness import format_value
from hvdtrain.reporting.results import Row, format_cell, mean_and_range, result_rows
from hvdtrain.reporting.table import Cell, Table
from hvdtrain.runs.fields import field_value
from hvdtrain.runs.read import Kind, Run, finished_by_kind

Preset = dict[str, Any]
# The records of a series of runs, by row.
Records = dict[Any, list[dict[str, Any]]]
# Options of a preset that a manifest records under the same name. A note below the table says which
# of our options differ from the preset.
_COMPARED_OPTIONS = (
    "model",
    "dataset",
    "pretrained",
    "width",
    "dropout",
    "image_size",
    "augment",
    "optimizer",
    "momentum",
    "weight_decay",
    "nesterov",
)
_EVALUATION_FIGURES = ("train_loss", "train_accuracy", "val_loss", "val_accuracy")


def load_preset(name: str) -> Preset:
    """Returns the preset that repeats a published experiment.

    Raises:
        UsageError: there is no such preset, or it has no table.
    """
    preset = recipes.load("presets", name)
    if "table" not in preset:
        raise UsageError(
            f"preset {name} repeats no published experiment: there is no table to stand beside"
        )
    return preset


def build_table(preset: Preset, runs: Sequence[Run]) -> Table:
    """Returns the table of the finished runs, with repeats as means and ranges.

    Raises:
        UsageError: no run has finished.
    """
    finished: list[Run] = []
    for members in finished_by_kind(runs).values():
        finished += members
    if not finished:
        raise UsageError("no finished run to put beside the reference")
    down = preset["table"]["down"]
    figures = preset["table"]["figures"]
    series = _own_series(preset, finished)
    for label, records in preset["table"]["reference"].items():
        series[f"reference: {label}"] = {record.get(down): [record] for record in records}
    rows: list[tuple[str, dict[str, Cell]]] = []
    for key in _row_keys(series):
        place = "" if key is None else f", {_heading(down)} {format_value(key)}"
        for label, records_by_row in series.items():
            if key in records_by_row:
                rows.append((label + place, _cells(figures, records_by_row[key])))
    shown = [name for name in figures if any(cells[name].text for _, cells in rows)]
    return Table(
        title=f"Beside {preset['reference']}",
        notes=[
            preset["table"]["note"],
            *_differences(preset["options"], finished),
            f"Repeats with their range: {MEANS}.",
        ],
        corner="run",
        headings=[_heading(name) for name in shown],
        rows=[(label, [cells[name] for name in shown]) for label, cells in rows],
    )


def _row_keys(series: Mapping[str, Records]) -> list[Any]:
    """Returns the keys of all rows, in order; None alone if rows have no keys."""
    keys: set[Any] = set()
    for records_by_row in series.values():
        keys.update(records_by_row)
    keys.discard(None)
    return sorted(keys) or [None]


def _cells(figures: Sequence[str], repeats: Sequence[Mapping[str, Any]]) -> dict[str, Cell]:
    """Returns the cells of a row by the names of their figures."""
    cells = {}
    for name in figures:
        values = mean_and_range([record.get(name) for record in repeats], name)
        cells[name] = format_cell(name, values, format_value=_format)
    return cells


def _heading(name: str) -> str:
    columns = COLUMNS | TRAINED
    return columns[name].heading if name in columns else name


def _own_series(preset: Preset, runs: Sequence[Run]) -> dict[str, Records]:
    """Returns the records of our runs by label: of each kind, and of each of its settings."""
    down = preset["table"]["down"]
    by_setting: dict[tuple[Setting, Kind], Records] = {}
    for row, run in zip(result_rows(runs), runs, strict=True):
        # The learning rate follows from the batch, or there is one.
        setting = Setting.of(run)._replace(lr=0.0)
        if down == "global_batch":
            setting = setting._replace(global_batch=0)
        records_by_row = by_setting.setdefault((setting, run.kind), {})
        for key, figures in _records(preset, row, run):
            records_by_row.setdefault(key, []).append(figures)
    series = {}
    for setting, kind in sorted(by_setting, key=lambda pair: (pair[0].order, pair[1].order)):
        varied = Setting.varied(other for other, other_kind in by_setting if other_kind == kind)
        words = [kind.label, *(setting.words(name) for name in varied)]
        series[", ".join(words)] = by_setting[setting, kind]
    return series


def _records(preset: Preset, row: Row, run: Run) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yields what a run contributes to the table: a row's key, and the figures there.

    The key is an epoch, the value of a column, or None.
    """
    down = preset["table"]["down"]
    if down != "epoch":
        yield row.get(down), row
        return
    seconds_before = 0.0
    samples_before = 0.0
    train_samples = field_value(run, "train_samples")
    for evaluation in run.summary.evaluations:
        figures = {name: getattr(evaluation, name) for name in _EVALUATION_FIGURES}
        # The last epoch may have ended midway. The time is that of a whole epoch.
        epochs = (evaluation.samples - samples_before) / train_samples if train_samples else None
        epoch_s = (evaluation.train_s - seconds_before) / epochs if epochs else None
        yield evaluation.epoch, figures | {"epoch_s": epoch_s}
        seconds_before = evaluation.train_s
        samples_before = evaluation.samples


def _format(name: str, value: float) -> str:
    """Returns a figure as publications write it: accuracies and losses with four digits."""
    if math.isnan(value):
        return "diverged"
    if name.endswith("accuracy"):
        return f"{value:.2%}"
    if name.endswith("loss"):
        return f"{value:.4f}"
    return format_figure(name, value)


def _differences(preset_options: Mapping[str, Any], runs: Sequence[Run]) -> list[str]:
    """Returns a note on the options in which our runs differ from the preset; none if equal."""
    options_of_runs = []
    for row, run in zip(result_rows(runs), runs, strict=True):
        options = {option: field_value(run, option) for option in _COMPARED_OPTIONS}
        options["schedule"] = str(field_value(run, "schedule")).split(" ")[0]
        if row["epochs"]:
            options["epochs"] = round(row["epochs"], 2)
        options_of_runs.append(options)
    differences = []
    for option, wanted in preset_options.items():
        wanted_values = wanted if isinstance(wanted, list) else [wanted]
        values = [options[option] for options in options_of_runs if option in options]
        if any(value not in wanted_values for value in values):
            ours = ", ".join(dict.fromkeys(map(format_value, values)))
            theirs = ", ".join(map(format_value, wanted_values))
            differences.append(f"{option} {ours} ({theirs})")
    if not differences:
        return []
    told = "; ".join(differences)
    return [f"These runs are not as the preset has them, which stands in brackets: {told}."]
