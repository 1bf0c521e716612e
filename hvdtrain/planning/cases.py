"""Published tables: what is unknown is fitted on some cells, and the others are predicted blind."""

import math
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, to_builtins

from hvdtrain.base.config.untrusted import parse_toml
from hvdtrain.base.errors import UsageError
from hvdtrain.planning.calibration import read_as
from hvdtrain.planning.layout import FINE
from hvdtrain.planning.predict import simulate
from hvdtrain.planning.scenario import MODES, SERVER_MODES, Layer, Scenario, Transport

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
    """A figure of the table. With `calibrate` the unknowns are fitted on it."""

    mode: str
    workers: Count
    samples_per_s: Positive
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


class PublishedTable(Struct, frozen=True, forbid_unknown_fields=True):
    """What a case file holds: its tables `model`, `cluster` and `cell`."""

    model: Model
    cluster: Cluster
    cell: Annotated[list[PublishedCell], Meta(min_length=1)]
    title: str = ""
    source: str = ""

    def layers(self) -> tuple[Layer, ...]:
        """Returns layers that compute as long as one worker did in all, a third of it forward."""
        known = [(layer.megabytes, layer.share_of_compute) for layer in self.model.layers]
        if not known:
            known = layers_of(self.model.name)
        computing_s = self.model.batch_per_worker / self.cluster.single_worker_samples_per_s
        third = computing_s / 3 / (sum(share for _, share in known) or 1.0)
        return tuple(
            Layer(round(megabytes * 1e6 / 4), third * share, 2 * third * share)
            for megabytes, share in known
        )


def load(path: Path) -> PublishedTable:
    """Reads a case file.

    Raises:
        UsageError: it is none. The message is one line.
    """
    return read_as(PublishedTable, "case", path, lambda content: parse_toml(content.decode()))


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


def samples_per_s(
    table: PublishedTable,
    layers: tuple[Layer, ...],
    cell: PublishedCell,
    unknowns: Mapping[str, float],
) -> float:
    """Returns a cell as it is simulated with these values of the unknowns."""
    cluster = table.cluster
    workers = cell.workers
    per_host = cluster.workers_per_host
    on_a_host = min(workers, per_host)
    weights = 4 * sum(layer.parameters for layer in layers)
    within_host_s = 0.0
    if on_a_host > 1:
        # Gradients go once to where they are added up and weights back, over what the workers of a
        # host share.
        within_host_s = 2 * on_a_host * weights / 1e9 / unknowns["host_gb_per_s"]
    if cell.servers:
        # The workers of a host add up before one of them pushes.
        workers = -(-workers // per_host)
        per_host = 1
    s_per_gb = unknowns["processor_s_per_gb"]
    transport = Transport(
        send_s_per_gb=s_per_gb,
        receive_s_per_gb=s_per_gb,
        server_send_s_per_gb=s_per_gb,
        server_receive_s_per_gb=s_per_gb,
        efficiency=unknowns["efficiency"],
    )
    job = Scenario(
        cell.mode,
        layers,
        workers,
        cell.servers,
        bandwidth_gbit=cluster.bandwidth_gbit,
        latency_s=cluster.latency_us * 1e-6,
        transport=transport,
        fixed_s=within_host_s,
        jitter=unknowns["jitter"],
        cores=cluster.cores_per_host,
        on_processor=False,
        workers_per_host=per_host,
        placement=cell.placement,
        under_way_bytes=NO_WINDOW,
        softsync=False,
    )
    detail = FINE._replace(pieces=100 if job.in_lockstep else 40)
    step_s = simulate(job, 3, detail).step_s
    return cell.workers * table.model.batch_per_worker / step_s


def predict(table: PublishedTable) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Fits the unknowns by least squares with a Gaussian prior, and predicts every cell.

    Returns:
        Every cell with `predicted`, `low` and `high`, and with `error`, predicted over published
        less 1; and what was fitted. Intervals come from draws of what is left uncertain.
    """
    import numpy as np
    from scipy.optimize import least_squares

    layers = table.layers()
    fitted_cells = [cell for cell in table.cell if cell.calibrate]

    def residuals(deviations: Any) -> Any:
        unknowns = _unknowns(deviations)
        errors = []
        for cell in fitted_cells:
            ratio = samples_per_s(table, layers, cell, unknowns) / cell.samples_per_s
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
        speeds = [samples_per_s(table, layers, cell, unknowns) for unknowns in [fitted, *drawn]]
        prediction = {
            "predicted": speeds[0],
            "low": min(speeds) / WIDER,
            "high": max(speeds) * WIDER,
            "error": speeds[0] / cell.samples_per_s - 1,
        }
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
