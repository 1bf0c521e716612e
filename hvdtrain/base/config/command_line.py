"""Command-line options: the fields of RunConfig, flags that commands share, and help in groups."""

import dataclasses
import shlex
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import click
from click.core import ParameterSource

from hvdtrain.base.config.option_types import (
    DURATION,
    METAVARS,
    Several,
    WordOr,
    with_unit_of_time,
)
from hvdtrain.base.config.run_config import OF_LOCAL_STEPS, RunConfig, flag, in_words

# Flags and the parameter's name. The first two flags are the field's, the third is shorter.
NUM_WORKERS = ("--num-workers", "-n", "--workers", "workers")
NUM_SERVERS = ("--num-servers", "-s", "--servers", "servers")
MODES = ("--modes", "--mode", "modes")

TRUST = click.option(
    "--trust-model",
    is_flag=True,
    help="Import the code that the run folder names for its model and data, or open its URL. Only "
    "for run folders that you trust: the code runs with your rights.",
)

# The headings of `--help` with their options, most used first. Options that are not listed come
# last under the first heading.
FIRST = "What to run"
GROUPS = {
    FIRST: (
        "preset",
        "mode",
        "modes",
        "ops",
        "workers",
        "servers",
        "repeats",
        "out",
        "dry_run",
        "resume",
        "join",
        "file",
        "script",
        "script_args",
        "trust_model",
    ),
    "Data": (
        "dataset",
        "skip_bad",
        "label",
        "validation",
        "image_size",
        "augment",
        "shuffle_block",
    ),
    "Model": ("model", "width", "pretrained", "freeze", "dropout"),
    "Optimisation": (
        "batch_size",
        "epochs",
        "steps",
        "time_budget",
        "lr",
        "optimizer",
        "schedule",
        "warmup",
        "weight_decay",
        "momentum",
        "nesterov",
        "per_worker",
        "lr_scaling",
        "lr_around",
        "lr_trainings",
        "looked_for",
        "accumulate",
        "step_epochs",
        "step_factor",
        "seed",
    ),
    "Communication": (
        "compression",
        "wire",
        "ring_transport",
        "bucket_mb",
        "wait_for",
        "shares",
    ),
    "Parameter server": (
        "staleness",
        "push_scale",
        "look_ahead",
        "backup",
        "staleness_lr",
        "delay_compensation",
        "record",
    ),
    "Local steps": ("local_steps", *OF_LOCAL_STEPS),
    "Hosts": ("hosts", "hostfile", "launcher", "interface", "sync_dst_dir", "secrets"),
    "Devices": ("device", "threads", "precision", "share_gpu", "compile", "deterministic"),
    "Measuring": (
        "decide_by",
        "target_accuracy",
        "target_loss",
        "stop_at_target",
        "margin",
        "accuracy_margin",
        "slow",
        "trace",
        "trace_steps",
        "log_every",
        "repeat",
        "sprint",
    ),
    "Saving and faults": (
        "save",
        "snapshot_every",
        "keep_snapshots",
        "retries",
        "respawn",
        "timeout",
    ),
}


# Words of other tools, and the words that stand for them here.
ALIASES = {"--synthetic": ("--dataset", "synthetic")}


class GroupedCommand(click.Command):
    """A command with its options in GROUPS in the help. It accepts ALIASES."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        words: list[str] = []
        for word in args:
            words += ALIASES.get(word, (word,))
        return super().parse_args(ctx, words)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        options = {
            param.name: param for param in self.get_params(ctx) if isinstance(param, click.Option)
        }
        grouped = set(chain.from_iterable(GROUPS.values()))
        ungrouped = [name for name in options if name not in grouped]
        for title, listed in GROUPS.items():
            names = [name for name in listed if name in options]
            if title == FIRST:
                names += ungrouped
            records = [options[name].get_help_record(ctx) for name in names]
            visible = [record for record in records if record]
            if visible:
                with formatter.section(title):
                    formatter.write_dl(visible)


def config_options(
    valid: Mapping[str, Iterable[str]],
    *without: str,
    several: Collection[str] = (),
    hidden: Collection[str] = (),
    **defaults: Any,
) -> Callable[[Callable], Callable]:
    """Returns a decorator that gives a command the fields of RunConfig as options.

    Args:
        valid: the valid names of a field, by field. Help texts list them in place of `{field}`.
        without: fields that become no options.
        several: fields that take lists of values.
        hidden: fields that the help does not show.
        defaults: other defaults, by field.
    """
    listed = {name: ", ".join(names) for name, names in valid.items()}

    def decorate(command: Callable) -> Callable:
        for field in reversed(dataclasses.fields(RunConfig)):
            if field.name in without:
                continue
            default = defaults.get(field.name, field.default)
            add_option = _as_option(
                field, default, listed, field.name in several, field.name in hidden
            )
            command = add_option(command)
        return command

    return decorate


def _as_option(
    field: dataclasses.Field,
    default: Any,
    listed: Mapping[str, str],
    takes_several: bool,
    is_hidden: bool,
) -> Callable[[Callable], Callable]:
    kind = field.metadata["type"]
    help_text = field.metadata["help"].format_map(listed)
    default = in_words(field, default)
    of_value = kind.other if isinstance(kind, WordOr) else kind
    if of_value is DURATION and not isinstance(default, str):
        default = with_unit_of_time(default)
    if takes_several:
        kind = Several(kind)
        help_text += " Several by commas."
    is_switch = kind is bool
    name = flag(field.name)
    if is_switch:
        name = f"{name}/--no-{name[2:]}"
    return click.option(
        *field.metadata["flags"],
        name,
        field.name,
        default=default,
        help=help_text,
        is_flag=is_switch,
        type=None if is_switch else kind,
        show_default=default not in (0, 0.0, "", False),
        hidden=is_hidden,
        metavar=METAVARS.get(type(kind)),
    )


SCRIPT_WORDS = click.argument(
    "script_words", nargs=-1, type=click.UNPROCESSED, metavar="[-- ARGUMENTS OF THE SCRIPT]"
)


def with_script_words(options: dict[str, Any], words: Sequence[str]) -> dict[str, Any]:
    """Returns the options with what follows -- on the command line as --script-args.

    Raises:
        click.UsageError: there is no script that it could be for.
    """
    if not words:
        return options
    if not options["script"]:
        plural = "s" if len(words) > 1 else ""
        raise click.UsageError(
            f"Got unexpected extra argument{plural} ({' '.join(words)})",
            click.get_current_context(),
        )
    return options | {"script_args": shlex.join(words)}


def given_options(ctx: click.Context, options: Iterable[str]) -> set[str]:
    """Returns the options that stand on the command line."""
    return {
        name for name in options if ctx.get_parameter_source(name) == ParameterSource.COMMANDLINE
    }
