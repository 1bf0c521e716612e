"""A worker's buckets on their way: gradients out as they become ready, weights in before they are needed."""

import heapq
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch

from hvdtrain.compression import Compressor
from hvdtrain.errors import Failure
from hvdtrain.modes import Pushed
from hvdtrain.ps import rpc
from hvdtrain.ps.plan import Piece

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

    Attributes:
        pushed: what is known of the current step's push.
        waited_s: seconds that wait_for took since the current step began.
        bytes_moved: bytes of tensors sent and received in all.
    """

    def __init__(
        self, worker: int, pieces: Sequence[Piece], sizes: Sequence[int], weights: torch.Tensor, compression: str,
        timeout: float,
    ) -> None:  # fmt: skip
        self.worker, self.pieces, self.weights, self.timeout = worker, pieces, weights, timeout
        # Where the gradients of several parameters come together, or those of a GPU arrive; others leave as they are.
        self._gathered = {
            number: torch.empty(piece.stop - piece.start, pin_memory=weights.is_cuda)
            for number, piece in enumerate(pieces)
            if len(piece.parameters) > 1 or weights.is_cuda
        }
        self.compressors = [Compressor(compression) for _ in pieces]  # each with the error it has yet to send
        self.versions = [0] * len(pieces)
        self.step, self.lr = 0, 0.0
        self.pushed = Pushed(0)
        self.waited_s = 0.0
        self.bytes_moved = 0
        self._starts = list(accumulate(sizes, initial=0))
        self._of_parameter: list[list[int]] = [[] for _ in sizes]
        for number, piece in enumerate(pieces):
            for parameter in piece.parameters:
                self._of_parameter[parameter].append(number)
        self._missing = [0] * len(pieces)  # gradients that a bucket waits for
        self._changed = threading.Condition()  # guards all below, which rpc's threads change too
        self._fresh = [True] * len(pieces)
        self._queue: list[tuple[int, torch.Tensor, int, float, Pushed]] = []  # a heap by number: one of each at most
        self._under_way = 0
        self._error: BaseException | None = None

    def begin(self, step: int, lr: float) -> None:
        """The step whose gradients come next."""
        self.step, self.lr, self.waited_s = step, lr, 0.0
        self.pushed = Pushed(len(self.pieces))
        self._missing = [len(piece.parameters) for piece in self.pieces]

    def put(self, parameter: int, gradient: torch.Tensor) -> None:
        """Take a parameter's gradient, which nobody else may change any more, and push every bucket it completes.

        From a GPU it is copied while the program goes on: call `arrived` when all are there.
        """
        flat, first = gradient.reshape(-1), self._starts[parameter]
        for number in self._of_parameter[parameter]:
            piece = self.pieces[number]
            start, stop = max(piece.start, first), min(piece.stop, first + len(flat))
            own = flat[start - first : stop - first]
            self._missing[number] -= 1
            if number in self._gathered:
                self._gathered[number][start - piece.start : stop - piece.start].copy_(own, non_blocking=True)
                if not self._missing[number] and not gradient.is_cuda:
                    self._push({number: self._gathered[number]})
            else:
                # By way of numpy it has a storage of its own: of a larger one, rpc would copy the part before sending.
                self._push({number: torch.from_numpy(own.numpy())})

    def arrived(self) -> None:
        """All gradients have been put and copied from the GPU: push every bucket."""
        self._push(self._gathered)

    def wait_for(self, parameters: Iterable[int]) -> None:
        """Return when these parameters are as the answers to the last push have them.

        Raises:
            Failure: a server failed, or did not answer in time.
        """
        self._wait({number for parameter in parameters for number in self._of_parameter[parameter]})

    def wait_for_all(self) -> None:
        """wait_for every parameter."""
        self._wait(range(len(self.pieces)))

    def read(self) -> None:
        """Take every bucket as it is on its server."""
        answers = [rpc.read(piece.server, piece.number, self.worker) for piece in self.pieces]
        for number, answer in enumerate(answers):
            self._write(number, *rpc.result(self.pieces[number].server, answer))

    def _wait(self, numbers: Iterable[int]) -> None:
        numbers = list(numbers)
        began = time.perf_counter()
        with self._changed:
            came = self._changed.wait_for(
                lambda: self._error or all(self._fresh[number] for number in numbers), self.timeout
            )
        self.waited_s += time.perf_counter() - began
        if self._error:
            raise Failure(str(self._error)) from self._error
        if not came:
            silent = sorted({self.pieces[number].server for number in numbers if not self._fresh[number]})
            raise Failure(f"parameter servers, ranks {silent}, did not answer within {self.timeout:.0f} s")

    def _push(self, gradients: Mapping[int, torch.Tensor]) -> None:
        with self._changed:
            for number, gradient in gradients.items():
                self._fresh[number] = False
                # With its step: it may wait here until the next one has begun.
                heapq.heappush(self._queue, (number, gradient, self.step, self.lr, self.pushed))
        self._send()

    def _send(self) -> None:
        """Push what is in the queue, as far as there is room."""
        while True:
            with self._changed:
                if not self._queue or self._under_way > UNDER_WAY:
                    return
                number, gradient, step, lr, pushed = heapq.heappop(self._queue)
                self._under_way += gradient.nbytes
                piece, version = self.pieces[number], self.versions[number]
                pushed.read(version)
            parts = self.compressors[number].encode(gradient)
            with self._changed:
                self.bytes_moved += sum(part.nbytes for part in parts)
            delivered = rpc.push(piece.server, piece.number, self.worker, step, version, lr, parts)
            delivered.add_done_callback(partial(self._delivered, number, pushed, gradient.nbytes))

    def _delivered(self, number: int, pushed: Pushed, size: int, done: Any) -> None:
        """The gradient is on its server; the answer may be here too."""
        with self._changed:
            self._under_way -= size
        self._guarded(self._send)
        self._guarded(self._take, number, pushed, done)

    def _take(self, number: int, pushed: Pushed, done: Any) -> None:
        piece = self.pieces[number]
        wire = rpc.result(piece.server, done)
        if wire is None:
            answer = rpc.answer(piece.server, piece.number, self.worker)
            answer.add_done_callback(partial(self._guarded, self._take, number, pushed))
            return
        self._write(number, *wire)
        with self._changed:
            pushed.answered(wire[1])
            self._fresh[number] = True
            self._changed.notify_all()

    def _write(self, number: int, version: int, staleness: int, weights: torch.Tensor) -> None:
        piece = self.pieces[number]
        self.weights[piece.start : piece.stop].copy_(weights)
        self.versions[number] = version
        with self._changed:
            self.bytes_moved += weights.nbytes

    def _guarded(self, act: Any, *args: Any) -> None:
        """What goes wrong in one of rpc's threads is raised where the worker waits."""
        try:
            act(*args)
        except BaseException as error:
            with self._changed:
                self._error = self._error or error
                self._changed.notify_all()
