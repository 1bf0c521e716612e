"""Recipes, which are TOML files, of data sets, launchers and presets.

`datasets/` and `launchers/` are beside the package in a checkout and inside it in a wheel;
`presets/` is beside this file. A launcher's recipe may also be any other file.
"""

import hashlib
import re
from functools import cache
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct, ValidationError, convert

from hvdtrain.base.config.untrusted import LARGEST_DOCUMENT, parse_toml, read_whole
from hvdtrain.base.errors import UsageError, unknown

PACKAGE = Path(__file__).parent.parent.parent
RECIPES = PACKAGE if (PACKAGE / "datasets").is_dir() else PACKAGE.parent
# The longest name of a job. Kubernetes and YARN have the strictest rule, RFC 1123's labels of 63
# characters, which also have to hold what is appended: `-` and five characters, and Kubernetes'
# `-worker-4095`.
MAX_NAME = 63 - len("-abcde-worker-4095")
SUFFIX = ".toml"


class Launcher(Struct, forbid_unknown_fields=True, frozen=True):
    """A launcher's recipe; launchers/README.md describes the keys.

    Attributes:
        name: the recipe's name, as `ssh`. For a recipe elsewhere it is the file's name, as
            `site.toml`: a run folder does not record the file's path.
        file: the recipe's file.
        option: the value of --launcher that names the recipe.
        digest: a hash of the file.
    """

    command: list[str | list[str]]
    name: str = ""
    file: str = ""
    option: str = ""
    digest: str = ""
    title: str = ""
    needs: list[str] = []
    hosts: Literal["", "needed"] = ""
    hosts_from: Literal["", "slurm", "mpijob"] = ""
    local: bool = False
    elastic: bool = False
    name_length: int = MAX_NAME
    script_name: str = ""
    script: str = ""
    resource: dict[str, Any] = {}
    stop: list[str | list[str]] = []
    job: str = ""
    status_command: list[str | list[str]] = []
    finished_pattern: str = ""
    name_command: list[str | list[str]] = []
    doubled: str = ""
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

    @property
    def knows_names(self) -> bool:
        """Whether the scheduler ends a job by our name for it, without the scheduler's number."""
        return bool(self.stop) and "{job}" not in repr(self.stop)

    def mentions(self, pattern: str) -> bool:
        """Returns whether the regular expression matches in any text of the recipe."""
        return bool(re.search(pattern, repr(self)))


class Preset(Struct):
    """The keys that every preset has."""

    title: str
    options: dict[str, Any]


SHAPES: dict[str, type[Struct]] = {"launchers": Launcher, "presets": Preset}
WHAT = {"datasets": "data set", "launchers": "launcher", "presets": "preset"}


def names(kind: str) -> list[str]:
    """Returns the sorted names of the recipes of a kind, which is one of WHAT."""
    return sorted(path.stem for path in _folder(kind).glob(f"*{SUFFIX}"))


def _folder(kind: str) -> Path:
    return Path(__file__).parent / kind if kind == "presets" else RECIPES / kind


def launcher(named: str) -> Launcher:
    """Returns a launcher's recipe.

    Args:
        named: the recipe's name, or its file, which ends in .toml.

    Raises:
        UsageError: see `load`.
    """
    is_file = named.endswith(SUFFIX)
    file = Path(named) if is_file else _file("launchers", named)
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", file.name):
        raise UsageError(
            f"--launcher {named!a}: its name may have letters, digits, `.`, `_` and `-`"
        )
    table, digest = _read(file, Launcher)
    given = {
        "name": file.name if is_file else named,
        "file": str(file),
        "option": named,
        "digest": digest,
    }
    return convert(table | given, Launcher)


@cache
def load(kind: str, name: str) -> dict[str, Any]:
    """Returns a recipe as a dictionary.

    Raises:
        UsageError: there is no recipe of that name (the message lists the valid names), or the file
            is not TOML, or has other keys than its kind (the message names file and line).
    """
    recipe, _ = _read(_file(kind, name), SHAPES.get(kind))
    return recipe


def _file(kind: str, name: str) -> Path:
    if name not in names(kind):
        raise unknown(WHAT[kind], name, names(kind))
    return _folder(kind) / f"{name}{SUFFIX}"


def _read(file: Path, shape: type[Struct] | None) -> tuple[dict[str, Any], str]:
    """Returns the content of a recipe's file, which has to be of that shape, and a hash of it."""
    try:
        content = read_whole(file, LARGEST_DOCUMENT)
        recipe = parse_toml(content.decode())
        if shape:
            convert(recipe, shape)
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror}") from None
    except (ValueError, ValidationError) as error:  # no UTF-8, no TOML, or other keys
        raise UsageError(f"{file}: {error}") from None
    return recipe, hashlib.blake2b(content, digest_size=8).hexdigest()
