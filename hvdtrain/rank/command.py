"""`hvdtrain train` and `hvdtrain modes`."""

from pathlib import Path
from typing import Any

import click

from hvdtrain import modes
from hvdtrain.config.command_line import TRUST, GroupedCommand, given_options
from hvdtrain.config.file import read_config
from hvdtrain.config.option_types import EQUAL, Folder
from hvdtrain.config.run_config import LENGTHS, RunConfig
from hvdtrain.errors import UsageError
from hvdtrain.runs.folder import CONFIG
from hvdtrain.runs.request import check_trusted, resumed_options, train_options
from hvdtrain.world.place import read_world


@click.command(cls=GroupedCommand)
@train_options()
@click.option(
    "--config", "file", type=click.Path(dir_okay=False, path_type=Path),
    help="Read options from a run's config.toml; those given here win.",
)  # fmt: skip
@click.option(  # not "readable": the first rank may make and remove it while another looks
    "--out", default="", type=Folder(readable=False), help="Run folder; must be new or empty  [default: runs/MODE-JOB]."
)
@click.option(
    "--resume", is_flag=True,
    help="Go on with the run in --out after its last snapshot, or begin it if there is none. Its options hold; those "
    "given here win.",
)  # fmt: skip
@click.option(
    "--join", is_flag=True,
    help="Be one more worker of the job that runs in --out, or come in place of one that was lost: ps-async and ps-ssp "
    "with --wire zmq, and rings with --elastic. SIGTERM lets it leave alone.",
)  # fmt: skip
@TRUST
@click.pass_context
def train(
    ctx: click.Context, file: Path | None, out: str, resume: bool, join: bool, trust_model: bool, **options: Any
) -> None:  # fmt: skip
    """Train one job, or, under horovodrun, mpirun, srun or torchrun, be one rank of it.

    \b
    hvdtrain train --mode single --dataset digits
    hvdtrain train --resume --out runs/MODE-JOB
    horovodrun -np 2 hvdtrain train --mode allreduce --out runs/ring
    mpirun --bind-to none -np 3 hvdtrain train --mode ps-sync --servers 1 --out runs/ps
    torchrun --nproc-per-node 2 -m hvdtrain train --mode ddp --out runs/ddp

    As root, give mpirun --allow-run-as-root, or set OMPI_ALLOW_RUN_AS_ROOT=1 and OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1.
    horovodrun takes MPI, slower over TCP than Gloo, unless it is given --gloo.

    The global batch is cut as evenly as can be for however many workers there are, so one worker with
    --batch-size 64 and four with --batch-size 64 train on the same batches.
    """
    if resume and not out:
        raise UsageError("--resume needs --out: the folder of the run to go on with")
    given = given_options(ctx, options)
    if join:
        if not out or resume or file or given:
            raise UsageError("--join takes --out, the folder of the job to join, and nothing else: its options hold")
        from hvdtrain.rank.join import join_run

        join_run(Path(out), trust_model)
        return
    if options["servers"] == EQUAL:
        options["servers"], odd = divmod(read_world().size, 2)
        if odd:
            raise UsageError("--servers equal: half of the ranks serve, so start 2, 4, 6 … of them")
    if resume and not file and (Path(out) / CONFIG).is_file():
        options = resumed_options(Path(out) / CONFIG, options, given)
    elif file:
        if given & LENGTHS:  # of the options that exclude each other, the one given here wins
            given |= LENGTHS
        options |= {name: value for name, value in read_config(file).items() if name not in given}
    check_trusted(options, given if file or resume else options, trust_model, file or Path(out))
    from hvdtrain.rank.process import run_rank

    run_rank(RunConfig(**options), out, resume)


@click.command("modes")
def list_modes() -> None:
    """List the synchronisation modes and what each does."""
    for mode in modes.names():
        click.echo(f"{mode:<10} {modes.declared(mode).help}")
