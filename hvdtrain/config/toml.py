"""TOML as anybody may have written it."""

import tomllib
from typing import Any


def parse(text: str) -> dict[str, Any]:
    """The table of a TOML document. tomllib.TOMLDecodeError where it is none, or is nested too deeply."""
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise tomllib.TOMLDecodeError("it is nested too deeply") from None
