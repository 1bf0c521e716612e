"""Images of a data set as batches of tensors, read and decoded ahead of the training loop."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps

from hvdtrain.data.augment import Augment
from hvdtrain.data.folder import ManyImages, Samples
from hvdtrain.data.image import decode_smaller, decoding, open_image, read, skippable, upright, upright_size
from hvdtrain.data.own import OwnSamples
from hvdtrain.data.sampling import Share
from hvdtrain.data.synthetic import SyntheticImage

# Images [n, 3, side, side] uint8, or a user's own tensors [n, …]; labels [n] int64.
Batch = tuple[torch.Tensor, torch.Tensor]

# Decoded images are cached if all of them fit, so that small data sets are decoded once and not every epoch.
CACHE_BYTES = 512 * 2**20
CHUNK = 16  # images that a thread decodes in one go for the cache: a task for each took as long as decoding it
AHEAD = 2  # batches decoded ahead of the loop, where they are not cached
READ_AHEAD = 6  # batches read ahead of those, where images come over a network
READERS = 16  # concurrent reads over a network: each waits for the server most of the time


def example(samples: Samples, side: int, count: int) -> torch.Tensor:
    """What a model is tried with: so many samples as it is given them, images float32."""
    if isinstance(samples, OwnSamples):
        return samples.batch([number % len(samples) for number in range(count)])[0]
    with torch.random.fork_rng(devices=[]):
        return torch.rand(count, 3, side, 1).expand(-1, -1, -1, side)


def open_loader(
    samples: Samples, side: int, threads: int, augment: Augment | None = None, resize: int = 0,
    soon: Iterable[int] | None = None,
) -> "Batches":  # fmt: skip
    """What makes batches of these samples; see Loader for the rest, which a user's own data has no use for."""
    if isinstance(samples, OwnSamples):
        return OwnLoader(samples)
    return Loader(samples, side, threads, augment, resize, soon)


class OwnLoader:
    """Batches a user's own data, as it is. Samples that nobody keeps yet are read ahead, by one thread."""

    def __init__(self, samples: OwnSamples) -> None:
        self.samples, self.sample, self.ahead = samples, samples.first[None], AHEAD
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="read")

    def batches(self, shares: Iterable[Share], look_ahead: bool = True) -> Iterator[tuple[Share, Batch]]:
        """As in Loader."""
        waiting: deque[tuple[Share, Future[Batch]]] = deque()
        for share in shares:
            if not waiting and self.samples.keeps(share.indices):  # handing it to a thread would take longer
                yield share, self.samples.batch(share.indices)
                continue
            waiting.append((share, self.pool.submit(self.samples.batch, share.indices)))
            if len(waiting) > (self.ahead if look_ahead else 0):
                first, batch = waiting.popleft()
                yield first, batch.result()
        for last, batch in waiting:
            yield last, batch.result()


class Loader:
    """Decodes, resizes and batches samples, in threads: forking after MPI or rpc has started is unsafe.

    Args:
        side: the middle square of an image is scaled to this side, in pixels.
        threads: how many images are decoded at the same time.
        augment: random changes; by default none.
        resize: 0, or what the shorter side of an image is scaled to before its middle square of `side` is taken, as
            torchvision does to test pretrained models (256, of which 224 are seen).
        soon: the samples that are decoded at once if images are cached, others when they are first asked for; by
            default all.

    Attributes:
        ahead: how many batches it begins before they are asked for.
        sample: one as batches have it, [1, …].

    Raises:
        Failure: an image cannot be read, or is none that a build would accept (data.image); the message names it. Of
            those that are not decoded at once, when they are asked for.
    """

    def __init__(
        self, samples: Samples, side: int, threads: int, augment: Augment | None = None, resize: int = 0,
        soon: Iterable[int] | None = None,
    ) -> None:  # fmt: skip
        self.samples, self.side, self.resize = samples, side, resize
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
            self.missing = set(range(len(samples)))  # in the cache
            self._keep(self.missing if soon is None else soon)

    def batches(self, shares: Iterable[Share], look_ahead: bool = True) -> Iterator[tuple[Share, Batch]]:
        """Each share with its batch, in order.

        Args:
            look_ahead: take shares before their batches are asked for, to decode and change their images ahead.
        """
        waiting: deque[tuple[Share, Future[torch.Tensor]]] = deque()
        for share in shares:
            if self.cache is not None:
                self._keep(share.indices)
            if self.cache is not None and self.augment.kind == "none":  # handing it to a thread would take longer
                yield share, (self.cache[share.indices], self.labels[share.indices])
                continue
            decoded = self._decoded(share.indices, share.epoch) if self.cache is None else []
            waiting.append((share, self.pool.submit(self._images, share, decoded)))
            if len(waiting) > (self.ahead if look_ahead else 0):
                first, images = waiting.popleft()
                yield first, (images.result(), self.labels[first.indices])
        for last, images in waiting:
            yield last, (images.result(), self.labels[last.indices])

    def _keep(self, indices: Iterable[int]) -> None:
        """Decode those of these samples that the cache lacks."""
        assert self.cache is not None
        new = sorted(self.missing.intersection(indices)) if self.missing else []
        if self.readers:
            new.sort(key=lambda index: self.samples[index][0].row)  # row group by row group
            for index, image in zip(new, self._decoded(new, 0), strict=True):
                self.cache[index] = image.result()
        else:
            chunks = (new[start : start + CHUNK] for start in range(0, len(new), CHUNK))
            for done in [self.pool.submit(self._decode_to_cache, chunk, self.cache) for chunk in chunks]:
                done.result()
        self.missing.difference_update(new)

    def _decode_to_cache(self, indices: Sequence[int], cache: torch.Tensor) -> None:
        for index in indices:
            cache[index] = self._decode(index, 0, None)

    def _images(self, share: Share, decoded: Sequence[Future[torch.Tensor]]) -> torch.Tensor:
        """The images of a share, changed. The pool began with those decoded, so this may wait for them in it."""
        images = [image.result() for image in decoded] if self.cache is None else self.cache[share.indices]
        changed = zip(images, share.indices, strict=True)
        return torch.stack([self.augment.change(image, share.epoch, index) for image, index in changed])

    def _decoded(self, indices: Iterable[int], epoch: int) -> list[Future[torch.Tensor]]:
        """Start to read and decode these samples, to squares [3, side, side]."""
        if not self.readers:
            return [self.pool.submit(self._decode, index, epoch, None) for index in indices]
        return [
            self.pool.submit(self._decode, index, epoch, self.readers.submit(read, self.samples[index][0]))
            for index in indices
        ]

    def _decode(self, index: int, epoch: int, reading: Future[bytes] | None) -> torch.Tensor:
        sample = self.samples[index][0]
        if isinstance(sample, SyntheticImage):  # nothing to decode, and no part of noise to prefer
            return sample.pixels(self.side)
        name = str(sample)
        with (
            skippable(sample),
            open_image(reading.result() if reading else read(sample), name) as image,
            decoding(name),
        ):
            fitted = self._fit(image, epoch, index)
            return torch.from_numpy(np.array(fitted)).permute(2, 0, 1).contiguous()

    def _fit(self, image: Image.Image, epoch: int, index: int) -> Image.Image:
        """The square of an image that is trained on, or tested."""
        square, size = (self.side, self.side), upright_size(image)
        left, upper, right, lower = self.augment.box(size, epoch, index) if self.augment.crops else (0, 0, *size)
        if not self.resize:  # a JPEG that is much larger is decoded smaller, to no less than twice what is needed
            decode_smaller(image, min(right - left, lower - upper) / self.side / 2)
        upright(image)
        image = _rgb(image)
        x, y = image.width / size[0], image.height / size[1]
        if self.augment.crops:
            return image.resize(square, Image.Resampling.BILINEAR, (left * x, upper * y, right * x, lower * y))
        if not self.resize:
            return ImageOps.fit(image, square, Image.Resampling.BILINEAR)
        shorter = min(image.size)
        image = image.resize(
            (self.resize * image.width // shorter, self.resize * image.height // shorter), Image.Resampling.BILINEAR
        )
        corner = (round((image.width - self.side) / 2), round((image.height - self.side) / 2))
        return image.crop((*corner, corner[0] + self.side, corner[1] + self.side))


Batches = OwnLoader | Loader


def labels(samples: Samples) -> torch.Tensor:
    """The class of each sample, [samples] int64."""
    if isinstance(samples, ManyImages):  # of which a million need no million paths for this
        return torch.from_numpy(samples.labels())
    return torch.tensor([label for _, label in samples], dtype=torch.int64)


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode == "I;16":  # PIL would not scale 16-bit values, but turn all above 255 white
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if isinstance(image.info.get("transparency"), bytes):  # of a palette, about which PIL would warn
        image = image.convert("RGBA")
    return image.convert("RGB")
