"""Where the recipes are: `datasets/` and `launchers/`, beside the package in a checkout, inside it in a wheel, and
`presets/`, beside this file.
"""

import re
from functools import cache
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct, ValidationError, convert

from hvdtrain.config.untrusted import parse_toml
from hvdtrain.errors import UsageError, unknown

PACKAGE = Path(__file__).parent.parent
RECIPES = PACKAGE if (PACKAGE / "datasets").is_dir() else PACKAGE.parent


class Launcher(Struct, forbid_unknown_fields=True, frozen=True):
    """The keys of a launcher's recipe; launchers/README.md says what each means."""

    command: list[str | list[str]]
    title: str = ""
    hosts: Literal["", "needed"] = ""
    local: bool = False
    script_name: str = ""
    script: str = ""
    resource: dict[str, Any] = {}
    stop: list[str | list[str]] = []
    job: str = ""
    status_command: list[str | list[str]] = []
    finished_pattern: str = ""
    unique_name: bool = False
    interpreter: str = ""
    runs: str = ""
    if_rank_may_die: list[str] = []
    if_rank_must_not: list[str] = []
    inherits: bool = False
    stop_signal: Literal["SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2", "file"] = "SIGTERM"
    environment: dict[str, str] = {}

    def __post_init__(self) -> None:
        if bool(self.status_command) != bool(self.finished_pattern):
            raise ValueError("`status_command` and `finished_pattern` go together")
        if self.stop and not self.job:
            raise ValueError("`stop` needs `job`: a pattern of what the scheduler prints for a job")
        for name in ("finished_pattern", "job"):
            try:
                re.compile(getattr(self, name))
            except re.error as error:
                raise ValueError(f"`{name}` is no pattern: {error}") from None

    def mentions(self, pattern: str) -> bool:
        """Whether a text in it has what the regular expression describes."""
        return bool(re.search(pattern, repr(self)))


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


def launcher(name: str) -> Launcher:
    """A launcher's recipe. UsageError as `load`."""
    return convert(load("launchers", name), Launcher)


@cache
def load(kind: str, name: str) -> dict[str, Any]:
    """One recipe as a dictionary.

    Raises:
        UsageError: there is none of that name (the valid names are listed), or it is not TOML, or its keys are not
            those of its kind; file and line are named.
    """
    if name not in names(kind):
        raise unknown(WHAT[kind], name, names(kind))
    file = _folder(kind) / f"{name}.toml"
    try:
        recipe = parse_toml(file.read_text("utf-8"))
        if kind in SHAPES:
            convert(recipe, SHAPES[kind])
    except (ValueError, ValidationError) as error:  # no UTF-8, no TOML, or other keys
        raise UsageError(f"{file}: {error}") from None
    return recipe
