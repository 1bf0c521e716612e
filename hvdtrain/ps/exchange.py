"""A worker's buckets on their way: gradients out as they become ready, weights in before they are needed."""

import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch

from hvdtrain.errors import Failure
from hvdtrain.numerics.clock import Stopwatch
from hvdtrain.numerics.compression import Compressor
from hvdtrain.ps import wire
from hvdtrain.ps.messages import Answer, Push, PushStatus
from hvdtrain.ps.partition import Completion, Piece
from hvdtrain.ps.shared import SharedMemory
from hvdtrain.ps.staging import Staging
from hvdtrain.world import trace

Announced = tuple[
    int, float, int | None, PushStatus
]  # step, learning rate, leased share, and the status of the step's push

# Bytes of gradients that a worker has under way at once: sent, and not answered. Enough to fill a link while answers
# travel back; little enough that a bucket that forward needs soon, ready late, does not queue behind all others
# (Jayarajan et al., 2019, arXiv:1905.03960). Servers share it evenly, so that none waits while another is busy. And all
# workers together have no more than that under way for each server: so much it may have to hold until others push.
UNDER_WAY = 48 * 2**20
SHORTEST_TRACED_S = 5e-5  # of waits for weights: most layers' are there
PULLS = 8  # buckets that are pulled at once


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
        timeout: seconds after which a wait is given up.
        staged: whether the weights are on a GPU, with CPU memory on the way to the servers.
        shared: by which tensors come and go on one host.
        pushes_again: servers may be killed and come back: see wire.wait_for_return.

    Attributes:
        push_status: of the current step.
        waited_s: seconds that wait_for took since the current step began; on a GPU, of waits that are over there.
        bytes_sent, bytes_received: of tensors, in all.
    """

    def __init__(
        self, worker: int, workers: int, pieces: Sequence[Piece], sizes: Sequence[int], weights: torch.Tensor,
        compression: str, timeout: float, staged: bool, shared: SharedMemory | None = None,
        pushes_again: bool = False,
    ) -> None:  # fmt: skip
        self.worker, self.pieces, self.weights, self.timeout = worker, pieces, weights, timeout
        self.workers, self.pushes_again = workers, pushes_again
        self.shared = shared or SharedMemory()
        servers = {piece.server for piece in pieces}
        self.room = UNDER_WAY // max(len(servers), workers)  # bytes, for each server
        self._staging = Staging(weights, pieces) if staged else None
        # Where the gradients of several parameters come together; others leave as they are.
        self._gathered = {
            number: torch.empty(piece.stop - piece.start)
            for number, piece in enumerate(pieces)
            if len(piece.parameters) > 1 and not staged
        }
        self.compressors = [Compressor(compression, piece.lengths) for piece in pieces]  # with the error yet to send
        self.versions = [0] * len(pieces)
        self.step, self.lr = 0, 0.0
        self.share: int | None = None
        self.push_status = PushStatus(0)
        self.bytes_sent = self.bytes_received = 0
        self._stopwatch = Stopwatch(weights.device)
        self._waits: list[tuple[Any, Any]] = []  # when each wait of this step began and ended
        self._completion = Completion(sizes, pieces)
        self._changed = threading.Condition()  # guards all below, which the wire's threads change too
        self._fresh = [True] * len(pieces)
        self._dropped = [0] * len(pieces)  # of this step's answers: see Answer.dropped
        self._queue: dict[int, tuple[torch.Tensor | None, Announced]] = {}  # buckets that wait, as they became ready
        self._under_way = dict.fromkeys(servers, 0)  # bytes
        self._extra: dict[int, int] = {}  # server -> its bucket that is under way though there was no room
        self._error: BaseException | None = None

    def begin(self, step: int, lr: float, share: int | None = None) -> None:
        """The step whose gradients come next."""
        self.step, self.lr, self.share, self._waits = step, lr, share, []
        self.push_status = PushStatus(len(self.pieces))
        self._completion.begin()
        self._dropped = [0] * len(self.pieces)

    def put(self, parameter: int, gradient: torch.Tensor) -> None:
        """Take a parameter's gradient, which nobody else may change any more, and push every bucket it completes."""
        flat = gradient.reshape(-1)
        for number, at, own_range, is_complete in self._completion.come(parameter):
            own = flat[own_range]
            if self._staging:
                self._staging.copy_out(number, at, own)
                if is_complete:
                    push = partial(self._guarded, self._push, number, self._announce(number))
                    self._staging.when_out(number, push, self.fail)
                continue
            if number in self._gathered:
                self._gathered[number][at : at + len(own)].copy_(own)
                own = self._gathered[number]
            if is_complete:
                # By way of numpy it has a storage of its own: of a larger one, rpc would copy the part before sending.
                self._push(number, self._announce(number), torch.from_numpy(own.numpy()))

    def skip(self) -> None:
        """Take the step without a gradient, where none of its gradients has been put."""
        for number in range(len(self.pieces)):
            self._push(number, self._announce(number), None)

    @property
    def waited_s(self) -> float:
        return sum(self._stopwatch.seconds(began, ended) for began, ended in self._waits)

    def wait_for(self, parameters: Iterable[int]) -> None:
        """Return when these parameters are as the answers to the last push have them.

        Raises:
            Failure: a server failed, or did not answer in time.
        """
        self._wait({number for parameter in parameters for number in self._completion.of_parameter[parameter]})

    def wait_for_all(self) -> None:
        """wait_for every parameter."""
        self._wait(range(len(self.pieces)))

    def wait_until_answered(self) -> None:
        """Return when this step's pushes, or the last one's, have all been answered: each server has taken them.

        Raises:
            Failure: as wait_for.
        """
        with self._changed:
            came = self._changed.wait_for(lambda: self._error or not self.push_status.pending, self.timeout)
        if self._error:
            raise Failure(str(self._error)) from self._error
        if not came:
            raise Failure(f"a parameter server did not answer a push within {self.timeout:.0f} s")

    def over(self) -> int:
        """The last step that is over in every bucket, where all of them dropped this worker's last push; else 0."""
        if not any(self._dropped):
            return 0
        self.wait_for_all()
        return min(self._dropped)

    def pull(self) -> None:
        """Take every bucket as it is on its server."""
        if self._staging:
            self._staging.settle()
        calls: deque[Any] = deque()
        for number in range(len(self.pieces) + PULLS):
            if number >= PULLS:
                self._write(number - PULLS, wire.result(self.pieces[number - PULLS].server, calls.popleft()))
            if number < len(self.pieces):
                calls.append(wire.call(self.pieces[number].server, "pull", self.pieces[number].number, self.worker))
        if self._staging:
            self._staging.wait_for(range(len(self.pieces)))

    def _wait(self, numbers: Iterable[int]) -> None:
        numbers = list(numbers)
        began = self._stopwatch.now()
        with self._changed:
            came = self._changed.wait_for(
                lambda: self._error or all(self._fresh[number] for number in numbers), self.timeout
            )
        if self._staging:
            self._staging.wait_for(numbers)
        ended = self._stopwatch.now()
        self._waits.append((began, ended))
        if trace.is_recording() and not self._staging and ended - began > SHORTEST_TRACED_S:
            trace.span(trace.STEP, "comm", began, ended)
        if self._error:
            raise Failure(str(self._error)) from self._error
        if not came:
            silent = sorted({self.pieces[number].server for number in numbers if not self._fresh[number]})
            raise Failure(f"parameter servers, ranks {silent}, did not answer within {self.timeout:.0f} s")

    def _announce(self, number: int) -> Announced:
        """A bucket is to be pushed: its weights are old now. Returns its step, which may be over when it is sent."""
        with self._changed:
            self._fresh[number] = False
        return self.step, self.lr, self.share, self.push_status

    def _push(self, number: int, announced: Announced, gradient: torch.Tensor | None) -> None:
        with self._changed:
            self._queue[number] = gradient, announced
        self._send()

    def _send(self) -> None:
        """Push what is in the queue, as far as there is room."""
        while True:
            with self._changed:
                if (number := self._next()) is None:
                    return
                gradient, (step, lr, share, status) = self._queue.pop(number)
                size = _bytes(gradient)
                self._under_way[self.pieces[number].server] += size
                piece, version = self.pieces[number], self.versions[number]
                status.sent(version)
            began = time.perf_counter()
            encoded = None if gradient is None else self.compressors[number].encode(gradient)
            with self._changed:
                self.bytes_sent += sum(tensor.nbytes for tensor in encoded or ())
            sent = None if encoded is None else [
                self.shared.put(tensor, piece.server, held=self.pushes_again) for tensor in encoded
            ]  # fmt: skip
            push = Push(self.worker, step, version, lr, sent, share)
            answer = wire.call(piece.server, "push", piece.number, push)
            traced = trace.is_on and trace.records(push.step_of_job(self.workers))
            if traced:
                flow = trace.flow_of(step, self.worker, piece.server, piece.number)
                trace.span(
                    trace.PUSH, f"push bucket {piece.number} to server {piece.server}", began, time.perf_counter(), flow
                )
                trace.count("bytes under way", sum(self._under_way.values()))
            answer.add_done_callback(
                partial(self._answered, number, size, status, step if traced else 0, began, sent or [])
            )

    def _next(self) -> int | None:
        """The bucket to push now, if any: of those that are next for their servers, what forward needs first."""
        waiting: dict[int, list[int]] = {}  # server -> its buckets, as they became ready
        for number in self._queue:
            waiting.setdefault(self.pieces[number].server, []).append(number)
        under_way = self._under_way
        if free := [
            first
            for server, first in ((server, min(own)) for server, own in waiting.items())
            if not under_way[server] or under_way[server] + _bytes(self._queue[first][0]) <= self.room
        ]:
            return min(free)
        for server, own in waiting.items():
            if server not in self._extra:
                self._extra[server] = own[0]
                return own[0]
        return None

    def _answered(
        self, number: int, size: int, status: PushStatus, traced_step: int, began: float, sent: list[Any], answer: Any
    ) -> None:
        came = time.perf_counter()
        for tensor in sent:
            self.shared.release(tensor)
        with self._changed:
            server = self.pieces[number].server
            self._under_way[server] -= size
            if self._extra.get(server) == number:
                del self._extra[server]
        self._guarded(self._send)
        self._guarded(self._take, number, status, answer)
        if traced_step:
            piece = self.pieces[number]
            flow = trace.flow_of(traced_step, self.worker, piece.server, piece.number)
            trace.span(trace.UNDER_WAY, f"bucket {number}", began, came)
            name = f"pull bucket {piece.number} from server {piece.server}"
            trace.span(trace.PULL, name, came, time.perf_counter(), flow)
            trace.count("bytes under way", sum(self._under_way.values()))
            trace.count("staleness", status.staleness)

    def _take(self, number: int, status: PushStatus, future: Any) -> None:
        answer: Answer = wire.result(self.pieces[number].server, future)
        self._write(number, answer)
        with self._changed:
            status.answered(answer.staleness, dropped=answer.dropped > 0)
            self._dropped[number] = answer.dropped
            self._fresh[number] = True
            self._changed.notify_all()

    def _write(self, number: int, answer: Answer) -> None:
        piece, weights = self.pieces[number], self.shared.get(answer.weights)
        if self._staging:
            self._staging.copy_in(number, weights)
        else:
            self.weights[piece.start : piece.stop].copy_(weights)
        self.versions[number] = answer.version
        with self._changed:
            self.bytes_received += weights.nbytes

    def fail(self, problem: BaseException) -> None:
        """Have this raised where the worker waits, or will."""
        with self._changed:
            self._error = self._error or problem
            self._changed.notify_all()

    def _guarded(self, act: Any, *args: Any) -> None:
        """What goes wrong in one of the wire's threads is raised where the worker waits."""
        try:
            act(*args)
        except BaseException as error:
            self.fail(error)


def _bytes(gradient: torch.Tensor | None) -> int:
    return 0 if gradient is None else gradient.nbytes
