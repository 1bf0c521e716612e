"""Gradients from a GPU to CPU memory and weights back, while the GPU goes on computing.

Both go through pinned memory, each way on a stream of its own, so that they overlap with backward and with each other.
Copies wait for the kernels that they need, and kernels for copies, by events: nobody waits on the processor but the
thread that sends a gradient once it has arrived.
"""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from hvdtrain.buckets.partition import Piece


class Staging:
    """The way of every bucket between a GPU and the network.

    What is copied out of a bucket's memory here has been sent when the bucket is next copied: its answer is awaited
    before forward uses its weights.

    Args:
        weights: [parameters] float32, the model's own memory, on the GPU.
        pieces: the buckets.

    Attributes:
        gradients: of each bucket, [bucket] float32 on the CPU.
    """

    def __init__(self, weights: torch.Tensor, pieces: Sequence[Piece]) -> None:
        self.weights, self.pieces = weights, pieces
        self.api: Any = torch.get_device_module(weights.device)  # torch.cuda; torch.cpu has the same, to test
        on_gpu = weights.device.type == "cuda"
        self.gradients = [torch.empty(piece.stop - piece.start, pin_memory=on_gpu) for piece in pieces]
        self.answers = [torch.empty(piece.stop - piece.start, pin_memory=on_gpu) for piece in pieces]
        self.outbound, self.inbound = self.api.Stream(), self.api.Stream()
        self.arrivals: dict[int, Any] = {}  # bucket -> the event of its newest weights
        self.sender = ThreadPoolExecutor(1, thread_name_prefix="staging")

    def copy_out(self, number: int, start: int, gradient: torch.Tensor) -> None:
        """Copy a part of a bucket's gradient, which begins at `start` there, once it is computed."""
        computed = self._event(self.api.current_stream())
        self.outbound.wait_event(computed)
        with self.api.stream(self.outbound):
            self.gradients[number][start : start + len(gradient)].copy_(gradient, non_blocking=True)
        if gradient.is_cuda:
            gradient.record_stream(self.outbound)

    def when_out(self, act: Callable[[], object], failed: Callable[[Exception], None]) -> None:
        """Call `act` on another thread when all that was copied out so far is there; `failed` with what goes wrong
        in the copy or there.
        """
        copied = self._event(self.outbound)

        def wait() -> None:
            try:
                copied.synchronize()
                act()
            except Exception as error:
                failed(error)

        self.sender.submit(wait)

    def copy_in(self, number: int, weights: torch.Tensor) -> None:
        """Copy a bucket's weights, [bucket] on the CPU, into the model. No kernel that is queued reads the old ones:
        its gradient was copied after all of them.
        """
        piece = self.pieces[number]
        if (last := self.arrivals.pop(number, None)) is not None:
            last.synchronize()  # nobody waited for it, and it may be reading what is overwritten now
        self.answers[number].copy_(weights)
        with self.api.stream(self.inbound):
            self.weights[piece.start : piece.stop].copy_(self.answers[number], non_blocking=True)
            self.arrivals[number] = self._event(self.inbound)

    def settle(self) -> None:
        """Let no copy into the model overtake what is queued for the model now."""
        self.inbound.wait_stream(self.api.current_stream())

    def wait_for(self, numbers: Iterable[int]) -> None:
        """Have the stream that computes wait for the weights of these buckets that are on their way."""
        stream = self.api.current_stream()
        for number in numbers:
            if (arrival := self.arrivals.pop(number, None)) is not None:
                stream.wait_event(arrival)

    def _event(self, stream: Any) -> Any:
        event = self.api.Event()
        event.record(stream)
        return event
