"""A calibration: what a step and its messages cost where it was measured, with spreads. README.md has the format."""

import json
import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hvdtrain.config.untrusted import parse_json
from hvdtrain.errors import UsageError
from hvdtrain.plan.fields import WrongField, number
from hvdtrain.plan.scenario import Layer, Transport

FORMAT, VERSION = "hvdtrain-calibration", 1
TRANSPORTS = ("allreduce", "ddp", "ps")
TRANSPORT_FIELDS = {  # key of the file -> field of Transport, and how many of the file's unit make one of ours
    "message_us": ("message_s", 1e-6),
    "operation_us": ("operation_s", 1e-6),
    "send_s_per_gb": ("send_s_per_gb", 1.0),
    "receive_s_per_gb": ("receive_s_per_gb", 1.0),
    "server_send_s_per_gb": ("server_send_s_per_gb", 1.0),
    "server_receive_s_per_gb": ("server_receive_s_per_gb", 1.0),
    "local_share": ("local_share", 1.0),
    "idle_cores": ("idle_cores", 1.0),
    "efficiency": ("efficiency", 1.0),
}
# What older calibrations have not: Transport has what is meant then.
OPTIONAL = ("local_share", "idle_cores")
# What the simulation itself leaves out, as a share of a step: an interval is never narrower.
MODEL_ERROR = 0.1
_Z90 = 1.645  # of 90 % of a normal distribution
_MOST_SPREAD = 0.5  # standard deviation of the logarithm of a figure


@dataclass(frozen=True)
class Quantity:
    """A measured figure: its median, and the range that 90 % of its measurements lie in."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> "Quantity":
        """From at least one measurement; with few, the range is that of all."""
        ordered = sorted(samples)
        cut = len(ordered) // 20
        return cls(statistics.median(ordered), ordered[cut], ordered[-1 - cut])

    def times(self, factor: float) -> "Quantity":
        return Quantity(self.value * factor, self.low * factor, self.high * factor)

    def drawn(self, draw: random.Random | None) -> float:
        """The median, or with a generator a value as measurements might have given it."""
        z = max(-2.0, min(2.0, draw.gauss(0, 1))) if draw else 0.0
        if not draw or self.high <= self.low:
            return self.value
        # A range down to almost nothing is noise around a small figure, and no reason to draw a huge one.
        spread = math.log(self.high / max(self.low, self.high * 1e-9)) / (2 * _Z90)
        return self.value * math.exp(z * min(spread, _MOST_SPREAD))

    def to_json(self) -> dict[str, float]:
        return {name: float(f"{getattr(self, name):.5g}") for name in ("value", "low", "high")}


@dataclass(frozen=True)
class Calibration:
    """
    Attributes:
        model: what was measured, for people.
        layers: (name, megabytes of gradients, forward in ms, backward in ms), in forward order.
        fixed_ms: of a step's computing, what belongs to no layer.
        batch_fixed_share: of computing, what does not grow with the batch.
        step_jitter: standard deviation of the logarithm of a step's computing time.
        codecs: by name: encode_ms_per_mb, decode_ms_per_mb, wire_share.
        transports: by mode, `ps` for all with servers: see TRANSPORT_FIELDS.
        cores_per_host: cores' worth of processor time; a part of one where a control group limits a host.
        bandwidth_gbit: of the hosts that it was made on, or None.
        most_workers, most_servers: that it was made with: what it can say something about.
    """

    model: dict[str, Any]
    batch_per_worker: int
    layers: tuple[tuple[str, float, Quantity, Quantity], ...]
    fixed_ms: Quantity
    optimizer_ms_per_mb: Quantity
    transports: dict[str, dict[str, Quantity]]
    codecs: dict[str, dict[str, Quantity]] = field(default_factory=dict)
    batch_fixed_share: float = 0.0
    step_jitter: float = 0.0
    cores_per_host: float = 1.0
    threads_per_worker: int = 1
    device: str = "cpu"
    hosts_share_cores: bool = False
    latency_us: Quantity = Quantity(50.0, 50.0, 50.0)
    bandwidth_gbit: float | None = None
    most_workers: int = 2
    most_servers: int = 1
    model_error: float = MODEL_ERROR
    made: dict[str, Any] = field(default_factory=dict)

    def scenario_layers(self, draw: random.Random | None = None, batch: int = 0) -> tuple[Layer, ...]:
        """Layers, with one draw for all of computing: what slows one layer slows the next too."""
        scale = self.batch_factor(batch)
        drawn = []
        of_forward = _relative([f for _, _, f, _ in self.layers]).drawn(draw)
        of_backward = _relative([b for _, _, _, b in self.layers]).drawn(draw)
        for name, megabytes, ahead, back in self.layers:
            seconds = ahead.value * of_forward * scale / 1e3, back.value * of_backward * scale / 1e3
            drawn.append(Layer(name, round(megabytes * 1e6 / 4), *seconds))
        return tuple(drawn)

    def batch_factor(self, batch: int) -> float:
        """How much longer computing takes with another batch."""
        if not batch:
            return 1.0
        return self.batch_fixed_share + (1 - self.batch_fixed_share) * batch / self.batch_per_worker

    def transport(self, mode: str, draw: random.Random | None = None) -> Transport:
        """What messages cost in a mode: each transport's costs were measured, and are drawn, by themselves."""
        kind = "ps" if mode.startswith("ps-") else mode if mode != "single" else "ddp"
        costs, draw = self.transports[kind], draw and random.Random(f"{draw.random()} {kind}")
        fields = {name: costs[key].drawn(draw) * unit for key, (name, unit) in TRANSPORT_FIELDS.items() if key in costs}
        return Transport(**(fields | {"efficiency": min(1.0, fields.get("efficiency", 1.0))}))

    def save(self, path: Path) -> None:
        plain = {
            name: getattr(self, name)
            for name in (
                "model", "batch_per_worker", "batch_fixed_share", "step_jitter", "cores_per_host",
                "threads_per_worker", "device", "hosts_share_cores", "bandwidth_gbit", "most_workers",
                "most_servers", "model_error", "made",
            )
        }  # fmt: skip
        layers = [
            {
                "name": name, "gradient_megabytes": round(megabytes, 6), "forward_ms": ahead.to_json(),
                "backward_ms": back.to_json(),
            }
            for name, megabytes, ahead, back in self.layers
        ]  # fmt: skip
        tables = {
            name: {key: {k: q.to_json() for k, q in costs.items()} for key, costs in getattr(self, name).items()}
            for name in ("codecs", "transports")
        }
        figures = {name: getattr(self, name).to_json() for name in ("fixed_ms", "optimizer_ms_per_mb", "latency_us")}
        path.write_text(
            json.dumps({"format": FORMAT, "version": VERSION} | plain | figures | tables | {"layers": layers}, indent=1)
            + "\n"
        )


def _relative(quantities: Sequence[Quantity]) -> Quantity:
    """The spread of a sum whose parts vary together, around 1."""
    total = sum(q.value for q in quantities) or 1.0
    low, high = sum(q.low for q in quantities) / total, sum(q.high for q in quantities) / total
    return Quantity(1.0, low, high)


def load(path: Path) -> Calibration:
    """Read a calibration and check it. UsageError, a line, where it is none, or of another version, or damaged."""
    try:
        found = parse_json(path.read_bytes())
    except FileNotFoundError:
        raise UsageError(f"there is no calibration {path}: make one with `hvdtrain plan calibrate`") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} is no readable calibration: {error}") from None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise UsageError(f'{path} is no calibration: it has no "format": "{FORMAT}"')
    if found.get("version") != VERSION:
        raise UsageError(
            f"{path} is of version {found.get('version')!r} of calibrations, and this reads {VERSION}: calibrate again"
        )
    try:
        return _parse(found)
    except WrongField as wrong:
        raise UsageError(f"{path}: {wrong}") from None


def _parse(found: dict[str, Any]) -> Calibration:
    layers = found.get("layers")
    if not isinstance(layers, list) or not layers or not all(isinstance(layer, dict) for layer in layers):
        raise WrongField("layers is no list of layers")
    transports = found.get("transports")
    if not isinstance(transports, dict) or not set(TRANSPORTS) <= transports.keys():
        raise WrongField(f"transports has not all of {', '.join(TRANSPORTS)}")
    codecs = found.get("codecs", {})
    if not isinstance(codecs, dict):
        raise WrongField("codecs is no table")
    return Calibration(
        model=found["model"] if isinstance(found.get("model"), dict) else {},
        batch_per_worker=_count(found, "batch_per_worker"),
        layers=tuple(
            (
                str(layer.get("name", f"layer {n}"))[:60],
                number(layer, f"layers[{n}].gradient_megabytes", most=1e6),
                _quantity(layer, f"layers[{n}].forward_ms"), _quantity(layer, f"layers[{n}].backward_ms"),
            )
            for n, layer in enumerate(layers)
        ),
        fixed_ms=_quantity(found, "fixed_ms"),
        optimizer_ms_per_mb=_quantity(found, "optimizer_ms_per_mb"),
        transports={
            name: {
                key: _quantity(transports[name], f"transports.{name}.{key}")
                for key in TRANSPORT_FIELDS
                if key not in OPTIONAL or key in transports[name]
            }
            for name in TRANSPORTS
        },
        codecs={
            name: {
                key: _quantity(costs, f"codecs.{name}.{key}")
                for key in ("encode_ms_per_mb", "decode_ms_per_mb", "wire_share")
            }
            for name, costs in codecs.items()
        },
        batch_fixed_share=number(found, "batch_fixed_share", most=1),
        step_jitter=number(found, "step_jitter", most=2),
        cores_per_host=number(found, "cores_per_host", 0.01, 1e6),
        threads_per_worker=_count(found, "threads_per_worker"),
        device="cuda" if found.get("device") == "cuda" else "cpu",
        hosts_share_cores=found.get("hosts_share_cores") is True,
        latency_us=_quantity(found, "latency_us"),
        bandwidth_gbit=None if found.get("bandwidth_gbit") is None else number(found, "bandwidth_gbit", most=1e5),
        most_workers=_count(found, "most_workers"),
        most_servers=_count(found, "most_servers"),
        model_error=number(found, "model_error", most=10),
        made=found["made"] if isinstance(found.get("made"), dict) else {},
    )  # fmt: skip


def _count(of: dict[str, Any], name: str) -> int:
    value = of.get(name)
    if type(value) is not int or not 1 <= value <= 10**6:
        raise WrongField(f"{name} is {value!r}, not a whole number from 1 to 1000000")
    return value


def _quantity(of: Any, path: str) -> Quantity:
    """A plain number, as somebody writes it by hand, or value, low and high."""
    value = of.get(path.rpartition(".")[2]) if isinstance(of, dict) else None
    if not isinstance(value, dict):
        plain = number(of, path)
        return Quantity(plain, plain, plain)
    middle = number(value, f"{path}.value")
    low, high = (number(value, f"{path}.{end}") if end in value else middle for end in ("low", "high"))
    if not low <= middle <= high:
        raise WrongField(f"{path} has not low <= value <= high: {low:g}, {middle:g}, {high:g}")
    return Quantity(middle, low, high)
