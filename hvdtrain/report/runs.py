"""Run folders as values: what one job wrote, read back and checked, whatever became of the job."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from hvdtrain.errors import UsageError

_SIGNS = ("manifest.json", "summary.json", "config.toml")
_COUNTS = ("workers", "servers", "repeat")
_SIZES = ("parameters", "global_batch", "train_samples", "validation_samples", "threads_per_worker")
_FIGURES = (
    "steps", "samples", "wall_s", "samples_per_s", "val_accuracy", "test_accuracy", "target_accuracy",
    "time_to_target_s", "exposed_comm_fraction", "bytes_sent_per_step", "staleness_mean", "staleness_max",
    "peak_rss_mb",
)  # fmt: skip
_LOSSES = ("val_loss", "test_loss")
_EVALUATION = ("samples", "train_s", "val_accuracy")  # and val_loss; epoch, train_loss and train_accuracy may be there
_MODE_ORDER = ("single", "allreduce", "ddp", "ps-sync", "ps-ssp", "ps-async")  # others follow by name


class Kind(NamedTuple):
    """What is compared: runs of one kind are repeats of each other."""

    mode: str
    workers: int
    servers: int

    @property
    def label(self) -> str:
        """`single`, `allreduce ×2`, `ps-sync ×2+1` (two workers and one server)."""
        if self.mode == "single":
            return self.mode
        return f"{self.mode} ×{self.workers}" + (f"+{self.servers}" if self.servers else "")

    @property
    def order(self) -> tuple[int, str, int, int]:
        """Sorts the baseline first, then rings, then parameter servers, each by size."""
        known = self.mode in _MODE_ORDER
        return (_MODE_ORDER.index(self.mode) if known else len(_MODE_ORDER), *self)


@dataclass(frozen=True)
class Run:
    """One job's folder.

    Attributes:
        folder: where it is.
        manifest, summary: the parsed files; empty where they could not be read.
        problem: why the run cannot stand in a table (it failed, it was killed), or empty.
    """

    folder: Path
    manifest: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    problem: str = ""

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def done(self) -> bool:
        return not self.problem

    @property
    def kind(self) -> Kind:
        return Kind(self.manifest["mode"], self.manifest["workers"], self.manifest["servers"])

    @property
    def repeat(self) -> int:
        return self.manifest["repeat"]

    @property
    def parts(self) -> list[dict[str, Any]]:
        """What the run was each time it was started: once, unless it was resumed."""
        found = self.manifest.get("parts")
        return [part for part in found if isinstance(part, dict)] if isinstance(found, list) else []

    def steps(self) -> tuple[dict[str, list[dict[str, Any]]], list[str]]:
        """The metrics, read now: a list of steps for each `rankN`, and what was left out, one line each.

        A step has at least `time` (seconds), `samples` (this rank's, this step) and `loss` (None where there
        were no samples). What is no such step is left out: a killed rank leaves half a line behind.
        """
        ranks: dict[str, list[dict[str, Any]]] = {}
        notes = []
        for path in sorted(self.folder.glob("metrics.rank*.jsonl")):
            good, bad = _read_steps(path)
            ranks[path.name.split(".")[1]] = good
            if bad:
                notes.append(f"{self.name}: unreadable lines of {path.name} left out: {bad}")
        if len(ranks) < self.manifest["workers"]:
            notes.append(f"{self.name}: the steps of {len(ranks)} of {self.manifest['workers']} workers were found")
        return ranks, notes


def load(folder: Path) -> Run:
    """One run folder. A run that failed or was killed is a Run with a `problem`.

    Raises:
        UsageError: not a run folder, or one whose manifest cannot be read; it says what is missing.
    """
    if not folder.is_dir():
        raise UsageError(f"{folder} is not a folder" if folder.exists() else f"there is no folder {folder}")
    try:
        manifest = _read_manifest(folder)
    except _Unreadable as error:
        raise UsageError(f"{folder} is no readable run folder: {error}") from None
    try:
        summary = _read_summary(folder)
    except _Unreadable as error:
        return Run(folder, manifest, problem=f"the run has not finished: {error}")
    if summary.get("status") != "done":
        return Run(folder, manifest, summary, f"the run ended with status {summary.get('status')!r}")
    if lost := summary.get("lost_workers"):
        return Run(folder, manifest, summary, f"it finished without ranks {lost}, which died on the way")
    run = Run(folder, manifest, summary)
    told = [_way(part) for part in run.parts]
    if len(set(told)) > 1:
        return Run(folder, manifest, summary, f"it was resumed in another way: {', then '.join(told)}")
    return run


def _way(part: dict[str, Any]) -> str:
    """How a part of a run was computed, for a person; an older version did not write all of it down."""
    told = f"{part.get('mode')} on {part.get('workers')} worker(s) and {part.get('servers')} server(s)"
    more = [f"{part['threads_per_worker']} thread(s) each"] if "threads_per_worker" in part else []
    return ", ".join([told, *more, *([f"on {part['device']}"] if "device" in part else [])])


def find(paths: Iterable[Path]) -> list[Run]:
    """The runs in these folders, each once, in order of kind and repeat.

    A path is a run folder, a folder of run folders, or what `hvdtrain compare` made (runs in `runs/`).
    In a folder of runs, one that cannot be read is a Run with a `problem`; named itself, it is an error.

    Raises:
        UsageError: a path that holds no run.
    """
    found: dict[Path, Run] = {}
    for path in paths:
        if not path.is_dir() or _is_run(path):
            found.setdefault(path.resolve(), load(path))
            continue
        inner = path / "runs" if (path / "runs").is_dir() else path
        folders = [f for f in sorted(inner.glob("[!.]*")) if f.is_dir() and _is_run(f)]
        if not folders:
            raise UsageError(f"no run in {path}: a run folder holds {', '.join(_SIGNS[:2])} and metrics.rank0.jsonl")
        for folder in folders:
            found.setdefault(folder.resolve(), _load_or_note(folder))
    return sorted(found.values(), key=lambda run: (run.kind.order, run.repeat) if run.manifest else _LAST)


_LAST = (Kind("", 0, 0).order, 0)


def grouped(runs: Sequence[Run]) -> dict[Kind, list[Run]]:
    """The finished runs by kind, kinds in display order, repeats in theirs."""
    groups: dict[Kind, list[Run]] = {}
    for run in sorted((r for r in runs if r.done), key=lambda r: (r.kind.order, r.repeat, r.name)):
        groups.setdefault(run.kind, []).append(run)
    return groups


def names(runs: Sequence[Run]) -> dict[Path, str]:
    """What to call each run, by folder: the folder's name, or its whole path where two share the name."""
    count = Counter(run.name for run in runs)
    return {run.folder: run.name if count[run.name] == 1 else str(run.folder) for run in runs}


def _load_or_note(folder: Path) -> Run:
    try:
        return load(folder)
    except UsageError as error:
        return Run(folder, problem=str(error))


def _is_run(folder: Path) -> bool:
    return any((folder / sign).exists() for sign in _SIGNS) or any(folder.glob("metrics.rank*.jsonl"))


class _Unreadable(Exception):
    """What is wrong with a file of a run folder."""


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise _Unreadable(f"it has no {path.name}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise _Unreadable(f"its {path.name} cannot be read ({error})") from None
    if not isinstance(value, dict):
        raise _Unreadable(f"its {path.name} holds no object")
    return value


def _read_manifest(folder: Path) -> dict[str, Any]:
    manifest = _read_object(folder / "manifest.json")
    for name in (*_COUNTS, *(size for size in _SIZES if manifest.get(size) is not None)):
        value = manifest.get(name)
        if type(value) is not int or not (name == "workers") <= value < 1e12:
            raise _Unreadable(f"{name} in its manifest.json is {value!r}, not a count")
    # A mode's name goes to the terminal, where control characters would be obeyed.
    if not isinstance(manifest.get("mode"), str) or not re.fullmatch(r"[\w-]+", manifest["mode"]):
        raise _Unreadable(f"mode in its manifest.json is {manifest.get('mode')!r}, not the name of a mode")
    if manifest.get("lr") is not None and not _is_figure(manifest["lr"]):
        raise _Unreadable(f"lr in its manifest.json is {manifest['lr']!r}, not a learning rate")
    if not isinstance(manifest.get("model", ""), str):
        raise _Unreadable(f"model in its manifest.json is {manifest['model']!r}, not a name")
    for name in ("versions", "hardware"):
        if not isinstance(manifest.get(name, {}), dict):
            raise _Unreadable(f"{name} in its manifest.json is {manifest[name]!r}, not an object")
    return manifest


def _read_summary(folder: Path) -> dict[str, Any]:
    summary = _read_object(folder / "summary.json")
    steps, histogram = summary.get("step_seconds") or {}, summary.get("staleness_histogram") or {}
    evaluations = summary.get("evaluations") or []
    for name in _FIGURES:
        most = 1 if name.endswith("accuracy") else 1e18
        if summary.get(name) is not None and not _is_figure(summary[name], most):
            raise _Unreadable(f"{name} in its summary.json is {summary[name]!r}, not a figure from 0 to {most:g}")
    for name in _LOSSES:
        if not _is_loss(summary.get(name)):
            raise _Unreadable(f"{name} in its summary.json is {summary[name]!r}, not a number")
    if not isinstance(steps, dict) or not all(map(_is_figure, steps.values())):
        raise _Unreadable("step_seconds in its summary.json is not a table of seconds")
    if not isinstance(histogram, dict) or not all(_is_staleness(*item) for item in histogram.items()):
        raise _Unreadable("staleness_histogram in its summary.json does not give a count for each staleness")
    if not isinstance(evaluations, list) or not all(map(_is_evaluation, evaluations)):
        raise _Unreadable(f"evaluations in its summary.json is no list of {', '.join(_EVALUATION)}, val_loss")
    return summary


def _is_figure(value: Any, most: float = 1e18) -> bool:
    """Whether it is a number that a run can have; NaN and infinity are not."""
    return type(value) in (int, float) and 0 <= value <= most


def _is_loss(value: Any) -> bool:
    """Whether it is a figure, or NaN or infinity, which are a finding and not a fault; or None."""
    return value is None or type(value) is float or _is_figure(value)


def _is_staleness(staleness: str, pushes: Any) -> bool:
    return staleness.isdecimal() and len(staleness) < 10 and _is_figure(pushes)


def _is_evaluation(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and all(_is_figure(value.get(name)) for name in _EVALUATION)
        and value.get("val_loss") is not None
        and all(map(_is_loss, (value["val_loss"], value.get("train_loss"))))
        and all(value.get(name) is None or _is_figure(value[name]) for name in ("epoch", "train_accuracy"))
    )


def _read_steps(path: Path) -> tuple[list[dict[str, Any]], int]:
    good, bad = [], 0
    with path.open("rb") as lines:
        for line in lines:
            try:
                step = json.loads(line)
                if not (_is_figure(step["time"]) and _is_figure(step["samples"]) and _is_loss(step["loss"])):
                    raise ValueError
                good.append(step)
            except (ValueError, KeyError, TypeError, RecursionError):
                bad += 1
    return good, bad
