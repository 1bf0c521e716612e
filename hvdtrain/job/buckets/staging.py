"""Copies of gradients from a GPU to CPU memory and of weights back, while the GPU goes on computing.

Both go through pinned memory, each way on a stream of its own, so that they overlap with backward
and with each other. Copies wait for the kernels that they need, and kernels for copies, by events.
No thread waits, except the one that sends a gradient once it has arrived.
"""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from hvdtrain.base.numerics.threads import compute_on
from hvdtrain.job.buckets.partition import BucketRange


class Staging:
    """The way of every bucket between a GPU and the network.

    A bucket's memory here can be overwritten by the next copy: what was copied out before has been
    sent by then, since its answer is awaited before forward uses the bucket's weights.

    Args:
        weights: [parameters] float32, the model's own memory, on the GPU.
        buckets: the buckets.

    Attributes:
        gradients: of each bucket, [bucket] float32 on the CPU.
    """

    def __init__(self, weights: torch.Tensor, buckets: Sequence[BucketRange]) -> None:
        self.weights = weights
        self.buckets = buckets
        # torch.cuda; torch.cpu has the same functions, to test.
        self.api: Any = torch.get_device_module(weights.device)
        on_gpu = weights.device.type == "cuda"
        # A thread that waits for an event sleeps. By default CUDA has it spin, on a core that
        # decodes and sends.
        self._of_event = {"blocking": True} if on_gpu else {}
        self.gradients = [torch.empty(bucket.elements, pin_memory=on_gpu) for bucket in buckets]
        self.answers = [torch.empty(bucket.elements, pin_memory=on_gpu) for bucket in buckets]
        self.outbound = self.api.Stream()
        self.inbound = self.api.Stream()
        # By bucket: the event of its newest weights, until they are waited for.
        self.arrivals: dict[int, Any] = {}
        # By bucket: the event after which nothing reads the memory of its answer.
        self._read: dict[int, Any] = {}
        self.sender = ThreadPoolExecutor(1, "staging", compute_on, (weights.device,))

    def copy_out(self, number: int, start: int, gradient: torch.Tensor) -> None:
        """Copies a part of a bucket's gradient off the GPU, once it is computed.

        Args:
            number: the bucket's number.
            start: where in the bucket the part begins.
            gradient: the part.
        """
        computed = self._event(self.api.current_stream())
        self.outbound.wait_event(computed)
        with self.api.stream(self.outbound):
            self.gradients[number][start : start + len(gradient)].copy_(gradient, non_blocking=True)
        if gradient.is_cuda:
            gradient.record_stream(self.outbound)

    def when_out(self, act: Callable[[], object], failed: Callable[[Exception], None]) -> None:
        """Calls `act` on another thread when all that was copied out so far is there.

        Args:
            act: what is to be done then.
            failed: called with the error, where the copy or `act` fails.
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
        """Copies a bucket's weights, [bucket] on the CPU, into the model.

        No kernel that is queued reads the old weights: all of them came before the copy of the
        bucket's gradient. A thread of the wire may call it.
        """
        compute_on(self.weights.device)
        bucket = self.buckets[number]
        last = self._read.get(number)
        if last is not None:
            last.synchronize()
        self.answers[number].copy_(weights)
        with self.api.stream(self.inbound):
            self.weights[bucket.start : bucket.stop].copy_(self.answers[number], non_blocking=True)
            arrival = self._event(self.inbound)
        self.arrivals[number] = arrival
        self._read[number] = arrival

    def settle(self) -> None:
        """Lets no copy into the model overtake the kernels that are queued now."""
        self.inbound.wait_stream(self.api.current_stream())

    def wait_for(self, numbers: Iterable[int]) -> None:
        """Has the stream that computes wait for weights of these buckets that are on their way."""
        stream = self.api.current_stream()
        for number in numbers:
            arrival = self.arrivals.pop(number, None)
            if arrival is not None:
                stream.wait_event(arrival)

    def _event(self, stream: Any) -> Any:
        event = self.api.Event(**self._of_event)
        event.record(stream)
        return event
