"""The fields of RunConfig as command-line options, flags that several commands share, and help that groups options."""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import click
from click.core import ParameterSource

from hvdtrain.config.option_types import METAVARS, Several
from hvdtrain.config.run_config import OF_LOCAL_STEPS, RunConfig, flag, in_words

# The first two of each are what the field calls it; the third is shorter.
NUM_WORKERS = ("--num-workers", "-n", "--workers", "workers")
NUM_SERVERS = ("--num-servers", "-s", "--servers", "servers")
MODES = ("--modes", "--mode", "modes")

TRUST = click.option(
    "--trust-model", is_flag=True,
    help="Import the code that the run folder names for its model and data: it may be anybody's, and runs as you.",
)  # fmt: skip

# What `--help` shows under which heading, most used first. What is nowhere here comes last under the first.
FIRST = "What to run"
GROUPS = {
    FIRST: (
        "preset", "mode", "modes", "ops", "workers", "servers", "repeats", "out", "dry_run", "resume", "join", "file",
        "trust_model",
    ),
    "Data": ("dataset", "skip_bad", "image_size", "augment", "shuffle_block"),
    "Model": ("model", "width", "pretrained", "freeze", "dropout"),
    "Optimisation": (
        "batch_size", "epochs", "steps", "time_budget", "lr", "optimizer", "schedule", "warmup", "weight_decay",
        "momentum", "nesterov", "per_worker", "lr_scaling", "accumulate", "step_epochs", "step_factor", "seed",
    ),
    "Parameter server": (
        "compression", "staleness", "push_scale", "look_ahead", "shares", "wait_for", "backup", "staleness_lr",
        "delay_compensation", "wire", "ring_transport", "bucket_mb", "record",
    ),
    "Local steps": ("local_steps", *OF_LOCAL_STEPS),
    "Hosts": ("hosts", "hostfile", "launcher", "interface", "sync_dst_dir", "secrets"),
    "Devices": ("device", "threads", "precision", "share_gpu", "compile", "deterministic"),
    "Measuring": (
        "target_accuracy", "stop_at_target", "margin", "accuracy_margin", "slow", "trace", "trace_steps", "log_every",
        "repeat", "sprint",
    ),
    "Saving and faults": ("save", "snapshot_every", "keep_snapshots", "retries", "respawn", "timeout"),
}  # fmt: skip


# What other tools call something, and how it is said here.
ALIASES = {"--synthetic": ("--dataset", "synthetic")}


class GroupedCommand(click.Command):
    """A command whose help has its options in GROUPS, and that takes ALIASES."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, [word for given in args for word in ALIASES.get(given, (given,))])

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        options = {param.name: param for param in self.get_params(ctx) if isinstance(param, click.Option)}
        elsewhere = {name for title, names in GROUPS.items() if title != FIRST for name in names}
        for title, listed in GROUPS.items():
            names = [name for name in listed if name in options]
            names += [name for name in options if title == FIRST and name not in {*elsewhere, *listed}]
            records = [record for name in names if (record := options[name].get_help_record(ctx))]
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


def config_options(
    valid: Mapping[str, Iterable[str]], *without: str, several: Collection[str] = (), **defaults: Any
) -> Callable[[Callable], Callable]:
    """Decorator: the fields of RunConfig as click options, but for some, and some with other defaults.

    Args:
        valid: by field, the names that it can have: help texts list them in place of `{field}`.
        several: fields that take lists of values.
    """
    listed = {name: ", ".join(names) for name, names in valid.items()}

    def decorate(command: Callable) -> Callable:
        for f in reversed(dataclasses.fields(RunConfig)):
            if f.name in without:
                continue
            default = in_words(f, defaults.get(f.name, f.default))
            kind, help_text = f.metadata["type"], f.metadata["help"].format_map(listed)
            if f.name in several:
                kind, help_text = Several(kind), f"{help_text} Several by commas."
            name = f"{flag(f.name)}/--no-{flag(f.name)[2:]}" if kind is bool else flag(f.name)
            command = click.option(
                *f.metadata["flags"], name, f.name, default=default, help=help_text,
                is_flag=kind is bool, type=None if kind is bool else kind,
                show_default=default not in (0, 0.0, "", False), metavar=METAVARS.get(type(kind)),
            )(command)  # fmt: skip
        return command

    return decorate


def given_options(ctx: click.Context, options: Iterable[str]) -> set[str]:
    """Those of the options that stand on the command line."""
    return {name for name in options if ctx.get_parameter_source(name) == ParameterSource.COMMANDLINE}
