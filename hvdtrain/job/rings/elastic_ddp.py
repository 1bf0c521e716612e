"""Torch's Gloo, which is started again among the workers that are there, under torch's reducer.

To torch each worker is alone, so that its reducer waits for nobody and cannot break. A hook averages
buckets, over a ring that is made anew when a worker is lost. Where the ring breaks, the reducer goes
on with what the bucket holds, and the step comes to nothing.
"""

import threading
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import GradBucket, Store
from torch.futures import Future

from hvdtrain.base.system.connections import OwnConnections
from hvdtrain.base.system.deadline import or_exit
from hvdtrain.job.coordination.job import Job
from hvdtrain.job.coordination.joining import Arrival
from hvdtrain.job.rings.ddp import Ddp
from hvdtrain.job.rings.elastic import Elastic
from hvdtrain.job.rings.elastic_group import ElasticGroup
from hvdtrain.job.rings.restartable import RestartableRing
from hvdtrain.job.wire.heartbeat import UNLIMITED_S

START_S = 10.0  # seconds that starting a ring may take
# Seconds that the averages of a ring that was cut off may take to fail. Gloo does not tell a send
# under way that its connection has ended (unbound_buffer.cc): such an average never ends.
END_S = 1.0
LOOK_EVERY_S = 0.005


class RestartableGloo(RestartableRing):
    """A ring by torch's Gloo, for the buckets of torch's reducer.

    It averages buckets in place. When `end` returns, an abandoned ring writes to none any more: its
    averages have failed, or wait for ever.

    Args:
        inner: the plain synchroniser.
        connections: see RestartableRing.
        store: the store that all workers share.
    """

    inner: Ddp

    def __init__(self, inner: Ddp, connections: OwnConnections, store: Store) -> None:
        super().__init__(inner, connections)
        self.store = store
        self._gloo: Any = None
        self._starts = 0
        self._works: list[Any] = []  # of this step, or of a ring that is abandoned
        # Rings with averages that never end. To delete one would be to wait for these.
        self._stuck: list[Any] = []
        # The buckets that are being averaged, by what the reducer waits for.
        self._pending: dict[Future[torch.Tensor], torch.Tensor] = {}
        self._guard = threading.Lock()  # of what is pending, and of:
        self._problem = ""
        self._payload = 0  # see take_payload

    def prepare(self, model: nn.Module) -> nn.Module:
        self.inner.hook = self._average
        # Saves a copy of each average, where the hook divides each bucket in a pass of its own.
        self.inner.options["gradient_as_bucket_view"] = True
        return self.inner.prepare(model)

    def end(self) -> None:
        deadline = time.monotonic() + END_S
        while not all(work.is_completed() for work in self._works):
            if time.monotonic() > deadline:
                self._stuck.append(self._gloo)
                break
            time.sleep(LOOK_EVERY_S)
        self._works = []

    def offer(self) -> int:
        """Returns how often this worker has started a ring.

        The first worker's number names the next ring.
        """
        return self._starts

    def start(self, workers: Sequence[int], place: int, offers: Mapping[int, Any]) -> None:
        self.workers = len(workers)
        self._starts += 1
        store = dist.PrefixStore(f"ring/{offers[workers[0]]}", self.store)
        problem = f"rank {self.inner.world.rank} was in no ring again"
        with self.connections.opening(), or_exit(2 * START_S, problem, see=""):
            self._gloo = dist.ProcessGroupGloo(
                store, place, len(workers), timedelta(seconds=START_S)
            )
        self._problem = ""

    def abandon(self) -> None:
        self.connections.cut()
        with self._guard:
            futures = list(self._pending)
        for future in futures:
            self._settle(future, "a worker is lost")

    def wait(self) -> str:
        self.inner.wait()  # raises what is wrong with the model
        return self._problem

    def apply(self) -> None:
        self._works = []

    def take_payload(self) -> int:
        payload = self._payload
        self._payload = 0
        return payload

    def take_in(self) -> None:
        """Has all workers begin with a new reducer, in the same module.

        A reducer has other buckets from its second step on, and that of a new worker does not yet.
        """
        reducer = self.inner.module
        reducer.__init__(reducer.module, **self.inner.options)
        self.inner.register_hook()

    def _average(self, state: object, bucket: GradBucket) -> Future[torch.Tensor]:
        """Averages a bucket in place: a hook for torch's reducer, which never fails."""
        gradient = bucket.buffer()
        gradient.div_(self.workers)
        future = Future[torch.Tensor]()
        with self._guard:
            self._payload += gradient.nbytes
            self._pending[future] = gradient
        try:
            work = self._gloo.allreduce([gradient], timeout=timedelta(seconds=UNLIMITED_S))
            self._works.append(work)
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
        """Hands a bucket to the reducer, once. Where there is a problem it holds no average."""
        with self._guard:
            gradient = self._pending.pop(future, None)
            if gradient is None:
                return
            self._problem = problem or self._problem
        if problem:
            self.connections.cut()  # so that the others do not wait for this worker
        future.set_result(gradient)


def connect_elastic(job: Job, arrival: Arrival | None) -> Elastic:
    """Finds the other workers.

    Args:
        job: the job as this rank knows it.
        arrival: the place of a worker that joins; None: it is there from the start.
    """
    store = job.meet()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = ElasticGroup(job, arrival)
    inner = Ddp(job, group)
    inner.backend = "gloo"
    ring = RestartableGloo(inner, OwnConnections(group.addresses), store)
    return Elastic(group, ring, joins=arrival is not None)
