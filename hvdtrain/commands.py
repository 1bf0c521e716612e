"""`hvdtrain train` and `hvdtrain modes`."""

from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from hvdtrain import modes
from hvdtrain.config import LENGTHS, RunConfig, config_options, read_config


@click.command()
@config_options()
@click.option(
    "--config", "file", type=click.Path(dir_okay=False, path_type=Path),
    help="Read options from a run's config.toml; those given here win.",
)  # fmt: skip
@click.option("--out", default="", help="Run folder; must be new or empty  [default: runs/MODE-JOB].")
@click.pass_context
def train(ctx: click.Context, file: Path | None, out: str, **options: Any) -> None:
    """Train one job, or, under horovodrun, mpirun, srun or torchrun, be one rank of it.

    \b
    hvdtrain train --mode single --dataset digits
    horovodrun -np 2 hvdtrain train --mode allreduce --out runs/ring
    mpirun --bind-to none -np 3 hvdtrain train --mode ps-sync --servers 1 --out runs/ps
    torchrun --nproc-per-node 2 -m hvdtrain train --mode ddp --out runs/ddp

    The global batch is cut as evenly as can be for however many workers there are, so one worker with
    --batch-size 64 and four with --batch-size 64 train on the same batches.
    """
    if file:
        given = {name for name in options if ctx.get_parameter_source(name) == ParameterSource.COMMANDLINE}
        if given & LENGTHS:  # of the options that exclude each other, the one given here wins
            given |= LENGTHS
        options |= {name: value for name, value in read_config(file).items() if name not in given}
    from hvdtrain.rank import run_rank

    run_rank(RunConfig(**options), out)


@click.command("modes")
def list_modes() -> None:
    """List the synchronisation modes and what each does."""
    for mode in modes.names():
        click.echo(f"{mode:<10} {modes.help_line(mode)}")
