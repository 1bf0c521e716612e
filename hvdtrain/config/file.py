"""A run's config.toml, read again."""

import dataclasses
from pathlib import Path
from typing import Any

import click

from hvdtrain.config.option_types import WordOr
from hvdtrain.config.run_config import RunConfig
from hvdtrain.config.untrusted import parse_toml, read_whole
from hvdtrain.errors import UsageError, unknown


def read_config(path: Path) -> dict[str, Any]:
    """The options in a config.toml, by field name.

    Raises:
        UsageError: the file cannot be read, or names an option that there is not, or a value that the command line
            would refuse too.
    """
    try:
        values = parse_toml(read_whole(path).decode())
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, not TOML, a number of too many digits
        takes = "--config takes the config.toml of a run folder"
        raise UsageError(f"cannot read the configuration {path}: {error}; {takes}") from None
    known = {f.name: f for f in dataclasses.fields(RunConfig)}
    read = {}
    for name, value in values.items():
        if name in ("workers", "job"):  # remembered for the reader; the starter decides them
            continue
        if name not in known:
            raise unknown(f"option in {path}:", name, list(known))
        expected, kind = type(known[name].default), known[name].metadata["type"]
        if isinstance(kind, WordOr) and value == kind.word:
            value = kind.meaning
        if type(value) is not expected and not (expected is float and type(value) is int):
            raise UsageError(f"{path}: {name} = {value!r} should be of type {expected.__name__}")
        try:
            read[name] = expected(value)
            if isinstance(kind, click.ParamType) and read[name] != known[name].default:
                kind.convert(str(read[name]), None, None)
        except (click.BadParameter, OverflowError) as error:
            raise UsageError(f"{path}: {name}: {error}") from None
    return read


def started_workers(file: Path) -> int | None:
    """How many workers the run of a config.toml had when it was last started; None where it does not say."""
    try:
        workers = parse_toml(read_whole(file).decode()).get("workers")
    except (OSError, ValueError):
        return None
    return workers if isinstance(workers, int) and workers > 0 else None
