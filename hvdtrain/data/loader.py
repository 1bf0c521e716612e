"""Images of an image folder as batches of tensors, decoded ahead of the training loop."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps

from hvdtrain.data.sampling import Share
from hvdtrain.errors import Failure

Batch = tuple[torch.Tensor, torch.Tensor]  # images [n, 3, side, side] uint8, labels [n] int64

# Decoded images are kept if all of them fit: small sets are decoded once, not once an epoch.
CACHE_BYTES = 512 * 2**20
AHEAD = 2  # batches decoded ahead of the loop, where they are not kept


def native_side(path: Path) -> int:
    """The side, in pixels, at which an image is trained on if nobody says: its shorter one, within 32 … 224."""
    with _open(path) as image:
        return max(32, min(224, *image.size))


class Loader:
    """Decodes, resizes and batches samples. Threads, not processes: a fork after MPI or rpc has started is unsafe.

    Args:
        samples: (file, class index) of every image.
        side: the middle square of an image is scaled to this side.
        threads: how many images are decoded at once.

    Raises:
        Failure: an image cannot be read; the message names it.
    """

    def __init__(self, samples: Sequence[tuple[Path, int]], side: int, threads: int) -> None:
        self.samples, self.side = samples, side
        self.pool = ThreadPoolExecutor(threads, thread_name_prefix="decode")
        self.labels = torch.tensor([label for _, label in samples])
        self.cache: torch.Tensor | None = None
        if len(samples) * 3 * side * side <= CACHE_BYTES:
            self.cache = torch.stack(list(self.pool.map(self._decode, range(len(samples)))))

    def batches(self, shares: Iterable[Share]) -> Iterator[tuple[Share, Batch]]:
        """Each share with its batch, in order."""
        waiting: deque[tuple[Share, list[Future[torch.Tensor]]]] = deque()
        for share in shares:
            if self.cache is not None:
                yield share, (self.cache[share.indices], self.labels[share.indices])
                continue
            waiting.append((share, [self.pool.submit(self._decode, i) for i in share.indices]))
            if len(waiting) > AHEAD:
                yield self._collect(*waiting.popleft())
        while waiting:
            yield self._collect(*waiting.popleft())

    def _collect(self, share: Share, images: list[Future[torch.Tensor]]) -> tuple[Share, Batch]:
        return share, (torch.stack([image.result() for image in images]), self.labels[share.indices])

    def _decode(self, index: int) -> torch.Tensor:
        with _open(self.samples[index][0]) as image:
            try:
                fitted = ImageOps.fit(_rgb(image), (self.side, self.side), Image.Resampling.BILINEAR)
                return torch.from_numpy(np.array(fitted)).permute(2, 0, 1).contiguous()
            except Exception as error:  # PIL's decoders raise OSError, ValueError, SyntaxError and others
                raise Failure(f"cannot decode {self.samples[index][0]}: {error}") from None


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode == "I;16":  # PIL would make white of all above 255 in place of scaling
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    return image.convert("RGB")


def _open(path: Path) -> Image.Image:
    try:
        return Image.open(path)
    except Exception as error:  # as above: a broken header provokes them too
        raise Failure(f"cannot read the image {path}: {error}") from None
