"""TOML and JSON as anybody may have written them."""

import json
import tomllib
from typing import Any

_TOO_DEEP = "it is nested too deeply"


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
