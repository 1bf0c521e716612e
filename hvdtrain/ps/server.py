"""What a server process holds, and what workers can ask of it: a message, a method, an answer."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch.futures import Future

from hvdtrain.ps.bucket import Bucket, Reply
from hvdtrain.ps.leases import Leases
from hvdtrain.ps.membership import Membership
from hvdtrain.ps.messages import Answer, Push
from hvdtrain.ps.server_metrics import Load
from hvdtrain.ps.shared import SharedMemory
from hvdtrain.world import trace
from hvdtrain.world.host import describe, own_clock


class Server:
    """The buckets of one server. Workers call its methods through ps.wire, by name.

    Args:
        make_bucket: a bucket from its number and the weights it is given.
        decode: a gradient, [bucket] float32, from the tensors that were sent.
        membership: the workers that are there.
        leases: which worker has which share, on the first server.
        load: counts what this server does.
        rank: this process's.
        shared: by which tensors come and go on one host.
    """

    def __init__(
        self,
        make_bucket: Callable[[int, torch.Tensor], Bucket],
        decode: Callable[[Sequence[torch.Tensor]], torch.Tensor],
        membership: Membership,
        leases: Leases,
        load: Load,
        rank: int = 0,
        shared: SharedMemory | None = None,
    ) -> None:
        self.make_bucket, self.decode = make_bucket, decode
        self.membership, self.leases, self.load, self.rank = membership, leases, load, rank
        self.shared = shared or SharedMemory()
        self.buckets: dict[int, Bucket] = {}
        self._deciding = threading.Lock()  # between a push's end and its lease's: a share that counts is not lost
        self.open: dict[tuple[int, int], Future[Answer]] = {}  # (bucket, worker) -> what its push is answered with

    def push(self, bucket: int, push: Push) -> "Future[Answer]":
        """Take a worker's encoded gradient. The future holds its answer, when it may go on."""
        self.membership.heard(push.worker)
        if push.gradient is not None:
            push = push._replace(gradient=[self.shared.get(sent) for sent in push.gradient])
        answer: Future[Answer] = Future()
        self.open[bucket, push.worker] = answer
        # The bucket that backward completes last: of a push that a worker's death cuts short, it counts.
        decides = bucket == 0
        began = time.perf_counter()
        with self.load.handling(bucket, push), self._deciding if decides else nullcontext():
            decoded = push if push.gradient is None else push._replace(gradient=self.decode(push.gradient))
            replies = self.buckets[bucket].push(decoded)
            if decides:
                self.leases.finished(push.worker, push.step)
        if trace.records(push.step):
            flow = trace.flow_of(push.step, push.worker, self.rank, bucket)
            name = f"apply bucket {bucket} of worker {push.worker}"
            trace.span(trace.APPLY, name, began, time.perf_counter(), flow)
            trace.count("queue", len(self.open))
        self._answer(bucket, replies)
        return answer

    def pull(self, bucket: int, worker: int) -> Answer:
        """A bucket as it is. The worker pushes nothing before it has it."""
        return self._sent(worker, bucket, self.buckets[bucket].pull(worker))

    def idle(self, worker: int, step: int) -> None:
        """The worker pushes nothing for now, after this step: see bucket.Policy."""
        for number, bucket in self.buckets.items():
            self._answer(number, bucket.idle(worker, step))

    def lose(self, worker: int) -> None:
        """Go on without a worker. Failure where the others cannot."""
        with self._deciding:
            for number, bucket in self.buckets.items():
                self._answer(number, bucket.lose(worker))
            self.leases.lose(worker)
        self.membership.lose(worker)
        self.load.lost(worker)
        self.shared.forget(worker)

    def _answer(self, bucket: int, replies: list[Reply]) -> None:
        for worker, answer in replies:
            self.open.pop((bucket, worker)).set_result(self._sent(worker, bucket, answer))

    def _sent(self, worker: int, bucket: int, answer: Answer) -> Answer:
        self.load.answered(worker, bucket, answer)
        weights = answer.weights  # of a version there may be two kinds: see Bucket.answer
        content = self.buckets[bucket], answer.version, weights.data_ptr()
        return answer._replace(weights=self.shared.put(weights, worker, content))

    def sum(self, worker: int, number: int, values: torch.Tensor) -> "Future[torch.Tensor]":
        """A worker's summand of a sum over the workers: see Membership.add."""
        return self.membership.add(worker, number, values)

    def missing(self, worker: int, number: int, seconds: float) -> tuple[list[int], list[int]]:
        """The workers that a sum still waits for, and those of them that were not heard for so long."""
        missing = self.membership.missing(worker, number)
        return missing, self.membership.silent(missing, seconds)

    def lease(self, worker: int, step: int, begin: int, end: int) -> int:
        """The worker's next share: see Leases."""
        return self.leases.lease(worker, step, begin, end)

    def await_lease(self, worker: int, step: int) -> "Future[tuple[int, int]]":
        """See Leases.wait."""
        return self.leases.wait(worker, step)

    def pause_leases(self) -> None:
        """See Leases.pause."""
        self.leases.pause(self.membership.workers)

    def install(self, bucket: int, weights: torch.Tensor) -> None:
        """Begin with these weights, [bucket] float32."""
        self.buckets[bucket] = self.make_bucket(bucket, weights)

    def restore(self, bucket: int, step: int, state: Mapping[str, torch.Tensor]) -> None:
        """Have a bucket go on after a snapshot: see Bucket.restore."""
        self.buckets[bucket].restore(step, state)

    def optimizer_state(self, bucket: int) -> dict[str, torch.Tensor]:
        return self.buckets[bucket].optimizer_state()

    def cost(self) -> dict[str, Any]:
        """See Load.cost."""
        return self.load.cost()

    def now(self) -> tuple[int, float]:
        """Which clock this process reads, and what it says: time.perf_counter."""
        return own_clock(), time.perf_counter()

    def traced(self) -> dict[str, Any]:
        """What this process has recorded: see world.trace."""
        return {"spans": trace.spans, "counts": trace.counts}

    def host(self) -> dict[str, Any]:
        """What this process's host has to offer: see world.host.describe."""
        return describe()
