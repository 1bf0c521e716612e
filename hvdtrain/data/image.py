"""One encoded image: reading, checking, decoding, shrinking and encoding it. Builds and training open images here, so
that both accept the same.
"""

import contextlib
import hashlib
import io
import math
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdtrain.errors import Failure

if TYPE_CHECKING:
    from hvdtrain.data.folder import ImageFolder

LOOKED_AT = 31  # images whose size stands for all, where nobody has looked at all
MAX_PIXELS = 64_000_000  # 8,000 x 8,000; a larger image is a mistake, or an attempt to exhaust memory
MAX_BYTES = 128 * 2**20  # of its file: an image has a few MB at most
ORIENTATION = 0x0112  # EXIF's tag: 1 as it is, 5 to 8 with width and height exchanged
FORMATS = ("PNG", "JPEG", "BMP", "WEBP")


def png(pixels: Any) -> bytes:
    """A uint8 array or tensor [height, width] or [height, width, 3], or PIL's image, as a PNG."""
    import numpy as np
    from PIL import Image

    buffer = io.BytesIO()
    # Level 3 takes half the time of the default, 6, and a tenth more bytes.
    Image.fromarray(np.asarray(pixels)).save(buffer, "PNG", compress_level=3)
    return buffer.getvalue()


def read(sample: Any) -> bytes:
    """An encoded image.

    Args:
        sample: a Path, or what has read_bytes as a Path does.

    Raises:
        Failure: it cannot be read, or is a file of more than MAX_BYTES.
    """
    try:
        if isinstance(sample, Path) and (size := sample.stat().st_size) > MAX_BYTES:
            raise Failure(f"{sample} has {size:,} bytes, too many for an image")
        return sample.read_bytes()
    except OSError as error:
        raise Failure(f"{sample} cannot be read: {error.strerror or error}") from None


def open_image(content: bytes, name: str) -> Any:
    """A PIL image of which only the header has been read.

    Raises:
        Failure: it is no image of FORMATS, has more than MAX_PIXELS, or a damaged header.
    """
    from PIL import Image

    Image.MAX_IMAGE_PIXELS = None  # it warns of more, and MAX_PIXELS are less
    try:
        image = Image.open(io.BytesIO(content), formats=FORMATS)
    except Exception as error:  # PIL's decoders raise OSError, ValueError, SyntaxError and others
        raise Failure(f"{name} is not an image that can be read: {_reason(error)}") from None
    if image.width * image.height > MAX_PIXELS:
        raise Failure(f"{name} has {image.width:,} x {image.height:,} pixels, more than {MAX_PIXELS:,} in all")
    return image


def check(content: bytes, name: str) -> tuple[int, int]:
    """Its width and height. Failure unless it looks like an image, by its header and a PNG's checksums: no pixels are
    decoded.
    """
    image = open_image(content, name)
    with decoding(name):
        image.verify()
    return image.size


def native_side(data: "ImageFolder") -> int:
    """The default side of training images, in pixels: what `data build` has written down, or else that of LOOKED_AT
    training images. Failure where one of them cannot be read.
    """
    if data.image_size:
        return data.image_size
    from hvdtrain.data.sampling import packing_order

    # The first that would be packed: of a packed set, they lie in one row group.
    samples = [data.train[i][0] for i in packing_order(len(data.train))[:LOOKED_AT].tolist()]
    with ThreadPoolExecutor(8) as pool, skippable(samples[0]):  # over a network each waits for the server mostly
        contents = list(pool.map(read, samples))
        return middle_side([min(open_image(*one).size) for one in zip(contents, map(str, samples), strict=True)])


def middle_side(sides: Sequence[int]) -> int:
    """The middle one of the shorter sides of images, in pixels, within 32 to 224."""
    return max(32, min(224, sorted(sides)[len(sides) // 2]))


def decode(content: bytes, name: str) -> Any:
    """A PIL image whose pixels are decoded. Failure where they cannot be."""
    image = open_image(content, name)
    with decoding(name):
        image.load()
    return image


def digest_or_problem(sample: Any) -> bytes | str:
    """The SHA-256 of an image's file, which is decoded too; or a line that says what is wrong with it."""
    try:
        content = read(sample)
        decode(content, str(sample))
        return hashlib.sha256(content).digest()
    except Failure as problem:
        return str(problem)


def shrink(content: bytes, side: int, name: str) -> bytes:
    """The image scaled to a shorter side of `side` pixels, in the same format; unchanged if it is not larger."""
    from PIL import Image

    image = open_image(content, name)
    shorter = min(image.size)
    kind = image.format
    if shorter <= side:
        return decode(content, name) and content
    size = tuple(max(1, round(length * side / shorter)) for length in image.size)
    with decoding(name):
        decode_smaller(image, shorter / side / 2)
        small = (
            image.resize(size, Image.Resampling.LANCZOS) if image.mode != "P" else image.convert("RGBA").resize(size)
        )
        upright(small)
        buffer = io.BytesIO()
        small.save(buffer, kind, **({"quality": 92} if kind in ("JPEG", "WEBP") else {}))
    return buffer.getvalue()


def upright_size(image: Any) -> tuple[int, int]:
    """Width and height of an image when EXIF's orientation is applied."""
    turned = False
    with contextlib.suppress(Exception):
        turned = image.getexif().get(ORIENTATION, 1) in (5, 6, 7, 8)
    return image.size[::-1] if turned else image.size


def upright(image: Any) -> None:
    """Apply EXIF's orientation, in place; one that cannot be read is none."""
    from PIL import ImageOps

    with contextlib.suppress(Exception):
        ImageOps.exif_transpose(image, in_place=True)


def decode_smaller(image: Any, factor: float) -> None:
    """Before a JPEG's pixels are decoded: have the decoder make it smaller by 2, 4 or 8, at most by this factor. That
    takes a fraction of the time. Images of other formats stay as they are.
    """
    image.draft(None, tuple(math.ceil(length / max(1, factor)) for length in image.size))


@contextlib.contextmanager
def decoding(name: str) -> Iterator[None]:
    """Failure where PIL cannot decode an image of which it could read the header."""
    try:
        yield
    except Exception as error:  # PIL's decoders raise OSError, ValueError, SyntaxError and others
        raise Failure(f"{name} is damaged: {_reason(error)}") from None


@contextlib.contextmanager
def skippable(sample: Any) -> Iterator[None]:
    """Failure of an image that training comes to: of a folder's says what leaves it out."""
    try:
        yield
    except Failure as problem:
        remedy = "; --skip-bad leaves such images out" if isinstance(sample, Path) else ""
        raise Failure(f"{problem}{remedy}") from None


def _reason(error: Exception) -> str:
    """The error's message, shortened, without the address of the buffer that PIL names in it."""
    message = " ".join(str(error).split())
    if message.startswith("cannot identify"):
        return f"it is no {', '.join(FORMATS)}"
    message = re.sub(r"<_io.BytesIO[^>]*>", "it", message)
    return message[:120] or type(error).__name__
