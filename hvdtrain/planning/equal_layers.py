"""A calibration from what a run's steps took, for a model of which no layers were measured."""

from hvdtrain.base.errors import UsageError
from hvdtrain.planning.calibrate import UNKNOWN
from hvdtrain.planning.calibration import LEAST_CORES, Calibration, LayerCost, Quantity
from hvdtrain.planning.probe import TRANSPORTS
from hvdtrain.runs.read import Run

# The equal layers that a model is taken to have.
LAYERS = 6
# Where no run of one process tells.
OPTIMIZER_MS_PER_MB = Quantity(0.5, 0.2, 1.5)
# The factor by which a figure of one run may be off.
ONE_RUN = 1.1
# More is not asked about: of seconds of a step, and of megabytes of gradients.
MOST_S = 1e4
MOST_MB = 1e5


def of_equal_layers(run: Run) -> Calibration:
    """Returns a calibration from the seconds of a run's steps, with guesses of what messages cost.

    Raises:
        UsageError: the run does not say what a step computes.
    """
    manifest = run.manifest
    step_seconds = run.summary.step_seconds
    workers = run.kind.workers
    megabytes = 4e-6 * (manifest.trained_parameters or manifest.parameters or 0)
    forward_s = step_seconds.get("forward", 0.0)
    backward_s = step_seconds.get("backward", 0.0)
    other_s = step_seconds.get("data", 0.0)
    is_known = 0 < forward_s + backward_s < MOST_S and 0 < megabytes < MOST_MB and other_s < MOST_S
    if not is_known or not manifest.global_batch:
        raise UsageError(f"{run.name} does not say what a step computes")
    layer = LayerCost(
        "part",
        megabytes / LAYERS,
        _milliseconds(forward_s / LAYERS),
        _milliseconds(backward_s / LAYERS),
    )
    is_on_gpu = (manifest.device or "").startswith("cuda")
    return Calibration(
        {"name": manifest.model or ""},
        max(1, manifest.global_batch // workers),
        (layer,) * LAYERS,
        _milliseconds(other_s),
        OPTIMIZER_MS_PER_MB,
        dict.fromkeys(TRANSPORTS, UNKNOWN),
        cores_per_host=_cores(run),
        threads_per_worker=manifest.threads_per_worker or 1,
        device="cuda" if is_on_gpu else "cpu",
        most_workers=workers,
    )


def _cores(run: Run) -> float:
    """Returns the cores of a host of a run; 1 where they are not known."""
    manifest = run.manifest
    known = [host.cores_usable for host in manifest.hosts.values() if host.cores_usable]
    return max(LEAST_CORES, manifest.hardware.cores_usable or min(known, default=1.0))


def _milliseconds(seconds: float) -> Quantity:
    return Quantity.exactly(1e3 * seconds).give_or_take(ONE_RUN)
