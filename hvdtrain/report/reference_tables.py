"""Tables with the figures of a published experiment beside ours.

What its authors measured is in the preset that repeats the experiment: hvdtrain/config/presets/NAME.toml. Its `table`
has the `figures`, columns of results.csv; `down`, what else tells rows apart: an `epoch`, of whose evaluation the
figures are then, or a column of results.csv such as `global_batch`, or nothing (`run`, `figure`); and by name the
authors' runs, each as a record for each row.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

from hvdtrain.config import recipes
from hvdtrain.errors import UsageError
from hvdtrain.report.columns import COLUMNS, MEANS, TRAINED, Setting, format_figure
from hvdtrain.report.fairness import format_value
from hvdtrain.report.results import Row, format_cell, result_rows, spread
from hvdtrain.report.table import Cell, Table
from hvdtrain.runs.fields import field_value
from hvdtrain.runs.read import Kind, Run, finished_by_kind

Preset = dict[str, Any]
# Options of a preset that a manifest records under the same name. The table says where ours differ from the preset's.
_COMPARED_OPTIONS = (
    "model", "dataset", "pretrained", "width", "dropout", "image_size", "augment", "optimizer", "momentum",
    "weight_decay", "nesterov",
)  # fmt: skip
_EVALUATION_FIGURES = ("train_loss", "train_accuracy", "val_loss", "val_accuracy")


def load_preset(name: str) -> Preset:
    """The preset that repeats a published experiment. UsageError where there is no such preset, or no table."""
    preset = recipes.load("presets", name)
    if "table" not in preset:
        raise UsageError(f"preset {name} repeats no published experiment: there is no table to stand beside")
    return preset


def build_table(preset: Preset, runs: Sequence[Run]) -> Table:
    """The table of the finished runs; repeats as means and ranges. UsageError where none has finished."""
    finished = [run for members in finished_by_kind(runs).values() for run in members]
    if not finished:
        raise UsageError("no finished run to put beside the reference")
    table, down = preset["table"], preset["table"]["down"]
    series = _own_series(preset, finished)
    for label, records in table["reference"].items():
        series[f"reference: {label}"] = {record.get(down): [record] for record in records}
    keys = sorted({key for records in series.values() for key in records if key is not None}) or [None]
    rows: list[tuple[str, dict[str, Cell]]] = []
    for key, (label, records) in itertools.product(keys, series.items()):
        if key in records:
            spreads = {name: spread([record.get(name) for record in records[key]], name) for name in table["figures"]}
            cells = {name: format_cell(name, of, format_value=_format) for name, of in spreads.items()}
            rows.append((label if key is None else f"{label}, {_heading(down)} {format_value(key)}", cells))
    shown = [name for name in table["figures"] if any(cells[name].text for _, cells in rows)]
    notes = [table["note"], *_differences(preset["options"], finished), f"Repeats with their range: {MEANS}."]
    shown_rows = [(label, [cells[name] for name in shown]) for label, cells in rows]
    return Table(f"Beside {preset['reference']}", notes, "run", [_heading(name) for name in shown], shown_rows)


def _heading(name: str) -> str:
    columns = COLUMNS | TRAINED
    return columns[name].heading if name in columns else name


def _own_series(preset: Preset, runs: Sequence[Run]) -> dict[str, dict[Any, list[dict[str, Any]]]]:
    """The records of our runs by label, then by row: of each kind, and setting where a kind has several."""
    down = preset["table"]["down"]
    of_ours: dict[tuple[Setting, Kind], dict[Any, list[dict[str, Any]]]] = {}
    for row, run in zip(result_rows(runs), runs, strict=True):
        setting = Setting.of(run)._replace(lr=0.0)  # which follows from the batch, or is one
        if down == "global_batch":
            setting = setting._replace(global_batch=0)
        records = of_ours.setdefault((setting, run.kind), {})
        for key, figures in _records(preset, row, run):
            records.setdefault(key, []).append(figures)
    series = {}
    for setting, kind in sorted(of_ours, key=lambda of: (of[0].order, of[1].order)):
        varied = Setting.varied(other for other, of in of_ours if of == kind)
        words = [kind.label, *(setting.words(name) for name in varied)]
        series[", ".join(words)] = of_ours[setting, kind]
    return series


def _records(preset: Preset, row: Row, run: Run) -> Iterator[tuple[Any, dict[str, Any]]]:
    """What a run contributes to the table: (row, figures), where the row is an epoch, a column's value or None."""
    if preset["table"]["down"] != "epoch":
        yield row.get(preset["table"]["down"]), row
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


def _format(name: str, value: float) -> str:
    """As publications do: accuracies and losses with four digits."""
    if math.isnan(value):
        return "diverged"
    if name.endswith("accuracy"):
        return f"{value:.2%}"
    return f"{value:.4f}" if name.endswith("loss") else format_figure(name, value)


def _differences(asked: dict[str, Any], runs: Sequence[Run]) -> list[str]:
    """A note on the options in which our runs differ from those that the preset asks for, if there are any."""
    differences, options = [], []  # of `hvdtrain compare`, that each run was done with
    for row, run in zip(result_rows(runs), runs, strict=True):
        done = {option: field_value(run, option) for option in _COMPARED_OPTIONS}
        done["schedule"] = str(field_value(run, "schedule")).split(" ")[0]
        if row["epochs"]:
            done["epochs"] = round(row["epochs"], 2)
        options.append(done)
    for option, theirs in asked.items():
        theirs = theirs if isinstance(theirs, list) else [theirs]
        ours = {format_value(of_run[option]): of_run[option] for of_run in options if option in of_run}
        if any(value not in theirs for value in ours.values()):
            differences.append(f"{option} {', '.join(ours)} ({', '.join(map(format_value, theirs))})")
    if not differences:
        return []
    return [f"These runs are not as the preset has them, which stands in brackets: {'; '.join(differences)}."]
