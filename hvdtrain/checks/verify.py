"""`hvdtrain verify`: every synchronous mode gives the weights of one process on the global batch."""

import dataclasses
import json
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hvdtrain import modes
from hvdtrain.config import recipes
from hvdtrain.config.command_line import MODES, NUM_WORKERS, GroupedCommand
from hvdtrain.config.option_types import NUMBERS, Several
from hvdtrain.config.recipes import Launcher
from hvdtrain.config.run_config import RunConfig
from hvdtrain.errors import Failure, UsageError
from hvdtrain.formatting import with_noun
from hvdtrain.launch.allocation import hosts_or_here
from hvdtrain.launch.hosts import Host, allocate, host_options, launcher_option, secrets_option
from hvdtrain.launch.job_log import failure_reason
from hvdtrain.launch.prepare import prepare
from hvdtrain.launch.processes import ends_late, launched_job
from hvdtrain.models import is_own
from hvdtrain.runs.request import check, check_workers

if TYPE_CHECKING:
    from numpy import ndarray as Vector

SYNCHRONOUS = [name for name in modes.names() if modes.declared(name).lockstep and name != "single"]
# Modes that are synchronous with these options: without staleness a worker of ps-ssp waits for all others' pushes, of
# which one step is made (--push-scale softsync).
MADE_SYNCHRONOUS: dict[str, dict[str, Any]] = {"ps-ssp": {"staleness": 0, "shares": "equal"}}
CHECKED_MODES = [*SYNCHRONOUS, *MADE_SYNCHRONOUS]

OPTIMIZERS = ("sgd", "adam")  # sgd has momentum

# Distance of the weights from the reference, over the distance that training moved them. Float32 rounding, and the
# order in which gradients are added up, leave about 4e-5. A short batch averaged by worker instead of by sample
# leaves 8e-3, another sample or a sum in place of a mean 1e-2 and more (each was tried).
TOLERANCE = 2e-4

# Five steps of 476 over 1,438 images: the fourth batch of the epoch has ten images, which four workers cannot share
# evenly, and the fifth step begins a new epoch. No batch norm and no dropout: both differ between workers by nature.
CHECKED = RunConfig(
    mode="single", dataset="digits", model="vggf", width=1 / 16, batch_size=476, steps=5, lr=1e-3, threads=1,
    schedule="constant", deterministic=True, snapshot_every="never", device="cpu",
)  # fmt: skip
SERVERS, BUCKET_MB = 2, 1 / 8  # nine buckets on each of two servers, whose borders lie within parameters


@click.command(cls=GroupedCommand)
@click.option(
    *MODES[:2], "names", type=Several(click.Choice(CHECKED_MODES)), metavar="NAMES", default=",".join(CHECKED_MODES),
    show_default=True, help="Modes to check.",
)  # fmt: skip
@click.option(*NUM_WORKERS, type=NUMBERS, default="1,2,4", show_default=True, help="Numbers of workers.")
@click.option(
    "--wait-for", type=click.Choice(["auto", "layer", "step"]), default="auto", show_default=True,
    help="What waits for fresh weights: see train.",
)  # fmt: skip
@click.option(
    "--shares", type=click.Choice(["auto", "equal", "measured"]), default="auto", show_default=True,
    help="How batches are shared out: see train.",
)  # fmt: skip
@click.option(
    "--model", default=CHECKED.model, show_default=True,
    help="Another model, as train takes it: without batch norm and dropout, which differ between workers by nature.",
)  # fmt: skip
@click.option("--dataset", default=CHECKED.dataset, show_default=True, help="Other data, as train takes it.")
@host_options
@launcher_option
@secrets_option
@click.pass_context
def verify(
    ctx: click.Context, names: list[str], workers: list[int], wait_for: str, shares: str, model: str, dataset: str,
    hosts: str | None, hostfile: Path | None, launcher: Launcher, secrets: dict[str, str],
) -> None:  # fmt: skip
    """Check that the synchronous modes compute the same as one process, on this machine's processor or your hosts'.

    \b
    hvdtrain verify
    hvdtrain verify --modes allreduce,ps-sync -H node1:3,node2:3

    Trains a small VGG, or your model, for a few steps as one process on the global batch, and in each mode on each
    number of workers, with momentum and with Adam, and compares the final weights and the samples seen: how far apart
    they are, as a part of the way that training moved them. Batches that cannot be cut evenly are among them; servers
    are two, of many buckets. ps-ssp is checked without staleness. Exit code 1 where anything differs by more than
    float32 rounding.
    """
    listed = hosts_or_here(ctx)
    options = {"wait_for": wait_for, "shares": shares}
    checked = CHECKED
    if (model, dataset) != (CHECKED.model, CHECKED.dataset):
        from hvdtrain.data.find import find_dataset

        width = 0.0 if is_own(model) else CHECKED.width
        checked = check(dataclasses.replace(CHECKED, model=model, dataset=dataset, width=width))
        # With batches of which the fourth of an epoch is short, as that of CHECKED, where the data is not too large.
        third = (len(find_dataset(dataset).train) - 1) // 3
        checked = dataclasses.replace(checked, batch_size=max(1, min(checked.batch_size, third)))
    for name in names:
        check(of_mode(checked, name, **options))
    for n in workers:
        check_workers(dataclasses.replace(checked, mode=names[0]), n)
        for name in names if listed else ():
            allocate(listed, n, of_mode(checked, name).servers)
    results = []
    # Hosts have to share the folder of the runs: the current one is taken to be shared.
    with tempfile.TemporaryDirectory(prefix="hvdtrain-verify-", dir="." if listed else None) as folder:
        out = Path(folder).absolute()
        for result in compare_with_single(names, workers, out, options, listed, launcher, secrets, checked=checked):
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
        buckets: in all, of servers or of a ring; 0 where torch cuts them.
        distance: of the weights, over the distance that training moved them.
        samples: whether the same samples were seen at the same steps.
    """

    config: RunConfig
    workers: int
    buckets: int
    distance: float
    samples: bool

    @property
    def same(self) -> bool:
        return self.samples and self.distance <= TOLERANCE

    @property
    def line(self) -> str:
        mode = f"{self.config.mode}, staleness 0" if self.config.mode in MADE_SYNCHRONOUS else self.config.mode
        servers = f" on {self.config.servers} servers" if self.config.servers else ""
        buckets = f"{self.buckets} buckets{servers}" if self.buckets else ""
        return (
            f"{'same' if self.same else 'DIFFERS':<8} {mode:<20} {with_noun(self.workers, 'worker'):<9}  "
            f"{self.config.optimizer:<4}  "
            f"{buckets:<23}  {self.distance:.1e} of the way trained (at most {TOLERANCE:.0e})"
            f"{'' if self.samples else ', other samples'}"
        )


def of_mode(config: RunConfig, mode: str, **options: Any) -> RunConfig:
    """The same in another mode, with these options, what makes it synchronous, small buckets and servers."""
    declared = modes.declared(mode)
    if "bucket_mb" in declared.options:
        options["bucket_mb"] = BUCKET_MB
    if declared.has_servers:
        options["servers"] = SERVERS
    return dataclasses.replace(config, mode=mode, **options | MADE_SYNCHRONOUS.get(mode, {}))


def compare_with_single(
    names: list[str], workers: list[int], folder: Path, options: Mapping[str, Any] = {},
    hosts: Sequence[Host] = (), launcher: Launcher | None = None, secrets: Mapping[str, str] | None = None,
    optimizers: Sequence[str] = OPTIMIZERS, checked: RunConfig = CHECKED,
) -> Iterator[Result]:  # fmt: skip
    """Run and compare, one after the other. Failure where a run fails.

    Args:
        folder: for the runs.
        options: of all of them but the reference.
        hosts: where runs of several ranks go, by the launcher; the reference, one process, runs here.
        secrets: variables for every rank that no command line may show.
        checked: what is trained.
    """
    import numpy as np

    from hvdtrain.buckets.partition import cut

    local = recipes.launcher("local")
    for optimizer in optimizers:
        config = dataclasses.replace(checked, optimizer=optimizer)
        initial, parameters = _initial(config)
        sizes = list(parameters.values())
        alone, samples = _train(config, 1, folder / f"single-{optimizer}", (), local, secrets, parameters)
        moved = float(np.linalg.norm(alone - initial))
        for mode in names:
            run = of_mode(config, mode, **options)
            for n in workers:
                used = allocate(hosts, n, run.servers) if hosts and n + run.servers > 1 else []
                out = folder / f"{mode}-{n}-{optimizer}"
                weights, seen = _train(run, n, out, used, launcher if launcher and used else local, secrets, parameters)
                distance = float(np.linalg.norm(weights - alone) / moved)
                buckets = len(cut(sizes, run.servers or 1, run.bucket_elements)) if run.bucket_mb == BUCKET_MB else 0
                yield Result(run, n, buckets, distance, seen == samples)


def _train(
    config: RunConfig, workers: int, out: Path, hosts: Sequence[Host], launcher: Launcher,
    secrets: Mapping[str, str] | None, parameters: Iterable[str],
) -> tuple["Vector", str]:  # fmt: skip
    """The final weights, of these parameters, as one vector float64, and the digest of the samples seen."""
    from safetensors.numpy import load_file

    log = out.with_suffix(".log")
    with launched_job(prepare(launcher, config, workers, hosts, out, secrets=secrets), log) as job:
        is_late = ends_late(out / "summary.json")
        while job.poll() is None and not is_late():
            time.sleep(0.1)
        code = job.returncode or 0
    if code:
        raise Failure(f"{config.mode} with {with_noun(workers, 'worker')} did not run: {failure_reason(log, code)}")
    weights = load_file(out / "snapshots" / "final.safetensors")
    return _flat(weights, parameters), json.loads((out / "summary.json").read_text())["samples_digest"]


def _initial(config: RunConfig) -> tuple["Vector", dict[str, int]]:
    """The weights that training begins with, as one vector, and how many elements each trained parameter has.

    Raises:
        UsageError: the model has layers that differ between workers by nature.
    """
    from hvdtrain.data.find import find_dataset
    from hvdtrain.models.own import batch_norm_and_dropout
    from hvdtrain.rank.work import initial_model, trial_inputs

    data = find_dataset(config.dataset)
    model = initial_model(config, len(data.classes), trial_inputs(config, data))
    for kind, has in batch_norm_and_dropout(model).items():
        if has:
            raise UsageError(
                f"--model {config.model} has {kind.replace('_', ' ')}: that differs between workers by nature, so that "
                "there is nothing to verify"
            )
    trained = {name: p.detach().numpy() for name, p in model.named_parameters() if p.requires_grad}
    return _flat(trained, trained), {name: values.size for name, values in trained.items()}


def _flat(weights: Mapping[str, "Vector"], names: Iterable[str]) -> "Vector":
    import numpy as np

    return np.concatenate([weights[name].ravel().astype(np.float64) for name in names])
