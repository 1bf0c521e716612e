"""Published tables as cases: what is unknown is fitted on some cells, and the others are predicted blind."""

import math
import random
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, to_builtins

from hvdtrain.config.untrusted import parse_toml
from hvdtrain.errors import UsageError
from hvdtrain.planning.calibration import read_as
from hvdtrain.planning.layout import FINE
from hvdtrain.planning.predict import simulate
from hvdtrain.planning.scenario import MODES, SERVER_MODES, Layer, Scenario, Transport

# What is not known of another system: the likely value, and the standard deviation of its logarithm before any cell was
# looked at.
UNKNOWNS = {
    "efficiency": (0.7, 0.8),  # share of the wire that payload reaches
    "processor_s_per_gb": (0.2, 1.0),  # at each end of a message
    "jitter": (0.03, 0.4),  # standard deviation of the logarithm of a step's computing
    "host_gb_per_s": (10.0, 0.7),  # between the workers of a host, shared by them
}
CELL_ERROR = 0.03  # of a published figure: to about so much it is fitted
DRAWS, WIDER = 8, 1.1
NO_WINDOW = 2**50
SIDE = {"inception_v3": 299}  # pixels; 224 for the others
Positive = Annotated[float, Meta(ge=1e-6, le=1e12)]
Count = Annotated[int, Meta(ge=1, le=4096)]


class NamedLayer(Struct, frozen=True):
    megabytes: Annotated[float, Meta(ge=0, le=1e6)]
    share_of_compute: Annotated[float, Meta(ge=0, le=1)]


class Model(Struct, frozen=True):
    """A name that layers_of knows, or layers."""

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


class Cell(Struct, frozen=True):
    """A figure of the table; with `calibrate` unknowns are fitted on it."""

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


class Case(Struct, frozen=True, forbid_unknown_fields=True):
    """The tables of the file."""

    model: Model
    cluster: Cluster
    cell: Annotated[list[Cell], Meta(min_length=1)]
    title: str = ""
    source: str = ""

    def layers(self) -> tuple[Layer, ...]:
        """Layers that compute in all as long as one worker took, a third of it forward."""
        model, computing_s = self.model, self.model.batch_per_worker / self.cluster.single_worker_samples_per_s
        known = [(one.megabytes, one.share_of_compute) for one in model.layers] or layers_of(model.name)
        third = computing_s / 3 / (sum(share for _, share in known) or 1.0)
        return tuple(Layer(round(size * 1e6 / 4), third * share, 2 * third * share) for size, share in known)


def load(path: Path) -> Case:
    """Read a case. UsageError, a line, where it is none."""
    return read_as(Case, path, lambda content: parse_toml(content.decode()))


def layers_of(name: str) -> list[tuple[float, float]]:
    """(megabytes of float32, share of all multiplications) of each layer with parameters, as they were made, of
    torchvision's network for ImageNet's 1,000 classes without auxiliary heads. UsageError where it has none.
    """
    import torch
    import torchvision
    from torch.utils.flop_counter import FlopCounterMode

    if name not in torchvision.models.list_models(torchvision.models):
        raise UsageError(f"unknown model '{name}': choose one of torchvision's, as vgg16, or write layers = […]")
    more = {"aux_logits": False, "init_weights": False} if name in ("inception_v3", "googlenet") else {}
    side, counter = SIDE.get(name, 224), FlopCounterMode(display=False)
    with torch.device("meta"), counter:
        model = torchvision.models.get_model(name, weights=None, **more).eval()
        model(torch.zeros(1, 3, side, side))
    work = {path.partition(".")[2]: sum(of.values()) for path, of in counter.get_flop_counts().items()}
    layers = []
    for path, of in model.named_modules():
        inside = sum(work.get(f"{path}.{name}".strip("."), 0) for name, _ in of.named_children())
        if size := sum(p.numel() for p in of.parameters(recurse=False)):
            layers.append((4e-6 * size, (work.get(path, 0) - inside) / work[""]))
    return layers


def samples_per_s(case: Case, layers: tuple[Layer, ...], cell: Cell, values: dict[str, float]) -> float:
    """A cell as it is simulated with the unknowns as given."""
    cost, cluster = values["processor_s_per_gb"], case.cluster
    workers, per_host = cell.workers, cluster.workers_per_host
    inside = min(workers, per_host)
    weights = 4 * sum(layer.parameters for layer in layers)
    # Gradients go once to where they are added up and weights back, on what the workers of a host share.
    local_s = 2 * inside * weights / 1e9 / values["host_gb_per_s"] if inside > 1 else 0.0
    if cell.servers:  # the workers of a host add up before one of them pushes
        workers, per_host = -(-workers // per_host), 1
    job = Scenario(
        cell.mode, layers, workers, cell.servers,
        bandwidth_gbit=cluster.bandwidth_gbit, latency_s=cluster.latency_us * 1e-6,
        transport=Transport(0, 0, cost, cost, cost, cost, efficiency=values["efficiency"]),
        fixed_s=local_s, jitter=values["jitter"], cores=cluster.cores_per_host, on_processor=False,
        workers_per_host=per_host, placement=cell.placement, under_way_bytes=NO_WINDOW, softsync=False,
    )  # fmt: skip
    detail = FINE._replace(pieces=100 if job.in_lockstep else 40)
    return cell.workers * case.model.batch_per_worker / simulate(job, 3, detail).step_s


def predict(case: Case) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Every cell with `predicted`, `low`, `high` and `error`, predicted over published less 1, and what was fitted: by
    least squares with a Gaussian prior. Intervals are those of draws from what is left uncertain.
    """
    import numpy as np
    from scipy.optimize import least_squares

    layers = case.layers()

    def residuals(deviations: Any) -> Any:
        values = _unknowns(deviations)
        ratios = [
            samples_per_s(case, layers, cell, values) / cell.samples_per_s for cell in case.cell if cell.calibrate
        ]
        return np.array([*(math.log(ratio) / CELL_ERROR for ratio in ratios), *deviations])

    fit = least_squares(residuals, np.zeros(len(UNKNOWNS)), diff_step=0.05, max_nfev=10)
    root = np.linalg.cholesky(np.linalg.inv(fit.jac.T @ fit.jac))
    draw = random.Random(0)
    drawn = [_unknowns(fit.x + root @ [draw.gauss(0, 1) for _ in UNKNOWNS]) for _ in range(DRAWS)]
    rows = []
    for cell in case.cell:
        speeds = [samples_per_s(case, layers, cell, values) for values in (_unknowns(fit.x), *drawn)]
        found = {"predicted": speeds[0], "low": min(speeds) / WIDER, "high": max(speeds) * WIDER}
        rows.append(to_builtins(cell) | found | {"error": speeds[0] / cell.samples_per_s - 1})
    return rows, _unknowns(fit.x)


def _unknowns(deviations: Any) -> dict[str, float]:
    """The unknowns, so many standard deviations of their logarithms away from the likely values."""
    priors = zip(UNKNOWNS.items(), deviations, strict=True)
    values = {name: value * math.exp(spread * deviation) for (name, (value, spread)), deviation in priors}
    return values | {"efficiency": min(1.0, values["efficiency"]), "jitter": min(0.5, values["jitter"])}
