"""A worker's buckets on their way: gradients out as they become ready, weights in before they are needed."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch.futures import Future

from hvdtrain.buckets.bucketer import Bucketer
from hvdtrain.buckets.partition import Piece
from hvdtrain.buckets.staging import Staging
from hvdtrain.errors import Failure
from hvdtrain.numerics.clock import Stopwatch
from hvdtrain.numerics.compression import Compressor
from hvdtrain.wire.messages import Answer, Push, PushStatus
from hvdtrain.wire.shared import SharedMemory
from hvdtrain.wire.wire import Wire, server_failed

# Bytes of gradients that a worker has under way at once: sent, and not answered. Enough to fill a link while answers
# travel back; little enough that a bucket that forward needs soon, ready late, does not queue behind all others
# (Jayarajan et al., 2019, arXiv:1905.03960). Servers share it evenly, so that none waits while another is busy. And all
# workers together have no more than that under way for each server: so much it may have to hold until others push.
UNDER_WAY = 48 * 2**20
AT_ONCE = 8  # buckets of which something else is asked for at once


class StepContext(NamedTuple):
    """What a push says of its step, which may be over when it is sent."""

    step: int
    lr: float
    share: int | None
    status: PushStatus


class Lane:
    """A bucket's way to its server and back. It has one push under way: no gradient follows before fresh weights.

    Attributes:
        number: of the bucket, in the order in which forward needs them.
        weights: [bucket] float32, the model's own memory.
        size: bytes of its gradient.
        gradient, context: what is to be pushed, [bucket] float32 on the CPU, and of which step that is.
        is_fresh: nothing that was pushed is unanswered.
        push, pushed_at: what is under way, or was last, and since when.
        bytes_sent, bytes_received: of tensors, in all.
    """

    gradient: torch.Tensor | None
    context: StepContext
    push: Push

    def __init__(
        self, number: int, piece: Piece, weights: torch.Tensor, compression: str, staging: Staging | None
    ) -> None:
        self.number, self.piece, self.staging = number, piece, staging
        self.weights = weights[piece.start : piece.stop]
        self.size = self.weights.nbytes
        # With the error yet to send; None where a gradient is sent as it is.
        self.compressor = None if compression == "none" else Compressor(compression, piece.lengths)
        self.version = 0
        self.is_fresh = True
        self.pushed_at = 0.0
        self.bytes_sent = self.bytes_received = 0

    def send(self, wire: Wire, shared: SharedMemory, worker: int, held: bool) -> "Future[Answer]":
        """Push the gradient, of this worker. `held`: see SharedMemory.put."""
        self.pushed_at = time.perf_counter()
        step, lr, share, status = self.context
        status.read.append(self.version)
        assert self.gradient is not None
        tensors, self.gradient = self.compressor.encode(self.gradient) if self.compressor else [self.gradient], None
        self.bytes_sent += sum(tensor.nbytes for tensor in tensors)
        sent = [shared.put(tensor, self.piece.server, held=held) for tensor in tensors]
        self.push = Push(worker, step, self.version, lr, sent, share)
        return wire.call(self.piece.server, "push", self.piece.number, self.push)

    def take(self, answer: Answer, shared: SharedMemory) -> None:
        """Have the weights of an answer."""
        weights = shared.get(answer.weights)
        if self.staging:
            self.staging.copy_in(self.number, weights)
        else:
            self.weights.copy_(weights)
        self.version = answer.version
        self.bytes_received += weights.nbytes


class Exchange:
    """Pushes each bucket when its last gradient is there; of those that wait, what forward needs first goes first.

    A push may be answered only when other workers have pushed the same bucket. So that workers do not wait for each
    other in a circle, one bucket beyond the limit may always be under way to each server: the one that was ready first.
    That order is the same on all workers, so the slowest one is always answered.

    Args:
        worker, workers: this worker's number, and of how many.
        pieces: the buckets, in the order of the flat vector: the order in which forward needs them.
        sizes: elements of each parameter.
        weights: [parameters] float32, the model's own memory: answers are written into it.
        compression: how gradients are encoded.
        staged: whether the weights are on a GPU, with CPU memory on the way to the servers.
        shared: by which tensors come and go on one host.
        pushes_again: servers may be killed and come back: see Wire.returning.

    Attributes:
        bucketer: takes the gradients.
        context: of the step whose gradients come next.
        observers: told of pushes that are sent and answered, and of waits.
    """

    def __init__(
        self, wire: Wire, worker: int, workers: int, pieces: Sequence[Piece], sizes: Sequence[int],
        weights: torch.Tensor, compression: str, staged: bool, shared: SharedMemory | None = None,
        pushes_again: bool = False,
    ) -> None:  # fmt: skip
        self.wire, self.worker, self.pushes_again = wire, worker, pushes_again
        self.shared = shared or SharedMemory()
        self._staging = Staging(weights, pieces) if staged else None
        self.bucketer = Bucketer(sizes, pieces, self._push, self._staging)
        self.lanes = [Lane(n, piece, weights, compression, self._staging) for n, piece in enumerate(pieces)]
        self.context = StepContext(0, 0.0, None, PushStatus(0))
        self.observers: list[Any] = []
        self._stopwatch = Stopwatch(weights.device)
        self._waits: list[tuple[Any, Any]] = []  # when each wait of this step began and ended
        self._changed = threading.Condition()  # guards all below, and lanes' freshness: the wire's threads change them
        servers = {piece.server for piece in pieces}
        self._waiting: dict[int, list[int]] = {server: [] for server in servers}  # buckets, as they became ready
        self._under_way = dict.fromkeys(servers, 0)  # bytes
        self.room = UNDER_WAY // max(len(servers), workers)  # bytes, for each server
        self._over_limit: dict[int, int] = {}  # server -> its bucket that is under way though there was no room
        self._error: BaseException | None = None

    def begin(self, step: int, lr: float, share: int | None = None) -> None:
        """The step whose gradients come next."""
        self.context, self._waits = StepContext(step, lr, share, PushStatus(len(self.lanes))), []

    @property
    def waited_s(self) -> float:
        """Seconds that wait_for took since the current step began; on a GPU, of waits that are over there."""
        return sum(self._stopwatch.seconds(began, ended) for began, ended in self._waits)

    def wait_for(self, numbers: Sequence[int]) -> None:
        """Return when these buckets' weights are as the answers to the last push have them.

        Raises:
            Failure: a server failed, or did not answer in time.
        """
        began = self._stopwatch.now()
        with self._changed:
            came = self._changed.wait_for(
                lambda: self._error or all(self.lanes[number].is_fresh for number in numbers), self.wire.patience
            )
        if self._staging:
            self._staging.wait_for(numbers)
        ended = self._stopwatch.now()
        self._waits.append((began, ended))
        for observer in self.observers:
            observer.waited(began, ended)
        if self._error or not came:
            self._give_up()

    def wait_for_all(self) -> None:
        """wait_for every bucket."""
        self.wait_for(range(len(self.lanes)))

    def wait_until_answered(self) -> None:
        """Return when this step's pushes, or the last one's, have all been answered: each server has taken them.

        Raises:
            Failure: as wait_for.
        """
        with self._changed:
            came = self._changed.wait_for(lambda: self._error or not self.context.status.pending, self.wire.patience)
        if self._error or not came:
            self._give_up()

    def last_closed_step(self) -> int:
        """The last step that is over in every bucket, where all of them dropped this worker's last push; else 0."""
        closed = self.context.status.closed
        if not any(closed):
            return 0
        self.wait_for_all()
        return min(closed)

    def ask_each(self, call: Callable[[Piece], "Future[Any]"]) -> Iterator[tuple[Lane, Any]]:
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
            lane.take(answer, self.shared)
        if self._staging:
            self._staging.wait_for(range(len(self.lanes)))

    def fail(self, problem: BaseException) -> None:
        """Have this raised where the worker waits, or will."""
        with self._changed:
            self._error = self._error or problem
            self._changed.notify_all()

    def _give_up(self) -> NoReturn:
        if self._error:
            raise Failure(str(self._error)) from self._error
        silent = sorted({lane.piece.server for lane in self.lanes if not lane.is_fresh})
        raise Failure(f"parameter servers, ranks {silent}, did not answer within {self.wire.patience:.0f} s")

    def _push(self, number: int, gradient: torch.Tensor) -> None:
        """A bucket is complete: its weights are old now."""
        lane = self.lanes[number]
        # By way of numpy it has a storage of its own: of a larger one, rpc would copy the part before sending.
        lane.gradient, lane.context, lane.is_fresh = torch.from_numpy(gradient.numpy()), self.context, False
        if self._staging:
            self._staging.when_out(partial(self._send, lane), self.fail)
        else:
            self._send(lane)

    def _send(self, ready: Lane | None = None) -> None:
        """Push this bucket and what else waits, as far as there is room."""
        if ready:
            with self._changed:
                self._waiting[ready.piece.server].append(ready.number)
        while True:
            with self._changed:
                if (number := self._next()) is None:
                    return
                lane = self.lanes[number]
                self._waiting[lane.piece.server].remove(number)
                self._under_way[lane.piece.server] += lane.size
            answer = lane.send(self.wire, self.shared, self.worker, self.pushes_again)
            for observer in self.observers:
                observer.sent(lane, sum(self._under_way.values()))
            answer.add_done_callback(partial(self._answered, lane))

    def _next(self) -> int | None:
        """The bucket to push now, if any: of those that are next for their servers, what forward needs first."""
        free, under_way = [], self._under_way
        for server, waiting in self._waiting.items():
            if waiting and (not under_way[server] or under_way[server] + self.lanes[min(waiting)].size <= self.room):
                free.append(min(waiting))
        if free:
            return min(free)
        for server, waiting in self._waiting.items():
            if waiting and server not in self._over_limit:
                self._over_limit[server] = waiting[0]
                return waiting[0]
        return None

    def _answered(self, lane: Lane, future: "Future[Answer]") -> None:
        """What goes wrong here, in one of the wire's threads, is raised where the worker waits."""
        came = time.perf_counter()
        try:
            answer = future.value()
        except Exception as error:
            self.fail(server_failed(lane.piece.server, error))
            return
        try:
            for tensor in lane.push.gradient if self.pushes_again else ():
                self.shared.release(tensor)
            lane.push = lane.push._replace(gradient=None)  # gives its memory back
            with self._changed:
                self._under_way[lane.piece.server] -= lane.size
                if self._over_limit.get(lane.piece.server) == lane.number:
                    del self._over_limit[lane.piece.server]
            self._send()
            lane.take(answer, self.shared)
            lane.context.status.closed.append(answer.dropped)
            lane.context.status.seen.append(answer.staleness)
            for observer in self.observers:
                observer.answered(lane, came, sum(self._under_way.values()))
            with self._changed:
                lane.is_fresh = True
                self._changed.notify_all()
        except Exception as error:
            self.fail(error)
