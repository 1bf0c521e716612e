"""A worker's buckets on their way to servers: gradients are pushed, and what is answered is fresh weights."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.futures import Future

from hvdtrain.buckets.exchange import Exchange, Lane
from hvdtrain.buckets.partition import Piece
from hvdtrain.buckets.staging import Staging
from hvdtrain.numerics.compression import Compressor
from hvdtrain.wire.messages import Answer, Push, PushStatus
from hvdtrain.wire.shared import SharedMemory
from hvdtrain.wire.wire import Wire, server_failed

# Bytes of gradients that a worker has under way at once: sent, and not answered. Servers share it evenly, so that none
# waits while another is busy. And all workers together have no more than that under way for each server: so much it may
# have to hold until others push.
UNDER_WAY = 48 * 2**20
AT_ONCE = 8  # buckets of which something else is asked for at once


class StepContext(NamedTuple):
    """What a push says of its step, which may be over when it is sent."""

    step: int
    lr: float
    share: int | None
    status: PushStatus


class PushLane(Lane):
    """
    Args:
        worker: this worker's number.
        pushes_again: servers may be killed and come back: see Wire.returning.

    Attributes:
        push: what is under way, or was last.
        bytes_sent, bytes_received: of tensors, in all.
    """

    context: StepContext
    push: Push

    def __init__(
        self, number: int, piece: Piece, weights: torch.Tensor, staging: Staging | None, compression: str,
        wire: Wire, shared: SharedMemory, worker: int, pushes_again: bool,
    ) -> None:  # fmt: skip
        super().__init__(number, piece, weights, staging)
        self.wire, self.shared, self.worker, self.pushes_again = wire, shared, worker, pushes_again
        # With the error yet to send; None where a gradient is sent as it is.
        self.compressor = None if compression == "none" else Compressor(compression, piece.lengths)
        self.version = 0
        self.bytes_sent = self.bytes_received = 0

    def send(self, gradient: torch.Tensor) -> "Future[Answer]":
        step, lr, share, status = self.context
        status.read.append(self.version)
        # By way of numpy it has a storage of its own: of a larger one, rpc would copy the part before sending.
        gradient = torch.from_numpy(gradient.numpy())
        tensors = self.compressor.encode(gradient) if self.compressor else [gradient]
        self.bytes_sent += sum(tensor.nbytes for tensor in tensors)
        sent = [self.shared.put(tensor, self.piece.server, held=self.pushes_again) for tensor in tensors]
        self.push = Push(self.worker, step, self.version, lr, sent, share)
        return self.wire.call(self.piece.server, "push", self.piece.number, self.push)

    def take(self, answer: Answer) -> None:
        for tensor in self.push.gradient if self.pushes_again else ():
            self.shared.release(tensor)
        self.push = self.push._replace(gradient=None)  # gives its memory back
        self.install(answer)
        self.context.status.closed.append(answer.dropped)
        self.context.status.seen.append(answer.staleness)

    def install(self, answer: Answer) -> None:
        """Have the weights of an answer."""
        weights = self.shared.get(answer.weights)
        self.write(weights)
        self.version = answer.version
        self.bytes_received += weights.nbytes

    def failure(self, error: Exception) -> Exception:
        return server_failed(self.piece.server, error)


class PushExchange(Exchange):
    """
    Args:
        worker, workers: this worker's number, and of how many.
        pieces: the buckets, in the order of the flat vector.
        sizes: elements of each parameter.
        weights: [parameters] float32, the model's own memory: answers are written into it.
        compression: how gradients are encoded.
        staged: whether the weights are on a GPU, with CPU memory on the way to the servers.
        shared: by which tensors come and go on one host.
        pushes_again: see PushLane.
    """

    lanes: Sequence[PushLane]

    def __init__(
        self, wire: Wire, worker: int, workers: int, pieces: Sequence[Piece], sizes: Sequence[int],
        weights: torch.Tensor, compression: str, staged: bool, shared: SharedMemory | None = None,
        pushes_again: bool = False,
    ) -> None:  # fmt: skip
        self.wire, self.worker = wire, worker
        staging, memory = Staging(weights, pieces) if staged else None, shared or SharedMemory()
        lanes = [
            PushLane(number, piece, weights, staging, compression, wire, memory, worker, pushes_again)
            for number, piece in enumerate(pieces)
        ]
        room = UNDER_WAY // max(len({piece.server for piece in pieces}), workers)
        super().__init__(lanes, sizes, weights, staging, room, wire.patience)
        self.begin(StepContext(0, 0.0, None, PushStatus(0)))  # none yet: nothing is to be answered

    def begin_step(self, step: int, lr: float, share: int | None = None, pushed: int | None = None) -> None:
        """The step whose gradients come next, and of how many buckets, if not of all."""
        self.begin(StepContext(step, lr, share, PushStatus(len(self.lanes) if pushed is None else pushed)))

    def wait_until_answered(self) -> None:
        """Return when this step's pushes, or the last one's, have all been answered: each server has taken them.

        Raises:
            Failure: as wait_for.
        """
        with self._changed:
            came = self._changed.wait_for(lambda: self._error or not self.context.status.pending, self.patience)
        if self._error or not came:
            self.give_up()

    def last_closed_step(self) -> int:
        """The last step that is over in every bucket, where all of them dropped this worker's last push; else 0."""
        closed = self.context.status.closed
        if not any(closed):
            return 0
        self.wait_for_all()
        return min(closed)

    def ask_each(self, call: Callable[[Piece], "Future[Any]"]) -> Iterator[tuple[PushLane, Any]]:
        """Each bucket, and what its server answers to a call about it. A few are under way at a time: the optimizer's
        state of all may be too much for one process.
        """
        for first in range(0, len(self.lanes), AT_ONCE):
            for lane, answer in [(lane, call(lane.piece)) for lane in self.lanes[first : first + AT_ONCE]]:
                yield lane, self.wire.result(lane.piece.server, answer)

    def pull(self) -> None:
        """Take every bucket as it is on its server."""
        if self._staging:
            self._staging.settle()
        for lane, answer in self.ask_each(lambda p: self.wire.call(p.server, "pull", p.number, self.worker)):
            lane.install(answer)
        if self._staging:
            self._staging.wait_for(range(len(self.lanes)))

    def silence(self, missing: Sequence[int]) -> str:
        silent = sorted({self.lanes[number].piece.server for number in missing})
        return f"parameter servers, ranks {silent}, did not answer within {self.patience:.0f} s"
