"""`hvdtrain launch` and `hvdtrain stop`."""

import dataclasses
import shlex
import time
from functools import partial
from itertools import chain, takewhile
from pathlib import Path
from typing import Any

import click

from hvdtrain.base import modes
from hvdtrain.base.config import recipes
from hvdtrain.base.config.command_line import (
    NUM_SERVERS,
    NUM_WORKERS,
    SCRIPT_WORDS,
    TRUST,
    GroupedCommand,
    given_options,
    with_script_words,
)
from hvdtrain.base.config.file import read_config, started_workers
from hvdtrain.base.config.option_types import EQUAL, RunFolder, ServerNumber
from hvdtrain.base.config.recipes import Launcher
from hvdtrain.base.config.run_config import RunConfig
from hvdtrain.base.errors import Failure, UsageError
from hvdtrain.base.system.preempt import EXIT_CODE
from hvdtrain.launch.allocation import allocated_hosts
from hvdtrain.launch.copies import check_destination, copy_commands, copy_here_to
from hvdtrain.launch.hosts import (
    RECIPE_OF_JOB,
    Host,
    allocate,
    given_hosts,
    host_options,
    secrets_option,
)
from hvdtrain.launch.job_log import log_text
from hvdtrain.launch.prepare import TrainingJob, prepare
from hvdtrain.launch.processes import end_process
from hvdtrain.launch.recipe import LaunchCommand
from hvdtrain.launch.records import Claim, cancel, claimed, forget, read_record
from hvdtrain.launch.supervise import STOP_TIMEOUT_S, hand_over, log_file, supervise
from hvdtrain.runs.folder import (
    CONFIG,
    check_free,
    last_saved_step,
    launch_folder,
    name_one_of,
    refuse_links,
    refuse_others,
)
from hvdtrain.runs.read import last_launch
from hvdtrain.runs.request import (
    another_job_error,
    check,
    check_elastic,
    check_functions,
    check_joinable,
    check_trusted,
    check_workers,
    fixed_options_changed,
    resumed_options,
    train_options,
)
from hvdtrain.runs.scripts import check_script


@click.command(cls=GroupedCommand, context_settings={"ignore_unknown_options": True})
@click.option(
    "--launcher",
    type=recipes.launcher,
    metavar="NAME|FILE",
    help="How ranks are started, by a recipe in launchers/: "
    f"{', '.join(recipes.names('launchers'))}; or by a file, ./site.toml  [default: local, with "
    "-H ssh].",
)
@click.option(
    *NUM_WORKERS, type=click.IntRange(1), help="Workers; with --resume, by default as before."
)
@click.option(
    *NUM_SERVERS,
    type=ServerNumber(),
    help="Number of parameter servers; `equal`: as many as workers; with --resume, by default as "
    "before.",
)
@host_options
@click.option(
    "--sync-dst-dir",
    metavar="DIR",
    help="First make DIR on every host a copy of this folder, with rsync, and run there. DIR must "
    "be new, empty, or an earlier copy. Hidden files, runs and data are left out.",
)
@click.option(
    "--network-interface",
    "interface",
    default="",
    metavar="NAME",
    help="Network interface by which the hosts reach each other  [default: HVDTRAIN_INTERFACE, else "
    "the one that the check of the hosts finds].",
)
@click.option(
    "--out",
    default="",
    type=RunFolder(),
    help="Run folder, new or empty  [default: runs/launch-TIME].",
)
@click.option("--resume", is_flag=True, help="Go on with the run in --out after its last snapshot.")
@click.option(
    "--retries",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    metavar="R",
    help="Start the job again this many times if it fails: it goes on after its last snapshot.",
)
@click.option(
    "--respawn",
    is_flag=True,
    help="On this machine, restart lost workers while the others go on, and killed servers while "
    "the workers wait. For ps-async and ps-ssp with --wire zmq, and for rings with --elastic. With "
    "--launcher ray only workers, on any node.",
)
@TRUST
@click.option(
    "--elastic",
    is_flag=True,
    help="If workers of a ring die, the others go on without a restart. New workers may join at the "
    "end of an epoch or after a snapshot. For allreduce, ddp and sharded on CPUs, by --launcher "
    "local, ray or ssh.",
)
@secrets_option
@click.option("--dry-run", is_flag=True, help="Print what would run, and run nothing.")
@click.argument("train_options", nargs=-1, type=click.UNPROCESSED, metavar="-- TRAIN OPTIONS")
def launch(
    launcher: Launcher | None,
    workers: int | None,
    servers: Any,
    hosts: str | None,
    hostfile: Path | None,
    sync_dst_dir: str | None,
    interface: str,
    out: str,
    resume: bool,
    retries: int,
    respawn: bool,
    elastic: bool,
    trust_model: bool,
    secrets: dict[str, str],
    dry_run: bool,
    train_options: tuple[str, ...],
) -> None:
    """Start a job with workers and, in the ps- modes, servers.

    \b
      hvdtrain launch -n 2 -- --mode allreduce --epochs 3
      hvdtrain launch --launcher ssh -n 3 -s 1 -H node1:2,node2:2 -- --mode ps-async
      hvdtrain launch --launcher slurm -n 8 --dry-run -- --mode allreduce --dataset s3://bucket/coil

    What follows -- is for `hvdtrain train`; without --mode it is allreduce, and with servers
    ps-sync. Servers are the first ranks. They have the slots that workers leave free; if there are
    none, they are spread over the hosts, beside the workers. Hosts are looked at before
    anything starts: the same code and versions, clocks, memory, the run folder on storage that they
    share, and connections between them. SIGTERM, and `hvdtrain stop`, let the ranks save a snapshot
    before they leave. With your own script (-- --script FILE) they leave at once.
    """
    resumed = _config_to_resume(out, workers) if resume else None
    recipe, listed = _where(launcher, given_hosts(hosts, hostfile), Path(out) if resume else None)
    workers = workers or (started_workers(resumed) if resumed else None)
    if servers == EQUAL:
        servers = workers
    config = _train_config(train_options, servers, resumed, trust_model, elastic)
    if not workers:
        raise UsageError("-n is missing: how many workers?")
    check_workers(config.for_workers(workers), workers)
    _check_recipe_can(recipe, config, workers, retries, respawn, elastic)
    if resumed:
        _check_same_job(Path(out), resumed, config, workers)
    used = allocate(listed, workers, config.servers) if listed else []
    if sync_dst_dir and not used:
        raise UsageError("--sync-dst-dir copies to hosts: give -H or --hostfile")
    destination = check_destination(sync_dst_dir) if sync_dst_dir else ""
    folder = Path(out or f"runs/launch-{time.strftime('%Y%m%d-%H%M%S')}").absolute()
    if not resume:
        check_free(folder)
    job = TrainingJob(
        config,
        workers,
        used,
        folder,
        working_folder=destination,
        interface=interface,
        resume=True,
        all_options=resumed is not None,
        respawn=respawn,
        secrets=secrets,
        elastic=elastic,
    )
    make_command = partial(prepare, recipe, job, check=not dry_run, measure=True)
    names = [host.name for host in used]
    if dry_run:
        copying = copy_commands(names, destination) if destination else {}
        lines = [shlex.join(command) for command in chain.from_iterable(copying.values())]
        click.echo("\n".join([*lines, make_command().dry_run_text()]))
        return
    refuse_others(folder, launch_folder(folder))
    refuse_links(folder)
    with claimed(folder, recipe) as claim:
        if not resume:
            check_free(folder)  # again, since another job may have come and ended meanwhile
        if destination:
            copy_here_to(names, destination)
        command = make_command()
        if recipe.script_name:
            _submit(command, folder, claim)
        else:
            supervise(command, folder, retries, respawn and recipe.local)


def _submit(command: LaunchCommand, folder: Path, claim: Claim) -> None:
    """Hands a job over to its scheduler.

    The record has the job's name before, by which it can be ended, and the scheduler's number of it
    afterwards.

    Raises:
        Failure: the scheduler did not take the job.
        SystemExit: SIGTERM came meanwhile.
    """
    if claim.recipe.stop:
        claim.will_hand_over(command.name)
    try:
        was_stopped = hand_over(command, folder)
    except Failure:
        claim.was_refused()
        raise
    if claim.recipe.stop:
        printed = log_text(log_file(folder)).split() or [""]  # the job's number last
        claim.was_handed_over(printed[-1])
    if was_stopped:
        click.echo(
            f"hvdtrain: {claim.recipe.name} has the job: `hvdtrain stop {folder}` ends it", err=True
        )
        raise SystemExit(EXIT_CODE)


def _config_to_resume(out: str, workers: int | None) -> Path | None:
    """Returns the config.toml of the run to resume.

    None if there is none but workers are given: then the run begins, or its folder is in pods.

    Raises:
        UsageError: there is no run in the folder, and no number of workers.
    """
    if not out:
        raise UsageError("--resume needs --out: the folder of the run to go on with")
    config = Path(out, CONFIG)
    if config.is_file():
        return config
    if not workers:
        where = name_one_of(Path(out)) or "; name the folder of one, or begin one there with -n"
        raise UsageError(f"there is no run in {out} to go on with{where}")
    return None


def _where(
    given: Launcher | None, listed: list[Host], resumed: Path | None
) -> tuple[Launcher, list[Host]]:
    """Returns the recipe and the hosts; no hosts if the recipe finds them, or is for this machine.

    Args:
        listed: the hosts that were given.
        resumed: the folder of the run to resume.

    Raises:
        UsageError: the run was launched elsewhere, and it is not said where it is to go on.
    """
    recipe = given or recipes.launcher("ssh" if listed else "local")
    listed = listed or allocated_hosts(recipe)
    before = last_launch(resumed) if resumed else None
    if not before or before.launcher == "local":
        return recipe, listed
    if before.launcher == recipe.name:
        is_unclear = bool(before.hosts) and not listed
    else:
        is_unclear = not given
    if is_unclear:
        raise UsageError(
            f"{resumed} was launched with `{shlex.join(before.place_options())}`: give these "
            "options again, or another --launcher. They are not read from the run folder, because "
            "it may come from a stranger"
        )
    return recipe, listed


def _check_recipe_can(
    recipe: Launcher, config: RunConfig, workers: int, retries: int, respawn: bool, elastic: bool
) -> None:
    """Checks that the recipe can do what --script, --retries, --respawn and --elastic need.

    Raises:
        UsageError: it cannot.
    """
    if config.script and not recipe.runs:  # elsewhere ranks see other folders than this machine
        check_script(config)
    if retries and config.script:
        raise UsageError(
            "--retries is not for --script, which has no snapshots: start the job again with "
            "another --out, and let the script load what job.save has written"
        )
    if retries and recipe.script_name:
        raise UsageError(
            f"--retries is for jobs that `launch` sees to their end: {recipe.name} takes them over"
        )
    if respawn:
        check_joinable(config, "--respawn", elastic)
    if respawn and not recipe.local and not recipe.mentions("{join}"):
        raise UsageError(
            f"--respawn starts ranks on this machine or by ray, not those of {recipe.name}: start "
            "`hvdtrain train --join --out RUN` on a host yourself"
        )
    if elastic and not recipe.elastic:
        can = [name for name in recipes.names("launchers") if recipes.launcher(name).elastic]
        raise UsageError(
            f"--elastic is for --launcher {', '.join(can)}: {recipe.name} ends all ranks"
        )
    if elastic and workers == 1:
        raise UsageError(
            "--elastic needs two workers or more: if the only worker dies, nothing goes on"
        )


def _check_same_job(out: Path, resumed: Path, config: RunConfig, workers: int) -> None:
    """Checks that a run with results keeps the options that may not change.

    Raises:
        UsageError: some have changed.
    """
    if last_saved_step(out) is None and not (out / "summary.json").is_file():
        return
    effective = dataclasses.replace(config.for_workers(workers), width=config.effective_width)
    changes = fixed_options_changed(read_config(resumed), effective)
    if changes:
        raise another_job_error(out, changes)


def _train_config(
    arguments: tuple[str, ...],
    servers: int | None,
    resumed: Path | None,
    trusts: bool,
    elastic: bool,
) -> RunConfig:
    """Returns the configuration that the arguments after -- give, as `hvdtrain train` parses them.

    Args:
        servers: the number of servers; None if -s is not given.
        resumed: the config.toml of the run to resume.
        trusts: whether code that it names may be imported.
    """
    launch_options = set(chain.from_iterable(option.opts for option in launch.params))
    of_train = takewhile(lambda word: word != "--", arguments)
    for argument in of_train:
        name, _, _ = argument.partition("=")
        if name in launch_options:
            raise UsageError(
                f"{name} is for launch: give {'-s' if name in NUM_SERVERS else name} before --"
            )

    @click.command("train", cls=GroupedCommand)
    @train_options("servers", mode="ps-sync" if servers else "allreduce")
    @SCRIPT_WORDS
    @click.pass_context
    def train(ctx: click.Context, script_words: tuple[str, ...], **options: Any) -> RunConfig:
        options["servers"] = servers or 0
        options = with_script_words(options, script_words)
        if resumed:
            given = given_options(ctx, options)
            if servers is not None:
                given |= {"servers"}
            options = resumed_options(resumed, options, given)
            check_trusted(options, given, trusts, resumed)
        if elastic:
            check_elastic(RunConfig(**options))
        check_functions([options["model"]], options["dataset"])
        if modes.declared(options["mode"]).has_servers and not options["servers"]:
            raise UsageError(f"--mode {options['mode']} needs a server: add -s 1 before --")
        return check(RunConfig(**options))

    config = train.main(list(arguments), prog_name="hvdtrain train", standalone_mode=False)
    if not isinstance(config, RunConfig):  # --help has been shown
        raise SystemExit(0)
    return config


@click.command()
@click.argument("out", metavar="RUN", type=click.Path(path_type=Path))
@RECIPE_OF_JOB
def stop(out: Path, launcher: Launcher | None) -> None:
    """End the job that `hvdtrain launch` started with --out RUN, on all its hosts.

    It ends the process that `launch` recorded, which lets the ranks save a snapshot and leave, or
    cancels the job that it handed to a scheduler. `hvdtrain launch --resume --out RUN` continues it,
    with the same --launcher, -H and --sync-dst-dir if there were any.
    """
    run = out.absolute()
    record = read_record(run, launcher)
    if not record:
        raise UsageError(f"{out}: no job that `hvdtrain launch` started is running there")
    was_running = False
    if "job" not in record:
        was_running = end_process(run, record, STOP_TIMEOUT_S)
        record = read_record(run, launcher)  # changed if the job was being handed over
    if "name" in record:
        was_running = cancel(record, STOP_TIMEOUT_S)
    forget(run, record)
    if not was_running:
        raise UsageError(f"{out}: its job has ended already")
    click.echo(f"{out}: its job has ended")
