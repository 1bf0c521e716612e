"""Files, TOML and JSON as anybody may have written them."""

import errno
import json
import stat
import tomllib
from pathlib import Path
from typing import Any

LARGEST = 2**30  # bytes of a file that is read whole
_TOO_DEEP = "it is nested too deeply"
_TOO_LONG = "a number in it has too many digits"


def regular(path: Path) -> Path:
    """The path of a file to open. OSError where it is a FIFO, a socket or a device, which may never come to an end."""
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):  # a folder cannot be opened anyway
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return path


def read_whole(path: Path) -> bytes:
    """All of a file. OSError where it cannot be read, is not `regular`, or is larger than LARGEST."""
    with regular(path).open("rb") as file:
        content = file.read(LARGEST + 1)
    if len(content) > LARGEST:
        raise OSError(errno.EFBIG, f"it is larger than {LARGEST:,} bytes", str(path))
    return content


def parse_toml(text: str) -> dict[str, Any]:
    """The table of a TOML document. tomllib.TOMLDecodeError where it is none, or is nested too deeply."""
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise tomllib.TOMLDecodeError(_TOO_DEEP) from None
    except ValueError as error:
        raise tomllib.TOMLDecodeError(_TOO_LONG if "set_int_max_str_digits" in str(error) else str(error)) from None


def parse_json(text: str | bytes) -> Any:
    """What a JSON document has, of any type. ValueError where it is none, or is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    except ValueError as error:
        raise ValueError(_TOO_LONG if "set_int_max_str_digits" in str(error) else error) from None
