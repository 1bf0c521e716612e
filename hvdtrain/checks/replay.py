"""`hvdtrain replay`: a recorded parameter-server run again, on one process, push by push in the order it had."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hvdtrain import modes
from hvdtrain.config.command_line import TRUST
from hvdtrain.config.file import read_config
from hvdtrain.config.run_config import RunConfig
from hvdtrain.config.untrusted import regular
from hvdtrain.errors import Failure, UsageError
from hvdtrain.formatting import with_noun
from hvdtrain.runs.folder import CONFIG
from hvdtrain.runs.request import check_trusted, config_of
from hvdtrain.runs.schema import Manifest, UnreadableFile, read

if TYPE_CHECKING:
    import torch


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@TRUST
def replay(run: Path, trust_model: bool) -> None:
    """Repeat a recorded parameter-server run to the same bits, on one process.

    \b
    mpirun --bind-to none --oversubscribe -np 3 hvdtrain train --mode ps-async --servers 1 --record --out runs/ps
    hvdtrain replay runs/ps

    An asynchronous run depends on which push came first. With --record its servers write that down, and here every
    gradient is computed again on the weights that its worker had, and applied in the recorded order. Exit code 1
    where the final weights are not those that the run saved, bit for bit.
    """
    config, workers, threads = _read(run)
    check_trusted(vars(config), (), trust_model, run)
    from hvdtrain.checks.ledger import read_leases, read_ledgers
    from hvdtrain.checks.playback import Playback
    from hvdtrain.rank.results import WEIGHTS

    if not (run / WEIGHTS).is_file():
        raise UsageError(f"{run} has no {WEIGHTS} to compare with: did it finish?")
    is_leased = not modes.declared(config.mode).lockstep
    lines = read_ledgers(run, config.servers, workers, is_leased)
    leases = read_leases(run, lines) if is_leased else None
    playback = Playback(config, workers, threads, lines, leases)
    weights, pushes = playback.run(), len(playback.pushes)
    joined = len({worker for worker, _ in playback.pushes} - set(range(workers)))
    total = sum(tensor.numel() for tensor in weights.values())
    if different := _different(weights, run / WEIGHTS):
        raise Failure(f"{different:,} of {total:,} weights differ from those that {run} saved")
    more = f" and {joined} that joined" if joined else ""
    made_by = f"{pushes:,} pushes of {with_noun(workers, 'worker')}{more}"
    click.echo(f"{made_by} replayed: the same {total:,} weights, bit for bit")


def _read(run: Path) -> tuple[RunConfig, int, int]:
    """What was run, its number of workers, and threads of each."""
    config = config_of(run)
    if absent := sorted({field.name for field in dataclasses.fields(config)} - read_config(run / CONFIG).keys()):
        raise UsageError(f"{run} was recorded by another version: its {CONFIG} has no {absent[0]}")
    if not modes.declared(config.mode).has_servers or not config.record:
        raise UsageError(f"{run} is not a recorded run: train with a ps- mode and --record")
    try:
        manifest = read(run, Manifest)
    except UnreadableFile as error:
        raise UsageError(f"{run}: {error}") from None
    if len(manifest.parts) > 1:
        raise UsageError(f"{run} was resumed, and replay begins at the first step: record a run in one go")
    threads = manifest.threads_per_worker or 0
    if not 0 < threads < 10_000 or manifest.workers >= 10_000:
        raise UsageError(f"{run}: {manifest.workers} workers with {threads} threads cannot be replayed")
    return config, manifest.workers, threads


def _different(weights: dict[str, "torch.Tensor"], saved: Path) -> int:
    """How many weights are not, bit for bit, those in the file."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        weights_saved = load_file(regular(saved))
        return sum(int((weights_saved[name] != tensor).sum()) for name, tensor in weights.items())
    except (OSError, SafetensorError, KeyError, RuntimeError) as error:
        raise Failure(f"{saved} cannot be read as this model's weights: {error}") from None
