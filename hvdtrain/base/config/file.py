"""Reading a run's config.toml."""

import dataclasses
from pathlib import Path
from typing import Any

import click

from hvdtrain.base.config.option_types import WordOr
from hvdtrain.base.config.run_config import RunConfig
from hvdtrain.base.config.untrusted import (
    LARGEST_CONFIG,
    MOST_RANKS,
    control_character,
    parse_toml,
    read_whole,
)
from hvdtrain.base.errors import UsageError, unknown


def read_config(path: Path) -> dict[str, Any]:
    """Returns the options in a config.toml, by field name.

    Raises:
        UsageError: the file cannot be read, has an unknown option, or a value that the command line
            would refuse too.
    """
    try:
        values = parse_toml(read_whole(path, LARGEST_CONFIG).decode())
    except (OSError, ValueError) as error:  # no UTF-8, no TOML, or a number of too many digits
        raise UsageError(
            f"cannot read the configuration {path}: {error}; "
            "--config takes the config.toml of a run folder"
        ) from None
    fields = {field.name: field for field in dataclasses.fields(RunConfig)}
    options = {}
    for name, value in values.items():
        if name in ("workers", "job"):  # for people who read the file; the starter decides them
            continue
        if name not in fields:
            raise unknown(f"option in {path}:", name, list(fields))
        options[name] = _checked(value, fields[name], path)
    return options


def _checked(value: Any, field: dataclasses.Field, path: Path) -> Any:
    """Returns the value of a field, if the command line would take it too."""
    expected: Any = type(field.default)
    kind = field.metadata["type"]
    if isinstance(kind, WordOr) and value == kind.word:
        value = kind.meaning
    is_whole_float = expected is float and type(value) is int
    if type(value) is not expected and not is_whole_float:
        raise UsageError(f"{path}: {field.name} = {value!r} should be of type {expected.__name__}")
    if isinstance(value, str) and control_character(value):
        raise UsageError(f"{path}: {field.name} = {value!a} has a control character")
    try:
        value = expected(value)
        if isinstance(kind, click.ParamType) and value != field.default:
            kind.convert(str(value), None, None)
    except (click.BadParameter, OverflowError) as error:
        raise UsageError(f"{path}: {field.name}: {error}") from None
    return value


def started_workers(file: Path) -> int | None:
    """Returns how many workers a run had at its last start; None if the file does not say."""
    try:
        config = parse_toml(read_whole(file, LARGEST_CONFIG).decode())
    except (OSError, ValueError):
        return None
    workers = config.get("workers")
    return workers if isinstance(workers, int) and 0 < workers <= MOST_RANKS else None
