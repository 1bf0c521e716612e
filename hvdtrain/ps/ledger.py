"""What a server writes down with --record: which push was applied to which bucket, in order."""

import csv
import threading
from collections.abc import Callable
from pathlib import Path

from hvdtrain.ps.server import Applied

COLUMNS = ("bucket", "worker", "step", "version_read", "version")


def ledger_file(folder: Path, server: int) -> Path:
    return folder / f"ledger.server{server}.csv"


class Ledger:
    """A line for each bucket of each push that was applied; the lines of one bucket are in the order of application."""

    def __init__(self, folder: Path, server: int) -> None:
        self.file = ledger_file(folder, server).open("x", newline="")
        self.writer = csv.writer(self.file, lineterminator="\n")
        self.writer.writerow(COLUMNS)
        self.lock = threading.Lock()  # buckets are updated by several threads

    def of_bucket(self, number: int) -> Callable[[Applied], None]:
        """What is to be told of every push applied to this bucket."""

        def tell(applied: Applied) -> None:
            with self.lock:
                self.writer.writerow((number, applied.worker, applied.step, applied.version_read, applied.version))

        return tell

    def close(self) -> None:
        self.file.close()
