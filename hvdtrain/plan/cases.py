"""Published tables as cases: what is unknown is fitted on some cells, and the others are predicted blind."""

import math
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hvdtrain.config.untrusted import parse_toml
from hvdtrain.errors import UsageError
from hvdtrain.plan.fields import WrongField, number
from hvdtrain.plan.layout import FINE
from hvdtrain.plan.published import layers_of
from hvdtrain.plan.scenario import MODES, SERVER_MODES, Layer, Scenario, Transport
from hvdtrain.plan.simulate import simulate

# What is not known of another system: the likely value, and the standard deviation of its logarithm before any cell was
# looked at. Cells move them, and as far as they do not, the interval is as wide as these say.
UNKNOWNS = {
    "efficiency": (0.7, 0.8),  # share of the wire that payload reaches
    "processor_s_per_gb": (0.2, 1.0),  # at each end of a message
    "jitter": (0.03, 0.4),  # standard deviation of the logarithm of a step's computing
    "host_gb_per_s": (10.0, 0.7),  # between the workers of a host, shared by them
}
CELL_ERROR = 0.03  # of a published figure: to about so much it is fitted
DRAWS, WIDER = 8, 1.1
NO_WINDOW = 2**50
CHOICES = {"partition": ("even", "tensor"), "overlap": ("none", "backward", "both")}
PLACEMENTS = ("dedicated", "shared")


@dataclass(frozen=True)
class Case:
    """
    Attributes:
        fixed: unknowns that the file gives.
        local_sum: workers of a host add their gradients up before one of them pushes.
    """

    title: str
    source: str
    layers: tuple[Layer, ...]
    batch: int
    bandwidth_gbit: float
    latency_us: float
    per_host: int
    cores: int
    partition: str
    overlap: str
    local_sum: bool
    cells: tuple[dict[str, Any], ...]
    fixed: dict[str, float] = field(default_factory=dict)

    @property
    def unknowns(self) -> list[str]:
        return [name for name in UNKNOWNS if name not in self.fixed and (name != "host_gb_per_s" or self.per_host > 1)]


def load(path: Path) -> Case:
    """Read a case. UsageError, a line, where it is none."""
    try:
        found = parse_toml(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"there is no case {path}") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} is no readable case: {error}") from None
    try:
        return _parse(found)
    except WrongField as wrong:
        raise UsageError(f"{path}: {wrong}") from None


def _parse(found: dict[str, Any]) -> Case:
    tables = {name: found.get(name, {}) for name in ("model", "cluster", "software")}
    cells = found.get("cell")
    if not all(isinstance(table, dict) for table in tables.values()) or not isinstance(cells, list) or not cells:
        raise WrongField("it has not [model], [cluster] and at least one [[cell]]")
    model, cluster, software = tables.values()
    words = {name: software.get(name, allowed[0]) for name, allowed in CHOICES.items()}
    for name, allowed in CHOICES.items():
        if words[name] not in allowed:
            raise WrongField(f"software.{name} is {words[name]!r}: choose from {', '.join(allowed)}")
    batch = int(number(model, "model.batch_per_worker", 1, 1e6))
    single = number(cluster, "cluster.single_worker_samples_per_s", 1e-6, 1e9)
    fixed = {
        name: number(software, f"software.{name}", 1e-6, 1 if name == "efficiency" else 1e6)
        for name in UNKNOWNS
        if name in software
    }
    return Case(
        str(found.get("title", "")), str(found.get("source", "")), _layers(model, batch / single), batch,
        number(cluster, "cluster.bandwidth_gbit", 1e-6, 1e5),
        number(cluster, "cluster.latency_us", 0, 1e7) if "latency_us" in cluster else 50.0,
        int(number(cluster, "cluster.workers_per_host", 1, 64)) if "workers_per_host" in cluster else 1,
        int(number(cluster, "cluster.cores_per_host", 1, 1024)) if "cores_per_host" in cluster else 2,
        words["partition"], words["overlap"], software.get("local_sum", True) is True,
        tuple(_cell(cell, f"cell[{n}]") for n, cell in enumerate(cells)), fixed,
    )  # fmt: skip


def _layers(model: dict[str, Any], computing_s: float) -> tuple[Layer, ...]:
    given = model.get("layers")
    if given is None and not isinstance(model.get("name"), str):
        raise WrongField("model has neither a name nor layers")
    if given is None:
        named = layers_of(model["name"])
    elif not isinstance(given, list) or not given or not all(isinstance(layer, dict) for layer in given):
        raise WrongField("model.layers is no list of layers")
    else:
        named = [
            (
                str(layer.get("name", n)), number(layer, f"model.layers[{n}].megabytes", 0, 1e6),
                number(layer, f"model.layers[{n}].share_of_compute", 0, 1),
            )
            for n, layer in enumerate(given)
        ]  # fmt: skip
    total = sum(share for _, _, share in named) or 1.0
    if not sum(size for _, size, _ in named):
        raise WrongField("model.layers have no megabytes")
    return tuple(
        Layer(name, round(size * 1e6 / 4), computing_s * share / total / 3, computing_s * share / total * 2 / 3)
        for name, size, share in named
    )


def _cell(cell: Any, name: str) -> dict[str, Any]:
    if not isinstance(cell, dict):
        raise WrongField(f"{name} is no table")
    mode = cell.get("mode")
    if mode not in MODES:
        raise WrongField(f"{name} has mode {mode!r}: choose from {', '.join(MODES)}")
    workers = int(number(cell, f"{name}.workers", 1, 4096))
    number(cell, f"{name}.samples_per_s", 1e-6, 1e12)
    if mode in SERVER_MODES:
        number(cell, f"{name}.servers", 1, 4096)
    elif cell.get("servers"):
        raise WrongField(f"{name}: {mode} has no servers")
    if mode == "single" and workers > 1:
        raise WrongField(f"{name}: single has one worker")
    if cell.get("placement", "dedicated") not in PLACEMENTS:
        raise WrongField(f"{name} has placement {cell['placement']!r}: choose from {', '.join(PLACEMENTS)}")
    if not isinstance(cell.get("calibrate", False), bool):
        raise WrongField(f"{name}: calibrate is {cell['calibrate']!r}, not true or false")
    return cell


def scenario(case: Case, cell: dict[str, Any], values: dict[str, float]) -> Scenario:
    """A cell with the unknowns as given."""
    cost = values["processor_s_per_gb"]
    workers, per_host, mode = int(cell["workers"]), case.per_host, cell["mode"]
    inside = min(workers, per_host)
    weights = 4 * sum(layer.parameters for layer in case.layers)
    # Gradients go once to where they are added up and weights back, on what the workers of a host share.
    local_s = 2 * inside * weights / 1e9 / values["host_gb_per_s"] if inside > 1 else 0.0
    if case.local_sum and mode in SERVER_MODES:
        workers, per_host = -(-workers // per_host), 1
    return Scenario(
        mode, case.layers, workers, int(cell.get("servers", 0)) if mode in SERVER_MODES else 0,
        bandwidth=case.bandwidth_gbit * 1e9 / 8, latency_s=case.latency_us * 1e-6,
        transport=Transport(0, 0, cost, cost, cost, cost, min(1.0, values["efficiency"])),
        fixed_s=local_s, jitter=values["jitter"], cores=case.cores, on_processor=False, workers_per_host=per_host,
        placement=cell.get("placement", "dedicated"), partition=case.partition, overlap=case.overlap,
        under_way_bytes=NO_WINDOW, softsync=False,
    )  # fmt: skip


def samples_per_s(case: Case, cell: dict[str, Any], values: dict[str, float]) -> float:
    job = scenario(case, cell, values)
    coarse = job.mode in SERVER_MODES and job.mode != "ps-sync"
    return int(cell["workers"]) * case.batch / simulate(job, 3, 0, FINE._replace(pieces=40 if coarse else 100)).step_s


def predict(case: Case) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Every cell with `predicted`, `low`, `high` and `error`, and the values of what was fitted.

    An error is predicted over published, less 1. Cells with calibrate = true are fitted, and say nothing.
    """
    names = case.unknowns
    fitted, covariance_root = _fit(case, names)
    middle = _values(case, names, fitted)
    draw = random.Random(0)
    others = []
    for _ in range(DRAWS):
        z = [draw.gauss(0, 1) for _ in names]
        moved = [
            x + sum(row[j] * z[j] for j in range(len(names))) for x, row in zip(fitted, covariance_root, strict=True)
        ]
        others.append(_values(case, names, moved))
    rows = []
    for cell in case.cells:
        predicted = samples_per_s(case, cell, middle)
        drawn = [predicted, *(samples_per_s(case, cell, values) for values in others)]
        rows.append(cell | {
            "predicted": predicted, "low": min(drawn) / WIDER, "high": max(drawn) * WIDER,
            "error": predicted / cell["samples_per_s"] - 1,
        })  # fmt: skip
    return rows, {name: middle[name] for name in names}


def _values(case: Case, names: list[str], logs: Any) -> dict[str, float]:
    found = {name: value for name, (value, _) in UNKNOWNS.items()} | case.fixed
    found |= {name: math.exp(x) for name, x in zip(names, logs, strict=True)}
    return found | {"efficiency": min(1.0, found["efficiency"]), "jitter": min(0.5, found["jitter"])}


def _fit(case: Case, names: list[str]) -> tuple[list[float], list[list[float]]]:
    """Logarithms of the unknowns that fit the cells with calibrate = true best while staying likely (least squares with
    a Gaussian prior), and a root of their covariance.
    """
    import numpy as np
    from scipy.optimize import least_squares, minimize_scalar

    centre = np.array([math.log(UNKNOWNS[name][0]) for name in names])
    spread = np.array([UNKNOWNS[name][1] for name in names])
    known = [cell for cell in case.cells if cell.get("calibrate")]
    if not known or not names:
        return list(centre), [[spread[i] if i == j else 0.0 for j in range(len(names))] for i in range(len(names))]

    def residuals(scaled: Any) -> Any:
        values = _values(case, names, centre + spread * scaled)
        off = [math.log(samples_per_s(case, cell, values) / cell["samples_per_s"]) / CELL_ERROR for cell in known]
        return np.array([*off, *scaled])

    # Each unknown alone may explain what was published: begin with the one that needs to move least.
    def alone(axis: Any) -> Any:
        found = minimize_scalar(
            lambda x: float(np.sum(residuals(x * axis) ** 2)), bounds=(-3, 3), method="bounded", options={"xatol": 0.05}
        )
        return found.x * axis

    starts = [np.zeros(len(names)), *(alone(axis) for axis in np.eye(len(names)))]
    best = min(starts, key=lambda start: float(np.sum(residuals(start) ** 2)))
    found = least_squares(residuals, best, diff_step=0.05, x_scale=1.0, max_nfev=6)
    covariance = np.linalg.inv(found.jac.T @ found.jac + 1e-9 * np.eye(len(names)))
    root = np.linalg.cholesky(covariance) * spread[:, None]
    return list(centre + spread * found.x), root.tolist()
