"""Where the recipes are: `datasets/` and `launchers/`, beside this package in a checkout, inside it in a wheel."""

import tomllib
from functools import cache
from pathlib import Path
from typing import Any

from hvdtrain.errors import unknown

PACKAGE = Path(__file__).parent
RECIPES = PACKAGE if (PACKAGE / "datasets").is_dir() else PACKAGE.parent


def names(kind: str) -> list[str]:
    """The names of the recipes of a kind (`datasets` or `launchers`), sorted."""
    return sorted(path.stem for path in (RECIPES / kind).glob("*.toml"))


@cache
def load(kind: str, name: str) -> dict[str, Any]:
    """One recipe as a dictionary. UsageError, listing the valid names, where there is none of that name."""
    if name not in names(kind):
        raise unknown({"datasets": "data set", "launchers": "launcher"}[kind], name, names(kind))
    return tomllib.loads((RECIPES / kind / f"{name}.toml").read_text())
