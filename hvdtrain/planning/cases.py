"""Published tables: what is unknown is fitted on some cells, and the others are predicted blind."""

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, to_builtins

from hvdtrain.base.config.untrusted import parse_toml
from hvdtrain.base.errors import UsageError
from hvdtrain.planning.calibration import (
    TRANSPORTS,
    Calibration,
    LayerCost,
    Quantity,
    read_as,
)
from hvdtrain.planning.layout import FINE
from hvdtrain.planning.naive import slower_of_both_s
from hvdtrain.planning.predict import simulate
from hvdtrain.planning.scenario import MODES, RING_MODES, SERVER_MODES, Scenario

# What is not known of another system: the likely value, and the standard deviation of its logarithm
# before any cell was looked at.
UNKNOWNS = {
    # the share of the wire that payload reaches
    "efficiency": (0.7, 0.8),
    # at each end of a message
    "processor_s_per_gb": (0.2, 1.0),
    # standard deviation of the logarithm of a step's computing
    "jitter": (0.03, 0.4),
    # between the workers of a host, shared by them
    "host_gb_per_s": (10.0, 0.7),
}
# A published figure is fitted to about so much.
CELL_ERROR = 0.03
# Draws of the unknowns for an interval, and how much wider than they are the interval is.
DRAWS = 8
WIDER = 1.1
# Values of the unknowns with which all but the wire is free.
NOTHING_COSTS = {
    "efficiency": 1.0,
    "processor_s_per_gb": 0.0,
    "jitter": 0.0,
    "host_gb_per_s": 1e9,
}
# Simulated steps of a cell.
STEPS = 3
# A bound of bytes under way that never holds.
NO_WINDOW = 2**50
# Pixels of an image's side, where it is not USUAL_SIDE.
SIDE = {"inception_v3": 299}
USUAL_SIDE = 224
# Networks with auxiliary heads, which are left out.
WITH_AUXILIARY_HEADS = ("inception_v3", "googlenet")
Positive = Annotated[float, Meta(ge=1e-6, le=1e12)]
Count = Annotated[int, Meta(ge=1, le=4096)]


class NamedLayer(Struct, frozen=True):
    megabytes: Annotated[float, Meta(ge=0, le=1e6)]
    share_of_compute: Annotated[float, Meta(ge=0, le=1)]


class Model(Struct, frozen=True):
    """A model with a name that layers_of knows, or with layers."""

    batch_per_worker: Annotated[int, Meta(ge=1, le=10**6)]
    name: str = ""
    layers: list[NamedLayer] = []

    def __post_init__(self) -> None:
        if not self.name and not sum(layer.megabytes for layer in self.layers):
            raise ValueError("it has neither a name nor layers with megabytes")


class Cluster(Struct, frozen=True, forbid_unknown_fields=True):
    single_worker_samples_per_s: Positive
    bandwidth_gbit: Positive
    latency_us: Annotated[float, Meta(ge=0, le=1e7)] = 50.0
    workers_per_host: Annotated[int, Meta(ge=1, le=64)] = 1
    cores_per_host: Annotated[int, Meta(ge=1, le=1024)] = 2


class PublishedCell(Struct, frozen=True):
    """A figure of the table: samples a second, or `times` as many as a ring, `over`, has.

    With `calibrate` the unknowns are fitted on it. Its network and GPUs may be others than the
    cluster's.
    """

    mode: str
    workers: Count
    samples_per_s: Positive | None = None
    times: Positive | None = None
    over: str = ""
    bandwidth_gbit: Positive | None = None
    single_worker_samples_per_s: Positive | None = None
    servers: Annotated[int, Meta(ge=0, le=4096)] = 0
    placement: Literal["dedicated", "shared"] = "dedicated"
    calibrate: bool = False

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"unknown mode '{self.mode}': choose from {', '.join(MODES)}")
        if (self.mode in SERVER_MODES) != bool(self.servers):
            raise ValueError(f"mode {self.mode} does not go with {self.servers} servers")
        if self.mode == "single" and self.workers > 1:
            raise ValueError("single has one worker")
        if self.over and self.over not in RING_MODES:
            raise ValueError(f"over '{self.over}' is no ring: choose from {', '.join(RING_MODES)}")
        if bool(self.samples_per_s) == bool(self.times) or bool(self.times) != bool(self.over):
            raise ValueError("a cell has either samples_per_s, or times and over")

    @property
    def published(self) -> float:
        return self.samples_per_s or self.times or 0.0


class PublishedTable(Struct, frozen=True, forbid_unknown_fields=True):
    """What a case file holds: its tables `model`, `cluster` and `cell`."""

    model: Model
    cluster: Cluster
    cell: Annotated[list[PublishedCell], Meta(min_length=1)]
    title: str = ""
    source: str = ""

    def speed_of_one(self, cell: PublishedCell) -> float:
        """Returns the samples a second of one worker."""
        return cell.single_worker_samples_per_s or self.cluster.single_worker_samples_per_s

    def calibration(self, cell: PublishedCell, unknowns: Mapping[str, float]) -> Calibration:
        """Returns what a step and its messages cost, with these values of the unknowns.

        Layers compute as long as one worker did in all, a third of it forward.
        """
        known = [(layer.megabytes, layer.share_of_compute) for layer in self.model.layers]
        if not known:
            known = layers_of(self.model.name)
        computing_ms = 1e3 * self.model.batch_per_worker / self.speed_of_one(cell)
        third = computing_ms / 3 / (sum(share for _, share in known) or 1.0)
        layers = []
        for number, (megabytes, share) in enumerate(known):
            forward_ms = Quantity.exactly(third * share)
            layers.append(LayerCost(str(number), megabytes, forward_ms, forward_ms.times(2)))
        s_per_gb = unknowns["processor_s_per_gb"]
        costs = {
            "message_us": 0.0,
            "operation_us": 0.0,
            "send_s_per_gb": s_per_gb,
            "receive_s_per_gb": s_per_gb,
            "server_send_s_per_gb": s_per_gb,
            "server_receive_s_per_gb": s_per_gb,
            "efficiency": unknowns["efficiency"],
        }
        of_messages = {name: Quantity.exactly(cost) for name, cost in costs.items()}
        return Calibration(
            {"name": self.model.name},
            self.model.batch_per_worker,
            tuple(layers),
            Quantity.exactly(0.0),
            Quantity.exactly(0.0),
            dict.fromkeys(TRANSPORTS, of_messages),
            step_jitter=unknowns["jitter"],
            cores_per_host=self.cluster.cores_per_host,
            device="cuda",
            latency_us=Quantity.exactly(self.cluster.latency_us),
            host_gb_per_s=unknowns["host_gb_per_s"],
            adds_up_on_host=True,
        )


def load(path: Path) -> PublishedTable:
    """Reads a case file.

    Raises:
        UsageError: it is none. The message is one line.
    """
    return read_as(PublishedTable, "case", path, lambda content: parse_toml(content.decode()))


@cache
def layers_of(name: str) -> list[tuple[float, float]]:
    """Returns the layers with parameters of torchvision's network for ImageNet's 1,000 classes,
    without auxiliary heads.

    Returns:
        (megabytes of float32, share of all multiplications) of each layer, in the order in which
        the layers were made.

    Raises:
        UsageError: torchvision has no such network.
    """
    import torch
    import torchvision
    from torch.utils.flop_counter import FlopCounterMode

    if name not in torchvision.models.list_models(torchvision.models):
        raise UsageError(
            f"unknown model '{name}': choose one of torchvision's, as vgg16, or write layers = […]"
        )
    options = {}
    if name in WITH_AUXILIARY_HEADS:
        options = {"aux_logits": False, "init_weights": False}
    side = SIDE.get(name, USUAL_SIDE)
    counter = FlopCounterMode(display=False)
    with torch.device("meta"), counter:
        model = torchvision.models.get_model(name, weights=None, **options).eval()
        model(torch.zeros(1, 3, side, side))
    # Multiplications by module, with the modules within it. "" is the whole network.
    work = {}
    for path, counts in counter.get_flop_counts().items():
        _, _, below_network = path.partition(".")
        work[below_network] = sum(counts.values())
    layers = []
    for path, module in model.named_modules():
        paths_within = [f"{path}.{child}".strip(".") for child, _ in module.named_children()]
        work_within = sum(work.get(path_within, 0) for path_within in paths_within)
        parameters = sum(weights.numel() for weights in module.parameters(recurse=False))
        if parameters:
            layers.append((4e-6 * parameters, (work.get(path, 0) - work_within) / work[""]))
    return layers


def job_of(table: PublishedTable, cell: PublishedCell) -> Scenario:
    """Returns the job that a cell is a measurement of."""
    return Scenario(
        cell.mode,
        workers=cell.workers,
        servers=cell.servers,
        bandwidth_gbit=cell.bandwidth_gbit or table.cluster.bandwidth_gbit,
        workers_per_host=table.cluster.workers_per_host,
        placement=cell.placement,
        under_way_bytes=NO_WINDOW,
        softsync=False,
    )


def figure(table: PublishedTable, cell: PublishedCell, unknowns: Mapping[str, float]) -> float:
    """Returns a cell as it is predicted with these values of the unknowns, the way of the map."""

    def seconds(job: Scenario) -> float:
        costed = table.calibration(cell, unknowns).with_costs(job)
        detail = FINE._replace(pieces=100 if job.in_lockstep else 40)
        return simulate(costed, STEPS, detail).step_s

    return _as_published(table, cell, seconds)


def _as_published(
    table: PublishedTable, cell: PublishedCell, seconds: Callable[[Scenario], float]
) -> float:
    """Returns what a cell has published, samples a second or times as many as another mode, from
    what says how long a step of a job takes.
    """
    job = job_of(table, cell)
    if cell.over:
        return seconds(replace(job, mode=cell.over, servers=0)) / seconds(job)
    return cell.workers * table.model.batch_per_worker / seconds(job)


def naive_figures(table: PublishedTable, cell: PublishedCell) -> dict[str, float]:
    """Returns a cell as rules have it that simulate nothing.

    `linear`: as many times one worker, or as the fitted cell has of each worker.
    `slower_of_both`: computing or the wire at its full rate, whichever takes longer.
    """
    costed = table.calibration(cell, NOTHING_COSTS).with_costs
    fitted = [other for other in table.cell if other.calibrate and other.samples_per_s]
    of_each = table.speed_of_one(cell)
    if fitted:
        last = fitted[-1]
        of_each *= last.published / last.workers / table.speed_of_one(last)
    return {
        "linear": 1.0 if cell.over else cell.workers * of_each,
        "slower_of_both": _as_published(table, cell, lambda job: slower_of_both_s(costed(job))),
    }


def predict(table: PublishedTable) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Fits the unknowns by least squares with a Gaussian prior, and predicts every cell.

    Returns:
        Every cell with `predicted`, `low` and `high`, and with `error`, predicted over published
        less 1; and what was fitted. Intervals come from draws of what is left uncertain.
    """
    import numpy as np
    from scipy.optimize import least_squares

    fitted_cells = [cell for cell in table.cell if cell.calibrate]

    def residuals(deviations: Any) -> Any:
        unknowns = _unknowns(deviations)
        errors = []
        for cell in fitted_cells:
            ratio = figure(table, cell, unknowns) / cell.published
            errors.append(math.log(ratio) / CELL_ERROR)
        return np.array([*errors, *deviations])

    fit = least_squares(residuals, np.zeros(len(UNKNOWNS)), diff_step=0.05, max_nfev=10)
    fitted = _unknowns(fit.x)
    covariance = np.linalg.inv(fit.jac.T @ fit.jac)
    root = np.linalg.cholesky(covariance)
    draw = random.Random(0)
    drawn = []
    for _ in range(DRAWS):
        normal = [draw.gauss(0, 1) for _ in UNKNOWNS]
        drawn.append(_unknowns(fit.x + root @ normal))
    rows = []
    for cell in table.cell:
        figures = [figure(table, cell, unknowns) for unknowns in [fitted, *drawn]]
        prediction = {
            "published": cell.published,
            "predicted": figures[0],
            "low": min(figures) / WIDER,
            "high": max(figures) * WIDER,
            "error": figures[0] / cell.published - 1,
        }
        for rule, naive in naive_figures(table, cell).items():
            prediction[rule] = naive
            prediction[f"{rule}_error"] = naive / cell.published - 1
        rows.append(to_builtins(cell) | prediction)
    return rows, fitted


def _unknowns(deviations: Any) -> dict[str, float]:
    """Returns values of the unknowns.

    Args:
        deviations: how far each is from the likely value, in standard deviations of its logarithm.
    """
    values = {}
    for (name, (likely, spread)), deviation in zip(UNKNOWNS.items(), deviations, strict=True):
        values[name] = likely * math.exp(spread * deviation)
    values["efficiency"] = min(1.0, values["efficiency"])
    values["jitter"] = min(0.5, values["jitter"])
    return values
