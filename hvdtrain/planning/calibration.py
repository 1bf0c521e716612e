"""A calibration: what a step and its messages cost where they were measured, with spreads.

README.md has the format.
"""

import json
import math
import random
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from msgspec import Meta, ValidationError, convert, to_builtins

from hvdtrain.base.config.run_config import WIRES
from hvdtrain.base.config.untrusted import LARGEST_DOCUMENT, parse_json, read_whole
from hvdtrain.base.config.writing import write_whole
from hvdtrain.base.errors import UsageError
from hvdtrain.planning.scenario import Codec, Layer, Scenario, Transport

FORMAT = "hvdtrain-calibration"
VERSION = 1
# The transports that each calibration has.
TRANSPORTS = ("allreduce", "ddp", "ps")
TRANSPORT_FIELDS = [of_transport.name for of_transport in fields(Transport)]
CODEC_FIELDS = [of_codec.name for of_codec in fields(Codec)]
# Fields that only runs tell.
OPTIONAL = ("local_share", "local_waits", "idle_cores")
# Fields of a transport that are processor time, which other processors take another of.
TIMES = [name for name in TRANSPORT_FIELDS if name.endswith(("_us", "_s_per_gb"))]
# The keys of the file that hold a Quantity, or a plain number where somebody writes it by hand.
FIGURES = {
    *TRANSPORT_FIELDS,
    *CODEC_FIELDS,
    "forward_ms",
    "backward_ms",
    "fixed_ms",
    "optimizer_ms_per_mb",
    "latency_us",
    "machine_speedup",
    "of_more_cores",
}
# See README.md, "Checked on hosts of one machine".
MODEL_ERROR = 0.06
# The part of what other cores could add to a worker's speed that they do add, unless it was
# measured: the likely one, the least and the most.
OF_MORE_CORES = (0.85, 0.5, 1.0)
# The factor by which what messages cost may be another for each doubling of a host's cores. A guess.
OF_OTHER_HOSTS = 1.1
# Nine in ten of a normal distribution are at most so many standard deviations off.
Z90 = 1.645
# The least cores of a host.
LEAST_CORES = 0.01
# The least that divides something: efficiency, machine_speedup.
_LEAST_RATE = 1e-3
# The least milliseconds that a step computes.
_LEAST_COMPUTING_MS = 1e-6
# The most that the standard deviation of the logarithm of a figure may be.
_MOST_SPREAD = 0.5
Figure = Annotated[float, Meta(ge=0, le=1e9)]
Share = Annotated[float, Meta(ge=0, le=1)]
Count = Annotated[int, Meta(ge=1, le=10**6)]
T = TypeVar("T")


@dataclass(frozen=True)
class Quantity:
    """A measured figure: the median, and the range in which 90 % of the measurements lie."""

    value: Figure
    low: Figure
    high: Figure

    def __post_init__(self) -> None:
        if not self.low <= self.value <= self.high:
            raise ValueError(
                f"it has not low <= value <= high: {self.low:g}, {self.value:g}, {self.high:g}"
            )

    @classmethod
    def exactly(cls, value: float) -> "Quantity":
        return cls(value, value, value)

    @classmethod
    def of(cls, samples: Sequence[float]) -> "Quantity":
        """Returns the figure of at least one measurement. The range of few is the range of all."""
        ordered = sorted(samples)
        cut = len(ordered) // 20
        return cls(statistics.median(ordered), ordered[cut], ordered[-1 - cut])

    def give_or_take(self, factor: float) -> "Quantity":
        """Returns the figure with a range that is wider by a factor at both ends."""
        return Quantity(self.value, self.low / factor, self.high * factor)

    def times(self, factor: float) -> "Quantity":
        return Quantity(self.value * factor, self.low * factor, self.high * factor)

    def drawn(self, draw: random.Random | None) -> float:
        """Returns the median, or with a generator a value as measurements might have given it."""
        if not draw:
            return self.value
        z = max(-2.0, min(2.0, draw.gauss(0, 1)))
        if self.high <= self.low:
            return self.value
        # A range down to almost nothing is noise around a small figure, and no reason to draw a
        # huge one.
        spread = math.log(self.high / max(self.low, self.high * 1e-9)) / (2 * Z90)
        return self.value * math.exp(z * min(spread, _MOST_SPREAD))


@dataclass(frozen=True)
class LayerCost:
    """What a layer with parameters costs a worker in a step. A MB is 10^6 bytes."""

    name: str
    gradient_megabytes: Annotated[float, Meta(ge=0, le=1e6)]
    forward_ms: Quantity
    backward_ms: Quantity


@dataclass(frozen=True)
class Calibration:
    """The keys of the file. README.md has their meanings and units.

    Raises:
        ValueError: a cost is missing, or no cost at all where something is divided by it.
    """

    model: dict[str, Any]
    batch_per_worker: Count
    layers: Annotated[tuple[LayerCost, ...], Meta(min_length=1)]
    fixed_ms: Quantity
    optimizer_ms_per_mb: Quantity
    transports: dict[str, dict[str, Quantity]]
    codecs: dict[str, dict[str, Quantity]] = field(default_factory=dict)
    batch_fixed_share: Share = 0.0
    step_jitter: Annotated[float, Meta(ge=0, le=2)] = 0.0
    cores_per_host: Annotated[float, Meta(ge=LEAST_CORES, le=1e6)] = 1.0
    threads_per_worker: Count = 1
    workers_per_host: Count = 1
    machine_speedup: Quantity | None = None
    of_more_cores: Quantity | None = None
    host_gb_per_s: Annotated[float, Meta(ge=1e-6, le=1e9)] | None = None
    adds_up_on_host: bool = False
    device: Literal["cpu", "cuda"] = "cpu"
    latency_us: Quantity = Quantity(50.0, 50.0, 50.0)
    bandwidth_gbit: Annotated[float, Meta(ge=0, le=1e5)] | None = None
    most_workers: Count = 2
    most_servers: Count = 1
    model_error: Annotated[float, Meta(ge=0, le=10)] = MODEL_ERROR
    bias: dict[str, Annotated[float, Meta(ge=0.1, le=10)]] = field(default_factory=dict)
    wires: Annotated[tuple[str, ...], Meta(min_length=1)] = WIRES[:1]
    made: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in (*TRANSPORTS, *self.transports):
            known = self.transports.get(name, {})
            _check_fields(f"transports.{name}", known, TRANSPORT_FIELDS)
        for name, codec in self.codecs.items():
            _check_fields(f"codecs.{name}", codec, CODEC_FIELDS)
        divisors = [costs.get("efficiency") for costs in self.transports.values()]
        divisors.append(self.machine_speedup)
        if any(divisor and divisor.value < _LEAST_RATE for divisor in divisors):
            raise ValueError(f"efficiency and machine_speedup have to be at least {_LEAST_RATE}")
        if self.fixed_ms.value + self.layers_ms < _LEAST_COMPUTING_MS:
            raise ValueError("fixed_ms and the layers' computing are no time at all")

    @property
    def others_share(self) -> float:
        """The share of the machine that other work had in measurements that count; 0: undisturbed."""
        share = self.made.get("others_share")
        return share if isinstance(share, float) else 0.0

    @property
    def layers_ms(self) -> float:
        """The milliseconds of forward and backward of all layers together."""
        return sum(layer.forward_ms.value + layer.backward_ms.value for layer in self.layers)

    def changed_layers(self, change: Callable[[Quantity], Quantity]) -> tuple[LayerCost, ...]:
        """Returns the layers with another time of forward and of backward each."""
        layers = []
        for layer in self.layers:
            forward_ms = change(layer.forward_ms)
            backward_ms = change(layer.backward_ms)
            layers.append(replace(layer, forward_ms=forward_ms, backward_ms=backward_ms))
        return tuple(layers)

    def slower(self, factor: float) -> "Calibration":
        """Returns the calibration with all computing so many times as long."""

        def longer(took: Quantity) -> Quantity:
            return took.times(factor)

        return replace(self, layers=self.changed_layers(longer), fixed_ms=longer(self.fixed_ms))

    def sooner(self, speedup: Quantity) -> "Calibration":
        """Returns the calibration with all computing so many times as fast."""

        def divided(took: Quantity) -> Quantity:
            return _ratio(took, speedup)

        return replace(self, layers=self.changed_layers(divided), fixed_ms=divided(self.fixed_ms))

    def with_batch(self, batch: int) -> "Calibration":
        """Returns the calibration for a worker's step of so many samples."""
        growing_share = 1 - self.batch_fixed_share
        factor = self.batch_fixed_share + growing_share * batch / self.batch_per_worker
        return replace(
            self.slower(factor),
            batch_per_worker=batch,
            batch_fixed_share=self.batch_fixed_share / factor,
        )

    def with_transport(self, name: str, costs: dict[str, Quantity]) -> "Calibration":
        """Returns the calibration with other costs of a transport, as far as `costs` has them."""
        return replace(self, transports=self.transports | {name: self.transports[name] | costs})

    def speedup_of_machine(self, workers_per_host: int) -> Quantity:
        """Returns how many times as fast as a worker one process computes with a whole host.

        All GPUs of a host are taken to do as much as they can.
        """
        if self.device == "cuda":
            return Quantity.exactly(workers_per_host)
        if self.machine_speedup:
            return self.machine_speedup
        return self.speedup_of_threads(max(self.threads_per_worker, int(self.cores_per_host)))

    def speedup_of_threads(self, threads: int) -> Quantity:
        """Returns how many times as fast as with the measured threads a worker computes with so
        many.

        Each further core adds a part of what the first ones do.
        """
        measured = self.threads_per_worker
        if threads == measured:
            return Quantity.exactly(1.0)
        share = self._share_of_more_cores()
        if threads > self.cores_per_host:
            # Nobody measured so many: the second core here may be the first one's other thread.
            likely, least, most = OF_MORE_CORES
            share = Quantity(likely, min(share.low, least), max(share.high, most))
        if threads > measured:
            more = threads / measured - 1
            return Quantity(*(1 + each * more for each in (share.value, share.low, share.high)))
        fewer = measured / threads - 1
        return Quantity(*(1 / (1 + each * fewer) for each in (share.value, share.high, share.low)))

    def _share_of_more_cores(self) -> Quantity:
        """Returns what a further core adds to a worker's speed, as a part of what the first does."""
        more = int(self.cores_per_host) / self.threads_per_worker - 1
        if self.machine_speedup and more > 0:
            speedup = self.machine_speedup
            figures = (speedup.value, speedup.low, speedup.high)
            return Quantity(*(max(0.0, (figure - 1) / more) for figure in figures))
        return self.of_more_cores or Quantity(*OF_MORE_CORES)

    def with_threads(self, threads: int) -> "Calibration":
        """Returns the calibration for workers that compute with so many threads."""
        return self.on_hosts(self.cores_per_host, self.workers_per_host, threads)

    def on_hosts(self, cores: float, workers_per_host: int = 1, threads: int = 0) -> "Calibration":
        """Returns the calibration for hosts of so many cores with so many workers each.

        On hosts of more cores messages are taken to cost as much, with a wider range.

        Args:
            threads: with which a worker computes; 0: its share of the cores. GPUs have none.
        """
        if self.device != "cpu":
            threads = self.threads_per_worker
        threads = threads or max(1, int(cores / workers_per_host))
        is_measured = (threads, int(cores)) == (self.threads_per_worker, int(self.cores_per_host))
        faster = self.speedup_of_threads(threads)
        machine_speedup = self.machine_speedup
        if not is_measured:
            of_machine = self.speedup_of_threads(max(threads, int(cores)))
            machine_speedup = _ratio(of_machine, faster) if threads < int(cores) else None
        found = replace(
            self.sooner(faster),
            cores_per_host=cores,
            workers_per_host=workers_per_host,
            threads_per_worker=threads,
            machine_speedup=machine_speedup,
        )
        doublings = math.log2(max(1.0, cores / self.cores_per_host))
        return found.with_messages(self.transports, 1.0, OF_OTHER_HOSTS**doublings)

    def with_messages(
        self, names: Iterable[str], times: float, give_or_take: float = 1.0
    ) -> "Calibration":
        """Returns the calibration in which messages of some transports take so many times the
        processor time, give or take a factor.
        """
        found = self
        for name in names:
            costs = self.transports[name]
            changed = {key: costs[key].times(times).give_or_take(give_or_take) for key in TIMES}
            found = found.with_transport(name, changed)
        return found

    def with_costs(self, job: Scenario, draw: random.Random | None = None) -> Scenario:
        """Returns a job with what its steps and messages cost.

        Args:
            draw: draws the costs as measurements might have come out; None: costs are the medians.
                Costs of messages are drawn for each transport by itself, all else is the same in
                each mode.

        Raises:
            UsageError: the costs of the job's transport are not known.
        """
        computing = self
        if job.replaces:
            computing = self.with_batch(self.batch_per_worker * job.replaces)
        # The order of what is drawn decides what comes out.
        forward = 1e-3 * _relative([layer.forward_ms for layer in computing.layers]).drawn(draw)
        backward = 1e-3 * _relative([layer.backward_ms for layer in computing.layers]).drawn(draw)
        fixed_s = 1e-3 * computing.fixed_ms.drawn(draw)
        optimizer_s_per_mb = 1e-3 * self.optimizer_ms_per_mb.drawn(draw)
        latency_s = 1e-6 * self.latency_us.drawn(draw)
        transport = self._transport_of(job, draw)
        within_host_s = self._seconds_within_host(job)
        if self.adds_up_on_host and job.servers:
            workers = job.hosts_with_workers
            job = replace(job, workers=workers, workers_per_host=1, ranks_by_host=())
        codec = {
            key: figure.drawn(draw) for key, figure in self.codecs.get(job.compression, {}).items()
        }
        speedup = 1.0
        if job.replaces:
            speedup = self.speedup_of_machine(job.workers_per_host).drawn(draw)
        layers = [
            Layer(
                parameters=round(layer.gradient_megabytes * 1e6 / 4),
                forward_s=layer.forward_ms.value * forward / speedup,
                backward_s=layer.backward_ms.value * backward / speedup,
            )
            for layer in computing.layers
        ]
        return replace(
            job,
            layers=tuple(layers),
            fixed_s=fixed_s / speedup + within_host_s,
            optimizer_s_per_mb=optimizer_s_per_mb,
            latency_s=latency_s,
            transport=transport,
            codec=Codec(**codec),
            jitter=self.step_jitter,
            cores=self.cores_per_host,
            threads=self.threads_per_worker,
            on_processor=self.device == "cpu",
        )

    def _seconds_within_host(self, job: Scenario) -> float:
        """Returns the seconds in which gradients go once to where a host adds them up, and weights
        back, over what the workers of a host share.
        """
        workers = min(job.workers, job.workers_per_host)
        if not self.host_gb_per_s or workers < 2:
            return 0.0
        megabytes = sum(layer.gradient_megabytes for layer in self.layers)
        return 2 * workers * megabytes / 1e3 / self.host_gb_per_s

    def _transport_of(self, job: Scenario, draw: random.Random | None) -> Transport:
        name = job.transport_name
        if not job.servers and name not in self.transports:
            name = "allreduce"
        if name not in self.transports:
            raise UsageError(
                f"this calibration has no transport {name}: calibrate again, or name another wire"
            )
        own_draw = draw and random.Random(f"{draw.random()} {name}")
        figures = self.transports[name]
        costs = {key: figures[key].drawn(own_draw) for key in TRANSPORT_FIELDS if key in figures}
        costs["efficiency"] = min(1.0, costs["efficiency"])
        return Transport(**costs)

    def save(self, path: Path) -> None:
        content = {"format": FORMAT, "version": VERSION} | to_builtins(self)
        write_whole(path, json.dumps(content, indent=1) + "\n")


def _check_fields(name: str, costs: dict[str, Quantity], keys: Sequence[str]) -> None:
    """Raises a ValueError if a cost is missing that is not optional."""
    missing = [key for key in keys if key not in costs and key not in OPTIONAL]
    if missing:
        raise ValueError(f"{name} has no {missing[0]}")


def _ratio(of: Quantity, to: Quantity) -> Quantity:
    """Returns one figure over another, with the range of both."""
    return Quantity(of.value / to.value, of.low / to.high, of.high / to.low)


def _relative(quantities: Sequence[Quantity]) -> Quantity:
    """Returns the spread of a sum whose parts vary together, around 1."""
    total = sum(quantity.value for quantity in quantities) or 1.0
    low = sum(quantity.low for quantity in quantities) / total
    high = sum(quantity.high for quantity in quantities) / total
    return Quantity(1.0, min(1.0, low), max(1.0, high))


def load(path: Path) -> Calibration:
    """Reads a calibration and checks it.

    Raises:
        UsageError: it is none, or of another version, or damaged. The message is one line.
    """
    return read_as(Calibration, "calibration", path, _parse)


def _parse(content: bytes) -> Any:
    document = parse_json(content)
    is_calibration = isinstance(document, dict) and (
        document.get("format") == FORMAT and document.get("version") == VERSION
    )
    if not is_calibration:
        raise ValueError(f"it is no {FORMAT} of version {VERSION}: calibrate again")
    return _with_quantities(document)


def read_as(kind: type[T], noun: str, path: Path, parse: Callable[[bytes], Any]) -> T:
    """Reads a file, parses it, and converts what is in it by msgspec.

    Args:
        noun: what the file is called in messages.

    Raises:
        UsageError: that cannot be done. The message is one line.
    """
    try:
        return convert(parse(read_whole(path, LARGEST_DOCUMENT)), kind)
    except FileNotFoundError:
        raise UsageError(f"there is no {noun} {path}") from None
    except (ValidationError, RecursionError) as error:
        raise UsageError(f"{path}: {error}") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read as a {noun}: {error}") from None


def _with_quantities(content: Any, name: str = "") -> Any:
    """Returns the content of a file with plain numbers as Quantity has them."""
    if name in FIGURES and isinstance(content, int | float):
        return {"value": content, "low": content, "high": content}
    if isinstance(content, dict):
        return {key: _with_quantities(value, key) for key, value in content.items()}
    if isinstance(content, list):
        return [_with_quantities(value) for value in content]
    return content
