"""A calibration: what a step and its messages cost where it was measured, with spreads. README.md has the format."""

import json
import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from msgspec import Meta, ValidationError, convert, to_builtins

from hvdtrain.config.run_config import WIRES
from hvdtrain.config.untrusted import parse_json, read_whole
from hvdtrain.errors import UsageError
from hvdtrain.planning.scenario import Codec, Layer, Scenario, Transport

FORMAT, VERSION = "hvdtrain-calibration", 1
TRANSPORTS = ("allreduce", "ddp", "ps")
TRANSPORT_FIELDS, CODEC_FIELDS = ([one.name for one in fields(kind)] for kind in (Transport, Codec))
OPTIONAL = ("local_share", "idle_cores")  # only runs tell
# Keys of the file that hold a Quantity, or a plain number where somebody writes it by hand.
FIGURES = {
    *TRANSPORT_FIELDS, *CODEC_FIELDS, "forward_ms", "backward_ms", "fixed_ms", "optimizer_ms_per_mb", "latency_us",
    "machine_speedup",
}  # fmt: skip
MODEL_ERROR = 0.06  # see README.md, "Checked on hosts of one machine"
OF_MORE_CORES = (0.85, 0.5, 1.0)  # of what other cores could add to a worker's speed, what they do, unless measured
Z90 = 1.645  # of 90 % of a normal distribution
LEAST_CORES = 0.01  # of a host
_MOST_SPREAD = 0.5  # standard deviation of the logarithm of a figure
Figure = Annotated[float, Meta(ge=0, le=1e9)]
Share = Annotated[float, Meta(ge=0, le=1)]
Count = Annotated[int, Meta(ge=1, le=10**6)]
T = TypeVar("T")


@dataclass(frozen=True)
class Quantity:
    """A measured figure: its median, and the range that 90 % of its measurements lie in."""

    value: Figure
    low: Figure
    high: Figure

    def __post_init__(self) -> None:
        if not self.low <= self.value <= self.high:
            raise ValueError(f"it has not low <= value <= high: {self.low:g}, {self.value:g}, {self.high:g}")

    @classmethod
    def exactly(cls, value: float) -> "Quantity":
        return cls(value, value, value)

    @classmethod
    def of(cls, samples: Sequence[float]) -> "Quantity":
        """From at least one measurement; with few, the range is that of all."""
        ordered = sorted(samples)
        cut = len(ordered) // 20
        return cls(statistics.median(ordered), ordered[cut], ordered[-1 - cut])

    def give_or_take(self, factor: float) -> "Quantity":
        return Quantity(self.value, self.low / factor, self.high * factor)

    def times(self, factor: float) -> "Quantity":
        return Quantity(self.value * factor, self.low * factor, self.high * factor)

    def drawn(self, draw: random.Random | None) -> float:
        """The median, or with a generator a value as measurements might have given it."""
        z = max(-2.0, min(2.0, draw.gauss(0, 1))) if draw else 0.0
        if not draw or self.high <= self.low:
            return self.value
        # A range down to almost nothing is noise around a small figure, and no reason to draw a huge one.
        spread = math.log(self.high / max(self.low, self.high * 1e-9)) / (2 * Z90)
        return self.value * math.exp(z * min(spread, _MOST_SPREAD))


@dataclass(frozen=True)
class LayerCost:
    name: str
    gradient_megabytes: Annotated[float, Meta(ge=0, le=1e6)]
    forward_ms: Quantity
    backward_ms: Quantity


@dataclass(frozen=True)
class Calibration:
    """The keys of the file, whose meaning and units README.md has. ValueError where a cost is missing."""

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
    machine_speedup: Quantity | None = None
    device: Literal["cpu", "cuda"] = "cpu"
    latency_us: Quantity = Quantity(50.0, 50.0, 50.0)
    bandwidth_gbit: Annotated[float, Meta(ge=0, le=1e5)] | None = None
    most_workers: Count = 2
    most_servers: Count = 1
    model_error: Annotated[float, Meta(ge=0, le=10)] = MODEL_ERROR
    wires: Annotated[tuple[str, ...], Meta(min_length=1)] = WIRES[:1]
    made: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        kinds = *TRANSPORTS, *self.transports
        costs = [(f"transports.{kind}", self.transports.get(kind, {}), TRANSPORT_FIELDS) for kind in kinds]
        costs += [(f"codecs.{name}", codec, CODEC_FIELDS) for name, codec in self.codecs.items()]
        for name, figures, keys in costs:
            if missing := [key for key in keys if key not in figures and key not in OPTIONAL]:
                raise ValueError(f"{name} has no {missing[0]}")
        rates = [self.machine_speedup, *(costs.get("efficiency") for costs in self.transports.values())]
        if any(rate and rate.value < 1e-3 for rate in rates):
            raise ValueError("efficiency and machine_speedup have to be at least 0.001")
        if sum((one.forward_ms.value + one.backward_ms.value for one in self.layers), self.fixed_ms.value) < 1e-6:
            raise ValueError("fixed_ms and the layers' computing are no time at all")

    def slower(self, factor: float) -> "Calibration":
        """The same, but that all computing takes so many times as long."""
        layers = (
            replace(one, forward_ms=one.forward_ms.times(factor), backward_ms=one.backward_ms.times(factor))
            for one in self.layers
        )
        return replace(self, layers=tuple(layers), fixed_ms=self.fixed_ms.times(factor))

    def with_batch(self, batch: int) -> "Calibration":
        """The same for a worker's step of so many samples."""
        factor = self.batch_fixed_share + (1 - self.batch_fixed_share) * batch / self.batch_per_worker
        return replace(self.slower(factor), batch_per_worker=batch, batch_fixed_share=self.batch_fixed_share / factor)

    def of_machine(self, workers_per_host: int) -> Quantity:
        """See machine_speedup; of GPUs it is taken that all of a host's do as much as they can."""
        if self.device == "cuda":
            return Quantity.exactly(workers_per_host)
        more = max(0.0, self.cores_per_host / self.threads_per_worker - 1)
        return self.machine_speedup or Quantity(*(1 + share * more for share in OF_MORE_CORES))

    def scenario(self, asked: Scenario, draw: random.Random | None = None) -> Scenario:
        """The scenario that is asked about with costs at the medians or, with a generator, as measurements might have
        come out: what messages cost for each transport by itself, all else the same in each mode.
        """
        made = self.with_batch(self.batch_per_worker * asked.replaces) if asked.replaces else self
        forward = 1e-3 * _relative([layer.forward_ms for layer in made.layers]).drawn(draw)
        backward = 1e-3 * _relative([layer.backward_ms for layer in made.layers]).drawn(draw)
        fixed_s = 1e-3 * made.fixed_ms.drawn(draw)
        optimizer_s_per_mb = 1e-3 * self.optimizer_ms_per_mb.drawn(draw)
        latency_s = 1e-6 * self.latency_us.drawn(draw)
        kind = asked.carrier if asked.servers or asked.carrier in self.transports else "allreduce"
        if kind not in self.transports:
            raise UsageError(f"this calibration has no transport {kind}: calibrate again, or name another wire")
        apart = draw and random.Random(f"{draw.random()} {kind}")
        figures = self.transports[kind]
        costs = {key: figures[key].drawn(apart) for key in TRANSPORT_FIELDS if key in figures}
        costs["efficiency"] = min(1.0, costs["efficiency"])
        codec = {key: figure.drawn(draw) for key, figure in self.codecs.get(asked.compression, {}).items()}
        faster = self.of_machine(asked.workers_per_host).drawn(draw) if asked.replaces else 1.0
        layers = []
        for layer in made.layers:
            seconds = layer.forward_ms.value * forward / faster, layer.backward_ms.value * backward / faster
            layers.append(Layer(round(layer.gradient_megabytes * 1e6 / 4), *seconds))
        return replace(
            asked, layers=tuple(layers), fixed_s=fixed_s / faster, optimizer_s_per_mb=optimizer_s_per_mb,
            latency_s=latency_s, transport=Transport(**costs), codec=Codec(**codec), jitter=self.step_jitter,
            cores=self.cores_per_host, threads=self.threads_per_worker, on_processor=self.device == "cpu",
        )  # fmt: skip

    def save(self, path: Path) -> None:
        content = {"format": FORMAT, "version": VERSION} | to_builtins(self)
        path.write_text(json.dumps(content, indent=1) + "\n")


def _relative(quantities: Sequence[Quantity]) -> Quantity:
    """The spread of a sum whose parts vary together, around 1."""
    total = sum(q.value for q in quantities) or 1.0
    low, high = sum(q.low for q in quantities) / total, sum(q.high for q in quantities) / total
    return Quantity(1.0, min(1.0, low), max(1.0, high))


def load(path: Path) -> Calibration:
    """Read a calibration and check it. UsageError, a line, where it is none, or of another version, or damaged."""

    def parse(content: bytes) -> Any:
        read = parse_json(content)
        if not isinstance(read, dict) or (read.get("format"), read.get("version")) != (FORMAT, VERSION):
            raise ValueError(f"it is no {FORMAT} of version {VERSION}: calibrate again")
        return _with_quantities(read)

    return read_as(Calibration, path, parse)


def read_as(kind: type[T], path: Path, parse: Callable[[bytes], Any]) -> T:
    """A file as msgspec converts what is parsed of it. UsageError, a line, where that cannot be."""
    try:
        return convert(parse(read_whole(path)), kind)
    except FileNotFoundError:
        raise UsageError(f"there is no {kind.__name__.lower()} {path}") from None
    except (ValidationError, RecursionError) as error:
        raise UsageError(f"{path}: {error}") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} is no readable {kind.__name__.lower()}: {error}") from None


def _with_quantities(content: Any, name: str = "") -> Any:
    """The content of a file with plain numbers as Quantity has them."""
    if name in FIGURES and isinstance(content, int | float):
        return {"value": content, "low": content, "high": content}
    if isinstance(content, dict):
        return {key: _with_quantities(value, key) for key, value in content.items()}
    return [_with_quantities(value) for value in content] if isinstance(content, list) else content
