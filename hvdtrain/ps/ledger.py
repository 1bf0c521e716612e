"""What a server writes down with --record: which push was applied to which bucket, or dropped, in order."""

import csv
import threading
from collections.abc import Callable
from pathlib import Path

from hvdtrain.ps.messages import Applied

COLUMNS = ("bucket", "worker", "step", "version_read", "version")
DROPPED = "dropped"  # in place of the version, of a push that came too late to be applied


def ledger_file(folder: Path, server: int) -> Path:
    return folder / f"ledger.server{server}.csv"


class Ledger:
    """A line for each bucket of each push; the lines of one bucket are in the order of application."""

    def __init__(self, folder: Path, server: int) -> None:
        self.file = ledger_file(folder, server).open("w", newline="")
        self.writer = csv.writer(self.file, lineterminator="\n")
        self.writer.writerow(COLUMNS)
        self.lock = threading.Lock()  # buckets are updated by several threads

    def of_bucket(self, number: int) -> Callable[[Applied], None]:
        """What writes down a push to this bucket."""

        def write(applied: Applied) -> None:
            with self.lock:
                made = DROPPED if applied.version is None else applied.version
                self.writer.writerow((number, applied.worker, applied.step, applied.version_read, made))

        return write

    def close(self) -> None:
        self.file.close()


LEASE_COLUMNS = ("worker", "step", "share")


def lease_file(folder: Path) -> Path:
    return folder / "leases.csv"


class LeaseLedger:
    """A line for each share that was leased: to whom, and at which step of its own it trains on that."""

    def __init__(self, folder: Path) -> None:
        self.file = lease_file(folder).open("w", newline="")
        self.writer = csv.writer(self.file, lineterminator="\n")
        self.writer.writerow(LEASE_COLUMNS)

    def write(self, worker: int, step: int, share: int) -> None:
        self.writer.writerow((worker, step, share))

    def close(self) -> None:
        self.file.close()
