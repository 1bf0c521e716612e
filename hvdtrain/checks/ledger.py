"""What the servers of a recorded run wrote down: which push came when, and which share each worker had."""

import csv
import itertools
from collections.abc import Iterator
from pathlib import Path

from hvdtrain.config.untrusted import regular
from hvdtrain.errors import UsageError
from hvdtrain.formatting import with_noun
from hvdtrain.ps.journal import DROPPED, lease_file, ledger_file
from hvdtrain.wire.messages import Applied

NO_VERSION = -1  # was made of a push


Lines = dict[tuple[int, int], list[Applied]]  # (server, bucket) -> its pushes, in order
Leases = dict[tuple[int, int], int]  # (worker, step) -> the number of its share


def read_ledgers(run: Path, servers: int, workers: int, is_leased: bool) -> Lines:
    """What the ledgers say. UsageError, with file and line, where one cannot be read or contradicts itself.

    Args:
        workers: how many there were at the start; where shares are leased, others may have joined.
    """
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
            lines.setdefault((server, bucket), []).append(Applied(worker, step, was_read, made))
    return lines


def read_leases(run: Path, lines: Lines) -> Leases:
    """Which share each worker had at each of its steps. UsageError, with file and line, where that cannot be read, or
    where there is none of a push that the ledgers have.
    """
    path, leases = lease_file(run), Leases()
    for number, (worker, step, share) in _numbered_rows(path, "worker", "step", "share"):
        if not (worker >= 0 and step > 0 and share >= 0) or (worker, step) in leases:
            raise UsageError(f"{path}, line {number}: no lease reads like this")
        leases[worker, step] = share
    for line in itertools.chain(*lines.values()):
        if line.version is not None and (line.worker, line.step) not in leases:
            raise UsageError(f"{run} has no lease of step {line.step} of worker {line.worker}, whose push it has")
    return leases


def _numbered_rows(path: Path, *columns: str) -> Iterator[tuple[int, list[int]]]:
    """These columns of a CSV file, of each row with the number of its line; NO_VERSION for DROPPED. UsageError where
    that cannot be read.
    """
    try:
        with regular(path).open(newline="") as file:
            for number, row in enumerate(csv.DictReader(file), 2):
                yield number, [NO_VERSION if row[name] == DROPPED else int(row[name]) for name in columns]
    except (OSError, ValueError, KeyError, TypeError, csv.Error) as error:
        raise UsageError(f"{path} cannot be read: {error}") from None
