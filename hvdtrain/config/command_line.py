"""The fields of RunConfig as command-line options."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import click
from click.core import ParameterSource

from hvdtrain.config.run_config import RunConfig, flag


def config_options(
    valid: Mapping[str, Iterable[str]], *without: str, **defaults: Any
) -> Callable[[Callable], Callable]:
    """Decorator: the fields of RunConfig as click options, but for some, and some with other defaults.

    Args:
        valid: by field, the names that it can have: help texts list them in place of `{field}`.
    """
    listed = {name: ", ".join(names) for name, names in valid.items()}

    def decorate(command: Callable) -> Callable:
        for f in reversed(dataclasses.fields(RunConfig)):
            if f.name in without:
                continue
            default = defaults.get(f.name, f.default)
            kind = f.metadata["type"]
            name = f"{flag(f.name)}/--no-{flag(f.name)[2:]}" if kind is bool else flag(f.name)
            command = click.option(
                name, *f.metadata["flags"], f.name, default=default, help=f.metadata["help"].format_map(listed),
                is_flag=kind is bool, type=None if kind is bool else kind,
                show_default=default not in (0, 0.0, "", False),
            )(command)  # fmt: skip
        return command

    return decorate


def given_options(ctx: click.Context, options: Iterable[str]) -> set[str]:
    """Those of the options that stand on the command line."""
    return {name for name in options if ctx.get_parameter_source(name) == ParameterSource.COMMANDLINE}
