"""`hvdtrain verify`: every synchronous mode gives the weights of one process on the global batch."""

import dataclasses
import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hvdtrain import modes
from hvdtrain.config.option_types import Names, Numbers
from hvdtrain.config.run_config import RunConfig
from hvdtrain.errors import Failure, unknown
from hvdtrain.launch.job_log import failure_reason
from hvdtrain.launch.processes import local_job
from hvdtrain.launch.recipe import train_program
from hvdtrain.runs.request import check_workers

if TYPE_CHECKING:
    from numpy import ndarray as Vector

SYNCHRONOUS = [name for name in modes.names() if modes.declared(name).lockstep and name != "single"]

# Distance of the weights from the reference, over the distance that training moved them. Float32 rounding, and the
# order in which gradients are added up, leave about 4e-5. A short batch averaged by worker instead of by sample
# leaves 8e-3, another sample or a sum in place of a mean 1e-2 and more (each was tried).
TOLERANCE = 2e-4
CHECKED_OPTIMIZERS = ("sgd", "adam")

# Five steps of 476 over 1,438 images: the fourth batch of the epoch has ten images, which four workers cannot share
# evenly, and the fifth step begins a new epoch. No batch norm and no dropout: both differ between workers by nature.
CHECKED = RunConfig(
    mode="single", dataset="digits", model="vggf", width=1 / 16, batch_size=476, steps=5, lr=1e-3, threads=1,
    schedule="constant", deterministic=True, snapshot_every="never", device="cpu",
)  # fmt: skip


@click.command()
@click.option(
    "--modes", "names", type=Names(), default=",".join(SYNCHRONOUS), show_default=True, help="Modes to check."
)  # fmt: skip
@click.option("--workers", "-n", type=Numbers(), default="1,2,4", show_default=True, help="Numbers of workers.")
def verify(names: list[str], workers: list[int]) -> None:
    """Check that the synchronous modes compute the same as one process, on this machine's processor.

    Trains a small VGG for a few steps as one process on the global batch, and in each mode on each number of
    workers, with SGD and momentum and with Adam, and compares the final weights and the samples seen. Batches
    that cannot be cut evenly are among them. Exit code 1 where anything differs by more than float32 rounding.
    """
    for name in names:
        if name not in SYNCHRONOUS:
            raise unknown("synchronous mode", name, SYNCHRONOUS)
    for n in workers:
        check_workers(dataclasses.replace(CHECKED, mode=names[0]), n)
    results = []
    for result in compare_with_single(names, workers):
        results.append(result)
        click.echo(result.line)
    wrong = [result for result in results if not result.same]
    if wrong:
        raise Failure(f"{len(wrong)} of {len(results)} differ from one process")
    click.echo(f"all {len(results)} agree with one process on the global batch")


@dataclass(frozen=True)
class Result:
    """How one run compares with one process.

    Attributes:
        distance: of the weights, over the distance that training moved them.
        samples: whether the same samples were seen at the same steps.
    """

    config: RunConfig
    workers: int
    distance: float
    samples: bool

    @property
    def same(self) -> bool:
        return self.samples and self.distance <= TOLERANCE

    @property
    def line(self) -> str:
        return (
            f"{'same' if self.same else 'DIFFERS':<8} {self.config.mode:<10} {self.workers} worker(s)  "
            f"{self.config.optimizer:<5} distance {self.distance:.1e} (at most {TOLERANCE:.0e})"
            f"{'' if self.samples else ', other samples'}"
        )


def compare_with_single(
    names: list[str], workers: list[int], optimizers: Sequence[str] = CHECKED_OPTIMIZERS
) -> Iterator[Result]:
    """Run and compare, one after the other. Failure where a run fails."""
    import numpy as np

    with tempfile.TemporaryDirectory(prefix="hvdtrain-verify-") as folder:
        for optimizer in optimizers:
            config = dataclasses.replace(CHECKED, optimizer=optimizer)
            alone, samples = _train(config, 1, Path(folder) / f"single-{optimizer}")
            moved = np.linalg.norm(alone - _initial(config))
            for mode in names:
                run = dataclasses.replace(config, mode=mode, servers=1 if modes.declared(mode).has_servers else 0)
                for n in workers:
                    weights, seen = _train(run, n, Path(folder) / f"{mode}-{n}-{optimizer}")
                    yield Result(run, n, float(np.linalg.norm(weights - alone) / moved), seen == samples)


def _train(config: RunConfig, workers: int, out: Path) -> tuple["Vector", str]:
    """The final weights as one vector [parameters] float64, and the digest of the samples seen."""
    from safetensors.numpy import load_file

    log = out.with_suffix(".log")
    with local_job("local", workers + config.servers, train_program(config, out), log) as job:
        code = job.wait()
    if code:
        raise Failure(f"{config.mode} with {workers} worker(s) did not run: {failure_reason(log, code)}")
    weights = load_file(out / "snapshots" / "final.safetensors")
    return _flat(weights), json.loads((out / "summary.json").read_text())["samples_digest"]


def _initial(config: RunConfig) -> "Vector":
    from hvdtrain.rank.work import initial_model

    return _flat({name: tensor.numpy() for name, tensor in initial_model(config, 10).state_dict().items()})


def _flat(weights: dict[str, "Vector"]) -> "Vector":
    import numpy as np

    return np.concatenate([weights[name].ravel().astype(np.float64) for name in sorted(weights)])
