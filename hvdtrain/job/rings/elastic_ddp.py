"""DistributedDataParallel whose workers may be lost.

To torch each worker is alone, so that its reducer waits for nobody and cannot break. A hook averages
buckets, over a ring that is made anew when a worker is lost. Where the ring breaks, the hook returns
the bucket as it was, and the step comes to nothing.
"""

import threading
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import GradBucket
from torch.futures import Future

from hvdtrain.base.system.deadline import or_exit
from hvdtrain.job.coordination.job import Job
from hvdtrain.job.coordination.joining import Arrival
from hvdtrain.job.rings.ddp import BUFFERS_APART, Ddp
from hvdtrain.job.rings.elastic import Elastic
from hvdtrain.job.wire.heartbeat import UNLIMITED_S

FORM_S = 10.0  # seconds that forming a ring may take


class ElasticDdp(Elastic, Ddp):
    """A synchroniser by torch's reducer whose workers may be lost.

    Attributes:
        ring: torch's Gloo, which averages copies of buckets: what it still does when it is
            abandoned harms nothing.
    """

    ring: Any = None

    def __init__(self, job: Job, arrival: Arrival | None) -> None:
        self.store = job.meet()
        # By what the reducer waits for: a bucket, and its average.
        self._pending: dict[Future[torch.Tensor], tuple[torch.Tensor, torch.Tensor]] = {}
        self._failed = ""
        self._payload = 0  # see take_payload
        self._guard = threading.Lock()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        self.meet(job, arrival)
        super().__init__(job, self.group)
        self.backend = "gloo"

    def prepare(self, model: nn.Module) -> nn.Module:
        """Prepares as Ddp does. All workers have the same weights, by the seed or a snapshot."""
        self.model = model
        self.hook = self._average
        return super().prepare(model)

    def form(self, place: int, given: Mapping[int, Any]) -> None:
        store = dist.PrefixStore(f"ring/{self.group.sums}", self.store)
        with (
            self.connections.opening(),
            or_exit(2 * FORM_S, f"worker {self.group.worker} was in no ring again", ""),
        ):
            self.ring = dist.ProcessGroupGloo(store, place, len(given), timedelta(seconds=FORM_S))
        self._failed = ""

    def abandon(self) -> None:
        self.connections.cut()
        with self._guard:
            futures = list(self._pending)
        for future in futures:
            self._settle(future, "a worker is lost")

    def let_join(self, state: Callable[[], dict[str, Any]]) -> tuple[int, int] | None:
        """Lets workers join: see Synchroniser.let_join.

        A reducer has other buckets from its second step on. So that all workers have the buckets
        of a new worker, all begin with a new reducer, in the same module.
        """
        ring = super().let_join(state)
        if ring:
            self.module.__init__(self.model, **BUFFERS_APART)
            self.register_hook()
        return ring

    def take_payload(self) -> int:
        payload = self._payload
        self._payload = 0
        return payload

    def wait(self) -> None:
        super().wait()  # raises what is wrong with the model, not with the ring
        self.take_together(self._failed)

    def _average(self, state: object, bucket: GradBucket) -> Future[torch.Tensor]:
        """Averages a bucket in its own memory: a hook for torch's reducer, which never fails."""
        gradient = bucket.buffer()
        future = Future[torch.Tensor]()
        average = gradient / len(self.members)
        with self._guard:
            self._payload += average.nbytes
            self._pending[future] = gradient, average
        try:
            work = self.ring.allreduce([average], timeout=timedelta(seconds=UNLIMITED_S))
            work.get_future().add_done_callback(partial(self._came, future))
        except RuntimeError as error:
            self._settle(future, str(error))
        return future

    def _came(self, future: Future[torch.Tensor], result: Any) -> None:
        try:
            result.value()
        except RuntimeError as error:
            self._settle(future, str(error))
        else:
            self._settle(future)

    def _settle(self, future: Future[torch.Tensor], problem: str = "") -> None:
        """Hands a bucket back, once; as it was, where there is a problem."""
        with self._guard:
            gradient, average = self._pending.pop(future, (None, None))
            if gradient is None or average is None:
                return
            if problem:
                self._failed = problem
            else:
                gradient.copy_(average)
        if problem:
            self.connections.cut()  # so that the others do not wait for this worker
        future.set_result(gradient)
