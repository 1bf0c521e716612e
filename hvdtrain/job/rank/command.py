"""`hvdtrain train` and `hvdtrain modes`."""

import shlex
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import click

from hvdtrain.base import modes
from hvdtrain.base.config.command_line import (
    SCRIPT_WORDS,
    TRUST,
    GroupedCommand,
    given_options,
    with_script_words,
)
from hvdtrain.base.config.file import read_config
from hvdtrain.base.config.option_types import EQUAL, RunFolder
from hvdtrain.base.config.run_config import LENGTHS, RunConfig
from hvdtrain.base.errors import UsageError
from hvdtrain.base.world.place import read_world
from hvdtrain.runs.folder import CONFIG, check_can_resume
from hvdtrain.runs.launched import read_launched
from hvdtrain.runs.request import check_functions, check_trusted, resumed_options, train_options
from hvdtrain.runs.scripts import NOT_FOR_SCRIPTS


@click.command(cls=GroupedCommand)
@train_options()
@click.option(
    "--config",
    "file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Read options from a run's config.toml; those given here win.",
)
# --out is not "readable": the first rank may make and remove it while another looks.
@click.option(
    "--out",
    default="",
    type=RunFolder(readable=False),
    help="Run folder; must be new or empty  [default: runs/MODE-JOB].",
)
@click.option(
    "--resume",
    is_flag=True,
    help="Continue the run in --out after its last snapshot, with its options. Options given here "
    "override them. If --out has no run, a new one begins if options are given, unless a run beside "
    "it has a similar name (--out may be mistyped).",
)
@click.option(
    "--join",
    is_flag=True,
    help="Be one more worker of the job that runs in --out, or come in place of one that was lost: "
    "ps-async and ps-ssp with --wire zmq, and rings with --elastic. On SIGTERM only this worker leaves.",
)
@TRUST
@SCRIPT_WORDS
@click.pass_context
def train(
    ctx: click.Context,
    file: Path | None,
    out: str,
    resume: bool,
    join: bool,
    trust_model: bool,
    script_words: tuple[str, ...],
    **options: Any,
) -> None:
    """Train one job, or, under horovodrun, mpirun, srun or torchrun, be one rank of it.

    \b
    hvdtrain train --mode single --dataset digits
    hvdtrain train --resume --out runs/MODE-JOB
    horovodrun -np 2 hvdtrain train --mode allreduce --out runs/ring
    mpirun --bind-to none -np 3 hvdtrain train --mode ps-sync --servers 1 --out runs/ps
    torchrun --nproc-per-node 2 -m hvdtrain train --mode ddp --out runs/ddp

    As root, give mpirun --allow-run-as-root, or set OMPI_ALLOW_RUN_AS_ROOT=1 and
    OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1. horovodrun takes MPI, slower over TCP than Gloo, unless it is
    given --gloo.

    The global batch is cut as evenly as can be for however many workers there are, so one worker
    with --batch-size 64 and four with --batch-size 64 train on the same batches.
    """
    if resume and not out:
        raise UsageError("--resume needs --out: the folder of the run to go on with")
    options = with_script_words(options, script_words)
    given = _given_options(ctx, options, script_words)
    if join:
        if not out or resume or file or given:
            raise UsageError(
                "--join takes --out, the folder of the job to join, and nothing else: "
                "the options of the job apply"
            )
        from hvdtrain.job.rank.join import join_run

        join_run(Path(out), trust_model)
        return
    if options["servers"] == EQUAL:
        options["servers"], odd = divmod(read_world().size, 2)
        if odd:
            raise UsageError("--servers equal: half of the ranks serve, so start 2, 4, 6 … of them")
    if resume and read_world().starter == "alone" and not read_launched():
        check_can_resume(Path(out), begins=bool(given or file))
    run_config = Path(out) / CONFIG
    if resume and not file and run_config.is_file():
        options = resumed_options(run_config, options, given)
    elif file:
        if given & LENGTHS:  # of the options that exclude each other, the one given here wins
            given |= LENGTHS
        options |= {name: value for name, value in read_config(file).items() if name not in given}
    check_functions([options["model"]], options["dataset"])
    # Only a file or the run to go on with can name what the user has not.
    named_by_user = given if file or resume else options
    check_trusted(options, named_by_user, trust_model, file or Path(out))
    from hvdtrain.job.rank.process import run_rank

    run_rank(RunConfig(**options), out, resume)


def _given_options(
    ctx: click.Context, options: dict[str, Any], script_words: tuple[str, ...]
) -> set[str]:
    """Returns the options that stand on the command line, the script's arguments among them."""
    given = given_options(ctx, options)
    if script_words:
        given.add("script_args")
    return given


@click.command(cls=GroupedCommand, context_settings={"allow_interspersed_args": False})
@train_options("script", "script_args", hidden=NOT_FOR_SCRIPTS, snapshot_every="never")
@click.option(
    "--out",
    default="",
    type=RunFolder(readable=False),
    help="Run folder; must be new or empty  [default: runs/MODE-JOB].",
)
@click.argument("script", type=click.Path(dir_okay=False))
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[ARGUMENTS OF THE SCRIPT]")
@click.pass_context
def run(ctx: click.Context, out: str, script: str, words: tuple[str, ...], **options: Any) -> None:
    """Run your own training script as one process, or as one rank under a starter.

    \b
    hvdtrain run --mode single train.py --my-option 3
    horovodrun -np 2 hvdtrain run --mode allreduce train.py
    hvdtrain launch -n 2 -s 1 -- --mode ps-sync --script train.py -- --my-option 3

    What stands before the script is for hvdtrain, and what follows it for the script.
    """
    from hvdtrain.job.rank.process import run_rank

    world = read_world()
    if options["servers"] == EQUAL:
        options["servers"] = world.size // 2
    misplaced = _misplaced(words, given_options(ctx, options))
    if misplaced and world.rank == 0:
        click.echo(
            f"note: {misplaced} comes after {script}, and is for the script: options of hvdtrain "
            "come before it",
            err=True,
        )
    run_rank(RunConfig(**options, script=script, script_args=shlex.join(words)), out)


def _misplaced(words: Sequence[str], given: Collection[str]) -> str:
    """Returns an option that decides what ranks do, and is among the words for the script.

    Empty if there is none, or if the option is given to hvdtrain too.
    """
    for word in words:
        name = word.partition("=")[0]
        if name in ("--mode", "--servers") and name[2:] not in given:
            return name
    return ""


@click.command("modes")
def list_modes() -> None:
    """List the synchronisation modes and what each does."""
    for mode in modes.names():
        click.echo(f"{mode:<10} {modes.declared(mode).help}")
