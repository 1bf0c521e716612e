"""`hvdtrain replay`: a recorded parameter-server run again, on one process, push by push in the order it had."""

import csv
import dataclasses
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hvdtrain import modes
from hvdtrain.config.file import read_config
from hvdtrain.config.run_config import RunConfig
from hvdtrain.config.untrusted import open_regular, parse_json, read_file, read_json
from hvdtrain.errors import Failure, UsageError
from hvdtrain.formatting import with_noun
from hvdtrain.runs.folder import CONFIG
from hvdtrain.runs.request import config_of, shares_of

if TYPE_CHECKING:
    import torch

Line = tuple[int, int, int, int | None]  # worker, step, version read, version made; None where it was dropped
Lines = dict[tuple[int, int], list[Line]]  # (server, bucket) -> its pushes, in order
Leases = dict[tuple[int, int], int]  # (worker, step) -> the number of its share
MOST_LIVES = 10_000  # of the workers of a run: each has a model here


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
    is_leased = shares_of(config) == "leased"
    most = _read_lives(run, workers) if is_leased else workers
    lines = _read_ledgers(run, config.servers, workers, most)
    leases = _read_leases(run, workers, most) if is_leased else None
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
        manifest = read_json(run / "manifest.json")
        if len(manifest.get("parts", [])) > 1:
            raise UsageError(f"{run} was resumed, and replay begins at the first step: record a run in one go")
        workers, threads = int(manifest["workers"]), int(manifest["threads_per_worker"])
        if not (0 < workers < 10_000 and 0 < threads < 10_000):
            raise ValueError(f"{workers} workers with {threads} threads")
        return config, workers, threads
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise UsageError(f"{run}: its summary.json or manifest.json cannot be read: {error}") from None


def _read_ledgers(run: Path, servers: int, workers: int, most: int) -> Lines:
    """What the ledgers say. UsageError, with file and line, where one cannot be read or contradicts itself.

    Args:
        workers: how many there were at the start.
        most: how many lives of workers there may have been.
    """
    from hvdtrain.ps.journal import DROPPED, ledger_file

    lines: Lines = {}
    seen = set()
    for server in range(servers):
        path = ledger_file(run, server)
        with _numbered_rows(path) as rows:
            for number, row in rows:
                bucket, worker, step = (int(row[name]) for name in ("bucket", "worker", "step"))
                read = int(row["version_read"])
                made = None if row["version"] == DROPPED else int(row["version"])
                if not (0 <= worker < most and step > 0 and 0 <= read and (made is None or read < made)):
                    raise UsageError(
                        f"{path}, line {number}: no push of {with_noun(workers, 'worker')} reads like this"
                    )
                if (server, bucket, worker, step) in seen:
                    raise UsageError(f"{path}, line {number}: step {step} of worker {worker} was applied before")
                seen.add((server, bucket, worker, step))
                lines.setdefault((server, bucket), []).append((worker, step, read, made))
    return lines


def _read_lives(run: Path, workers: int) -> int:
    """How many lives the run's workers had, those at the start included. UsageError where that cannot be read."""
    from hvdtrain.coordination.membership_log import membership_file

    path = membership_file(run)
    try:
        members = [int(parse_json(line)["member"]) for line in read_file(path).splitlines()]
        if members and not 0 <= max(members) < MOST_LIVES:
            raise ValueError(f"a worker's number is {max(members)}")
        return max([workers, *(1 + member for member in members)])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from None


def _read_leases(run: Path, workers: int, most: int) -> Leases:
    """Which share each worker had at each of its steps. UsageError, with file and line, where that cannot be read."""
    from hvdtrain.ps.journal import lease_file

    path, leases = lease_file(run), Leases()
    with _numbered_rows(path) as rows:
        for number, row in rows:
            worker, step, share = (int(row[name]) for name in ("worker", "step", "share"))
            if not (0 <= worker < most and step > 0 and share >= 0) or (worker, step) in leases:
                raise UsageError(f"{path}, line {number}: no lease of {with_noun(workers, 'worker')} reads like this")
            leases[worker, step] = share
    return leases


@contextmanager
def _numbered_rows(path: Path) -> Iterator[Iterator[tuple[int, dict[str, str]]]]:
    """The rows of a CSV file with their lines' numbers. UsageError where it, or a row in the block, cannot be read."""
    try:
        with open_regular(path) as opened, TextIOWrapper(opened, newline="") as file:
            yield enumerate(csv.DictReader(file), 2)
    except (OSError, ValueError, KeyError, TypeError, csv.Error) as error:
        raise UsageError(f"{path} cannot be read: {error}") from None


def _different(weights: dict[str, "torch.Tensor"], saved: Path) -> int:
    """How many weights are not, bit for bit, those in the file."""
    from safetensors import SafetensorError

    from hvdtrain.runs.snapshot import read_tensors

    try:
        there = read_tensors(saved)
        return sum(int((there[name] != tensor).sum()) for name, tensor in weights.items())
    except (OSError, SafetensorError, KeyError, RuntimeError) as error:
        raise Failure(f"{saved} cannot be read as this model's weights: {error}") from None
