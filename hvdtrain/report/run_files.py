"""Reads the files of a run folder and checks them, since any program may have written them."""

import json
import re
from pathlib import Path
from typing import Any

_REQUIRED_COUNTS = ("workers", "servers", "repeat")
_OPTIONAL_COUNTS = ("parameters", "global_batch", "train_samples", "validation_samples", "threads_per_worker")
_FIGURES = (
    "steps", "samples", "wall_s", "samples_per_s", "val_accuracy", "test_accuracy", "target_accuracy",
    "time_to_target_s", "exposed_comm_fraction", "bytes_sent_per_step", "staleness_mean", "staleness_max",
    "peak_rss_mb",
)  # fmt: skip
_LOSSES = ("val_loss", "test_loss")
# Beside val_loss, which may be NaN; epoch, train_loss and train_accuracy are optional.
_EVALUATION_FIELDS = ("samples", "train_s", "val_accuracy")


class UnreadableFile(Exception):
    """What is wrong with a file of a run folder."""


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise UnreadableFile(f"it has no {path.name}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UnreadableFile(f"its {path.name} cannot be read ({error})") from None
    if not isinstance(value, dict):
        raise UnreadableFile(f"its {path.name} holds no object")
    return value


def read_manifest(folder: Path) -> dict[str, Any]:
    """The checked manifest.json of a run folder."""
    manifest = _read_object(folder / "manifest.json")
    for name in (*_REQUIRED_COUNTS, *(count for count in _OPTIONAL_COUNTS if manifest.get(count) is not None)):
        value = manifest.get(name)
        if type(value) is not int or not (name == "workers") <= value < 1e12:
            raise UnreadableFile(f"{name} in its manifest.json is {value!r}, not a count")
    # A mode's name goes to the terminal, where control characters would be obeyed.
    if not isinstance(manifest.get("mode"), str) or not re.fullmatch(r"[\w-]+", manifest["mode"]):
        raise UnreadableFile(f"mode in its manifest.json is {manifest.get('mode')!r}, not the name of a mode")
    if manifest.get("lr") is not None and not _is_figure(manifest["lr"]):
        raise UnreadableFile(f"lr in its manifest.json is {manifest['lr']!r}, not a learning rate")
    if not isinstance(manifest.get("model", ""), str):
        raise UnreadableFile(f"model in its manifest.json is {manifest['model']!r}, not a name")
    for name in ("versions", "hardware", "environment", "hosts"):
        if not isinstance(manifest.get(name, {}), dict):
            raise UnreadableFile(f"{name} in its manifest.json is {manifest[name]!r}, not an object")
    if not all(map(_is_host, manifest.get("hosts", {}).values())):
        raise UnreadableFile("hosts in its manifest.json does not tell what each host has")
    return manifest


def read_summary(folder: Path) -> dict[str, Any]:
    """The checked summary.json of a run folder."""
    summary = _read_object(folder / "summary.json")
    steps, histogram = summary.get("step_seconds") or {}, summary.get("staleness_histogram") or {}
    evaluations, own_steps = summary.get("evaluations") or [], summary.get("step_time") or {}
    processes = summary.get("processes") or []
    for name in _FIGURES:
        most = 1 if name.endswith("accuracy") else 1e18
        if summary.get(name) is not None and not _is_figure(summary[name], most):
            raise UnreadableFile(f"{name} in its summary.json is {summary[name]!r}, not a figure from 0 to {most:g}")
    for name in _LOSSES:
        if not _is_loss(summary.get(name)):
            raise UnreadableFile(f"{name} in its summary.json is {summary[name]!r}, not a number")
    if not isinstance(steps, dict) or not all(map(_is_figure, steps.values())):
        raise UnreadableFile("step_seconds in its summary.json is not a table of seconds")
    if not isinstance(own_steps, dict) or not all(v is None or _is_figure(v) for v in own_steps.values()):
        raise UnreadableFile("step_time in its summary.json is not a table of seconds")
    if not isinstance(histogram, dict) or not all(_is_staleness(*item) for item in histogram.items()):
        raise UnreadableFile("staleness_histogram in its summary.json does not give a count for each staleness")
    if not isinstance(processes, list) or not all(map(_is_process, processes)):
        raise UnreadableFile("processes in its summary.json is no list of what each process cost")
    if not isinstance(evaluations, list) or not all(map(_is_evaluation, evaluations)):
        raise UnreadableFile(f"evaluations in its summary.json is no list of {', '.join(_EVALUATION_FIELDS)}, val_loss")
    return summary


def _is_figure(value: Any, most: float = 1e18) -> bool:
    """Whether it is a finite number from 0 to `most`."""
    return type(value) in (int, float) and 0 <= value <= most


def _is_loss(value: Any) -> bool:
    """Whether it is a loss or None. NaN and infinity are losses: training diverged, and the file is not at fault."""
    return value is None or type(value) is float or _is_figure(value)


def _is_staleness(staleness: str, pushes: Any) -> bool:
    return staleness.isdecimal() and len(staleness) < 10 and _is_figure(pushes)


def _is_host(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(value.get(name, {}), dict) for name in ("versions", "environment")
    ) and all(_is_figure(value.get(name, 0)) for name in ("memory_gb", "cores_usable"))  # fmt: skip


def _is_process(value: Any) -> bool:
    return isinstance(value, dict) and _is_figure(value.get("cpu_s")) and _is_figure(value.get("samples") or 0)


def _is_evaluation(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and all(_is_figure(value.get(name)) for name in _EVALUATION_FIELDS)
        and value.get("val_loss") is not None
        and all(map(_is_loss, (value["val_loss"], value.get("train_loss"))))
        and all(value.get(name) is None or _is_figure(value[name]) for name in ("epoch", "train_accuracy"))
    )


def read_steps(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The steps in a rank's metrics, and how many lines are no such step: a killed rank leaves half a line behind."""
    steps, unreadable = [], 0
    with path.open("rb") as lines:
        for line in lines:
            try:
                step = json.loads(line)
                if not (_is_figure(step["time"]) and _is_figure(step["samples"]) and _is_loss(step["loss"])):
                    raise ValueError
                steps.append(step)
            except (ValueError, KeyError, TypeError, RecursionError):
                unreadable += 1
    return steps, unreadable
