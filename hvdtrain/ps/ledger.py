"""What a server writes down with --record: which push was applied to which bucket, or dropped, in order."""

import csv
import threading
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path

from hvdtrain.ps.messages import Applied

COLUMNS = ("bucket", "worker", "step", "version_read", "version")
DROPPED = "dropped"  # in place of the version, of a push that came too late to be applied


def ledger_file(folder: Path, server: int) -> Path:
    return folder / f"ledger.server{server}.csv"


class _CsvFile:
    """A new file with these columns, open until it is closed. Lines are in it at once, should the server be killed.

    The file of an earlier start of the run is kept, with a number: `leases.1.csv`.
    """

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        if path.exists():
            path.rename(next(name for n in count(1) if not (name := path.with_suffix(f".{n}.csv")).exists()))
        self.file = path.open("w", newline="", buffering=1)
        self.writer = csv.writer(self.file, lineterminator="\n")
        self.writer.writerow(columns)

    def close(self) -> None:
        self.file.close()


class Ledger(_CsvFile):
    """A line for each bucket of each push; the lines of one bucket are in the order of application."""

    def __init__(self, folder: Path, server: int) -> None:
        super().__init__(ledger_file(folder, server), COLUMNS)
        self.lock = threading.Lock()  # buckets are updated by several threads

    def of_bucket(self, number: int) -> Callable[[Applied], None]:
        """What writes down a push to this bucket."""

        def write(applied: Applied) -> None:
            with self.lock:
                made = DROPPED if applied.version is None else applied.version
                self.writer.writerow((number, applied.worker, applied.step, applied.version_read, made))

        return write


LEASE_COLUMNS = ("worker", "step", "share")


def lease_file(folder: Path) -> Path:
    return folder / "leases.csv"


class LeaseLedger(_CsvFile):
    """A line for each share that was leased: to whom, and at which step of its own it trains on that."""

    def __init__(self, folder: Path) -> None:
        super().__init__(lease_file(folder), LEASE_COLUMNS)

    def write(self, worker: int, step: int, share: int) -> None:
        self.writer.writerow((worker, step, share))
