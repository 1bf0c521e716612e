"""Names of files and folders: which are images, and which systems leave in anybody's folders."""

import os
import re
import unicodedata
from collections.abc import Iterable, Sequence

from hvdtrain.base.config.untrusted import is_utf8
from hvdtrain.base.formatting import printable, some_of, with_noun

# The endings of images, in lower or upper case. Some formats have several.
SUFFIXES = (
    *(".png", ".apng"),
    *(".jpg", ".jpeg", ".jpe", ".jfif", ".jfi", ".jif", ".pjpeg", ".pjp", ".mpo"),
    *(".bmp", ".dib"),
    ".webp",
)
USUAL_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp")  # for messages
# The endings of images in formats that are not read.
FOREIGN_SUFFIXES = (
    *(".gif", ".tif", ".tiff", ".heic", ".heif", ".avif", ".jxl", ".jp2", ".svg", ".ico"),
    *(".ppm", ".pgm", ".tga", ".psd", ".raw", ".dng", ".cr2", ".nef", ".arw"),
)
# What systems and programs leave in folders, in lower case. Some of it holds thumbnails of images.
LEFT_BY_SYSTEMS = frozenset(
    {
        *("__macosx", "icon\r"),  # macOS
        *("thumbs.db", "ehthumbs.db", "desktop.ini", "$recycle.bin", "system volume information"),
        *("@eadir", "#recycle", "#snapshot", "@tmp"),  # Synology
        *("@recycle", "@recently-snapshot", "@__thumb"),  # QNAP
        *("lost+found", "__pycache__"),
    }
)
_ENDING = re.compile(r"\.[a-z][a-z0-9]{0,4}", re.IGNORECASE)


def is_passed_over(name: str) -> bool:
    """Returns whether a file or folder is hidden, or is one that systems leave in folders."""
    return name.startswith(".") or name.lower() in LEFT_BY_SYSTEMS


def is_image_name(name: str) -> bool:
    """Returns whether a name has the ending of an image."""
    return name.lower().endswith(SUFFIXES)


def has_no_ending(name: str) -> bool:
    """Returns whether a name does not tell the format of its file.

    Such are `0001`, `photo.jpg?w=300` and `photo.jpg-large`. The first bytes of the file tell it.
    """
    return not _ENDING.fullmatch(os.path.splitext(name)[1])


def counted_images_first(paths: Iterable[str]) -> str:
    """Returns how many of some paths are images by their names, and how many others; and the first.

    Images come first, since somebody may miss them. Hidden ones, and those that systems leave, are
    no images.
    """
    images = []
    others = []
    for path in sorted(paths):
        is_image = path.lower().endswith((*SUFFIXES, *FOREIGN_SUFFIXES))
        if is_image and not any(map(is_passed_over, path.split("/"))):
            images.append(path)
        else:
            others.append(path)
    counts = [with_noun(len(images), "image")] if images else []
    if others:
        counts.append(f"{len(others):,} {'other ' if images else ''}file(s) or folder(s)")
    return f"{' and '.join(counts)}: {some_of(images + others)}"


def no_regular_files(paths: Iterable[str]) -> str:
    """Returns how many of some paths there are, and the first, and what stands in place of files."""
    return (
        f"{counted_images_first(paths)} (no regular files, but broken links, pipes or devices: put "
        "files in their place)"
    )


def order_of_numbers(classes: Sequence[str]) -> list[str]:
    """Returns a line about classes whose names are numbers that are not in the order of numbers.

    Classes are sorted as text, as torchvision's ImageFolder does: a checkpoint may have others.
    """
    if not all(name.isascii() and name.isdigit() and len(name) < 10 for name in classes):
        return []
    by_number = sorted(classes, key=int)
    if by_number == list(classes):
        return []
    return [
        f"classes are in the order of text ({', '.join(classes[:4])} …), and not of numbers: a last "
        "layer that was trained in the order of numbers knows others; then rename them, as "
        f"{by_number[0].zfill(len(by_number[-1]))}"
    ]


def composed(name: str) -> str:
    """Returns a name with letters and their accents as one character (NFC), as Linux writes it.

    macOS may write the same name with accents of their own (NFD).
    """
    return unicodedata.normalize("NFC", name)


def readable(name: str) -> str:
    """Returns the name of a file or folder for a person: as UTF-8, or else as Latin-1."""
    if is_utf8(name):
        return name
    encoded = os.fsencode(name)
    try:
        return encoded.decode()
    except UnicodeDecodeError:
        return encoded.decode("latin-1")


def not_utf8(name: str) -> str:
    """Returns a line about a class whose name is not UTF-8, with what renames it."""
    return (
        f"the name of class '{printable(readable(name))}' is not UTF-8 but Latin-1, say: rename its "
        "folder, or all of them with `convmv -f latin1 -t utf8 -r --notest FOLDER` (with the "
        "encoding in which it reads right, such as gbk or cp932, in place of latin1; `unzip -O gbk` "
        "unpacks a zip so)"
    )
