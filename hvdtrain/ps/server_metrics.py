"""What a server has to do: counted as it happens, and written down once a second."""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import psutil
import torch

from hvdtrain.system import trace
from hvdtrain.system.appending import AppendedFile, whole_lines
from hvdtrain.system.memory import peak_rss_mb
from hvdtrain.wire.messages import Push

EVERY_S = 0.9  # at least once a second, on a busy host too
Key = tuple[Any, Any]  # of a message: whose it is, as a rule a bucket, and the worker


def server_metrics_file(folder: Path, rank: int) -> Path:
    return folder / f"metrics.server{rank}.jsonl"


class Load:
    """What a server does, counted by whichever thread does it.

    Args:
        before: the last row of a server that was killed, in whose place this one is.

    Attributes:
        pushes: taken in, each of one bucket.
        held: which pushes wait for others: a Desk says so.
        applying_s: seconds that optimizers took, over all threads.
        queued_s: seconds that pushes waited before a thread was at work on them, added up over pushes that waited at
            the same time: see `waited`.
        bytes_received, bytes_sent: payload of the tensors that workers pushed, and of the weights that they were given.
    """

    def __init__(self, before: Mapping[str, Any] | None = None) -> None:
        before = before or {}
        self.pushes = before.get("pushes", 0)
        self.applying_s = before.get("applying_s", 0.0)
        self.queued_s = before.get("queued_s", 0.0)
        self.bytes_received, self.bytes_sent = before.get("bytes_received", 0), before.get("bytes_sent", 0)
        self._cpu_s = before.get("cpu_s", 0.0)
        self.held: Callable[[], Iterable[Key]] = tuple
        self._at_work: set[Key] = set()  # pushes that a thread is at work on
        self._lock = threading.Lock()

    def waited(self, method: str, seconds: float) -> None:
        """A call waited so long for a thread since this process had read it, or for a bucket, which another's was in.
        Pushes count.

        What nobody can see is not in it: how long a message lay in the system's buffers or in the wire's before it was
        read, and over rpc until one of its threads began. A push that is held until others have pushed waits for them,
        and not for this server.
        """
        if method == "push":
            with self._lock:
                self.queued_s += seconds

    def took(self, push: Key, size: int) -> None:
        """A push of so many bytes is being handled, until `handled`."""
        with self._lock:
            self.pushes += 1
            self.bytes_received += size
            self._at_work.add(push)

    def handled(self, push: Key | None, sent: int) -> None:
        """A push has been handled, or another message, and weights of so many bytes were given to workers."""
        with self._lock:
            self.bytes_sent += sent
            if push:
                self._at_work.discard(push)

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
            held = set(self.held()) - self._at_work
            return {
                "pushes": self.pushes,
                "queue": len(held) + len(self._at_work),
                "waiting": len({worker for _, worker in held}),
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


def traced(push: Callable[[int, Push], Any], rank: int, workers: int, load: Load) -> Callable[[int, Push], Any]:
    """The call by which workers push, with what it takes in the timeline: see system.trace."""

    def observed(bucket: int, message: Push) -> Any:
        began = time.perf_counter()
        answer = push(bucket, message)
        if trace.records(message.step_of_job(workers)):
            flow = trace.flow_of(message.step, message.worker, rank, bucket)
            name = f"apply bucket {bucket} of worker {message.worker}"
            trace.span(trace.APPLY, name, began, time.perf_counter(), flow)
            trace.count("queue", load.row()["queue"])
        return answer

    return observed


class ServerMetrics:
    """Appends a line to metrics.server{r}.jsonl once a second, and one when it is stopped.

    `time` is in seconds since 1970, and the rest as this process has counted it since it began: where a run was
    resumed, counts begin anew with a later time. Nothing is taken back: work that is done again was done.
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
        is_last = False
        while True:
            rss_mb = self.process.memory_info().rss / 2**20
            row = {"time": round(time.time(), 3), **self.load.row(), "cpu_s": round(self.load.cpu_s(), 3)}
            self.file.write(json.dumps(row | {"rss_mb": round(rss_mb, 1)}) + "\n")
            if is_last:
                return
            is_last = self.stopped.wait(EVERY_S)

    def stop(self) -> None:
        self.stopped.set()
        self.thread.join()
        self.file.close()
