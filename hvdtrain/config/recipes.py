"""Where the recipes are: `datasets/` and `launchers/`, beside the package in a checkout, inside it in a wheel, and
`presets/`, beside this file.
"""

import re
import signal
import tomllib
from functools import cache
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct, ValidationError, convert

from hvdtrain.config.untrusted import parse_toml
from hvdtrain.errors import UsageError, unknown

PACKAGE = Path(__file__).parent.parent
RECIPES = PACKAGE if (PACKAGE / "datasets").is_dir() else PACKAGE.parent


class Launcher(Struct, forbid_unknown_fields=True):
    """The keys of a launcher's recipe; launchers/README.md says what each means."""

    command: list[str | list[str]]
    title: str = ""
    hosts: Literal["", "needed"] = ""
    here: bool = False
    script_name: str = ""
    script: str = ""
    resource: dict[str, Any] = {}
    stop: list[str | list[str]] = []
    job: str = ""
    ask: list[str | list[str]] = []
    gone: str = ""
    remember: dict[str, list[str]] = {}
    unique_name: bool = False
    interpreter: str = ""
    runs: str = ""
    survive: list[str] = []
    end_together: list[str] = []
    inherits: bool = False
    leave: str = ""
    environment: dict[str, str] = {}

    def __post_init__(self) -> None:
        if bool(self.ask) != bool(self.gone):
            raise ValueError("`ask` and `gone` go together")
        if self.leave not in {"", "file", *signal.Signals.__members__}:
            raise ValueError(f"`leave` is no signal: {self.leave!r}")
        if self.stop and not self.job:
            raise ValueError("`stop` needs `job`: a pattern of what the scheduler prints for a job")
        for name in ("gone", "job"):
            try:
                re.compile(getattr(self, name))
            except re.error as error:
                raise ValueError(f"`{name}` is no pattern: {error}") from None


class Preset(Struct):
    """What every preset has."""

    title: str
    options: dict[str, Any]


SHAPES = {"launchers": Launcher, "presets": Preset}
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
        UsageError: there is none of that name (the valid names are listed), or it is not TOML (file and line), or its
            keys are not those of its kind.
    """
    if name not in names(kind):
        raise unknown(WHAT[kind], name, names(kind))
    file = _folder(kind) / f"{name}.toml"
    content = file.read_bytes()
    try:
        recipe = parse_toml(content.decode())
        if kind in SHAPES:
            convert(recipe, SHAPES[kind])
        return recipe
    except ValidationError as error:
        raise UsageError(f"{file}: {error}") from None
    except tomllib.TOMLDecodeError as error:  # "... (at line 3, column 5)" or "... (at end of document)"
        problem = str(error)
        at = re.search(r"at line (\d+)", problem)
        line = int(at[1]) if at else len(content.splitlines())
    except UnicodeDecodeError as error:
        problem = "not UTF-8"
        line = content.count(b"\n", 0, error.start) + 1
    except ValueError as error:  # a number of too many digits
        raise UsageError(f"{file}: {error}") from None
    raise UsageError(f"{file}, line {line}: {problem}")
