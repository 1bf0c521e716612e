"""Reading files, TOML and JSON that anybody may have written.

Limits on their size and depth hold before they are parsed.
"""

import errno
import json
import os
import re
import stat
import tomllib
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hvdtrain.base.errors import UsageError

LARGEST = 2**30  # bytes of a file that is read whole
# Bytes of a file that is parsed as a whole, which takes some 20 times as much memory for a while.
LARGEST_DOCUMENT = 2**24
LARGEST_CONFIG = 2**16
LARGEST_TOML = 2**22  # characters
LONGEST_LINE = 2**16  # bytes
LONGEST_NAME = 4096  # characters of a path or URL
MOST_RANKS = 4096  # workers of a job, and servers of a job
LARGEST_NUMBER = 10**12  # options, and counts in a run folder, are smaller
# A TOML key with many parts. Each part is a table within the one before, and tomllib's time and
# memory grow with the square of their number.
_KEY = r"""(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')"""
_LONG_KEY = re.compile(rf"(?<![\w-]){_KEY}(?:[ \t]*+\.[ \t]*+{_KEY}){{32}}")
_TOO_DEEP = "it is nested too deeply"


def is_url(dataset: str) -> bool:
    """Returns whether `--dataset` is a URL for fsspec, such as `s3://…` or `hf://datasets/…`."""
    return "://" in dataset


def regular(path: Path) -> Path:
    """Returns the path of a file that is to be opened.

    Raises:
        OSError: the file is a FIFO, a socket or a device, which may never end.
    """
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):  # a folder cannot be opened anyway
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return path


def read_whole(path: Path, most: int = LARGEST) -> bytes:
    """Returns the content of a file.

    Raises:
        OSError: the file cannot be read, is not `regular`, or has more than `most` bytes.
    """
    with regular(path).open("rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"it is larger than {most:,} bytes", str(path))
    return content


def read_lines(path: Path) -> Iterator[bytes]:
    """Yields the lines of a file, up to LARGEST bytes in all.

    A line that is longer than LONGEST_LINE comes in pieces.

    Raises:
        OSError: see `read_whole`.
    """
    left = LARGEST
    with regular(path).open("rb") as file:
        while line := file.readline(min(left, LONGEST_LINE)):
            left -= len(line)
            yield line.rstrip(b"\r\n")


def read_tail(path: Path, most: int) -> bytes:
    """Returns the last bytes of a file, `most` at most.

    Raises:
        OSError: see `read_whole`.
    """
    with regular(path).open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - most))
        return file.read(most)


def check_not_endless(option: str, value: str) -> None:
    """Checks that an option's value is no longer than a path, since parsing it may take long.

    Raises:
        UsageError: it is longer.
    """
    if len(value) > LONGEST_NAME:
        raise UsageError(
            f"{option} has {len(value):,} characters, more than {LONGEST_NAME:,}: {value[:40]}…"
        )


def control_character(text: str) -> str:
    """Returns the first control character of a text, or an empty string.

    Characters of Unicode's categories Cc, Zl and Zp may begin a new line, end a name or steer a
    terminal. They are kept out of files that others read line by line, as schedulers read scripts.
    """
    return next((char for char in text if unicodedata.category(char) in ("Cc", "Zl", "Zp")), "")


def is_utf8(name: str) -> bool:
    """Returns whether the bytes of a name are UTF-8. Names in Latin-1 or GBK mostly are not."""
    # Python has each byte that it cannot decode as a surrogate.
    return not any("\ud800" <= letter <= "\udfff" for letter in name)


def parse_toml(text: str) -> dict[str, Any]:
    """Returns the table of a TOML document.

    Raises:
        tomllib.TOMLDecodeError: the text is no TOML, is nested too deeply, or is too long.
    """
    if len(text) > LARGEST_TOML:
        raise tomllib.TOMLDecodeError(f"it has more than {LARGEST_TOML:,} characters")
    if _LONG_KEY.search(text):
        raise tomllib.TOMLDecodeError(_TOO_DEEP)
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise tomllib.TOMLDecodeError(_TOO_DEEP) from None


def parse_json(text: str | bytes) -> Any:
    """Returns the value of a JSON document.

    Raises:
        ValueError: the text is no JSON, or is nested too deeply.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
