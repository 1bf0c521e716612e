"""Images of a data set as batches of tensors, read and decoded ahead of the training loop."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps

from hvdtrain.data.augment import Augment
from hvdtrain.data.decoded import decoded_images
from hvdtrain.data.folder import ManyImages, Samples
from hvdtrain.data.image import (
    decode_smaller,
    decoding,
    in_rgb,
    open_image,
    read,
    skippable,
    upright,
    upright_size,
)
from hvdtrain.data.own import OwnSamples
from hvdtrain.data.sampling import Share
from hvdtrain.data.synthetic import SyntheticImage

# Images [n, 3, side, side] uint8, or a user's own tensors [n, …]; labels [n] int64.
Batch = tuple[torch.Tensor, torch.Tensor]

# Decoded images are cached if all of them fit, so that small data sets are decoded once and not
# every epoch.
CACHE_BYTES = 512 * 2**20
# Images that a thread decodes as one task for the cache. A task for each image would take as long
# as decoding it.
CHUNK = 16
AHEAD = 2  # batches that are decoded ahead of the training loop, where images are not cached
READ_AHEAD = 6  # batches that are read ahead of those, where images come over a network
READERS = 16  # concurrent reads over a network: each waits for the server most of the time


def example(samples: Samples, side: int, count: int) -> torch.Tensor:
    """Returns a batch to try a model with: random images float32, or samples of a user's data.

    Args:
        samples: The samples of the data set.
        side: The side of images in pixels.
        count: The number of samples in the batch.
    """
    if isinstance(samples, OwnSamples):
        tensors, _ = samples.batch([number % len(samples) for number in range(count)])
        return tensors
    with torch.random.fork_rng(devices=[]):
        return torch.rand(count, 3, side, 1).expand(-1, -1, -1, side)


def open_loader(
    samples: Samples,
    side: int,
    threads: int,
    augment: Augment | None = None,
    resize: int = 0,
    soon: Iterable[int] | None = None,
) -> "Batches":
    """Returns the loader for these samples. See Loader; a user's own data takes no arguments."""
    if isinstance(samples, OwnSamples):
        return OwnLoader(samples)
    return Loader(samples, side, threads, augment, resize, soon)


class OwnLoader:
    """Loader of a user's own data. Samples that are not in memory are read ahead, by one thread.

    Attributes:
        ahead: The number of batches that are begun before they are requested.
        sample: A batch of one sample, [1, …].
    """

    def __init__(self, samples: OwnSamples) -> None:
        self.samples = samples
        self.sample = samples.first[None]
        self.ahead = AHEAD
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="read")

    def batches(
        self, shares: Iterable[Share], look_ahead: bool = True
    ) -> Iterator[tuple[Share, Batch]]:
        """Yields each share with its batch; see Loader.batches."""
        waiting: deque[tuple[Share, Future[Batch]]] = deque()
        for share in shares:
            # Samples in memory are copied here: to hand the task to a thread would take longer.
            if not waiting and self.samples.keeps(share.indices):
                yield share, self.samples.batch(share.indices)
                continue
            waiting.append((share, self.pool.submit(self.samples.batch, share.indices)))
            if len(waiting) > (self.ahead if look_ahead else 0):
                first, batch = waiting.popleft()
                yield first, batch.result()
        for last, batch in waiting:
            yield last, batch.result()


class Loader:
    """Loader of images: decodes, resizes and batches them, in threads.

    There are no worker processes, because forking after MPI or rpc has started is unsafe.

    Args:
        samples: The samples of the data set.
        side: The side, in pixels, to which the middle square of an image is scaled.
        threads: The number of images that are decoded at the same time.
        augment: Random changes; by default none.
        resize: 0, or the pixels to which the shorter side of an image is scaled before the middle
            square of `side` is cut out, as torchvision tests pretrained models (256 and 224).
        soon: The samples that are decoded at once if images are cached; by default all. Others are
            decoded when they are first requested. None is decoded if an earlier process has: see
            data.decoded.

    Attributes:
        ahead: The number of batches that are begun before they are requested.
        sample: A batch of one image, [1, 3, side, side] uint8.

    Raises:
        Failure: An image cannot be read, or `data build` would not accept it (data.image). The
            message names it. Of images that are not decoded at once, `batches` raises it.
    """

    def __init__(
        self,
        samples: Samples,
        side: int,
        threads: int,
        augment: Augment | None = None,
        resize: int = 0,
        soon: Iterable[int] | None = None,
    ) -> None:
        self.samples = samples
        self.side = side
        self.resize = resize
        self.sample = torch.zeros(1, 1, 1, 1, dtype=torch.uint8).expand(1, 3, side, side)
        self.augment = augment or Augment("none", 0)
        self.pool = ThreadPoolExecutor(threads, thread_name_prefix="decode")
        remote = not isinstance(samples[0][0], Path | SyntheticImage)
        self.readers = ThreadPoolExecutor(READERS, thread_name_prefix="read") if remote else None
        self.ahead = AHEAD + (READ_AHEAD if remote else 0)
        self.labels = labels(samples)
        self.cache: torch.Tensor | None = None
        if len(samples) * 3 * side * side <= CACHE_BYTES and not self.augment.crops:
            self.cache = torch.empty(len(samples), 3, side, side, dtype=torch.uint8)
            self.missing = set(range(len(samples)))  # samples that the cache lacks
            self._begin_cache(self.cache, soon)

    def batches(
        self, shares: Iterable[Share], look_ahead: bool = True
    ) -> Iterator[tuple[Share, Batch]]:
        """Yields each share with its batch, in order.

        Args:
            shares: The shares to load.
            look_ahead: Whether `ahead` shares are taken, and their images decoded, before their
                batches are requested.
        """
        waiting: deque[tuple[Share, Future[torch.Tensor]]] = deque()
        for share in shares:
            decoded: list[Future[torch.Tensor]] = []
            if self.cache is None:
                decoded = self._start_decoding(share.indices, share.epoch)
            else:
                self._fill_cache(share.indices)
                # Without changes to make, to hand the task to a thread would take longer.
                if self.augment.kind == "none":
                    yield share, (self.cache[share.indices], self.labels[share.indices])
                    continue
            waiting.append((share, self.pool.submit(self._images, share, decoded)))
            if len(waiting) > (self.ahead if look_ahead else 0):
                first, images = waiting.popleft()
                yield first, (images.result(), self.labels[first.indices])
        for last, images in waiting:
            yield last, (images.result(), self.labels[last.indices])

    def _begin_cache(self, cache: torch.Tensor, soon: Iterable[int] | None) -> None:
        """Reads all samples where an earlier process has decoded them, or decodes those of `soon`."""
        decoded = decoded_images(self.samples, self.side, self.resize)
        if decoded and decoded.read(cache):
            self.missing.clear()
            return
        self._fill_cache(self.missing if soon is None else soon)
        if decoded and not self.missing:
            decoded.write(cache)

    def _fill_cache(self, indices: Iterable[int]) -> None:
        """Decodes the samples that the cache lacks, and blocks until they are in it."""
        assert self.cache is not None
        new = sorted(self.missing.intersection(indices)) if self.missing else []
        if self.readers:
            new.sort(key=lambda index: self.samples[index][0].row)  # row group by row group
            for index, image in zip(new, self._start_decoding(new, 0), strict=True):
                self.cache[index] = image.result()
        else:
            tasks = []
            for start in range(0, len(new), CHUNK):
                chunk = new[start : start + CHUNK]
                tasks.append(self.pool.submit(self._decode_to_cache, chunk, self.cache))
            for task in tasks:
                task.result()
        self.missing.difference_update(new)

    def _decode_to_cache(self, indices: Sequence[int], cache: torch.Tensor) -> None:
        for index in indices:
            cache[index] = self._decode(index, 0, None)

    def _images(self, share: Share, decoded: Sequence[Future[torch.Tensor]]) -> torch.Tensor:
        """Returns the images of a share with random changes, [n, 3, side, side] uint8.

        This runs in the pool, and may wait there for `decoded`: the pool has begun these before.

        Args:
            share: The share.
            decoded: Its images; empty where they are in the cache.
        """
        if self.cache is None:
            images = [image.result() for image in decoded]
        else:
            images = list(self.cache[share.indices])
        changed = []
        for image, index in zip(images, share.indices, strict=True):
            changed.append(self.augment.change(image, share.epoch, index))
        return torch.stack(changed)

    def _start_decoding(self, indices: Iterable[int], epoch: int) -> list[Future[torch.Tensor]]:
        """Starts to read and decode samples, each to [3, side, side] uint8."""
        decoded = []
        for index in indices:
            reading = None
            if self.readers:
                reading = self.readers.submit(read, self.samples[index][0])
            decoded.append(self.pool.submit(self._decode, index, epoch, reading))
        return decoded

    def _decode(self, index: int, epoch: int, reading: Future[bytes] | None) -> torch.Tensor:
        """Decodes one sample, [3, side, side] uint8, after reading it unless `reading` does."""
        sample = self.samples[index][0]
        if isinstance(sample, SyntheticImage):  # noise is neither decoded nor cropped
            return sample.pixels(self.side)
        name = str(sample)
        with skippable(sample):
            content = reading.result() if reading else read(sample)
            with open_image(content, name) as image, decoding(name):
                fitted = self._fit(image, epoch, index)
                return torch.from_numpy(np.array(fitted)).permute(2, 0, 1).contiguous()

    def _fit(self, image: Image.Image, epoch: int, index: int) -> Image.Image:
        """Returns the square of an image to train on or to test, in RGB."""
        square = (self.side, self.side)
        width, height = upright_size(image)
        box: tuple[float, float, float, float] = (0, 0, width, height)
        if self.augment.crops:
            box = self.augment.box((width, height), epoch, index)
        left, upper, right, lower = box
        # A much larger JPEG is decoded smaller, to at least twice the side that is needed. As
        # torchvision tests pretrained models, it is decoded whole.
        shrinks = min(right - left, lower - upper) / self.side / 2
        decode_smaller(image, 1 if self.resize else shrinks)
        upright(image)
        image = in_rgb(image)
        if self.augment.crops:
            x = image.width / width
            y = image.height / height
            scaled_box = (left * x, upper * y, right * x, lower * y)
            return image.resize(square, Image.Resampling.BILINEAR, scaled_box)
        if not self.resize:
            return ImageOps.fit(image, square, Image.Resampling.BILINEAR)
        return image.resize(square, Image.Resampling.BILINEAR, self._middle(image.size))

    def _middle(self, size: tuple[int, int]) -> tuple[float, float, float, float]:
        """Returns the part of an image that the square shows, when `resize` is given.

        Only this part is scaled: to scale an image of 1 x 30,000 pixels first would take 5.9 GB.

        Returns:
            left, upper, right, lower, in pixels of the image.
        """
        width, height = size
        left, right = self._middle_of(width, min(size))
        upper, lower = self._middle_of(height, min(size))
        return left, upper, right, lower

    def _middle_of(self, length: int, shorter: int) -> tuple[float, float]:
        """Returns where that part begins and ends along a side of this length."""
        scaled = self.resize * length // shorter
        begin = round((scaled - self.side) / 2)
        return begin * length / scaled, (begin + self.side) * length / scaled


Batches = OwnLoader | Loader


def labels(samples: Samples) -> torch.Tensor:
    """Returns the class of each sample, [samples] int64."""
    if isinstance(samples, ManyImages):  # without making a path for each image
        return torch.from_numpy(samples.labels())
    return torch.tensor([label for _, label in samples], dtype=torch.int64)
