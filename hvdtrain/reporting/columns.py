"""The figures of a run, one Column each: the figure's source, its format, and where it is shown.

results.csv and the pages' tables are made of COLUMNS. To add a figure, add an entry, and say in
README.md beside this file what the figure means.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from hvdtrain.base.formatting import printable, with_unit
from hvdtrain.reporting.target import samples_to_target, seconds_to_target
from hvdtrain.runs.network_bound import network_bound
from hvdtrain.runs.read import Run

# How repeats of a figure are summarised: see results.mean_and_range.
MEANS = "means, of speeds and times the geometric"


@dataclass(frozen=True)
class Column:
    """A figure of a run.

    Attributes:
        name: the column's name in results.csv.
        heading: the heading in tables.
        unit, digits: see formatting.with_unit.
        is_shown: whether the pages' table of costs has the figure. results.csv has all figures.
        value: returns the figure of a run, None if it was not measured. By default the figure is
            the field of this name in the run's manifest or summary.
        is_geometric: whether the mean over repeats is the geometric mean. Then the ratio of two
            means is the mean of the ratios in each repeat, so that the lead, the table and scaling
            efficiency agree.
    """

    name: str
    heading: str = ""
    unit: str = ""
    digits: str = ""
    is_shown: bool = False
    value: Callable[[Run], Any] | None = None
    is_geometric: bool = False

    def of(self, run: Run) -> Any:
        """Returns the figure of a run."""
        if self.value:
            return self.value(run)
        record = run.manifest if hasattr(run.manifest, self.name) else run.summary
        return getattr(record, self.name, None)


def _divided(figure: Any, divisor: Any) -> float | None:
    """Returns the quotient; None if it is not known or the divisor is 0."""
    return figure / divisor if figure is not None and divisor else None


def steps_per_epoch(run: Run) -> int | None:
    samples = run.manifest.train_samples
    batch = run.manifest.global_batch
    return -(-samples // batch) if samples and batch else None


def epochs(run: Run) -> float | None:
    return _divided(run.summary.samples, run.manifest.train_samples)


def cpu_s_per_1000_samples(run: Run) -> float | None:
    """Returns the processor time for 1,000 samples, of all processes together.

    Returns None unless the processor time of every process of the job was recorded.
    """
    processes = run.summary.processes
    if len(processes) != run.kind.workers + run.kind.servers:
        return None
    if not all(process.cpu_s > 0 for process in processes):
        return None
    # Of a resumed run, both are counted since its last start.
    samples = sum(process.samples or 0 for process in processes)
    cpu_s = sum(process.cpu_s for process in processes)
    return _divided(1000 * cpu_s, samples)


def busy_cores_share(run: Run) -> float | None:
    """Returns the share of the hosts' cores that the job's processes kept busy, spinning included.

    Returns None if that is not known.
    """
    per_1000 = cpu_s_per_1000_samples(run)
    speed = run.summary.samples_per_s
    cores = [host.available_cores for host in run.manifest.hosts.values()]
    if per_1000 is None or not speed or not cores or not all(cores):
        return None
    return per_1000 / 1000 * speed / sum(filter(None, cores))


def busiest_share(run: Run) -> float | None:
    """Returns the share of samples of the worker that had the most; None of one process."""
    samples = [process.samples for process in run.summary.processes if process.samples is not None]
    if len(samples) < 2:
        return None
    return _divided(max(samples), sum(samples))


def epoch_s(run: Run) -> float | None:
    return _divided(run.summary.wall_s, epochs(run))


def worker_samples_per_s(run: Run) -> float | None:
    return _divided(run.summary.samples_per_s, run.kind.workers)


def process_samples_per_s(run: Run) -> float | None:
    return _divided(run.summary.samples_per_s, run.kind.workers + run.kind.servers)


_COLUMNS = (
    Column("mode"),
    Column("workers"),
    Column("servers"),
    Column("hosts", value=lambda run: run.hosts_used),
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
    Column("epoch_s", "time of an epoch", "s", value=epoch_s, is_geometric=True),
    Column("samples_per_s", "samples/s", is_geometric=True),
    Column("network_bound", "samples/s that the links allow", is_shown=True, value=network_bound),
    Column(
        "worker_samples_per_s",
        "samples/s of a worker",
        value=worker_samples_per_s,
        is_geometric=True,
    ),
    Column(
        "process_samples_per_s",
        "samples/s of a process",
        is_shown=True,
        value=process_samples_per_s,
        is_geometric=True,
    ),
    Column(
        "cpu_s_per_1000_samples",
        "processor time of 1,000 samples",
        "s",
        value=cpu_s_per_1000_samples,
    ),
    Column("busiest_share", "samples of the busiest worker", "%", ".0f", value=busiest_share),
    Column(
        "scaling_efficiency", "scaling efficiency", digits=".2f", is_shown=True, is_geometric=True
    ),
    Column("val_accuracy", "validation accuracy", digits=".3f"),
    Column("val_loss", "validation loss"),
    Column("best_val_loss", "best validation loss"),
    Column("test_loss", "test loss"),
    Column("test_accuracy", "test accuracy (top-1)", digits=".3f"),
    Column("time_to_target_s", "time to target", "s", value=seconds_to_target, is_geometric=True),
    Column("samples_to_target", digits=",.0f", value=samples_to_target, is_geometric=True),
    Column("exposed_comm_fraction", "comm. wait", "%", ".0f", is_shown=True),
    Column(
        "step_p50_s",
        "a worker's own step: median",
        "ms",
        value=lambda run: run.summary.step_time.get("p50_s"),
    ),
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
)
COLUMNS = {column.name: column for column in _COLUMNS}
# Figures of one evaluation. Tables of epochs have them too.
TRAINED = {
    "train_loss": Column("train_loss", "training loss"),
    "train_accuracy": Column("train_accuracy", "training accuracy", digits=".3f"),
}


def format_figure(name: str, value: float | None) -> str:
    """Returns the figure of this name with its unit; empty for None."""
    if value is None:
        return ""
    column = COLUMNS[name] if name in COLUMNS else TRAINED[name]
    if name == "epochs":
        return f"{value:.1f}".removesuffix(".0")
    return with_unit(value, column.unit, column.digits)


class Setting(NamedTuple):
    """What several values of --model, --batch-size and --slow vary.

    Only runs of one setting are compared.
    """

    model: str
    global_batch: int
    lr: float
    slow: str

    @classmethod
    def of(cls, run: Run) -> "Setting":
        """Returns the setting of a run. Learning rates that read the same are equal.

        Rates that were looked for around the same one are of one setting.
        """
        manifest = run.manifest
        lr = float(f"{manifest.lr_around or manifest.lr or 0:.4g}")
        return cls(manifest.model or "", manifest.global_batch or 0, lr, manifest.slow.asked)

    @classmethod
    def varied(cls, settings: "Iterable[Setting]") -> list[str]:
        """Returns the names of the fields in which settings differ."""
        values_by_field = zip(*settings, strict=True)
        fields = zip(cls._fields, values_by_field, strict=False)
        return [name for name, values in fields if len(set(values)) > 1]

    @property
    def order(self) -> tuple[Any, ...]:
        """The place of the setting among others, as a key to sort by."""
        is_slow = self.slow != "none"
        return self.model, self.global_batch, self.lr, is_slow, self.slow

    def words(self, name: str) -> str:
        """Returns the value of a field with what it is: `global batch 64`."""
        if name == "global_batch":
            return f"global batch {self.global_batch:,}"
        prefixes = {"lr": "learning rate ", "slow": "slow: "}
        return prefixes.get(name, "") + printable(str(getattr(self, name)))
