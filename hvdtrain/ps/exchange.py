"""A worker's buckets on their way: gradients out as they become ready, weights in before they are needed."""

import heapq
import threading
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch

from hvdtrain.errors import Failure
from hvdtrain.numerics.clock import Stopwatch
from hvdtrain.numerics.compression import Compressor
from hvdtrain.ps import rpc
from hvdtrain.ps.messages import Answer, Push, PushStatus
from hvdtrain.ps.partition import Piece
from hvdtrain.ps.staging import Staging

Announced = tuple[int, float, PushStatus]  # step, learning rate, and the status of the step's push

# Bytes of gradients under way at once. Enough to fill a link while answers travel back; little enough that a bucket
# that forward needs soon, ready late, does not queue behind all others (Jayarajan et al., 2019, arXiv:1905.03960).
UNDER_WAY = 48 * 2**20


class Exchange:
    """Pushes each bucket when its last gradient is there; of those that wait, what forward needs first goes first.

    Args:
        worker: this worker's number.
        pieces: the buckets, in the order of the flat vector: the order in which forward needs them.
        sizes: elements of each parameter.
        weights: [parameters] float32, the model's own memory: answers are written into it.
        compression: how gradients are encoded.
        timeout: seconds after which a wait is given up.
        staged: whether the weights are on a GPU, with CPU memory on the way to the servers.

    Attributes:
        push_status: of the current step.
        waited_s: seconds that wait_for took since the current step began; of a GPU, those that have come.
        bytes_sent, bytes_received: of tensors, in all.
    """

    def __init__(
        self, worker: int, pieces: Sequence[Piece], sizes: Sequence[int], weights: torch.Tensor, compression: str,
        timeout: float, staged: bool,
    ) -> None:  # fmt: skip
        self.worker, self.pieces, self.weights, self.timeout = worker, pieces, weights, timeout
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
        self.push_status = PushStatus(0)
        self.bytes_sent = self.bytes_received = 0
        self._stopwatch = Stopwatch(weights.device)
        self._waits: list[tuple[Any, Any]] = []  # when each wait of this step began and ended
        self._starts = list(accumulate(sizes, initial=0))
        self._of_parameter: list[list[int]] = [[] for _ in sizes]
        for number, piece in enumerate(pieces):
            for parameter in piece.parameters:
                self._of_parameter[parameter].append(number)
        self._missing = [0] * len(pieces)  # gradients that a bucket waits for
        self._numbers = {(piece.server, piece.number): number for number, piece in enumerate(pieces)}
        self._changed = threading.Condition()  # guards all below, which rpc's threads change too
        self._fresh = [True] * len(pieces)
        # A heap by number, one of each at most; the rest is as _push puts it there.
        self._queue: list[tuple[int, torch.Tensor | None, int, float, PushStatus]] = []
        self._sent: dict[int, PushStatus] = {}  # bucket -> of its last push
        self._under_way = 0
        self._error: BaseException | None = None

    def begin(self, step: int, lr: float) -> None:
        """The step whose gradients come next."""
        self.step, self.lr, self._waits = step, lr, []
        self.push_status = PushStatus(len(self.pieces))
        self._missing = [len(piece.parameters) for piece in self.pieces]

    def put(self, parameter: int, gradient: torch.Tensor) -> None:
        """Take a parameter's gradient, which nobody else may change any more, and push every bucket it completes."""
        flat, first = gradient.reshape(-1), self._starts[parameter]
        for number in self._of_parameter[parameter]:
            piece = self.pieces[number]
            start, stop = max(piece.start, first), min(piece.stop, first + len(flat))
            own = flat[start - first : stop - first]
            self._missing[number] -= 1
            if self._staging:
                self._staging.copy_out(number, start - piece.start, own)
                if not self._missing[number]:
                    self._staging.when_out(number, partial(self._guarded, self._push, number, self._announce(number)))
                continue
            if number in self._gathered:
                self._gathered[number][start - piece.start : stop - piece.start].copy_(own)
                own = self._gathered[number]
            if not self._missing[number]:
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
        self._wait({number for parameter in parameters for number in self._of_parameter[parameter]})

    def wait_for_all(self) -> None:
        """wait_for every parameter."""
        self._wait(range(len(self.pieces)))

    def pull(self) -> None:
        """Take every bucket as it is on its server."""
        answers = [rpc.call(piece.server, "pull", piece.number, self.worker) for piece in self.pieces]
        if self._staging:
            self._staging.settle()
        for number, answer in enumerate(answers):
            self._write(number, rpc.result(self.pieces[number].server, answer))
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
        self._waits.append((began, self._stopwatch.now()))
        if self._error:
            raise Failure(str(self._error)) from self._error
        if not came:
            silent = sorted({self.pieces[number].server for number in numbers if not self._fresh[number]})
            raise Failure(f"parameter servers, ranks {silent}, did not answer within {self.timeout:.0f} s")

    def _announce(self, number: int) -> Announced:
        """A bucket is to be pushed: its weights are old now. Returns its step, which may be over when it is sent."""
        with self._changed:
            self._fresh[number] = False
        return self.step, self.lr, self.push_status

    def _push(self, number: int, announced: Announced, gradient: torch.Tensor | None) -> None:
        with self._changed:
            heapq.heappush(self._queue, (number, gradient, *announced))
        self._send()

    def _send(self) -> None:
        """Push what is in the queue, as far as there is room."""
        while True:
            with self._changed:
                if not self._queue or self._under_way > UNDER_WAY:
                    return
                number, gradient, step, lr, status = heapq.heappop(self._queue)
                size = 0 if gradient is None else gradient.nbytes
                self._under_way += size
                self._sent[number] = status
                piece, version = self.pieces[number], self.versions[number]
                status.sent(version)
            encoded = None if gradient is None else self.compressors[number].encode(gradient)
            with self._changed:
                self.bytes_sent += sum(tensor.nbytes for tensor in encoded or ())
            delivered = rpc.call(piece.server, "push", piece.number, Push(self.worker, step, version, lr, encoded))
            delivered.add_done_callback(partial(self._delivered, number, size))

    def _delivered(self, number: int, size: int, future: Any) -> None:
        """The gradient is on its server; the answer may have come back with it."""
        with self._changed:
            self._under_way -= size
        self._guarded(self._send)
        self._guarded(self._take_result, number, future)

    def _take_result(self, number: int, future: Any) -> None:
        answer = rpc.result(self.pieces[number].server, future)
        if answer is not None:
            self._take(number, answer)

    def take_answer(self, server: int, bucket: int, answer: Answer) -> None:
        """A server's answer to a push that had to wait; servers call this."""
        self._guarded(self._take, self._numbers[server, bucket], answer)

    def _take(self, number: int, answer: Answer) -> None:
        self._write(number, answer)
        with self._changed:
            self._sent[number].answered(answer.staleness)
            self._fresh[number] = True
            self._changed.notify_all()

    def _write(self, number: int, answer: Answer) -> None:
        piece = self.pieces[number]
        if self._staging:
            self._staging.copy_in(number, answer.weights)
        else:
            self.weights[piece.start : piece.stop].copy_(answer.weights)
        self.versions[number] = answer.version
        with self._changed:
            self.bytes_received += answer.weights.nbytes

    def fail(self, problem: BaseException) -> None:
        """Have this raised where the worker waits, or will."""
        with self._changed:
            self._error = self._error or problem
            self._changed.notify_all()

    def _guarded(self, act: Any, *args: Any) -> None:
        """What goes wrong in one of rpc's threads is raised where the worker waits."""
        try:
            act(*args)
        except BaseException as error:
            self.fail(error)
