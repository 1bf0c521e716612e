"""`hvdtrain verify`: compares each synchronous mode with one process on the global batch."""

import dataclasses
import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hvdtrain.base import modes
from hvdtrain.base.config import recipes
from hvdtrain.base.config.command_line import (
    MODES,
    NUM_WORKERS,
    SCRIPT_WORDS,
    GroupedCommand,
    with_script_words,
)
from hvdtrain.base.config.option_types import NUMBERS, Several
from hvdtrain.base.config.recipes import Launcher
from hvdtrain.base.config.run_config import RunConfig
from hvdtrain.base.errors import Failure, UsageError
from hvdtrain.base.formatting import with_noun
from hvdtrain.base.system.preempt import ended_by_signals
from hvdtrain.launch.allocation import hosts_or_here
from hvdtrain.launch.hosts import Host, allocate, host_options, launcher_option, secrets_option
from hvdtrain.launch.job_log import failure_reason
from hvdtrain.launch.prepare import TrainingJob, prepare
from hvdtrain.launch.processes import ends_late, launched_job, still_runs
from hvdtrain.models import is_own
from hvdtrain.runs.request import check, check_workers
from hvdtrain.runs.scripts import check_script
from hvdtrain.tools.checks.agreement import TOLERANCE, distance, flat
from hvdtrain.tools.checks.smooth import WIDTH

if TYPE_CHECKING:
    from numpy import ndarray as Vector

SYNCHRONOUS = [name for name in modes.names() if modes.declared(name).lockstep and name != "single"]
# Modes that are synchronous with these options. Without staleness a worker of ps-ssp waits for the
# pushes of all others, from which the server makes one step (--push-scale softsync).
MADE_SYNCHRONOUS: dict[str, dict[str, Any]] = {"ps-ssp": {"staleness": 0, "shares": "equal"}}
CHECKED_MODES = [*SYNCHRONOUS, *MADE_SYNCHRONOUS]

OPTIMIZERS = ("sgd", "adam")  # sgd has momentum

# Five steps of 476 images over 1,438: the fourth batch of the epoch has ten images, which four
# workers cannot share evenly, and the fifth step begins a new epoch. The model has no batch norm
# and no dropout, which differ between workers by nature.
CHECKED = RunConfig(
    mode="single",
    dataset="digits",
    model="hvdtrain.tools.checks.smooth:vgg",
    batch_size=476,
    steps=5,
    lr=1e-3,
    threads=1,
    schedule="constant",
    deterministic=True,
    snapshot_every="never",
    device="cpu",
)
# Of a script, which has all else.
OF_SCRIPT = RunConfig(
    mode="single", threads=1, deterministic=True, snapshot_every="never", device="cpu"
)
# Nine buckets on each of two servers, with borders within parameters.
SERVERS = 2
BUCKET_MB = 1 / 8


@click.command(cls=GroupedCommand)
@click.option(
    *MODES[:2],
    "names",
    type=Several(click.Choice(CHECKED_MODES)),
    metavar="NAMES",
    default=",".join(CHECKED_MODES),
    show_default=True,
    help="Modes to check.",
)
@click.option(
    *NUM_WORKERS, type=NUMBERS, default="1,2,4", show_default=True, help="Numbers of workers."
)
@click.option(
    "--wait-for",
    type=click.Choice(["auto", "layer", "step"]),
    default="auto",
    show_default=True,
    help="What waits for fresh weights: see train.",
)
@click.option(
    "--shares",
    type=click.Choice(["auto", "equal", "measured"]),
    default="auto",
    show_default=True,
    help="How batches are shared out: see train.",
)
@click.option(
    "--model",
    default=CHECKED.model,
    show_default=True,
    help="Another model, as train takes it: without batch norm and dropout, which differ between "
    "workers by nature. With ReLU or max pooling, rounding alone may exceed the tolerance.",
)
@click.option(
    "--dataset", default=CHECKED.dataset, show_default=True, help="Other data, as train takes it."
)
@click.option(
    "--script",
    metavar="FILE.py",
    default="",
    help="Your own training script in place of a model and data; arguments after -- go to it. Its "
    "batches have to be the same whatever the number of workers, as those of job.sampler are.",
)
@host_options
@launcher_option
@secrets_option
@SCRIPT_WORDS
@click.pass_context
@ended_by_signals
def verify(
    ctx: click.Context,
    names: list[str],
    workers: list[int],
    wait_for: str,
    shares: str,
    model: str,
    dataset: str,
    hosts: str | None,
    hostfile: Path | None,
    launcher: Launcher,
    secrets: dict[str, str],
    script: str,
    script_words: tuple[str, ...],
) -> None:
    """Check that the synchronous modes compute the same as one process, here or on your hosts.

    \b
    hvdtrain verify
    hvdtrain verify --modes allreduce,ps-sync -H node1:3,node2:3
    hvdtrain verify --script train.py -n 2 -- --my-option 3

    Trains a small VGG, or your model, for a few steps: as one process on the global batch, and in
    each mode with each number of workers. Does this with momentum and with Adam. Then compares the
    final weights and the samples seen. A difference is given relative to how far training moved the
    weights. With Adam the 0.1 % of the weights that differ most are left out: a weight whose
    gradient is no more than rounding moves in any direction, as far as any other weight. The
    gradients of ReLU and max pooling jump, so that they would amplify the rounding differences
    between processors: the VGG has ELU and average pooling in their place. Some batches cannot be
    cut evenly. There are two servers with many buckets. ps-ssp is checked without staleness. Exit
    code 1 if anything differs by more than float32 rounding.
    """
    listed = hosts_or_here(ctx)
    given = with_script_words({"script": script}, script_words)
    options = {"wait_for": wait_for, "shares": shares}
    checked = CHECKED
    if script:
        checked = check(dataclasses.replace(OF_SCRIPT, **given))
        check_script(checked)
    elif (model, dataset) != (CHECKED.model, CHECKED.dataset):
        checked = _with_other_inputs(model, dataset)
    for name in names:
        check(of_mode(checked, name, **options))
    for n in workers:
        check_workers(dataclasses.replace(checked, mode=names[0]), n)
        if listed:
            for name in names:
                allocate(listed, n, of_mode(checked, name).servers)
    compare_runs = compare_script if script else compare_with_single
    results = []
    # Hosts have to share the folder of the runs. The current folder is taken to be shared.
    shared = "." if listed else None
    with tempfile.TemporaryDirectory(prefix="hvdtrain-verify-", dir=shared) as folder:
        out = Path(folder).absolute()
        for result in compare_runs(
            names, workers, out, options, listed, launcher, secrets, checked=checked
        ):
            results.append(result)
            click.echo(result.line)
    wrong = [result for result in results if not result.same]
    if wrong:
        raise Failure(f"{len(wrong)} of {len(results)} differ from one process")
    click.echo(f"all {len(results)} agree with one process on the global batch")


def _with_other_inputs(model: str, dataset: str) -> RunConfig:
    """Returns the configuration of a check with another model or data set.

    If the data set is small enough, its batches are such that the fourth of an epoch is short, as
    in CHECKED.
    """
    from hvdtrain.data.find import find_dataset

    width = 0.0 if is_own(model) else WIDTH
    checked = check(dataclasses.replace(CHECKED, model=model, dataset=dataset, width=width))
    third = (len(find_dataset(dataset).train) - 1) // 3
    return dataclasses.replace(checked, batch_size=max(1, min(checked.batch_size, third)))


@dataclass(frozen=True)
class Result:
    """The comparison of one run with one process.

    Attributes:
        config: The configuration of the run.
        workers: The number of workers.
        buckets: The number of buckets on all servers or of a ring; 0 where torch cuts them.
        distance: The distance of the final weights; see `agreement.distance`.
        samples: Whether both have seen the same samples at the same steps.
    """

    config: RunConfig
    workers: int
    buckets: int
    distance: float
    samples: bool

    @property
    def same(self) -> bool:
        """Whether the run agrees with one process."""
        return self.samples and self.distance <= TOLERANCE

    @property
    def line(self) -> str:
        """The line for the user."""
        verdict = "same" if self.same else "DIFFERS"
        mode = self.config.mode
        if mode in MADE_SYNCHRONOUS:
            mode = f"{mode}, staleness 0"
        workers = with_noun(self.workers, "worker")
        servers = f" on {self.config.servers} servers" if self.config.servers else ""
        buckets = f"{self.buckets} buckets{servers}" if self.buckets else ""
        samples = "" if self.samples else ", other samples"
        return (
            f"{verdict:<8} {mode:<20} {workers:<9}  {self.config.optimizer:<4}  {buckets:<23}  "
            f"{self.distance:.1e} of the way trained (at most {TOLERANCE:.0e}){samples}"
        )


def of_mode(config: RunConfig, mode: str, **options: Any) -> RunConfig:
    """Returns the configuration in another mode, made synchronous, with small buckets.

    Args:
        config: The configuration.
        mode: One of CHECKED_MODES.
        options: Further options.
    """
    declared = modes.declared(mode)
    if "bucket_mb" in declared.options:
        options["bucket_mb"] = BUCKET_MB
    if declared.has_servers:
        options["servers"] = SERVERS
    return dataclasses.replace(config, mode=mode, **options | MADE_SYNCHRONOUS.get(mode, {}))


def compare_with_single(
    names: list[str],
    workers: list[int],
    folder: Path,
    options: Mapping[str, Any] = {},
    hosts: Sequence[Host] = (),
    launcher: Launcher | None = None,
    secrets: Mapping[str, str] | None = None,
    optimizers: Sequence[str] = OPTIMIZERS,
    checked: RunConfig = CHECKED,
) -> Iterator[Result]:
    """Trains each mode on each number of workers, and yields the comparisons with one process.

    Args:
        names: The modes.
        workers: The numbers of workers.
        folder: The folder for the runs.
        options: Options of all runs but the reference.
        hosts: Hosts for runs of several ranks. The reference runs here.
        launcher: Starts runs on hosts.
        secrets: Variables for every rank that no command line may show.
        optimizers: The optimizers.
        checked: The configuration of the reference.

    Raises:
        Failure: A run fails.
        UsageError: The model has layers that differ between workers by nature.
    """
    from hvdtrain.job.buckets.partition import cut

    local = recipes.launcher("local")
    for optimizer in optimizers:
        config = dataclasses.replace(checked, optimizer=optimizer)
        initial, parameters = _initial(config)
        sizes = list(parameters.values())
        alone, samples = _train(
            config, 1, folder / f"single-{optimizer}", (), local, secrets, parameters
        )
        runs = [of_mode(config, mode, **options) for mode in names]
        for run, n, used, starter in _started(runs, workers, hosts, launcher):
            out = folder / f"{run.mode}-{n}-{optimizer}"
            weights, seen = _train(run, n, out, used, starter, secrets, parameters)
            buckets = 0
            if run.bucket_mb == BUCKET_MB:
                buckets = len(cut(sizes, run.servers or 1, run.bucket_elements))
            apart = distance(weights, alone, initial, optimizer)
            yield Result(run, n, buckets, apart, seen == samples)


def compare_script(
    names: list[str],
    workers: list[int],
    folder: Path,
    options: Mapping[str, Any] = {},
    hosts: Sequence[Host] = (),
    launcher: Launcher | None = None,
    secrets: Mapping[str, str] | None = None,
    checked: RunConfig = OF_SCRIPT,
) -> Iterator[Result]:
    """Runs a script in each mode on each number of workers, and compares as compare_with_single."""
    from safetensors.numpy import load_file

    local = recipes.launcher("local")
    alone = folder / "single"
    _run_to_end(checked, 1, alone, (), local, secrets)
    initial = load_file(alone / "snapshots" / "initial.safetensors")
    floats = [name for name, values in initial.items() if values.dtype.kind == "f"]
    start = flat(initial, floats)
    reference = flat(load_file(alone / "snapshots" / "final.safetensors"), floats)
    optimizer = json.loads((alone / "manifest.json").read_text(encoding="utf-8"))["optimizer"]
    runs = [of_mode(checked, mode, **options) for mode in names]
    for run, n, used, starter in _started(runs, workers, hosts, launcher):
        out = folder / f"{run.mode}-{n}"
        _run_to_end(run, n, out, used, starter, secrets)
        weights = flat(load_file(out / "snapshots" / "final.safetensors"), floats)
        named = dataclasses.replace(run, optimizer=optimizer)
        yield Result(named, n, 0, distance(weights, reference, start, optimizer), True)


def _started(
    runs: Sequence[RunConfig],
    worker_counts: Sequence[int],
    hosts: Sequence[Host],
    launcher: Launcher | None,
) -> Iterator[tuple[RunConfig, int, Sequence[Host], Launcher]]:
    """Yields each run with each number of workers, its hosts, and what starts it there."""
    for run in runs:
        for workers in worker_counts:
            is_alone = workers + run.servers == 1
            used = allocate(hosts, workers, run.servers) if hosts and not is_alone else []
            starter = launcher if launcher and used else recipes.launcher("local")
            yield run, workers, used, starter


def _train(
    config: RunConfig,
    workers: int,
    out: Path,
    hosts: Sequence[Host],
    launcher: Launcher,
    secrets: Mapping[str, str] | None,
    parameters: Iterable[str],
) -> tuple["Vector", str]:
    """Trains, and returns the final weights and the digest of the samples seen.

    Args:
        config: The configuration.
        workers: The number of workers.
        out: The run folder.
        hosts: Hosts, each with its slots; none for this machine.
        launcher: Starts the ranks.
        secrets: Variables for every rank that no command line may show.
        parameters: The names of the parameters, in the order of the weights, [n] float64.

    Raises:
        Failure: The run fails.
    """
    from safetensors.numpy import load_file

    _run_to_end(config, workers, out, hosts, launcher, secrets)
    weights = load_file(out / "snapshots" / "final.safetensors")
    digest = json.loads((out / "summary.json").read_text(encoding="utf-8"))["samples_digest"]
    return flat(weights, parameters), digest


def _run_to_end(
    config: RunConfig,
    workers: int,
    out: Path,
    hosts: Sequence[Host],
    launcher: Launcher,
    secrets: Mapping[str, str] | None,
) -> None:
    """Runs a job until it has left its results: see _train."""
    log = out.with_suffix(".log")
    summary = out / "summary.json"
    command = prepare(launcher, TrainingJob(config, workers, hosts, out, secrets=secrets))
    with launched_job(command, log) as job:
        is_late = ends_late(summary)
        while still_runs(job) and not is_late():
            pass
        code = job.returncode or 0
    if code:
        raise Failure(
            f"{config.mode} with {with_noun(workers, 'worker')} did not run: "
            f"{failure_reason(log, code)}"
        )


def _initial(config: RunConfig) -> tuple["Vector", dict[str, int]]:
    """Returns the initial weights, [n] float64, and the size of each trained parameter.

    Raises:
        UsageError: The model has layers that differ between workers by nature.
    """
    from hvdtrain.data.find import find_dataset_of
    from hvdtrain.job.training.model import initial_model, trial_inputs
    from hvdtrain.models.own import batch_norm_and_dropout

    data = find_dataset_of(config)
    model = initial_model(config, len(data.classes), trial_inputs(config, data))
    for kind, has in batch_norm_and_dropout(model).items():
        if has:
            raise UsageError(
                f"--model {config.model} has {kind.replace('_', ' ')}: that differs between "
                "workers by nature, so that there is nothing to verify"
            )
    trained = {name: p.detach().numpy() for name, p in model.named_parameters() if p.requires_grad}
    return flat(trained, trained), {name: values.size for name, values in trained.items()}
