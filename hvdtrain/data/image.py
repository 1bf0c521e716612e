"""One encoded image: reading, checking, decoding, shrinking and encoding it.

Builds and training both open images here, so that both accept the same images.
"""

import contextlib
import hashlib
import io
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hvdtrain.base.errors import Failure

# 8,000 x 8,000, as decoded. More is a mistake, or an attempt to exhaust memory.
MAX_PIXELS = 64_000_000
# Of a JPEG, which can be decoded at an eighth of its size. A camera of a telephone has 200 million.
MAX_JPEG_PIXELS = 512_000_000
# What decoding a JPEG in several scans, as progressive ones are, may take beside its pixels: all
# coefficients are in memory at once, however small the image is to be.
MAX_COEFFICIENT_BYTES = 400_000_000
DRAFTS = (1, 2, 4, 8)  # by which a JPEG can be decoded smaller
MAX_BYTES = 128 * 2**20  # of an image's file; few have more than some MB
ORIENTATION = 0x0112  # EXIF's tag: 1 as it is, 5 to 8 with width and height exchanged
FORMATS = ("PNG", "JPEG", "BMP", "WEBP")
START = 64  # bytes of a file by which format_of knows its format
# The first bytes of formats, and how many bytes precede them. Names of foreign formats are for
# messages.
_SIGNATURES = (
    (0, b"\x89PNG\r\n\x1a\n", "PNG"),
    (0, b"\xff\xd8\xff", "JPEG"),
    (8, b"WEBP", "WEBP"),
    (0, b"GIF8", "a GIF"),
    (0, b"II*\0", "a TIFF"),
    (0, b"MM\0*", "a TIFF"),
    (0, b"8BPS", "a Photoshop file"),
    (0, b"\0\0\0\x0cJXL ", "a JPEG XL"),
    (0, b"\xff\x0a", "a JPEG XL"),
    (0, b"\0\0\0\x0cjP  ", "a JPEG 2000"),
    (0, b"\0\0\1\0", "an ICO"),
    (4, b"ftypavi", "an AVIF"),
    (4, b"ftyphei", "a HEIC"),
    (4, b"ftyphev", "a HEIC"),
    (4, b"ftypmif1", "a HEIC"),
    (4, b"ftyp", "an MP4 or the like"),
    (0, b"%PDF", "a PDF"),
    (0, b"PK\3\4", "a zip"),
    (0, b"\x1f\x8b", "a gzip"),
    (0, b"version https://git-lfs", "a Git LFS pointer, which `git lfs pull` replaces"),
    (0, b"\0\5\x16\7", "what macOS keeps beside an image"),
    (0, b"<svg", "an SVG"),
    (0, b"<?xml", "XML"),
    (0, b"<!doctype html", "an HTML page"),
    (0, b"<html", "an HTML page"),
)
MAX_TEXT_BYTES = 2**24  # of one text or colour profile in a PNG, unpacked
GROUND = "white"  # what transparent images are put on


def png(pixels: Any) -> bytes:
    """Encodes an image as a PNG.

    Args:
        pixels: A uint8 array or tensor [height, width] or [height, width, 3], or a PIL image.
    """
    import numpy as np
    from PIL import Image

    buffer = io.BytesIO()
    # Level 3 takes half the time of the default, 6, and a tenth more bytes.
    Image.fromarray(np.asarray(pixels)).save(buffer, "PNG", compress_level=3)
    return buffer.getvalue()


def read(sample: Any) -> bytes:
    """Reads an encoded image.

    Args:
        sample: A Path, or another object that has read_bytes as a Path does.

    Raises:
        Failure: The image cannot be read, or its file has more than MAX_BYTES.
    """
    try:
        if isinstance(sample, Path):
            size = sample.stat().st_size
            if size > MAX_BYTES:
                raise Failure(f"{sample} has {size:,} bytes, too many for an image")
        return sample.read_bytes()
    except OSError as error:
        raise Failure(f"{sample} cannot be read: {error.strerror or error}") from None


def format_of(start: bytes) -> str:
    """Returns the format of a file by its first bytes; empty if it is unknown."""
    lower = start.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    for offset, signature, name in _SIGNATURES:
        if start.startswith(signature, offset) or (offset == 0 and lower.startswith(signature)):
            return name
    if start.startswith(b"BM") and start[6:10] == bytes(4):
        return "BMP"
    return ""


def is_image(start: bytes) -> bool:
    """Returns whether a file is an image of FORMATS by its first bytes."""
    return format_of(start) in FORMATS


def is_image_file(path: str) -> bool:
    """Returns whether a file can be read and is an image of FORMATS by its first bytes."""
    try:
        with open(path, "rb") as file:
            return is_image(file.read(START))
    except OSError:
        return False


def open_image(content: bytes, name: str) -> Any:
    """Returns a PIL image of which only the header has been read.

    Before its pixels are decoded, `decode_smaller` is to be called.

    Args:
        content: The encoded image.
        name: The name for messages.

    Raises:
        Failure: This is no image of FORMATS, decoding it would take too much memory, or its header
            is damaged.
    """
    from PIL import Image, PngImagePlugin

    Image.MAX_IMAGE_PIXELS = None  # PIL warns of images that are larger than MAX_PIXELS only
    # PIL refuses an image for a colour profile or a text of more than 1 MiB.
    PngImagePlugin.MAX_TEXT_CHUNK = MAX_TEXT_BYTES
    try:
        image = Image.open(io.BytesIO(content), formats=FORMATS)
    except Exception as error:  # PIL's decoders raise OSError, ValueError, SyntaxError and others
        reason = _reason(error, content)
        raise Failure(f"{name} is not an image that can be read: {reason}") from None
    size = f"{image.width:,} x {image.height:,} pixels"
    most = MAX_JPEG_PIXELS if _is_jpeg(image) else MAX_PIXELS
    if image.width * image.height > most:
        raise Failure(f"{name} has {size}, more than {most:,} in all")
    if _is_jpeg(image) and _coefficient_bytes(image, content) > MAX_COEFFICIENT_BYTES:
        raise Failure(
            f"{name} has {size} in several scans, as progressive JPEGs have, which takes too much "
            "memory: save it as a baseline JPEG, or smaller"
        )
    return image


def _is_jpeg(image: Any) -> bool:
    return image.format in ("JPEG", "MPO")  # MPO is a JPEG with further images behind it


def _coefficient_bytes(image: Any, content: bytes) -> int:
    """Returns the bytes of coefficients that decoding a JPEG keeps in memory.

    They are 0 for a JPEG in one scan, which is decoded row by row.
    """
    if image.width * image.height * 2 * image.layers <= MAX_COEFFICIENT_BYTES:
        return 0  # it is small enough in any case
    if not _has_several_scans(content):
        return 0
    # A component has a coefficient of 2 bytes for each of its samples.
    factors = [(across, down) for _, across, down, _ in image.layer]
    most_across = max(across for across, _ in factors)
    most_down = max(down for _, down in factors)
    samples = sum(across * down for across, down in factors) / (most_across * most_down)
    return int(image.width * image.height * 2 * samples)


def _has_several_scans(content: bytes) -> bool:
    """Returns whether the pixels of a JPEG are in several scans; True if its header is damaged."""
    place = 2
    components = 0
    while place + 4 <= len(content) and content[place] == 0xFF:
        marker = content[place + 1]
        if marker == 0xFF:  # a byte to fill up with
            place += 1
            continue
        length = int.from_bytes(content[place + 2 : place + 4])
        # SOF0 to SOF15 but DHT, JPG and DAC: the frame's header.
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            if marker not in (0xC0, 0xC1):  # neither baseline nor extended
                return True
            components = content[place + 9] if place + 9 < len(content) else 0
        if marker == 0xDA:  # SOS: the header of the first scan
            in_scan = content[place + 4] if place + 4 < len(content) else 0
            return in_scan != components
        place += 2 + length
    return True


def check(content: bytes, name: str) -> tuple[int, int]:
    """Checks an image by its header, and by the checksums of a PNG, without decoding pixels.

    Returns:
        Width and height.

    Raises:
        Failure: The image cannot be used.
    """
    image = open_image(content, name)
    with decoding(name):
        image.verify()
    return image.size


def middle_side(sides: Sequence[int]) -> int:
    """Returns the median of the shorter sides of images, in pixels, clamped to 32 to 224."""
    return max(32, min(224, sorted(sides)[len(sides) // 2]))


def decode(content: bytes, name: str) -> None:
    """Decodes all of an image, to check it. Raises Failure if that fails."""
    image = open_image(content, name)
    with decoding(name):
        # All of a JPEG's data is read at any size.
        decode_smaller(image, DRAFTS[-1])
        image.load()


def digest_or_problem(sample: Any) -> bytes | str:
    """Decodes an image; returns the SHA-256 of its file, or a line that says what is wrong."""
    try:
        content = read(sample)
        decode(content, str(sample))
        return hashlib.sha256(content).digest()
    except Failure as problem:
        return str(problem)


def shrink(content: bytes, side: int, name: str) -> bytes:
    """Scales an image to a shorter side of `side` pixels; a smaller one is returned unchanged.

    The format stays the same, and what was transparent.

    Raises:
        Failure: The image cannot be decoded.
    """
    from PIL import Image

    image = open_image(content, name)
    shorter = min(image.size)
    image_format = image.format
    if shorter <= side:
        decode(content, name)  # to check it
        return content
    size = tuple(max(1, round(length * side / shorter)) for length in image.size)
    with decoding(name):
        decode_smaller(image, shorter / side / 2)
        if image.has_transparency_data:
            image = image.convert("RGBA")
        elif image.mode == "P":
            image = image.convert("RGB")
        small = image.resize(size, Image.Resampling.LANCZOS)
        upright(small)
        options = {"quality": 92} if image_format in ("JPEG", "WEBP") else {}
        buffer = io.BytesIO()
        small.save(buffer, image_format, **options)
    return buffer.getvalue()


def upright_size(image: Any) -> tuple[int, int]:
    """Returns width and height of an image after EXIF's orientation is applied."""
    turned = False
    with contextlib.suppress(Exception):
        turned = image.getexif().get(ORIENTATION, 1) in (5, 6, 7, 8)
    return image.size[::-1] if turned else image.size


def upright(image: Any) -> None:
    """Applies EXIF's orientation in place. An orientation that cannot be read is ignored."""
    from PIL import ImageOps

    with contextlib.suppress(Exception):
        ImageOps.exif_transpose(image, in_place=True)


def decode_smaller(image: Any, factor: float) -> None:
    """Has a JPEG decoded at 1/2, 1/4 or 1/8 of its size, which takes a fraction of the time.

    This does nothing to other formats, and must be called before pixels are decoded.

    Args:
        image: A PIL image.
        factor: The most by which the image may become smaller; more is taken of an image that has
            more than MAX_PIXELS.
    """
    if not _is_jpeg(image):
        return
    pixels = image.width * image.height
    needed = next(draft for draft in DRAFTS if pixels <= MAX_PIXELS * draft * draft)
    wanted = [math.ceil(length / max(1, factor)) for length in image.size]
    if needed > factor:
        wanted = [max(1, length // needed) for length in image.size]
    image.draft(None, tuple(wanted))


def in_rgb(image: Any) -> Any:
    """Returns a decoded PIL image in RGB. What is transparent shows GROUND."""
    import numpy as np
    from PIL import Image

    if image.mode == "I;16":  # PIL would not scale 16-bit values, but turn all above 255 white
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if not image.has_transparency_data:
        return image.convert("RGB")
    if image.mode != "RGBA":
        image = image.convert("RGBA")
    ground = Image.new("RGB", image.size, GROUND)
    ground.paste(image, mask=image)
    return ground


@contextlib.contextmanager
def decoding(name: str) -> Iterator[None]:
    """Turns any error of PIL's decoders into a Failure that names the image."""
    try:
        yield
    except Exception as error:  # PIL's decoders raise OSError, ValueError, SyntaxError and others
        raise Failure(f"{name} is damaged: {_reason(error)}") from None


class Unread(Failure):
    """What holds an image cannot be read, so that nothing is known of the image itself."""


@contextlib.contextmanager
def skippable(sample: Any) -> Iterator[None]:
    """Adds to the Failure of an image that --skip-bad leaves it out."""
    try:
        yield
    except Unread:
        raise
    except Failure as problem:
        remedy = "--skip-bad leaves such images out"
        if isinstance(sample, Path):
            remedy += ", in training and in `data build folder`"
        raise Failure(f"{problem}; {remedy}") from None


def _reason(error: Exception, content: bytes = b"") -> str:
    """Returns the error's message, shortened, without the address of PIL's buffer.

    Args:
        error: The error of PIL.
        content: The encoded image, if it could not be opened.
    """
    message = " ".join(str(error).split())
    if message.startswith("cannot identify"):
        found = format_of(content[:START])
        if not content:
            return "the file is empty"
        if found in FORMATS:
            return f"it begins as a {found}, and is damaged or cut off"
        formats = ", ".join(FORMATS)
        return f"it is {found}, and no {formats}" if found else f"it is no {formats}"
    message = re.sub(r"<_io.BytesIO[^>]*>", "it", message)
    return message[:120] or type(error).__name__
