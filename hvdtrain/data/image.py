"""One encoded image: reading, checking, decoding, shrinking and encoding it. Builds and training open images here, so
that both accept the same.
"""

import io
import re
from pathlib import Path
from typing import Any

from hvdtrain.errors import Failure

MAX_PIXELS = 64_000_000  # 8,000 x 8,000; a larger image is a mistake, or an attempt to exhaust memory
MAX_BYTES = 128 * 2**20  # of its file: an image has a few MB at most
FORMATS = ("PNG", "JPEG", "BMP", "WEBP")


def png(pixels: Any) -> bytes:
    """A uint8 array [height, width] or [height, width, 3] as a PNG."""
    from PIL import Image

    buffer = io.BytesIO()
    # Level 3 takes half the time of the default, 6, and a tenth more bytes.
    Image.fromarray(pixels).save(buffer, "PNG", compress_level=3)
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

    try:
        image = Image.open(io.BytesIO(content), formats=FORMATS)
    except Exception as error:  # PIL's decoders raise OSError, ValueError, SyntaxError and others
        raise Failure(f"{name} is not an image that can be read: {_reason(error)}") from None
    if image.width * image.height > MAX_PIXELS:
        raise Failure(f"{name} has {image.width:,} x {image.height:,} pixels, more than {MAX_PIXELS:,} in all")
    return image


def check(content: bytes, name: str) -> None:
    """Failure unless it looks like an image, by its header and a PNG's checksums: no pixels are decoded."""
    image = open_image(content, name)
    try:
        image.verify()
    except Exception as error:
        raise damaged(name, error) from None


def decode(content: bytes, name: str) -> Any:
    """A PIL image whose pixels are decoded. Failure where they cannot be."""
    image = open_image(content, name)
    try:
        image.load()
        return image
    except Exception as error:
        raise damaged(name, error) from None


def shrink(content: bytes, side: int, name: str) -> bytes:
    """The image scaled to a shorter side of `side` pixels, in the same format; unchanged if it is not larger."""
    from PIL import Image

    image = open_image(content, name)
    shorter = min(image.size)
    kind = image.format
    if shorter <= side:
        return decode(content, name) and content
    size = tuple(max(1, round(length * side / shorter)) for length in image.size)
    try:
        if kind == "JPEG":  # let the decoder do the first halvings
            image.draft(None, (2 * size[0], 2 * size[1]))
        small = (
            image.resize(size, Image.Resampling.LANCZOS) if image.mode != "P" else image.convert("RGBA").resize(size)
        )
        buffer = io.BytesIO()
        small.save(buffer, kind, **({"quality": 92} if kind in ("JPEG", "WEBP") else {}))
    except Exception as error:
        raise damaged(name, error) from None
    return buffer.getvalue()


def damaged(name: str, error: Exception) -> Failure:
    """What to raise where PIL cannot decode an image of which it could read the header."""
    return Failure(f"{name} is damaged: {_reason(error)}")


def _reason(error: Exception) -> str:
    """The error's message, shortened, without the address of the buffer that PIL names in it."""
    message = re.sub(r"<_io.BytesIO[^>]*>", "it", " ".join(str(error).split()))
    return message[:120] or type(error).__name__
