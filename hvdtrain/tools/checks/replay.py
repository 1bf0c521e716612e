"""`hvdtrain replay`: repeats a recorded parameter-server run in one process, push by push."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hvdtrain.base import modes
from hvdtrain.base.config.command_line import TRUST
from hvdtrain.base.config.file import read_config
from hvdtrain.base.config.run_config import RunConfig
from hvdtrain.base.config.untrusted import regular
from hvdtrain.base.errors import Failure, UsageError
from hvdtrain.base.formatting import with_noun
from hvdtrain.base.system.preempt import ended_by_signals
from hvdtrain.runs.folder import CONFIG
from hvdtrain.runs.request import check_trusted, read_run_config
from hvdtrain.runs.schema import Manifest, UnreadableFile, read

if TYPE_CHECKING:
    import torch


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "--dataset",
    default="",
    help="The URL of the run's images, if RUN names one and --trust-model is not given.",
)
@TRUST
@ended_by_signals
def replay(run: Path, dataset: str, trust_model: bool) -> None:
    """Repeat a recorded parameter-server run bit for bit, on one process.

    \b
    mpirun --bind-to none --oversubscribe -np 3 \\
        hvdtrain train --mode ps-async --servers 1 --record --out runs/ps
    hvdtrain replay runs/ps

    An asynchronous run depends on the order of pushes. With --record servers write this order down.
    Replay computes every gradient again on the weights that its worker had, and applies it in the
    recorded order. Exit code 1 if the final weights differ in a bit from those that the run saved.
    """
    config, workers, threads = _read(run)
    if dataset and dataset != config.dataset:
        raise UsageError(
            f"{run} was trained on {config.dataset}, not {dataset}: replay takes the same images"
        )
    check_trusted(vars(config), {"dataset"} if dataset else (), trust_model, run)
    from hvdtrain.job.rank.results import WEIGHTS
    from hvdtrain.tools.checks.ledger import read_leases, read_ledgers
    from hvdtrain.tools.checks.playback import open_playback

    if not (run / WEIGHTS).is_file():
        raise UsageError(f"{run} has no {WEIGHTS} to compare with: did it finish?")
    is_leased = not modes.declared(config.mode).lockstep
    lines = read_ledgers(run, config.servers, workers, is_leased)
    leases = read_leases(run, lines) if is_leased else None
    playback = open_playback(config, workers, threads, lines, leases)
    weights = playback.run()
    joined = len({worker for worker, _ in playback.pushes} - set(range(workers)))
    total = sum(tensor.numel() for tensor in weights.values())
    different = _count_different(weights, run / WEIGHTS)
    if different:
        raise Failure(f"{different:,} of {total:,} weights differ from those that {run} saved")
    more = f" and {joined} that joined" if joined else ""
    replayed = f"{len(playback.pushes):,} pushes of {with_noun(workers, 'worker')}{more}"
    click.echo(f"{replayed} replayed: the same {total:,} weights, bit for bit")


def _read(run: Path) -> tuple[RunConfig, int, int]:
    """Returns the configuration of a run, the number of workers, and threads of each worker.

    Raises:
        UsageError: The run was not recorded, or cannot be replayed.
    """
    config = read_run_config(run)
    fields = {field.name for field in dataclasses.fields(config)}
    absent = sorted(fields - read_config(run / CONFIG).keys())
    if absent:
        raise UsageError(f"{run} was recorded by another version: its {CONFIG} has no {absent[0]}")
    if not modes.declared(config.mode).has_servers or not config.record:
        raise UsageError(f"{run} is not a recorded run: train with a ps- mode and --record")
    try:
        manifest = read(run, Manifest)
    except UnreadableFile as error:
        raise UsageError(f"{run}: {error}") from None
    if len(manifest.parts) > 1:
        raise UsageError(
            f"{run} was resumed, and replay begins at the first step: record a run in one go"
        )
    threads = manifest.threads_per_worker or 0
    if not 0 < threads < 10_000 or manifest.workers >= 10_000:
        raise UsageError(
            f"{run}: {manifest.workers} workers with {threads} threads cannot be replayed"
        )
    return config, manifest.workers, threads


def _count_different(weights: dict[str, "torch.Tensor"], saved: Path) -> int:
    """Returns how many weights differ from those in a file. Raises Failure if it cannot be read."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        reference = load_file(regular(saved))
        return sum(int((reference[name] != tensor).sum()) for name, tensor in weights.items())
    except (OSError, SafetensorError, KeyError, RuntimeError) as error:
        raise Failure(f"{saved} cannot be read as this model's weights: {error}") from None
