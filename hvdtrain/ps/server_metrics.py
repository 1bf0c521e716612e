"""What a server has to do: counted as it happens, and written down once a second."""

import json
import socket
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import torch

from hvdtrain.ps.messages import Answer
from hvdtrain.world.appending import AppendedFile, whole_lines
from hvdtrain.world.memory import peak_rss_mb

EVERY_S = 0.9  # at least once a second, on a busy host too


def server_metrics_file(folder: Path, rank: int) -> Path:
    return folder / f"metrics.server{rank}.jsonl"


class Load:
    """What a server does, counted by whichever thread does it.

    Args:
        before: the last row of a server that was killed, in whose place this one is.

    Attributes:
        pushes: taken in, each of one bucket.
        applying_s: seconds that optimizers took, over all threads.
        queued_s: seconds that pushes waited before a thread was at work on them, added up over pushes that waited at
            the same time: see `queued`.
        bytes_received, bytes_sent: payload of the tensors that workers pushed, and of the weights that they were given.
    """

    def __init__(self, before: Mapping[str, Any] | None = None) -> None:
        before = before or {}
        self.pushes = before.get("pushes", 0)
        self.applying_s = before.get("applying_s", 0.0)
        self.queued_s = before.get("queued_s", 0.0)
        self.bytes_received, self.bytes_sent = before.get("bytes_received", 0), before.get("bytes_sent", 0)
        self._cpu_s = before.get("cpu_s", 0.0)
        self._handled: set[tuple[int, int]] = set()  # worker and bucket of pushes that a thread is at work on
        self._unanswered: set[tuple[int, int]] = set()  # of all that have no answer yet
        self._lock = threading.Lock()

    def queued(self, seconds: float) -> None:
        """A push waited so long for a thread since this process had read it, or for its bucket, which another's was in.

        What nobody can see is not in it: how long a message lay in the system's buffers or in the wire's before it was
        read, and over rpc until one of its threads began. A push that is held until others have pushed waits for them,
        and not for this server.
        """
        with self._lock:
            self.queued_s += seconds

    def took(self, worker: int, bucket: int, size: int) -> None:
        """A push of so many bytes is being handled, until `handled`. Its answer may be given before that, or later."""
        key = worker, bucket
        with self._lock:
            self.pushes += 1
            self.bytes_received += size
            self._handled.add(key)
            self._unanswered.add(key)

    def handled(self, worker: int, bucket: int, is_refused: bool) -> None:
        """A push has been handled. One that is refused gets no answer."""
        key = worker, bucket
        with self._lock:
            if is_refused:
                self._unanswered.discard(key)
            self._handled.discard(key)

    def answered(self, worker: int, bucket: int, answer: Answer) -> None:
        """The worker is given the bucket's weights."""
        with self._lock:
            self.bytes_sent += answer.weights.nbytes
            self._unanswered.discard((worker, bucket))

    def lost(self, worker: int) -> None:
        """The worker is gone for good, and gets no more answers."""
        with self._lock:
            self._unanswered = {key for key in self._unanswered if key[0] != worker}

    def time_steps_of(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Have the optimizer's steps counted."""
        step = optimizer.step

        def timed() -> None:
            began = time.perf_counter()
            step()
            with self._lock:
                self.applying_s += time.perf_counter() - began

        setattr(optimizer, "step", timed)  # noqa: B010  # optimizers here are without torch's hooks
        return optimizer

    def row(self) -> dict[str, Any]:
        """All of it now: a line of the metrics. `queue` pushes are being handled or held; those of `waiting` workers
        are held, for pushes of others.
        """
        with self._lock:
            return {
                "pushes": self.pushes,
                "queue": len(self._unanswered),
                "waiting": len({worker for worker, _ in self._unanswered - self._handled}),
                "applying_s": round(self.applying_s, 6),
                "queued_s": round(self.queued_s, 6),
                "bytes_received": self.bytes_received,
                "bytes_sent": self.bytes_sent,
            }

    def cpu_s(self) -> float:
        """Processor seconds of the server."""
        return self._cpu_s + time.process_time()

    def cost(self) -> dict[str, Any]:
        """What this process has cost up to now, as summary.json has it of each process."""
        return {"host": socket.gethostname(), "cpu_s": self.cpu_s(), "peak_rss_mb": peak_rss_mb(),
                "bytes_sent": self.bytes_sent, "bytes_received": self.bytes_received}  # fmt: skip


def last_row(folder: Path, rank: int) -> dict[str, Any]:
    """What was last written of a server that was killed; nothing where there is nothing."""
    file = server_metrics_file(folder, rank)
    lines = whole_lines(file) if file.exists() else []
    return json.loads(lines[-1]) if lines else {}


class ServerMetrics:
    """Appends a line to metrics.server{r}.jsonl once a second, and one when it is stopped.

    `time` is in seconds since 1970, and the rest as this server has counted it since the job began, also if it was
    killed and came back: where a run is resumed, counts begin anew. Nothing is taken back: work done again was done.
    """

    def __init__(self, folder: Path, rank: int, load: Load) -> None:
        self.load = load
        file = server_metrics_file(folder, rank)
        if file.exists():  # of a start that was killed, or whose disk was full, amid a line
            whole_lines(file)
        self.file = AppendedFile(file)
        self.process = psutil.Process()
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True, name="server metrics")
        self.thread.start()

    def _run(self) -> None:
        self._write()
        while not self.stopped.wait(EVERY_S):
            self._write()
        self._write()

    def _write(self) -> None:
        rss_mb = self.process.memory_info().rss / 2**20
        row = {"time": round(time.time(), 3), **self.load.row(), "cpu_s": round(self.load.cpu_s(), 3)}
        self.file.write(json.dumps(row | {"rss_mb": round(rss_mb, 1)}) + "\n")

    def stop(self) -> None:
        self.stopped.set()
        self.thread.join()
        self.file.close()
