"""What a server writes down with --record: which push was applied to which bucket, or dropped, in order."""

import csv
import os
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from pathlib import Path

from hvdtrain.ps.messages import Applied
from hvdtrain.world.appending import AppendedFile, whole_lines

COLUMNS = ("bucket", "worker", "step", "version_read", "version")
DROPPED = "dropped"  # in place of the version, of a push that came too late to be applied


def ledger_file(folder: Path, server: int) -> Path:
    return folder / f"ledger.server{server}.csv"


class _CsvFile:
    """A new file with these columns, open until it is closed. Lines are in it at once, should the server be killed.

    The file of an earlier start of the run is kept, with a number: `leases.1.csv`.

    Args:
        is_kept: of a server that comes back, which goes on with the file: whether the next line stays, by its first
            column. One that is left out was written as the server was killed, and will be written again.
    """

    def __init__(self, path: Path, columns: Sequence[str], is_kept: Callable[[int], bool] | None = None) -> None:
        if is_kept:
            _shorten(path, is_kept)
        elif path.exists():
            path.rename(next(name for n in count(1) if not (name := path.with_suffix(f".{n}.csv")).exists()))
        self.file = AppendedFile(path, anew=not is_kept)
        self.writer = csv.writer(self.file, lineterminator="\n")
        if not is_kept:
            self.writer.writerow(columns)

    def close(self) -> None:
        self.file.close()


def _shorten(path: Path, is_kept: Callable[[int], bool]) -> None:
    """Leave out what is not kept, and a line that was not written to its end."""
    header, *lines = whole_lines(path)
    other = path.with_suffix(".writing")
    kept = [line for line in lines if is_kept(int(line.split(",")[0]))]
    other.write_text("\n".join([header, *kept, ""]))
    os.replace(other, path)


class Ledger(_CsvFile):
    """A line for each bucket of each push; the lines of one bucket are in the order of application.

    Args:
        kept: of a server that comes back: how many lines each bucket had written when it last answered.
    """

    def __init__(self, folder: Path, server: int, kept: Mapping[int, int] | None = None) -> None:
        left = Counter(kept)

        def is_kept(bucket: int) -> bool:
            left[bucket] -= 1
            return left[bucket] >= 0

        super().__init__(ledger_file(folder, server), COLUMNS, None if kept is None else is_kept)
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
    """A line for each share that was leased: to whom, and at which step of its own it trains on that.

    Args:
        kept: of a server that comes back: how many lines it had written when it last answered.
    """

    def __init__(self, folder: Path, kept: int | None = None) -> None:
        left = iter(range(kept or 0))

        def is_kept(worker: int) -> bool:
            return next(left, None) is not None

        super().__init__(lease_file(folder), LEASE_COLUMNS, None if kept is None else is_kept)

    def write(self, worker: int, step: int, share: int) -> None:
        self.writer.writerow((worker, step, share))
