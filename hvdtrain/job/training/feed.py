"""Batches on their way from the loader to the device that computes."""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from hvdtrain.base.config.run_config import RunConfig
from hvdtrain.base.numerics.threads import compute_on
from hvdtrain.base.system.own_code import is_code
from hvdtrain.data.loader import Batch
from hvdtrain.data.sampling import Share
from hvdtrain.job.training.device import memory_format

# The mean and deviation of ImageNet's pixels, which torchvision's weights expect.
MEAN = (0.485, 0.456, 0.406)
DEVIATION = (0.229, 0.224, 0.225)
AHEAD = 2  # how many batches are copied to a GPU ahead


def feed(
    batches: Iterator[tuple[Share, Batch]], device: torch.device, leased: bool = False
) -> Iterator[tuple[Share, Batch]]:
    """Yields the batches on the device.

    For a GPU a thread makes the batches, and copies them from pinned memory on another stream,
    while the GPU computes on earlier batches. The stream that computes waits for each copy.

    Args:
        batches: shares, and their images and labels.
        device: the device.
        leased: whether shares are leased. Then a thread makes one batch ahead, on a CPU too, since
            the next share is leased while this one is trained on.
    """
    if device.type == "cpu" and not leased:
        yield from batches
        return
    ahead = Ahead(batches, device, leased)
    try:
        yield from ahead.batches()
    finally:
        ahead.close()


class Ahead:
    """Makes batches, and copies them to a device, ahead: AHEAD of them, or one of leased shares."""

    def __init__(
        self, batches: Iterator[tuple[Share, Batch]], device: torch.device, leased: bool = False
    ) -> None:
        self.source = batches
        self.device = device
        self.leased = leased
        self.api: Any = torch.get_device_module(device)
        self.stream = self.api.Stream()
        self.pins = device.type == "cuda"
        self.pool = ThreadPoolExecutor(1, "feed", compute_on, (device,))
        self.waiting: deque[Future[tuple[Share, Batch, Any] | None]] = deque()

    def batches(self) -> Iterator[tuple[Share, Batch]]:
        """Yields the batches, in order. The current stream may use each of them."""
        for _ in range(1 if self.leased else AHEAD):
            self.waiting.append(self.pool.submit(self._copy_next))
        while (found := self.waiting.popleft().result()) is not None:
            self.waiting.append(self.pool.submit(self._copy_next))
            share, batch, copied = found
            computing = self.api.current_stream()
            computing.wait_event(copied)
            if self.pins:
                for tensor in batch:
                    # Its memory is not used again before this stream is done with it.
                    tensor.record_stream(computing)
            yield share, batch

    def _copy_next(self) -> tuple[Share, Batch, Any] | None:
        """Returns the next batch, and the event at the end of its copy; None if there is none."""
        found = next(self.source, None)
        if found is None:
            return None
        share, (images, labels) = found
        with self.api.stream(self.stream):
            if self.pins:
                images = images.pin_memory()
                labels = labels.pin_memory()
            batch = (
                images.to(self.device, non_blocking=True),
                labels.to(self.device, non_blocking=True),
            )
            copied = self.api.Event()
            copied.record(self.stream)
        return share, batch, copied

    def close(self) -> None:
        # With leased shares the thread may wait for a lease without end.
        self.pool.shutdown(wait=not self.leased, cancel_futures=True)


class Normalise:
    """Normalises images to float32, by the mean and deviation of ImageNet's pixels.

    It takes uint8 images, [n, 3, side, side], on the device. Samples of a user's own data stay as
    they are.
    """

    def __init__(self, config: RunConfig, device: torch.device) -> None:
        self.takes_images = not is_code(config.dataset)
        self.layout = memory_format(config, device)
        self.shift = torch.tensor(MEAN, device=device).view(1, 3, 1, 1) * 255
        self.scale = 1 / (torch.tensor(DEVIATION, device=device).view(1, 3, 1, 1) * 255)

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        if not self.takes_images:
            return images
        return images.to(torch.float32, memory_format=self.layout).sub_(self.shift).mul_(self.scale)
