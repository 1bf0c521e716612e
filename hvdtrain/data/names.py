"""Names of files and folders: which are images, and which systems leave in anybody's folders."""

import os
import re
import unicodedata

from hvdtrain.base.formatting import printable

# The endings of images, in lower or upper case. Some formats have several.
SUFFIXES = (
    *(".png", ".apng"),
    *(".jpg", ".jpeg", ".jpe", ".jfif", ".jfi", ".jif", ".pjpeg", ".pjp", ".mpo"),
    *(".bmp", ".dib"),
    ".webp",
)
USUAL_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp")  # for messages
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


def composed(name: str) -> str:
    """Returns a name with letters and their accents as one character (NFC), as Linux writes it.

    macOS may write the same name with accents of their own (NFD).
    """
    return unicodedata.normalize("NFC", name)


def is_utf8(name: str) -> bool:
    """Returns whether the bytes of a name are UTF-8. Names in Latin-1 or GBK mostly are not."""
    return not any("\ud800" <= letter <= "\udfff" for letter in name)


def not_utf8(name: str) -> str:
    """Returns a line about a class whose name is not UTF-8, with what renames it."""
    as_latin1 = os.fsencode(name).decode("latin-1")
    return (
        f"the name of class '{printable(as_latin1)}' is not UTF-8 but Latin-1, say: rename its "
        "folder, or all of them with `convmv -f latin1 -t utf8 -r --notest FOLDER`"
    )
