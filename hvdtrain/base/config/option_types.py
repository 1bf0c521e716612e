"""Types of command-line options, and options that are fields of a dataclass."""

import math
import os
import re
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from hvdtrain.base.config.untrusted import is_utf8
from hvdtrain.base.config.writing import check_replacing
from hvdtrain.base.errors import UsageError

LONGEST_S = 1e9  # 30 years, which every timer can count
METAVARS: Mapping[type, str] = {click.IntRange: "N", click.FloatRange: "X"}


class WithUnit(click.ParamType):
    """A positive number with a unit, which becomes a number of one base unit.

    Args:
        name: the quantity, for messages.
        units: the value of each unit in base units, by its name in small letters.
        least, most: the range of values, in base units.
        examples: valid values, for messages.
        pattern: a regular expression with a group for the number and one for the unit.
    """

    def __init__(
        self,
        name: str,
        units: Mapping[str, float],
        most: float,
        examples: str,
        pattern: str = r"(\d+(?:\.\d+)?)\s*([a-zA-Z]+)",
        least: float = 0.0,
    ) -> None:
        self.name = name
        self.units = units
        self.least = least
        self.most = most
        self.examples = examples
        self.pattern = pattern

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number = 0.0
        match = re.fullmatch(self.pattern, str(value).strip())
        if match:
            number = float(match[1]) * self.units.get(match[2].lower(), 0)
        if number and self.least <= number <= self.most:
            return number
        return self.fail(f"'{value}' is not a {self.name} such as {self.examples}", param, ctx)


SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600}
DURATION = WithUnit(
    "duration", SECONDS, LONGEST_S, "90s, 30m or 2h", r"(\d+(?:\.\d+)?(?:e[+-]?\d+)?)\s*([smh]?)"
)


def with_unit_of_time(seconds: float) -> str:
    """Returns `5m` for 300.0, as DURATION takes it: in the largest unit of which it is a whole
    number.
    """
    unit = next((unit for unit in ("h", "m") if seconds % SECONDS[unit] == 0), "s")
    return f"{seconds / SECONDS[unit]:g}{unit}"


class Real(click.FloatRange):
    """A number in a range. Unlike click's type it refuses nan, which click has in any range."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number: float = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"'{value}' is not a number", param, ctx)
        return number


# How files begin that commands write: JSON, SVG, PNG and PDF.
_WRITTEN = (b"{", b"[", b"<?xml", b"<svg", b"\x89PNG", b"%PDF")


class FileToWrite(click.Path):
    """A file in an existing folder, which can be written in.

    Only a file of a kind that commands write is replaced.
    """

    def __init__(self) -> None:
        super().__init__(dir_okay=False, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path: Any = super().convert(value, param, ctx)
        if not path.absolute().parent.is_dir():
            raise UsageError(f"there is no folder {path.parent} to write {path.name} in")
        if path.is_file() and not _may_be_replaced(path):
            raise UsageError(
                f"{path} is a file of another kind: name another, or remove it yourself"
            )
        if path.is_symlink() and path.is_file():
            path = path.resolve()
        try:
            check_replacing(path)
        except OSError as error:
            raise UsageError(
                f"{path} cannot be written: {error.strerror}; choose another folder"
            ) from None
        return path


def _may_be_replaced(file: Path) -> bool:
    """Returns whether a file is empty, or begins like a file that a command has written."""
    try:
        with file.open("rb") as opened:
            begins = opened.read(100).lstrip()
    except OSError:
        return True  # who writes to it is told why it cannot be
    return not begins or begins.startswith(_WRITTEN)


class Folder(click.Path):
    """A folder. An empty name, as of a shell variable that is not set, is refused."""

    name = "folder"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "" and ctx and param:
            source = ctx.get_parameter_source(param.name or "")
            if source == ParameterSource.COMMANDLINE:
                self.fail("the name of a folder cannot be empty", param, ctx)
        return super().convert(value, param, ctx)


class RunFolder(Folder):
    """A folder for one run or several, whose files name it. So its name has to be UTF-8."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        # A shell leaves the ~ of --out=~/runs as it is.
        folder: Any = super().convert(os.path.expanduser(value), param, ctx)
        if not is_utf8(str(folder)):
            raise UsageError(f"--out {str(folder)!a} is not valid UTF-8: choose another name")
        return folder


class WordOr(click.ParamType):
    """A word such as `auto`, or a value of another type.

    Args:
        word: the word on the command line and in files.
        meaning: the value in RunConfig that stands for the word.
        other: the type of other values.
    """

    def __init__(self, word: str, meaning: Any, other: click.ParamType) -> None:
        self.word = word
        self.meaning = meaning
        self.other = other
        name = METAVARS.get(type(other), other.name)
        self.name = f"{word}|{name.upper()}"

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        return self.name

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value in (self.word, self.meaning):
            return self.meaning
        return self.other.convert(value, param, ctx)


class NumberOfThreads(click.IntRange):
    """A number of threads, or, below zero, of cores that are left free."""

    name = "n"

    def __init__(self) -> None:
        super().__init__(-1023, 1024)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if number == 0:
            self.fail("0 threads compute nothing: give `auto`, 1 or more, or below 0", param, ctx)
        return number


class SnapshotEvery(click.ParamType):
    """`epoch`, `never` or a duration, which stays as it was written."""

    name = "epoch|never|duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value not in ("epoch", "never"):
            DURATION.convert(value, param, ctx)
        return str(value)


EQUAL = "equal"  # as many servers as workers


class ServerNumber(WordOr):
    """EQUAL, or a whole number from `least`, up to `most` if that is given."""

    def __init__(self, least: int = 0, most: int | None = None) -> None:
        super().__init__(EQUAL, EQUAL, click.IntRange(least, most))


class Several(click.ParamType):
    """`16,32` as a list of different values.

    Args:
        kind: the type of each value; words by default.
        name: the name of such a list in the help.
    """

    def __init__(self, kind: Any = click.STRING, name: str = "names") -> None:
        self.kind = click.types.convert_type(kind)
        self.name = name

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> list[Any]:
        items = value if isinstance(value, list) else str(value).split(",")  # a preset has lists
        words = [str(item).strip() for item in items]
        if not words or "" in words:
            self.fail(f"'{value}' is not a list such as 2,4 or single,ddp", param, ctx)
        values = [self.kind.convert(word, param, ctx) for word in words]
        return list(dict.fromkeys(values))


NUMBERS = Several(click.IntRange(1), "numbers")
SERVER_NUMBERS = Several(ServerNumber(1), "numbers|equal")  # such as `1,2,equal`


def option(default: Any, help: str, type: Any = None, flags: tuple[str, ...] = ()) -> Any:
    """Returns a field of RunConfig that is also a command-line option."""
    return field(default=default, metadata={"help": help, "type": type, "flags": flags})
