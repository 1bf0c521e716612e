"""The figures of a run, one Column each: what it means, where it comes from, how it is written, where it is shown.

results.csv, the tables on a terminal and in the pages, and the page's list of what columns mean are made of COLUMNS. To
add a figure, add an entry.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hvdtrain.formatting import with_unit
from hvdtrain.runs.read import Run

# Tables that show a figure, beside results.csv, which has all: the pages' summary; the terminal's, with the range over
# repeats or without, for it has to fit 100 columns; the table of a step's time.
SUMMARY, TERMINAL, TERMINAL_RANGE, STEP = "summary", "terminal", "terminal with range", "step"
# How repeats of a figure are summarised; see results.spread.
MEANS = "means, of speeds and times the geometric"


@dataclass(frozen=True)
class Column:
    """A figure of a run.

    Attributes:
        name: in results.csv.
        meaning: for who reads that file.
        heading: in tables.
        unit, digits: see formatting.with_unit.
        shown: the tables that it is in.
        short: its heading on a terminal, in two lines, where that is another.
        value: the figure of a run, None where it was not measured; the field of this name, if not given.
        is_geometric: its mean over repeats is the geometric one, so that a ratio of two means is the mean of the ratios
            in each repeat: what is said of a lead, the table and scaling efficiency agree.
        identifies: it tells which run it is, and is no figure.
    """

    name: str
    meaning: str
    heading: str = ""
    unit: str = ""
    digits: str = ""
    shown: tuple[str, ...] = ()
    short: str = ""
    value: Callable[[Run], Any] | None = None
    is_geometric: bool = False
    identifies: bool = False

    def of(self, run: Run) -> Any:
        """The value of a run."""
        if self.value:
            return self.value(run)
        return getattr(run.manifest if hasattr(run.manifest, self.name) else run.summary, self.name, None)


def _divided(figure: Any, by: Any) -> float | None:
    return figure / by if figure is not None and by else None


def steps_per_epoch(run: Run) -> int | None:
    samples, batch = run.manifest.train_samples, run.manifest.global_batch
    return -(-samples // batch) if samples and batch else None


def epochs(run: Run) -> float | None:
    return _divided(run.summary.samples, run.manifest.train_samples)


def cpu_s_per_1000_samples(run: Run) -> float | None:
    """None unless the processor time of every process of the job was recorded."""
    processes = run.summary.processes
    if len(processes) != run.kind.workers + run.kind.servers or not all(process.cpu_s > 0 for process in processes):
        return None
    samples = sum(process.samples or 0 for process in processes)  # of a resumed run, what was trained on since
    return _divided(1000 * sum(process.cpu_s for process in processes), samples)


def bytes_sent_per_1000_samples(run: Run) -> float | None:
    sent, steps = run.summary.bytes_sent_per_step, run.summary.steps
    return _divided(1000 * sent * steps, run.summary.samples) if sent is not None and steps else None


def samples_to_target(run: Run) -> float | None:
    """Samples trained on until an evaluation first reached the target accuracy."""
    target = run.summary.target_accuracy
    return next(
        (e.samples for e in run.summary.evaluations if target is not None and e.val_accuracy >= target), None
    )  # fmt: skip


def best_val_loss(run: Run) -> float | None:
    losses = [e.val_loss for e in run.summary.evaluations]
    return min((loss for loss in losses if not math.isnan(loss)), default=None)


_COLUMNS = (
    Column("mode", "how the workers are kept in step", identifies=True),
    Column("workers", "processes that compute gradients", identifies=True),
    Column("servers", "processes that hold the weights and apply the optimizer (parameter-server modes)",
           identifies=True),
    Column("variant", "what is not a mode's default in how it waits for slow workers: `backup 1` of ps-sync, `bound 8` "
           "(--staleness) of ps-ssp", value=lambda run: run.kind.variant, identifies=True),
    Column("model", "the network", identifies=True),
    Column("parameters", "its trainable weights", identifies=True),
    Column("global_batch", "samples of one step, over all workers together", "global batch", digits=",.0f"),
    Column("lr", "learning rate for the global batch, as the schedule starts from", "learning rate", digits=".3g"),
    Column("steps_per_epoch", "train_samples / global_batch, rounded up", "steps per epoch", digits=",.0f",
           value=steps_per_epoch),
    Column("steps", "steps done, each of one global batch"),
    Column("samples", "samples trained on, over all workers together"),
    Column("epochs", "samples / train_samples: passes over the training data", "epochs", value=epochs),
    Column("wall_s", "seconds of training, without set-up and evaluation", "training time", "s", is_geometric=True),
    Column("epoch_s", "wall_s / epochs: mean seconds of training of a pass over the training data", "time of an epoch",
           "s", value=lambda run: _divided(run.summary.wall_s, epochs(run)), is_geometric=True),
    Column("samples_per_s", "samples / wall_s", "samples/s", shown=(SUMMARY, TERMINAL_RANGE), short="samples\n/s",
           is_geometric=True),
    Column("worker_samples_per_s", "samples_per_s / workers", "samples/s of a worker",
           value=lambda run: _divided(run.summary.samples_per_s, run.kind.workers), is_geometric=True),
    Column("process_samples_per_s", "samples_per_s / (workers + servers)", "samples/s of a process", shown=(SUMMARY,),
           value=lambda run: _divided(run.summary.samples_per_s, run.kind.workers + run.kind.servers),
           is_geometric=True),
    Column("cpu_s_per_1000_samples",
           "seconds of processor time (user and system) for 1,000 samples, of all processes, servers included, while "
           "they train; set-up and evaluation left out. A process that spins while it waits takes processor time too",
           "processor time of 1,000 samples", "s", shown=(SUMMARY, TERMINAL), short="CPU of\n1,000",
           value=cpu_s_per_1000_samples),
    Column("scaling_efficiency",
           "samples_per_s / (workers × samples_per_s of the baseline). The baseline is the single run of the same "
           "repeat, else the geometric mean of all single runs; without any it is another mode on one worker, the same "
           "for all modes; empty where there is none. It has the same model and the same global batch or, where runs "
           "on more workers have larger ones, the same batch per worker (weak scaling). 1 is perfect scaling",
           "scaling efficiency", digits=".2f", shown=(SUMMARY, TERMINAL_RANGE), short="scaling\neffic.",
           is_geometric=True),
    Column("val_accuracy", "accuracy on the validation images at the last evaluation, every image counted once",
           "validation accuracy", digits=".3f", shown=(SUMMARY, TERMINAL_RANGE), short="validation\naccuracy"),
    Column("val_loss", "mean cross-entropy on the validation images at the last evaluation", "validation loss"),
    Column("best_val_loss", "the smallest val_loss of all evaluations", "best validation loss", value=best_val_loss),
    Column("test_loss", "mean cross-entropy of the best model on the test images, where the data set has some",
           "test loss"),
    Column("test_accuracy", "accuracy of the best model on the test images", "test accuracy (top-1)", digits=".3f"),
    Column("time_to_target_s", "seconds of training until an evaluation first reached the target accuracy",
           "time to target", "s", shown=(SUMMARY, TERMINAL_RANGE), short="time to\ntarget", is_geometric=True),
    Column("samples_to_target", "samples trained on until then: time_to_target_s = these × seconds a sample",
           value=samples_to_target, is_geometric=True),
    Column("exposed_comm_fraction",
           "share of a worker's training time in which it waits for other processes: exposed communication, between "
           "steps, for a share, for weights to evaluate",
           "comm. wait", "%", ".0f", shown=(SUMMARY, TERMINAL), short="comm.\nwait"),
    Column("step_p50_s", "median of the seconds of a worker's own step, the first ones of each start left out",
           "a worker's own step: median", "ms", shown=(STEP,), value=lambda run: run.summary.step_time.p50_s),
    Column("step_p95_s", "what 95 % of them do not exceed", "95 %", "ms", shown=(STEP,),
           value=lambda run: run.summary.step_time.p95_s),
    Column("step_p99_s", "what 99 % of them do not exceed", "99 %", "ms", shown=(STEP,),
           value=lambda run: run.summary.step_time.p99_s),
    Column("bytes_sent_per_step", "bytes of weights and gradients sent in a step by all processes, servers included",
           "sent per step", "B", shown=(SUMMARY, TERMINAL), short="sent per\nstep"),
    Column("bytes_sent_per_1000_samples", "the same for 1,000 samples", "sent for 1,000 samples", "B",
           value=bytes_sent_per_1000_samples),
    Column("staleness_mean",
           "mean number of updates of a bucket of weights from a worker's pull until its push is applied",
           "mean staleness", digits=".2f", shown=(SUMMARY, TERMINAL), short="stale-\nness"),
    Column("staleness_max", "the largest such number", "largest staleness", digits="g"),
    Column("peak_rss_mb",
           "largest resident memory of all processes together, servers included, in MB of 2^20 bytes (pages that "
           "processes share count once for each)",
           "memory", "MB", shown=(SUMMARY, TERMINAL), short="\nmemory"),
    Column("repeat", "number of the repeat; repeats have different seeds unless said otherwise", identifies=True),
)  # fmt: skip
COLUMNS = {column.name: column for column in _COLUMNS}
# Figures of one evaluation, which tables of epochs have beside those above.
TRAINED = {
    column.name: column
    for column in (
        Column("train_loss", "mean cross-entropy on the training batches", "training loss"),
        Column("train_accuracy", "accuracy on the training batches", "training accuracy", digits=".3f"),
    )
}


def format_figure(name: str, value: float | None) -> str:
    """The figure of this name with its unit; empty for None."""
    if value is None:
        return ""
    column = COLUMNS[name] if name in COLUMNS else TRAINED[name]
    if name == "epochs":
        return f"{value:.1f}".removesuffix(".0")
    return with_unit(value, column.unit, column.digits)
