"""Parquet files that threads of the test's process read, in place of a process for each data set."""

import contextlib
import os
import subprocess
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection
from types import SimpleNamespace

import pytest

from hvdtrain.data import parquet_process


class ReaderThreads:
    """What ParquetReader starts, as far as it uses a `Popen`. The threads end when it closes its
    connections.
    """

    pid = os.getpid()

    def __init__(self, arguments: Sequence[str], pass_fds: Sequence[int], **_: object) -> None:
        files = parquet_process._Files()
        for descriptor in pass_fds:
            connection = Connection(os.dup(descriptor))
            threading.Thread(target=_serve, args=(files, connection), daemon=True).start()

    def kill(self) -> None:
        """Does nothing."""

    def wait(self, timeout: float | None = None) -> int:
        return 0


def _serve(files: parquet_process._Files, connection: Connection) -> None:
    with connection, contextlib.suppress(OSError, EOFError):
        while True:
            files.answer(connection)


def read_by_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has this process read Parquet files itself, in this test: a process takes 0.3 s to begin."""
    in_place = {"Popen": ReaderThreads, "DEVNULL": subprocess.DEVNULL}
    in_place["TimeoutExpired"] = subprocess.TimeoutExpired
    monkeypatch.setattr(parquet_process, "subprocess", SimpleNamespace(**in_place))
