"""DistributedDataParallel whose workers may be lost: its buckets are averaged over a ring that is made anew then.

To torch each worker is alone, so that its reducer waits for nobody, and cannot be broken: what averages buckets is a
hook, which hands back what it was given where the ring breaks. The step then comes to nothing.
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

from hvdtrain.coordination.job import Job
from hvdtrain.coordination.joining import Arrival
from hvdtrain.modes._elastic import Elastic
from hvdtrain.modes.ddp import Ddp
from hvdtrain.system.deadline import or_exit

FORM_S = 10.0  # that forming a ring may take


class ElasticDdp(Elastic, Ddp):
    """
    Attributes:
        ring: torch's Gloo, which averages copies of buckets: what it still does when it is abandoned harms nothing.
    """

    ring: Any = None

    def __init__(self, job: Job, arrival: Arrival | None) -> None:
        self.store, self.timeout = job.meet(), timedelta(seconds=job.config.timeout)
        self._pending: dict[Future[torch.Tensor], tuple[torch.Tensor, torch.Tensor]] = {}  # a bucket, and its average
        self._failed = ""
        self._guard = threading.Lock()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        self.meet(job, arrival)
        super().__init__(job, self.group)
        self.backend = "gloo"

    def prepare(self, model: nn.Module) -> nn.Module:
        """As in Ddp. That all have the first worker's weights, the seed or a snapshot decides, and is checked."""
        self.model = model
        self.hook = self._average
        return super().prepare(model)

    def form(self, place: int, given: Mapping[int, Any]) -> None:
        store = dist.PrefixStore(f"ring/{self.group.sums}", self.store)
        with self.connections.opening(), or_exit(2 * FORM_S, f"worker {self.group.worker} was in no ring again", ""):
            self.ring = dist.ProcessGroupGloo(store, place, len(given), timedelta(seconds=FORM_S))
        self._failed = ""

    def abandon(self) -> None:
        self.connections.cut()
        with self._guard:
            futures = list(self._pending)
        for future in futures:
            self._settle(future, "a worker is lost")

    def let_join(self, state: Callable[[], dict[str, Any]]) -> tuple[int, int] | None:
        """As in Elastic. A reducer has other buckets from its second step on: to have the same as a new worker's, all
        begin with new ones, in the same module.
        """
        if ring := super().let_join(state):
            self.module.__init__(self.model, forward_sync_buffers=False)
            self.register_hook()
        return ring

    def wait(self) -> None:
        self.take_together(self._failed)

    def _average(self, state: object, bucket: GradBucket) -> Future[torch.Tensor]:
        """The hook: the average of a bucket, in its own memory. It does not fail."""
        gradient, future = bucket.buffer(), Future[torch.Tensor]()
        average = gradient / len(self.members)
        with self._guard:
            self._pending[future] = gradient, average
        try:
            work = self.ring.allreduce([average], timeout=self.timeout)
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
        """Hand a bucket back, once: as it was, where there is a problem."""
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
