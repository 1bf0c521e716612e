"""Where the recipes are: `datasets/` and `launchers/`, beside the package in a checkout, inside it in a wheel, and
`presets/`, beside this file.
"""

import re
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

from hvdtrain.errors import UsageError, unknown

PACKAGE = Path(__file__).parent.parent
RECIPES = PACKAGE if (PACKAGE / "datasets").is_dir() else PACKAGE.parent


WHAT = {"datasets": "data set", "launchers": "launcher", "presets": "preset"}


def names(kind: str) -> list[str]:
    """The names of the recipes of a kind (one of WHAT), sorted."""
    return sorted(path.stem for path in _folder(kind).glob("*.toml"))


def _folder(kind: str) -> Path:
    return Path(__file__).parent / kind if kind == "presets" else RECIPES / kind


@cache
def load(kind: str, name: str) -> dict[str, Any]:
    """One recipe as a dictionary.

    Raises:
        UsageError: there is none of that name (the valid names are listed), or it is not TOML (file and line).
    """
    if name not in names(kind):
        raise unknown(WHAT[kind], name, names(kind))
    file = _folder(kind) / f"{name}.toml"
    content = file.read_bytes()
    try:
        return tomllib.loads(content.decode())
    except tomllib.TOMLDecodeError as error:  # "... (at line 3, column 5)" or "... (at end of document)"
        problem = str(error)
        at = re.search(r"at line (\d+)", problem)
        line = int(at[1]) if at else len(content.splitlines())
    except UnicodeDecodeError as error:
        problem = "not UTF-8"
        line = content.count(b"\n", 0, error.start) + 1
    raise UsageError(f"{file}, line {line}: {problem}")
