"""Readers of what the servers of a recorded run have written: ledgers of pushes, and leases."""

import csv
import itertools
from collections.abc import Iterator
from pathlib import Path

from hvdtrain.base.config.untrusted import regular
from hvdtrain.base.errors import UsageError
from hvdtrain.base.formatting import with_noun
from hvdtrain.job.ps.journal import DROPPED, lease_file, ledger_file
from hvdtrain.job.wire.messages import LedgerLine

NO_VERSION = -1  # stands for the version of a push that was dropped
LEDGER_COLUMNS = ("bucket", "worker", "step", "version_read", "version")

Lines = dict[tuple[int, int], list[LedgerLine]]  # (server, bucket) -> pushes, in order
Leases = dict[tuple[int, int], int]  # (worker, step) -> the number of the share


def read_ledgers(run: Path, servers: int, workers: int, is_leased: bool) -> Lines:
    """Reads the ledgers of all servers.

    Args:
        run: The run folder.
        servers: The number of servers.
        workers: The number of workers at the start.
        is_leased: Whether shares are leased: then more workers may have joined.

    Raises:
        UsageError: A ledger cannot be read, or contradicts itself. The message has file and line.
    """
    lines: Lines = {}
    seen = set()
    for server in range(servers):
        path = ledger_file(run, server)
        for number, row in _numbered_rows(path, *LEDGER_COLUMNS):
            bucket, worker, step, version_read, version = row
            is_known = 0 <= worker and (is_leased or worker < workers)
            is_dropped = version == NO_VERSION
            in_order = 0 <= version_read and (is_dropped or version_read < version)
            if not (is_known and step > 0 and in_order):
                raise UsageError(
                    f"{path}, line {number}: no push of {with_noun(workers, 'worker')} reads like "
                    "this"
                )
            if (server, bucket, worker, step) in seen:
                raise UsageError(
                    f"{path}, line {number}: step {step} of worker {worker} was applied before"
                )
            seen.add((server, bucket, worker, step))
            push = LedgerLine(worker, step, version_read, None if is_dropped else version)
            lines.setdefault((server, bucket), []).append(push)
    return lines


def read_leases(run: Path, lines: Lines) -> Leases:
    """Reads which share each worker had at each step.

    Args:
        run: The run folder.
        lines: The lines of all ledgers.

    Raises:
        UsageError: The leases cannot be read, or lack one of a push. The message has file and line.
    """
    path = lease_file(run)
    leases: Leases = {}
    for number, (worker, step, share) in _numbered_rows(path, "worker", "step", "share"):
        if not (worker >= 0 and step > 0 and share >= 0) or (worker, step) in leases:
            raise UsageError(f"{path}, line {number}: no lease reads like this")
        leases[worker, step] = share
    for line in itertools.chain(*lines.values()):
        if line.version is not None and (line.worker, line.step) not in leases:
            raise UsageError(
                f"{run} has no lease of step {line.step} of worker {line.worker}, whose push it has"
            )
    return leases


def _numbered_rows(path: Path, *columns: str) -> Iterator[tuple[int, list[int]]]:
    """Yields the line number and these columns of each row of a CSV file.

    NO_VERSION stands for DROPPED.

    Raises:
        UsageError: The file cannot be read.
    """
    try:
        with regular(path).open(newline="", encoding="utf-8") as file:
            for number, row in enumerate(csv.DictReader(file), 2):
                cells = [row[name] for name in columns]
                yield number, [NO_VERSION if cell == DROPPED else int(cell) for cell in cells]
    except (OSError, ValueError, KeyError, TypeError, csv.Error) as error:
        raise UsageError(f"{path} cannot be read: {error}") from None
