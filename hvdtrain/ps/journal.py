"""What a server writes down of what its parts do, before anybody is answered: which push was applied to which bucket,
or dropped, and who leased what (--record), and what survives a kill (see ps.crash_memory).
"""

import csv
import os
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from hvdtrain.ps.crash_memory import CrashMemory
from hvdtrain.system.appending import AppendedFile, whole_lines
from hvdtrain.wire.messages import Part

COLUMNS = ("bucket", "worker", "step", "version_read", "version")
LEASE_COLUMNS = ("worker", "step", "share")
DROPPED = "dropped"  # in place of the version, of a push that came too late to be applied
_BUCKET = "bucket "  # before a bucket's number, the name of its part
LEASES = "leases"


def ledger_file(folder: Path, server: int) -> Path:
    """Has a line for each bucket of each push; the lines of one bucket are in the order of application."""
    return folder / f"ledger.server{server}.csv"


def lease_file(folder: Path) -> Path:
    """Has a line for each share that was leased: to whom, and at which step of its own it trains on that."""
    return folder / "leases.csv"


class Journal:
    """
    Args:
        memory: survives a kill; None where servers do not come back. If it has anything, this server goes on there.
        folder: of a run that is recorded.
        server: its rank: the first one leases shares.
    """

    def __init__(self, memory: CrashMemory | None = None, folder: Path | None = None, server: int = 0) -> None:
        self.memory = memory
        self._saved = {name: memory.state_of(name) for name in memory.parts} if memory else {}
        # Of each part's, in the ledger: those beyond what it had saved are written again.
        self.lines = Counter({name: state.plain[0] for name, state in self._saved.items() if state.plain is not None})
        self._names: dict[Part, str] = {}
        self._lock = threading.Lock()
        self._ledger = self._leases = None
        if folder:
            kept = self.lines if self._saved else None
            self._ledger = _CsvFile(ledger_file(folder, server), COLUMNS, kept, _BUCKET.__add__)
        if folder and server == 0:
            self._leases = _CsvFile(lease_file(folder), LEASE_COLUMNS, kept, lambda worker: LEASES)

    def keep(self, part: Part, name: str | int) -> None:
        """Write down what this part does, which is that of the name, or the bucket of the number. It is told what was
        saved of it, if anything was.
        """
        key = self._names[part] = name if isinstance(name, str) else f"{_BUCKET}{name}"
        if self.memory:
            saved = self._saved[key] = self._saved.get(key) or self.memory.state_of(key)
            if saved.plain is not None:
                part.restore(saved.plain[1], saved.tensors())
            else:
                self.commit(part)

    def commit(self, part: Part, lines: Sequence[tuple[Any, ...]] = ()) -> None:
        """These lines, and what the part knows, outlive this process from now on."""
        name = self._names[part]
        if lines:
            self.lines[name] += len(lines)
            self._write(name, lines)
        if self.memory:
            plain, tensors = part.state()
            self._saved[name].save((self.lines[name], plain), tensors)

    def _write(self, name: str, lines: Sequence[tuple[Any, ...]]) -> None:
        with self._lock:  # parts are updated by several threads
            if name == LEASES and self._leases:
                self._leases.writer.writerows(lines)
            elif name != LEASES and self._ledger:
                number = name.removeprefix(_BUCKET)
                for *of_push, version in lines:
                    self._ledger.writer.writerow((number, *of_push, DROPPED if version is None else version))

    def saved_buckets(self) -> list[int]:
        """Their numbers."""
        return [int(name.removeprefix(_BUCKET)) for name in self.lines if name.startswith(_BUCKET)]

    def close(self) -> None:
        """Nothing more comes."""
        for file in (self._ledger, self._leases):
            if file:
                file.file.close()


class _CsvFile:
    """A file with these columns, open until it is closed. Lines are in it at once, should the server be killed.

    The file of an earlier start of the run is kept, with a number: `leases.1.csv`.

    Args:
        kept: of a server that comes back: how many lines of each part are left in it. Others were written as it was
            killed, and will be written again.
        part_of: the part's name, by a line's first column.
    """

    def __init__(
        self, path: Path, columns: Sequence[str], kept: Mapping[str, int] | None, part_of: Callable[[str], str]
    ) -> None:
        if kept is not None:
            header, *lines = whole_lines(path)
            seen, other = Counter[str](), path.with_suffix(".writing")
            written = [header]
            for line in lines:
                seen[part := part_of(line.split(",")[0])] += 1
                if seen[part] <= kept.get(part, 0):
                    written.append(line)
            other.write_text("\n".join([*written, ""]))
            os.replace(other, path)
        elif path.exists():
            path.rename(next(name for n in count(1) if not (name := path.with_suffix(f".{n}.csv")).exists()))
        self.file = AppendedFile(path, anew=kept is None)
        self.writer = csv.writer(self.file, lineterminator="\n")
        if kept is None:
            self.writer.writerow(columns)
