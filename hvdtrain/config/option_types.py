"""What values of command-line options look like, and options that are fields of a dataclass."""

import math
import re
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from hvdtrain.errors import UsageError

LONGEST_S = 1e9  # 30 years: what every timer below us can count
METAVARS: Mapping[type, str] = {click.IntRange: "N", click.FloatRange: "X"}


class Measure(click.ParamType):
    """A number above 0 with one of these units, as a number of another one, from `least` to `most`.

    Args:
        units: in small letters.
        pattern: of a number and its unit, a group each.
    """

    def __init__(
        self, name: str, units: Mapping[str, float], most: float, examples: str,
        pattern: str = r"(\d+(?:\.\d+)?)\s*([a-zA-Z]+)", least: float = 0.0,
    ) -> None:  # fmt: skip
        self.name, self.units, self.least, self.most = name, units, least, most
        self.examples, self.pattern = examples, pattern

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        match = re.fullmatch(self.pattern, str(value).strip())
        number = float(match[1]) * self.units.get(match[2].lower(), 0) if match else 0.0
        if not (number and self.least <= number <= self.most):
            self.fail(f"'{value}' is not a {self.name} such as {self.examples}", param, ctx)
        return number


SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600}
DURATION = Measure("duration", SECONDS, LONGEST_S, "90s, 30m or 2h", r"(\d+(?:\.\d+)?(?:e[+-]?\d+)?)\s*([smh]?)")


class Real(click.FloatRange):
    """A number of a range; click takes nan to be in any."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number: float = super().convert(value, param, ctx)
        return self.fail(f"'{value}' is not a number", param, ctx) if math.isnan(number) else number


class FileToWrite(click.Path):
    """A file in a folder that there is."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path: Any = super().convert(value, param, ctx)
        if not path.absolute().parent.is_dir():
            raise UsageError(f"there is no folder {path.parent} to write {path.name} in")
        return path


class Folder(click.Path):
    """A folder, by its name: an empty one, of a variable that is not set, is not the current folder."""

    name = "folder"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        given = ctx and param and ctx.get_parameter_source(param.name or "") == ParameterSource.COMMANDLINE
        if value == "" and given:
            self.fail("an empty name is no folder's", param, ctx)
        return super().convert(value, param, ctx)


class WordOr(click.ParamType):
    """A word such as `auto`, or a value of another type.

    Args:
        word: on the command line and in files.
        meaning: what stands for it in RunConfig.
        other: the type of other values.
    """

    def __init__(self, word: str, meaning: Any, other: click.ParamType) -> None:
        self.word, self.meaning, self.other = word, meaning, other
        name = METAVARS.get(type(other), other.name)
        self.name = f"{word}|{name.upper()}"

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        return self.name

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return self.meaning if value in (self.word, self.meaning) else self.other.convert(value, param, ctx)


class SnapshotEvery(click.ParamType):
    """`epoch`, `never` or a duration, as it was given."""

    name = "epoch|never|duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value not in ("epoch", "never"):
            DURATION.convert(value, param, ctx)
        return str(value)


EQUAL = "equal"  # as many servers as workers


class ServerNumber(WordOr):
    """EQUAL, or a whole number, from `least` to `most` if there is one."""

    def __init__(self, least: int = 0, most: int | None = None) -> None:
        super().__init__(EQUAL, EQUAL, click.IntRange(least, most))


class Several(click.ParamType):
    """`16,32` as a list of different values.

    Args:
        kind: the type of each; words by default.
        name: of such a list in the help.
    """

    def __init__(self, kind: Any = click.STRING, name: str = "names") -> None:
        self.kind, self.name = click.types.convert_type(kind), name

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[Any]:
        listed = value if isinstance(value, list) else str(value).split(",")  # a preset has lists
        words = [str(word).strip() for word in listed]
        if not words or "" in words:
            self.fail(f"'{value}' is not a list such as 2,4 or single,ddp", param, ctx)
        return list(dict.fromkeys(self.kind.convert(word, param, ctx) for word in words))


NUMBERS = Several(click.IntRange(1), "numbers")
SERVER_NUMBERS = Several(ServerNumber(1), "numbers|equal")  # `1,2,equal`, say


def option(default: Any, help: str, type: Any = None, flags: tuple[str, ...] = ()) -> Any:
    """A field of RunConfig that is also a command-line option."""
    return field(default=default, metadata={"help": help, "type": type, "flags": flags})
