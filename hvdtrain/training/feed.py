"""Batches on their way from the loader to the device that computes."""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from hvdtrain.config.run_config import RunConfig
from hvdtrain.data.loader import Batch
from hvdtrain.data.sampling import Share
from hvdtrain.system.own_code import is_code
from hvdtrain.training.device import memory_format

# The mean and deviation of ImageNet's pixels, which torchvision's weights expect.
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
AHEAD = 2  # batches that are on a GPU before they are asked for


def feed(
    batches: Iterator[tuple[Share, Batch]], device: torch.device, leased: bool = False
) -> Iterator[tuple[Share, Batch]]:
    """The batches on the device.

    For a GPU, a thread puts them together and copies them, from pinned memory and on a stream of its own, while the
    GPU computes on those before; the stream that computes waits for the copy it needs.

    Args:
        leased: one at a time, by a thread on the CPU too: the next share is known while the one before is trained on.
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
    """Makes batches, and copies them to a device, before they are asked for: AHEAD of them, or one where shares are
    leased.
    """

    def __init__(self, batches: Iterator[tuple[Share, Batch]], device: torch.device, leased: bool = False) -> None:
        self.source, self.device, self.leased = batches, device, leased
        self.api: Any = torch.get_device_module(device)
        self.stream = self.api.Stream()
        self.pins = device.type == "cuda"
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="feed")
        self.waiting: deque[Future[tuple[Share, Batch, Any] | None]] = deque()

    def batches(self) -> Iterator[tuple[Share, Batch]]:
        for _ in range(1 if self.leased else AHEAD):
            self.waiting.append(self.pool.submit(self._copy_next))
        while (found := self.waiting.popleft().result()) is not None:
            self.waiting.append(self.pool.submit(self._copy_next))
            share, batch, copied = found
            computing = self.api.current_stream()
            computing.wait_event(copied)
            if self.pins:
                for tensor in batch:
                    tensor.record_stream(computing)  # its memory is not given away before this stream is done with it
            yield share, batch

    def _copy_next(self) -> tuple[Share, Batch, Any] | None:
        found = next(self.source, None)
        if found is None:
            return None
        share, (images, labels) = found
        with self.api.stream(self.stream):  # on its GPU too: this thread would pin for the first one
            if self.pins:
                images, labels = images.pin_memory(), labels.pin_memory()
            batch = images.to(self.device, non_blocking=True), labels.to(self.device, non_blocking=True)
            copied = self.api.Event()
            copied.record(self.stream)
        return share, batch, copied

    def close(self) -> None:
        self.pool.shutdown(wait=not self.leased, cancel_futures=True)  # its thread may wait for a lease for ever


class Normalise:
    """uint8 images [n, 3, side, side] of the device to float32, with ImageNet's mean and deviation. A user's own data
    stays as it is.
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
