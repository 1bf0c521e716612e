"""`hvdtrain replay`: a recorded parameter-server run again, on one process, push by push in the order it had."""

import csv
import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hvdtrain import modes
from hvdtrain.config.file import read_config
from hvdtrain.config.run_config import RunConfig
from hvdtrain.config.untrusted import regular
from hvdtrain.errors import Failure, UsageError
from hvdtrain.formatting import with_noun
from hvdtrain.runs.folder import CONFIG
from hvdtrain.runs.request import config_of
from hvdtrain.runs.schema import Manifest, UnreadableFile, read

if TYPE_CHECKING:
    import torch

Line = tuple[int, int, int, int | None]  # worker, step, version read, version made; None where it was dropped
Lines = dict[tuple[int, int], list[Line]]  # (server, bucket) -> its pushes, in order
Leases = dict[tuple[int, int], int]  # (worker, step) -> the number of its share
NO_VERSION = -1  # was made of a push


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
def replay(run: Path) -> None:
    """Repeat a recorded parameter-server run to the same bits, on one process.

    \b
    mpirun --bind-to none --oversubscribe -np 3 hvdtrain train --mode ps-async --servers 1 --record --out runs/ps
    hvdtrain replay runs/ps

    An asynchronous run depends on which push came first. With --record its servers write that down, and here every
    gradient is computed again on the weights that its worker had, and applied in the recorded order. Exit code 1
    where the final weights are not those that the run saved, bit for bit.
    """
    config, workers, threads = _read(run)
    from hvdtrain.checks.playback import Playback
    from hvdtrain.rank.results import WEIGHTS

    if not (run / WEIGHTS).is_file():
        raise UsageError(f"{run} has no {WEIGHTS} to compare with: did it finish?")
    is_leased = not modes.declared(config.mode).lockstep
    lines = _read_ledgers(run, config.servers, workers, is_leased)
    leases = _read_leases(run) if is_leased else None
    if leases is not None:
        for worker, step, _, made in itertools.chain(*lines.values()):
            if made is not None and (worker, step) not in leases:
                raise UsageError(f"{run} has no lease of step {step} of worker {worker}, whose push its ledgers have")
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


def _read_ledgers(run: Path, servers: int, workers: int, is_leased: bool) -> Lines:
    """What the ledgers say. UsageError, with file and line, where one cannot be read or contradicts itself.

    Args:
        workers: how many there were at the start; where shares are leased, others may have joined.
    """
    from hvdtrain.ps.journal import ledger_file

    lines: Lines = {}
    seen = set()
    for server in range(servers):
        path = ledger_file(run, server)
        for number, row in _numbered_rows(path, "bucket", "worker", "step", "version_read", "version"):
            bucket, worker, step, was_read, version = row
            made = None if version == NO_VERSION else version
            is_known = 0 <= worker and (is_leased or worker < workers)
            if not (is_known and step > 0 and 0 <= was_read and (made is None or was_read < made)):
                raise UsageError(f"{path}, line {number}: no push of {with_noun(workers, 'worker')} reads like this")
            if (server, bucket, worker, step) in seen:
                raise UsageError(f"{path}, line {number}: step {step} of worker {worker} was applied before")
            seen.add((server, bucket, worker, step))
            lines.setdefault((server, bucket), []).append((worker, step, was_read, made))
    return lines


def _read_leases(run: Path) -> Leases:
    """Which share each worker had at each of its steps. UsageError, with file and line, where that cannot be read."""
    from hvdtrain.ps.journal import lease_file

    path, leases = lease_file(run), Leases()
    for number, (worker, step, share) in _numbered_rows(path, "worker", "step", "share"):
        if not (worker >= 0 and step > 0 and share >= 0) or (worker, step) in leases:
            raise UsageError(f"{path}, line {number}: no lease reads like this")
        leases[worker, step] = share
    return leases


def _numbered_rows(path: Path, *columns: str) -> Iterator[tuple[int, list[int]]]:
    """These columns of a CSV file, of each row with the number of its line; NO_VERSION for DROPPED. UsageError where
    that cannot be read.
    """
    from hvdtrain.ps.journal import DROPPED

    try:
        with regular(path).open(newline="") as file:
            for number, row in enumerate(csv.DictReader(file), 2):
                yield number, [NO_VERSION if row[name] == DROPPED else int(row[name]) for name in columns]
    except (OSError, ValueError, KeyError, TypeError, csv.Error) as error:
        raise UsageError(f"{path} cannot be read: {error}") from None


def _different(weights: dict[str, "torch.Tensor"], saved: Path) -> int:
    """How many weights are not, bit for bit, those in the file."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        weights_saved = load_file(regular(saved))
        return sum(int((weights_saved[name] != tensor).sum()) for name, tensor in weights.items())
    except (OSError, SafetensorError, KeyError, RuntimeError) as error:
        raise Failure(f"{saved} cannot be read as this model's weights: {error}") from None
