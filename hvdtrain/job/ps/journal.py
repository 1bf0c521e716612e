"""A server's journal, written before anybody is answered.

The ledgers (--record) say which push was applied to which bucket, or dropped, and who leased which
share. The crash memory has the state of every part, for after a kill.
"""

import csv
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from hvdtrain.base.config.writing import write_whole
from hvdtrain.base.system.appending import AppendedFile, whole_lines
from hvdtrain.job.ps.crash_memory import CrashMemory, SavedState
from hvdtrain.job.wire.messages import Part

COLUMNS = ("bucket", "worker", "step", "version_read", "version")
LEASE_COLUMNS = ("worker", "step", "share")
DROPPED = "dropped"  # in place of the version, of a push that was not applied
LEASES = "leases"  # the name of the part whose lines are in the leases' file
_BUCKET = "bucket "  # with a bucket's number, the name of a bucket


def ledger_file(folder: Path, server: int) -> Path:
    """Returns the path of a server's ledger.

    The ledger has a line for each bucket of each push; the lines of one bucket are in the order of
    application.
    """
    return folder / f"ledger.server{server}.csv"


def lease_file(folder: Path) -> Path:
    """Returns the path of the leases.

    The file has a line for each leased share: the worker, and the worker's step that trains on it.
    """
    return folder / "leases.csv"


class Journal:
    """The ledgers and the crash memory of one server.

    Args:
        memory: survives a kill; None where servers do not come back. Where the memory has saved
            parts, this server goes on with them.
        folder: the folder of a run that is recorded; None: no ledgers.
        server: the server's rank. The first one leases shares.

    Attributes:
        lines: how many ledger lines each part has written, by the part's name.
    """

    def __init__(
        self, memory: CrashMemory | None = None, folder: Path | None = None, server: int = 0
    ) -> None:
        self.memory = memory
        self.lines = Counter[str]()
        self._saved: dict[str, SavedState] = {}
        if memory:
            self._saved = {name: memory.state_of(name) for name in memory.parts}
        for name, saved in self._saved.items():
            if saved.plain is not None:
                self.lines[name] = saved.plain[0]
        self._names: dict[Part, str] = {}
        self._lock = threading.Lock()
        self._ledger: _CsvFile | None = None
        self._leases: _CsvFile | None = None
        # Lines beyond these were written as the server was killed, and will be written again.
        kept = self.lines if self._saved else None
        if folder:
            path = ledger_file(folder, server)
            self._ledger = _CsvFile(path, COLUMNS, kept, part_of=_BUCKET.__add__)
        if folder and server == 0:
            path = lease_file(folder)
            self._leases = _CsvFile(path, LEASE_COLUMNS, kept, part_of=lambda worker: LEASES)

    def keep(self, part: Part, name: str | int) -> None:
        """Begins to write down what a part does; restores the part, if it was saved before.

        Args:
            part: the part.
            name: the part's name, or a bucket's number.
        """
        full_name = name if isinstance(name, str) else f"{_BUCKET}{name}"
        self._names[part] = full_name
        if not self.memory:
            return
        saved = self._saved.get(full_name) or self.memory.state_of(full_name)
        self._saved[full_name] = saved
        if saved.plain is None:
            self.commit(part)
        else:
            _, plain = saved.plain
            part.restore(plain, saved.tensors())

    def commit(self, part: Part, lines: Sequence[tuple[Any, ...]] = ()) -> None:
        """Writes a part's ledger lines, and saves its state. Both outlive this process."""
        name = self._names[part]
        if lines:
            self.lines[name] += len(lines)
            self._write(name, lines)
        if self.memory:
            plain, tensors = part.state()
            self._saved[name].save((self.lines[name], plain), tensors)

    def _write(self, name: str, lines: Sequence[tuple[Any, ...]]) -> None:
        file = self._leases if name == LEASES else self._ledger
        if not file:
            return
        with self._lock:  # parts are updated by several threads
            if name == LEASES:
                file.writer.writerows(lines)
                return
            number = name.removeprefix(_BUCKET)
            for *push, version in lines:
                file.writer.writerow((number, *push, DROPPED if version is None else version))

    def saved_buckets(self) -> list[int]:
        """Returns the numbers of the buckets that were saved."""
        buckets = [name for name in self.lines if name.startswith(_BUCKET)]
        return [int(name.removeprefix(_BUCKET)) for name in buckets]

    def close(self) -> None:
        """Closes the ledgers."""
        for file in (self._ledger, self._leases):
            if file:
                file.file.close()


class _CsvFile:
    """A file of lines that are in it at once, should the server be killed.

    The file of an earlier start of the run is kept, with a number: `leases.1.csv`.

    Args:
        path: where the file is.
        columns: the names of the columns.
        kept: on a server that comes back, how many lines of each part stay in the file; else None.
        part_of: returns the name of a line's part, given the line's first column.
    """

    def __init__(
        self,
        path: Path,
        columns: Sequence[str],
        kept: Mapping[str, int] | None,
        part_of: Callable[[str], str],
    ) -> None:
        if kept is not None:
            _keep_lines(path, kept, part_of)
        elif path.exists():
            _put_aside(path)
        self.file = AppendedFile(path, anew=kept is None)
        self.writer = csv.writer(self.file, lineterminator="\n")
        if kept is None:
            self.writer.writerow(columns)


def _keep_lines(path: Path, kept: Mapping[str, int], part_of: Callable[[str], str]) -> None:
    """Writes the file again with so many lines of each part."""
    header, *lines = whole_lines(path)
    written = [header]
    seen = Counter[str]()
    for line in lines:
        first_column = line.split(",")[0]
        part = part_of(first_column)
        seen[part] += 1
        if seen[part] <= kept.get(part, 0):
            written.append(line)
    write_whole(path, "\n".join([*written, ""]))


def _put_aside(path: Path) -> None:
    """Renames the file of an earlier start to the first number that is free."""
    numbered = (path.with_suffix(f".{number}.csv") for number in count(1))
    path.rename(next(name for name in numbered if not name.exists()))
