"""A server's load: counted as it happens, and written down once a second."""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import psutil
import torch

from hvdtrain.base.system import trace
from hvdtrain.base.system.appending import AppendedFile, whole_lines
from hvdtrain.base.system.memory import peak_rss_mb
from hvdtrain.job.wire.messages import Push

EVERY_S = 0.9  # at least once a second, on a busy host too
PushKey = tuple[Any, Any]  # a bucket and a worker


def server_metrics_file(folder: Path, rank: int) -> Path:
    return folder / f"metrics.server{rank}.jsonl"


class ServerLoad:
    """Counts what a server does. Any thread may call its methods.

    Args:
        before: the last row of a server that was killed, in whose place this one is.

    Attributes:
        pushes: how many pushes were taken, each of one bucket.
        held: returns the pushes that wait for others; set by the Server.
        applying_s: seconds that optimizers took, over all threads.
        queued_s: seconds that pushes waited for a thread or a bucket, added up: see `waited`.
        bytes_received: payload bytes of the tensors that workers pushed.
        bytes_sent: payload bytes of the weights that workers were given.
    """

    def __init__(self, before: Mapping[str, Any] | None = None) -> None:
        before = before or {}
        self.pushes = before.get("pushes", 0)
        self.applying_s = before.get("applying_s", 0.0)
        self.queued_s = before.get("queued_s", 0.0)
        self.bytes_received = before.get("bytes_received", 0)
        self.bytes_sent = before.get("bytes_sent", 0)
        self._cpu_s = before.get("cpu_s", 0.0)
        self.held: Callable[[], Iterable[PushKey]] = tuple
        self._at_work: set[PushKey] = set()  # pushes that a thread is at work on
        self._lock = threading.Lock()

    def waited(self, method: str, seconds: float) -> None:
        """Counts how long a call waited for a thread, or for a bucket that another call was in.

        Only pushes are counted. Waiting begins when this process has read the message, over rpc
        when one of its threads begins: how long the message lay in buffers before is not known. A
        push that is held until others have pushed does not wait for this server.
        """
        if method == "push":
            with self._lock:
                self.queued_s += seconds

    def took(self, push: PushKey, size: int) -> None:
        """Counts a push of so many bytes, which is at work until `handled`."""
        with self._lock:
            self.pushes += 1
            self.bytes_received += size
            self._at_work.add(push)

    def handled(self, push: PushKey) -> None:
        """Takes note that a push was handled: it is answered or held."""
        with self._lock:
            self._at_work.discard(push)

    def sent(self, size: int) -> None:
        """Counts bytes of weights that a worker is given."""
        with self._lock:
            self.bytes_sent += size

    def time_steps_of(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Counts the seconds of the optimizer's steps; returns the optimizer."""
        step = optimizer.step

        def timed() -> None:
            began = time.perf_counter()
            step()
            with self._lock:
                self.applying_s += time.perf_counter() - began

        setattr(optimizer, "step", timed)  # noqa: B010  # optimizers here are without torch's hooks
        return optimizer

    def row(self) -> dict[str, Any]:
        """Returns the counts as a line of the metrics.

        `queue` is the number of pushes that are being handled or held, `waiting` the number of
        workers with a held push.
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
        """Returns the processor seconds of the server."""
        return self._cpu_s + time.process_time()

    def cost(self) -> dict[str, Any]:
        """Returns this process's row of `processes` in summary.json, up to now."""
        return {
            "host": socket.gethostname(),
            "cpu_s": self.cpu_s(),
            "peak_rss_mb": peak_rss_mb(),
            "bytes_sent": self.bytes_sent,
            "bytes_received": self.bytes_received,
        }


def last_row(folder: Path, rank: int) -> dict[str, Any]:
    """Returns the last row that a killed server has written; empty where there is none."""
    file = server_metrics_file(folder, rank)
    lines = whole_lines(file) if file.exists() else []
    return json.loads(lines[-1]) if lines else {}


def traced(
    push: Callable[[int, Push], Any], rank: int, workers: int, load: ServerLoad
) -> Callable[[int, Push], Any]:
    """Returns the handler of pushes, with its spans in the timeline: see system.trace."""

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

    `time` is in seconds since 1970. The counts begin with this process: where a run was resumed,
    they begin anew with a later time. Nothing is taken back: work that is done again counts again.
    """

    def __init__(self, folder: Path, rank: int, load: ServerLoad) -> None:
        self.load = load
        file = server_metrics_file(folder, rank)
        if file.exists():
            whole_lines(file)  # cuts off half a line, of a start that was killed or had no space
        self.file = AppendedFile(file)
        self.process = psutil.Process()
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True, name="server metrics")
        self.thread.start()

    def _run(self) -> None:
        is_last = False
        while True:
            rss_mb = self.process.memory_info().rss / 2**20
            row = {
                "time": round(time.time(), 3),
                **self.load.row(),
                "cpu_s": round(self.load.cpu_s(), 3),
            }
            self.file.write(json.dumps(row | {"rss_mb": round(rss_mb, 1)}) + "\n")
            if is_last:
                return
            is_last = self.stopped.wait(EVERY_S)

    def stop(self) -> None:
        """Appends the last line."""
        self.stopped.set()
        self.thread.join()
        self.file.close()
