"""A worker's buckets on their way: gradients are pushed to servers, and answered by weights."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.futures import Future

from hvdtrain.base.numerics.compression import Compressor
from hvdtrain.base.numerics.optimizers import StepSettings, settings_of
from hvdtrain.job.buckets.exchange import Exchange, Lane
from hvdtrain.job.buckets.partition import BucketRange
from hvdtrain.job.buckets.send_queue import UNDER_WAY
from hvdtrain.job.buckets.staging import Staging
from hvdtrain.job.wire.heartbeat import named
from hvdtrain.job.wire.messages import FreshWeights, Push, PushStatus
from hvdtrain.job.wire.shared import SharedMemory
from hvdtrain.job.wire.wire import Wire, server_failed

AT_ONCE = 8  # the most buckets that one call each is under way for, in ask_each


class StepContext(NamedTuple):
    """The step that a push belongs to, which may be over when the push is sent.

    Attributes:
        step: the worker's step, from 1.
        lr: the learning rate, or the settings of each group of parameters.
        share: the number of the leased share; None where shares are not leased.
        status: collects the answers to the step's pushes.
    """

    step: int
    lr: StepSettings
    share: int | None
    status: PushStatus


@dataclass(frozen=True)
class PushPath:
    """How a worker's pushes travel: what its lanes have in common.

    Attributes:
        wire: carries calls to the servers.
        shared: passes tensors to and from servers on this host.
        worker: this worker's number.
        compression: the name of the codec.
        pushes_again: servers may be killed and come back: see Wire.returning.
    """

    wire: Wire
    shared: SharedMemory
    worker: int
    compression: str
    pushes_again: bool


class PushLane(Lane):
    """A bucket's way to its server and back.

    Args:
        number, bucket, weights, staging: see Lane.
        path: how pushes travel.

    Attributes:
        push: the push that is under way, or was last.
        version: the version of this worker's weights.
        compressor: the codec, with the error that is added to the next push. None where gradients
            are sent as they are.
        bytes_sent: payload bytes of all gradients sent.
        bytes_received: payload bytes of all weights received.
    """

    context: StepContext
    push: Push

    def __init__(
        self,
        number: int,
        bucket: BucketRange,
        weights: torch.Tensor,
        staging: Staging | None,
        path: PushPath,
    ) -> None:
        super().__init__(number, bucket, weights, staging)
        self.path = path
        self.compressor: Compressor | None = None
        if path.compression != "none":
            self.compressor = Compressor(path.compression, bucket.lengths)
        self.version = 0
        self.bytes_sent = 0
        self.bytes_received = 0

    def send(self, gradient: torch.Tensor) -> "Future[FreshWeights]":
        step, settings, share, status = self.context
        lr, others = settings_of(settings, self.group)
        status.read.append(self.version)
        # By way of numpy, the tensor becomes a whole storage. Of a part of a storage, rpc would
        # send a copy.
        gradient = torch.from_numpy(gradient.numpy())
        tensors = self.compressor.encode(gradient) if self.compressor else [gradient]
        self.bytes_sent += sum(tensor.nbytes for tensor in tensors)
        path = self.path
        server = self.bucket.server
        sent = [path.shared.put(tensor, server, held=path.pushes_again) for tensor in tensors]
        self.push = Push(path.worker, step, self.version, lr, sent, share, dict(others))
        return path.wire.call(server, "push", self.bucket.number, self.push)

    def take(self, answer: FreshWeights) -> None:
        if self.path.pushes_again:
            for tensor in self.push.gradient:
                self.path.shared.release(tensor)
        self.push = self.push._replace(gradient=None)  # frees the memory
        self.install(answer)
        status = self.context.status
        status.closed.append(answer.dropped)
        status.seen.append(answer.staleness)

    def restore_left_out(self, values: torch.Tensor) -> None:
        """Adds to the next push what the codec left out of the last push before a snapshot.

        Args:
            values: [bucket] float32.
        """
        if self.compressor:
            self.compressor.error = values.clone()

    def install(self, answer: FreshWeights) -> None:
        """Writes an answer's weights into the model."""
        weights = self.path.shared.get(answer.weights)
        self.write(weights)
        self.version = answer.version
        self.bytes_received += weights.nbytes

    def failure(self, error: Exception) -> Exception:
        return server_failed(self.bucket.server, error)


class PushExchange(Exchange):
    """Pushes a worker's buckets, and waits for their weights.

    Args:
        wire: carries calls to the servers.
        worker: this worker's number.
        workers: the number of workers.
        buckets: the buckets, in the order of the flat vector.
        sizes: elements of each parameter.
        weights: [parameters] float32, the model's own memory, which answers are written into.
        compression: the name of the codec.
        staged: whether the weights are on a GPU, with CPU memory on the way to the servers.
        shared: passes tensors to and from servers on this host.
        pushes_again: servers may be killed and come back: see Wire.returning.
        patience, tell: see Exchange.
    """

    lanes: Sequence[PushLane]

    def __init__(
        self,
        wire: Wire,
        worker: int,
        workers: int,
        buckets: Sequence[BucketRange],
        sizes: Sequence[int],
        weights: torch.Tensor,
        compression: str,
        staged: bool,
        shared: SharedMemory | None = None,
        pushes_again: bool = False,
        patience: float | None = None,
        tell: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.path = PushPath(wire, shared or SharedMemory(), worker, compression, pushes_again)
        staging = Staging(weights, buckets) if staged else None
        lanes = [
            PushLane(number, bucket, weights, staging, self.path)
            for number, bucket in enumerate(buckets)
        ]
        servers = {bucket.server for bucket in buckets}
        largest = max((lane.size for lane in lanes), default=1)
        # A server holds an encrypted copy of each answer until the worker has received it.
        self._at_once = min(AT_ONCE, max(1, UNDER_WAY // (workers * largest)))
        room = UNDER_WAY // max(len(servers), workers)
        super().__init__(lanes, sizes, weights, staging, room, patience, tell, wire.condition())
        no_step = StepContext(0, 0.0, None, PushStatus(0))  # there is nothing to wait for yet
        self.begin(no_step)

    def begin_step(
        self, step: int, lr: StepSettings, share: int | None = None, pushed: int | None = None
    ) -> None:
        """Begins the step whose gradients come next.

        Args:
            step, lr, share: see StepContext.
            pushed: how many buckets the step pushes; None: all.
        """
        buckets = len(self.lanes) if pushed is None else pushed
        self.begin(StepContext(step, lr, share, PushStatus(buckets)))

    def wait_until_answered(self) -> None:
        """Blocks until this step's pushes have all been answered: each server has taken them.

        Raises:
            Failure: see wait_for.
        """
        self._wait_until(lambda: not self.context.status.pending)
        self._raise_error()

    def last_closed_step(self) -> int:
        """Returns the last step that is over in every bucket.

        0 unless all buckets dropped this worker's last push.
        """
        closed = self.context.status.closed
        if not any(closed):
            return 0
        self.wait_for_all()
        return min(closed)

    def ask_each(
        self, call: Callable[[BucketRange], "Future[Any]"]
    ) -> Iterator[tuple[PushLane, Any]]:
        """Calls each bucket's server; yields the buckets and the answers.

        A few calls are under way at a time: the optimizer's state of all buckets may be too much
        for one process.
        """
        for first in range(0, len(self.lanes), self._at_once):
            lanes = self.lanes[first : first + self._at_once]
            answers = [(lane, call(lane.bucket)) for lane in lanes]
            for lane, answer in answers:
                yield lane, self.path.wire.result(lane.bucket.server, answer)

    def pull(self) -> None:
        """Takes every bucket's weights as they are on its server."""
        if self._staging:
            self._staging.settle()
        for lane, answer in self.ask_each(self._pull):
            lane.install(answer)
        if self._staging:
            self._staging.wait_for(range(len(self.lanes)))

    def _pull(self, bucket: BucketRange) -> "Future[FreshWeights]":
        return self.path.wire.call(bucket.server, "pull", bucket.number, self.path.worker)

    def whom(self, missing: Sequence[int]) -> str:
        servers = sorted({self.lanes[number].bucket.server for number in missing})
        return f"parameter servers, {named(servers)}"
