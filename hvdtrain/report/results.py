"""The figures of runs: a row for each run (results.csv), and their mean and range for each kind of run."""

import csv
import io
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from statistics import geometric_mean
from typing import Any

from hvdtrain.report.runs import Kind, Run, finished_by_kind

Row = dict[str, Any]

# The columns of results.csv in their order, each with what it means. A cell is empty where the figure was not measured
# or does not apply.
COLUMNS = {
    "mode": "how the workers are kept in step",
    "workers": "processes that compute gradients",
    "servers": "processes that hold the weights and apply the optimizer (parameter-server modes)",
    "model": "the network",
    "parameters": "its trainable weights",
    "global_batch": "samples of one step, over all workers together",
    "lr": "learning rate for the global batch, as the schedule starts from",
    "steps_per_epoch": "train_samples / global_batch, rounded up",
    "steps": "steps done, each of one global batch",
    "samples": "samples trained on, over all workers together",
    "epochs": "samples / train_samples: passes over the training data",
    "wall_s": "seconds of training, without set-up and evaluation",
    "epoch_s": "wall_s / epochs: mean seconds of training of a pass over the training data",
    "samples_per_s": "samples / wall_s",
    "worker_samples_per_s": "samples_per_s / workers",
    "process_samples_per_s": "samples_per_s / (workers + servers)",
    "cpu_s_per_1000_samples": (
        "seconds of processor time (user and system) for 1,000 samples, of all processes, servers included, while they "
        "train; set-up and evaluation left out. A process that spins while it waits takes processor time too"
    ),
    "scaling_efficiency": (
        "samples_per_s / (workers × samples_per_s of the baseline). The baseline is the single run of the "
        "same repeat, else the geometric mean of all single runs; without any it is another mode on one worker, the "
        "same for all modes; empty where there is none. It has the same model and the same global batch or, where "
        "runs on more workers have larger ones, the same batch per worker (weak scaling). 1 is perfect scaling"
    ),
    "val_accuracy": "accuracy on the validation images at the last evaluation, every image counted once",
    "val_loss": "mean cross-entropy on the validation images at the last evaluation",
    "best_val_loss": "the smallest val_loss of all evaluations",
    "test_loss": "mean cross-entropy of the best model on the test images, where the data set has some",
    "test_accuracy": "accuracy of the best model on the test images",
    "time_to_target_s": "seconds of training until an evaluation first reached the target accuracy",
    "samples_to_target": "samples trained on until then: time_to_target_s = these × seconds a sample",
    "exposed_comm_fraction": (
        "share of a worker's training time in which it waits for other processes: exposed communication, between "
        "steps, for a share, for weights to evaluate"
    ),
    "step_p50_s": "median of the seconds of a worker's own step, the first ones of each start left out",
    "step_p95_s": "what 95 % of them do not exceed",
    "step_p99_s": "what 99 % of them do not exceed",
    "bytes_sent_per_step": "bytes of weights and gradients sent in a step by all processes, servers included",
    "staleness_mean": "mean number of updates of a bucket of weights from a worker's pull until its push is applied",
    "staleness_max": "the largest such number",
    "peak_rss_mb": (
        "largest resident memory of all processes together, servers included, in MB of 2^20 bytes "
        "(pages that processes share count once for each)"
    ),
    "repeat": "number of the repeat; repeats have different seeds unless said otherwise",
}
# Of these the mean over repeats is the geometric one, so that a ratio of two means is the mean of the ratios in each
# repeat: what is said of a lead, the table and scaling efficiency agree.
_GEOMETRIC = ("samples_per_s", "worker_samples_per_s", "scaling_efficiency", "wall_s", "epoch_s", "time_to_target_s",
              "samples_to_target")  # fmt: skip
# What identifies a run; all other columns are figures.
_IDENTIFYING = ("mode", "workers", "servers", "model", "parameters", "repeat")
FIGURES = tuple(name for name in COLUMNS if name not in _IDENTIFYING)


@dataclass(frozen=True)
class Spread:
    """Mean and range of a figure over the n repeats that have it; all NaN if one of them is (it diverged)."""

    mean: float
    low: float
    high: float
    n: int


@dataclass(frozen=True)
class Group:
    """The n runs of one kind: a Spread for each of FIGURES, None where no run has it."""

    kind: Kind
    n: int
    figures: dict[str, Spread | None]

    def __getitem__(self, figure: str) -> Spread | None:
        return self.figures[figure]


def result_rows(runs: Sequence[Run], others: Sequence[Run] = ()) -> list[Row]:
    """One row of COLUMNS for each finished run, in display order of kinds, then of repeats.

    Args:
        others: further runs that may hold the baseline of scaling efficiency.
    """
    rows = [_row(run) for members in finished_by_kind(runs).values() for run in members]
    all_rows = rows + [_row(run) for run in others if run.is_finished and run not in runs]
    for row in rows:
        row["scaling_efficiency"] = _scaling_efficiency(row, all_rows)
    return rows


def _row(run: Run) -> Row:
    recorded = run.summary | run.manifest
    row = {name: recorded.get(name) for name in COLUMNS}
    batch, train, samples, wall = (recorded.get(n) for n in ("global_batch", "train_samples", "samples", "wall_s"))
    losses = [evaluation["val_loss"] for evaluation in recorded.get("evaluations") or []]
    row["steps_per_epoch"] = -(-train // batch) if train and batch else None
    row["epochs"] = samples / train if samples is not None and train else None
    row["epoch_s"] = wall / row["epochs"] if wall is not None and row["epochs"] else None
    speed = row["samples_per_s"]
    row["worker_samples_per_s"] = speed / row["workers"] if speed is not None else None
    row["process_samples_per_s"] = speed / (run.kind.workers + run.kind.servers) if speed is not None else None
    row["cpu_s_per_1000_samples"] = _cpu_s_per_1000_samples(run.summary.get("processes") or [])
    own = recorded.get("step_time") or {}
    row |= {f"step_{name}": own.get(name) for name in ("p50_s", "p95_s", "p99_s")}
    row["samples_to_target"] = samples_to_target(run)
    row["best_val_loss"] = min((loss for loss in losses if not math.isnan(loss)), default=None)
    return row


def _cpu_s_per_1000_samples(processes: Sequence[dict[str, Any]]) -> float | None:
    samples = sum(process.get("samples") or 0 for process in processes)
    return 1000 * sum(process["cpu_s"] for process in processes) / samples if samples else None


def samples_to_target(run: Run) -> float | None:
    """Samples trained on until an evaluation first reached the target accuracy."""
    target = run.summary.get("target_accuracy")
    evaluations = run.summary.get("evaluations") or []
    return next((e["samples"] for e in evaluations if target is not None and e["val_accuracy"] >= target), None)


def csv_text(rows: Sequence[Row]) -> str:
    """results.csv: the rows with a header; None is an empty cell, numbers have all their digits."""
    file = io.StringIO()
    writer = csv.DictWriter(file, list(COLUMNS), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


def summarise(rows: Sequence[Row]) -> list[Group]:
    """The figures over their repeats, one Group for each (mode, workers, servers), in the rows' order."""
    kinds: dict[Kind, list[Row]] = {}
    for row in rows:
        kinds.setdefault(Kind(row["mode"], row["workers"], row["servers"]), []).append(row)
    return [
        Group(kind, len(members), {n: spread([row[n] for row in members], n) for n in FIGURES})
        for kind, members in kinds.items()
    ]


def spread(values: Sequence[float | None], name: str = "") -> Spread | None:
    """Mean and range of the values that are not None: the geometric mean for figures of the names in _GEOMETRIC."""
    present = [value for value in values if value is not None]
    if not present:
        return None
    if any(map(math.isnan, present)):
        return Spread(math.nan, math.nan, math.nan, len(present))
    low, high = min(present), max(present)
    mean = geometric_mean(present) if name in _GEOMETRIC and low > 0 else sum(present) / len(present)
    return Spread(min(max(mean, low), high), low, high, len(present))  # within them, whatever is rounded


def scales_weakly(rows: Sequence[Row]) -> bool:
    """Whether the global batch grows with the number of workers (weak scaling), rather than being the same.

    A grid of several batch sizes has some of both: that decides by which more runs share a batch with runs on another
    number of workers.
    """

    def sharing_runs(is_weak: bool) -> int:
        workers: dict[Hashable, set[int]] = {}
        for row in rows:
            workers.setdefault(_scaling_key(row, is_weak), set()).add(row["workers"])
        return sum(len(workers[_scaling_key(row, is_weak)]) > 1 for row in rows)

    return sharing_runs(True) > sharing_runs(False)


def _scaling_key(row: Row, is_weak: bool) -> Hashable:
    """What runs have in common that scaling compares: the model, and the batch, for weak scaling that of a worker."""
    batch = row["global_batch"]
    return row["model"], Fraction(batch, row["workers"]) if is_weak and batch is not None else batch


def _baseline_speed(row: Row, rows: Sequence[Row]) -> float | None:
    """Samples/s of the one-worker baseline of a row, chosen as COLUMNS["scaling_efficiency"] says."""
    is_weak = scales_weakly(rows)
    one_worker = [r for r in rows if r["workers"] == 1 and _scaling_key(r, is_weak) == _scaling_key(row, is_weak)]
    found: dict[Kind, list[Row]] = {}
    for r in one_worker:
        if r["samples_per_s"]:
            found.setdefault(Kind(r["mode"], r["workers"], r["servers"]), []).append(r)
    if not found:
        return None
    baseline = found[min(found, key=lambda kind: kind.order)]
    same_repeat = [r for r in baseline if r["repeat"] == row["repeat"]]
    speed = spread([r["samples_per_s"] for r in same_repeat or baseline], "samples_per_s")
    return speed.mean if speed else None


def _scaling_efficiency(row: Row, rows: Sequence[Row]) -> float | None:
    baseline = _baseline_speed(row, rows)
    return row["samples_per_s"] / (row["workers"] * baseline) if baseline and row["samples_per_s"] is not None else None
