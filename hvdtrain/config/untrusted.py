"""Files, TOML and JSON as anybody may have written them."""

import errno
import json
import os
import stat
import tomllib
from pathlib import Path
from typing import Any, BinaryIO

MOST_BYTES = 2**30  # that are read of one file
_TOO_DEEP = "it is nested too deeply"


def open_regular(path: Path) -> BinaryIO:
    """A file, open to be read. OSError where it is not a regular one: a FIFO would have its reader wait."""
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return file


def read_file(path: Path) -> bytes:
    """The content of a regular file. OSError where it is none, or has more than MOST_BYTES."""
    with open_regular(path) as file:
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise OSError(errno.EFBIG, f"it has more than {MOST_BYTES} bytes", str(path))
    return content


def read_json(path: Path) -> Any:
    """What a JSON file has. OSError as read_file, ValueError as parse_json."""
    return parse_json(read_file(path))


def read_toml(path: Path) -> dict[str, Any]:
    """What a TOML file has. OSError as read_file; ValueError where it is not UTF-8, or as parse_toml."""
    return parse_toml(read_file(path).decode())


def parse_toml(text: str) -> dict[str, Any]:
    """The table of a TOML document. tomllib.TOMLDecodeError where it is none, or is nested too deeply."""
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise tomllib.TOMLDecodeError(_TOO_DEEP) from None


def parse_json(text: str | bytes) -> Any:
    """What a JSON document has, of any type. ValueError where it is none, or is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
