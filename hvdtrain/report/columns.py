"""The figures of a run, one Column each: where it comes from, how it is written, where it is shown.

results.csv and the pages' tables are made of COLUMNS. To add a figure, add an entry, and say in
README.md beside this file what it means.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from hvdtrain.formatting import printable, with_unit
from hvdtrain.runs.network_bound import network_bound
from hvdtrain.runs.read import Run

# How repeats of a figure are summarised; see results.spread.
MEANS = "means, of speeds and times the geometric"


@dataclass(frozen=True)
class Column:
    """A figure of a run.

    Attributes:
        name: in results.csv.
        heading: in tables.
        unit, digits: see formatting.with_unit.
        is_shown: in the pages' table of what runs cost too, beside results.csv, which has all.
        value: the figure of a run, None where it was not measured; the field of this name, if not given.
        is_geometric: its mean over repeats is the geometric one, so that a ratio of two means is the mean of the ratios
            in each repeat: what is said of a lead, the table and scaling efficiency agree.
    """

    name: str
    heading: str = ""
    unit: str = ""
    digits: str = ""
    is_shown: bool = False
    value: Callable[[Run], Any] | None = None
    is_geometric: bool = False

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


def busiest_share(run: Run) -> float | None:
    """The share of samples of the worker that had the most; None of one process."""
    samples = [process.samples for process in run.summary.processes if process.samples is not None]
    return _divided(max(samples), sum(samples)) if len(samples) > 1 else None


def samples_to_target(run: Run) -> float | None:
    """Samples trained on until an evaluation first reached the target accuracy."""
    target = run.summary.target_accuracy
    if target is None:
        return None
    return next((e.samples for e in run.summary.evaluations if e.val_accuracy >= target), None)


_COLUMNS = (
    Column("mode"),
    Column("workers"),
    Column("servers"),
    Column("variant", value=lambda run: run.kind.variant),
    Column("model"),
    Column("parameters"),
    Column("threads_per_worker"),
    Column("global_batch", "global batch", digits=",.0f"),
    Column("lr", "learning rate", digits=".3g"),
    Column("slow", value=lambda run: run.manifest.slow.asked),
    Column("steps_per_epoch", "steps per epoch", digits=",.0f", value=steps_per_epoch),
    Column("steps"),
    Column("samples"),
    Column("epochs", "epochs", value=epochs),
    Column("wall_s", "training time", "s", is_geometric=True),
    Column("epoch_s", "time of an epoch", "s", value=lambda run: _divided(run.summary.wall_s, epochs(run)),
           is_geometric=True),
    Column("samples_per_s", "samples/s", is_geometric=True),
    Column("network_bound", "samples/s that the links allow", is_shown=True, value=network_bound),
    Column("worker_samples_per_s", "samples/s of a worker",
           value=lambda run: _divided(run.summary.samples_per_s, run.kind.workers), is_geometric=True),
    Column("process_samples_per_s", "samples/s of a process", is_shown=True,
           value=lambda run: _divided(run.summary.samples_per_s, run.kind.workers + run.kind.servers),
           is_geometric=True),
    Column("cpu_s_per_1000_samples", "processor time of 1,000 samples", "s", value=cpu_s_per_1000_samples),
    Column("busiest_share", "samples of the busiest worker", "%", ".0f", value=busiest_share),
    Column("scaling_efficiency", "scaling efficiency", digits=".2f", is_shown=True, is_geometric=True),
    Column("val_accuracy", "validation accuracy", digits=".3f"),
    Column("val_loss", "validation loss"),
    Column("best_val_loss", "best validation loss"),
    Column("test_loss", "test loss"),
    Column("test_accuracy", "test accuracy (top-1)", digits=".3f"),
    Column("time_to_target_s", "time to target", "s", is_geometric=True),
    Column("samples_to_target", value=samples_to_target, is_geometric=True),
    Column("exposed_comm_fraction", "comm. wait", "%", ".0f", is_shown=True),
    Column("step_p50_s", "a worker's own step: median", "ms", value=lambda run: run.summary.step_time.get("p50_s")),
    Column("step_p95_s", "95 %", "ms", value=lambda run: run.summary.step_time.get("p95_s")),
    Column("step_p99_s", "99 %", "ms", value=lambda run: run.summary.step_time.get("p99_s")),
    Column("bytes_sent_per_step", "sent per step", "B", is_shown=True),
    Column("peak_bytes_per_step", "sent in a step, at most", "B", is_shown=True),
    Column("rounds", "rounds of local steps", digits=",.0f"),
    Column("worker_distance", "a worker's distance", digits=".2g", is_shown=True),
    Column("staleness_mean", "mean staleness", digits=".2f", is_shown=True),
    Column("staleness_max", "largest staleness", digits="g"),
    Column("peak_rss_mb", "memory", "MB", is_shown=True),
    Column("repeat"),
    Column("sprint"),
)  # fmt: skip
COLUMNS = {column.name: column for column in _COLUMNS}
# Figures of one evaluation, which tables of epochs have beside those above.
TRAINED = {
    "train_loss": Column("train_loss", "training loss"),
    "train_accuracy": Column("train_accuracy", "training accuracy", digits=".3f"),
}


def format_figure(name: str, value: float | None) -> str:
    """The figure of this name with its unit; empty for None."""
    if value is None:
        return ""
    column = COLUMNS[name] if name in COLUMNS else TRAINED[name]
    if name == "epochs":
        return f"{value:.1f}".removesuffix(".0")
    return with_unit(value, column.unit, column.digits)


class Setting(NamedTuple):
    """What several values of --model, --batch-size and --slow vary: only runs of one setting are compared."""

    model: str
    global_batch: int
    lr: float
    slow: str

    @classmethod
    def of(cls, run: Run) -> "Setting":
        """Learning rates that read the same are equal."""
        manifest = run.manifest
        lr = float(f"{manifest.lr or 0:.4g}")
        return cls(manifest.model or "", manifest.global_batch or 0, lr, manifest.slow.asked)

    @classmethod
    def varied(cls, settings: "Iterable[Setting]") -> list[str]:
        """The fields in which they differ."""
        values = map(set, zip(*settings, strict=True))
        return [name for name, different in zip(cls._fields, values, strict=False) if len(different) > 1]

    @property
    def order(self) -> tuple[Any, ...]:
        return *self[:3], self.slow != "none", self.slow

    def words(self, name: str) -> str:
        """A field's value with what it is: `global batch 64`."""
        value = getattr(self, name)
        what = {"global_batch": "global batch ", "lr": "learning rate ", "slow": "slow: "}.get(name, "")
        return what + (f"{value:,}" if name == "global_batch" else printable(str(value)))
