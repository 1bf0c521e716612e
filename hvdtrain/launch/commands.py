"""`hvdtrain launch` and `hvdtrain stop`."""

import dataclasses
import shlex
import time
from functools import partial
from pathlib import Path
from typing import Any

import click

from hvdtrain import modes
from hvdtrain.config import recipes
from hvdtrain.config.command_line import NUM_SERVERS, NUM_WORKERS, TRUST, GroupedCommand, given_options
from hvdtrain.config.file import read_config, started_workers
from hvdtrain.config.option_types import EQUAL, Folder, ServerNumber
from hvdtrain.config.recipes import Launcher
from hvdtrain.config.run_config import RunConfig
from hvdtrain.errors import UsageError
from hvdtrain.launch.allocation import allocated_hosts
from hvdtrain.launch.copies import check_destination, copy_commands, copy_here_to
from hvdtrain.launch.hosts import RECIPE_OF_JOB, Host, allocate, given_hosts, host_options, secrets_option
from hvdtrain.launch.prepare import prepare
from hvdtrain.launch.processes import end_process
from hvdtrain.launch.records import cancel, claimed, forget, read_record
from hvdtrain.launch.supervise import STOP_TIMEOUT_S, log_file, supervise
from hvdtrain.runs.folder import CONFIG, check_free, last_saved_step, name_one_of, refuse_links
from hvdtrain.runs.launched import remembered
from hvdtrain.runs.request import (
    changed_for_good,
    check,
    check_elastic,
    check_joinable,
    check_trusted,
    check_workers,
    of_another_job,
    resumed_options,
    train_options,
)


@click.command(cls=GroupedCommand, context_settings={"ignore_unknown_options": True})
@click.option(
    "--launcher", type=recipes.launcher, metavar="NAME|FILE",
    help=f"How ranks are started, by a recipe in launchers/: {', '.join(recipes.names('launchers'))}; or by a file, "
    "./site.toml  [default: local, with -H ssh; with --resume as before].",
)  # fmt: skip
@click.option(*NUM_WORKERS, type=click.IntRange(1), help="Workers; with --resume, by default as before.")
@click.option(*NUM_SERVERS, type=ServerNumber(), help="Parameter servers, or `equal` to the workers; likewise.")
@host_options
@click.option(
    "--sync-dst-dir", metavar="DIR",
    help="First make DIR on every host a copy of this folder, with rsync, and run there. DIR must be new, empty, or an "
    "earlier copy. Hidden files, runs and data are left out.",
)  # fmt: skip
@click.option(
    "--network-interface", "interface", default="", metavar="NAME",
    help="By which hosts reach each other  [default: the one with the address that their names mean].",
)  # fmt: skip
@click.option("--out", default="", type=Folder(), help="Run folder, new or empty  [default: runs/launch-TIME].")
@click.option("--resume", is_flag=True, help="Go on with the run in --out after its last snapshot.")
@click.option(
    "--retries", type=click.IntRange(0), default=0, show_default=True, metavar="R",
    help="Start the job again so many times if it fails: it goes on after its last snapshot.",
)  # fmt: skip
@click.option(
    "--respawn", is_flag=True,
    help="Start a worker that is lost again, while the others go on, and a server that is killed, for which they wait: "
    "in ps-async and ps-ssp with --wire zmq, and in rings with --elastic, on this machine; by ray, a worker on any "
    "node, and no server.",
)  # fmt: skip
@TRUST
@click.option(
    "--elastic", is_flag=True,
    help="A ring goes on without workers that die, in the same processes, and takes others when an epoch is over: "
    "allreduce, ddp and sharded on CPUs, by --launcher local, ray or ssh.",
)  # fmt: skip
@secrets_option
@click.option("--dry-run", is_flag=True, help="Print what would run, and run nothing.")
@click.argument("train_options", nargs=-1, type=click.UNPROCESSED, metavar="-- TRAIN OPTIONS")
def launch(
    launcher: Launcher | None, workers: int | None, servers: Any, hosts: str | None, hostfile: Path | None,
    sync_dst_dir: str | None, interface: str, out: str, resume: bool, retries: int,
    respawn: bool, elastic: bool, trust_model: bool, secrets: dict[str, str], dry_run: bool,
    train_options: tuple[str, ...],
) -> None:  # fmt: skip
    """Start a job of so many workers and servers.

    \b
      hvdtrain launch -n 2 -- --mode allreduce --epochs 3
      hvdtrain launch --launcher ssh -n 3 -s 1 -H node1:2,node2:2 -- --mode ps-async
      hvdtrain launch --launcher slurm -n 8 --dry-run -- --mode allreduce --dataset s3://bucket/coil

    What follows -- is for `hvdtrain train`; without --mode it is allreduce, and with servers ps-sync. Servers, the
    first ranks, are spread over the hosts. Hosts are looked at before anything starts: the same code and versions,
    clocks, memory, the run folder on storage that they share, and connections between them. SIGTERM, and `hvdtrain
    stop`, let the ranks save a snapshot before they leave.
    """
    resumed = _config_to_resume(out, workers) if resume else None
    recipe, listed = _where(launcher, given_hosts(hosts, hostfile), Path(out) if resume else None)
    workers = workers or (started_workers(resumed) if resumed else None)
    config = _train_config(train_options, workers if servers == EQUAL else servers, resumed, trust_model, elastic)
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
    make_command = partial(
        prepare, recipe, config, workers, used, folder, check=not dry_run, working_folder=destination,
        interface=interface, resume=True, all_options=resumed is not None, measure=True, respawn=respawn,
        secrets=secrets, elastic=elastic,
    )  # fmt: skip
    names = [host.name for host in used]
    if dry_run:
        copying = copy_commands(names, destination) if destination else {}
        lines = [shlex.join(command) for commands in copying.values() for command in commands]
        click.echo("\n".join([*lines, make_command().dry_run_text()]))
        return
    refuse_links(folder)
    with claimed(folder, recipe) as job:
        if not resume:  # again: another job may have come and ended meanwhile
            check_free(folder)
        if destination:
            copy_here_to(names, destination)
        supervise(command := make_command(), folder, retries, respawn and recipe.local)
        if recipe.stop:
            printed = log_file(folder).read_text().split() or [""]  # the job's number last
            job |= {"job": printed[-1], "name": command.name}


def _config_to_resume(out: str, workers: int | None) -> Path | None:
    """The config.toml of the run to go on with; None where workers are given, and the run is to begin or in pods."""
    if not out:
        raise UsageError("--resume needs --out: the folder of the run to go on with")
    if (config := Path(out, CONFIG)).is_file():
        return config
    if not workers:
        where = name_one_of(Path(out)) or "; name the folder of one, or begin one there with -n"
        raise UsageError(f"there is no run in {out} to go on with{where}")
    return None


def _where(given: Launcher | None, listed: list[Host], resumed: Path | None) -> tuple[Launcher, list[Host]]:
    """The recipe, and the hosts; none where it finds them itself, or is for this machine.

    Args:
        listed: the hosts that were given.
        resumed: the folder of a run to go on with.
    """
    before = remembered(resumed) if resumed else None
    name = given.name if given else before.launcher if before else "ssh" if listed else "local"
    recipe = given if given or name.endswith(recipes.SUFFIX) else recipes.launcher(name)
    listed = listed or (allocated_hosts(recipe) if recipe else [])
    if before and (not recipe or (before.hosts and before.launcher == name and not listed)):
        raise UsageError(
            f"{resumed} was launched with `{shlex.join(before.place_options())}`: give that again, or another "
            "--launcher; a run folder may be a stranger's, and does not say where ssh goes"
        )
    assert recipe
    return recipe, listed


def _check_recipe_can(
    recipe: Launcher, config: RunConfig, workers: int, retries: int, respawn: bool, elastic: bool
) -> None:  # fmt: skip
    """UsageError where a job cannot be started again like this, or its workers not, or cannot go on without one."""
    if retries and recipe.script_name:
        raise UsageError(f"--retries is for jobs that `launch` sees to their end: {recipe.name} takes them over")
    if respawn:
        check_joinable(config, "--respawn", elastic)
    if respawn and not recipe.local and not recipe.mentions("{join}"):
        raise UsageError(
            f"--respawn starts ranks on this machine or by ray, not those of {recipe.name}: start "
            "`hvdtrain train --join --out RUN` on a host yourself"
        )
    if elastic and not recipe.elastic:
        can = [name for name in recipes.names("launchers") if recipes.launcher(name).elastic]
        raise UsageError(f"--elastic is for --launcher {', '.join(can)}: {recipe.name} ends all ranks")
    if elastic and workers == 1:
        raise UsageError("--elastic needs two workers or more: without the first one nothing goes on")


def _check_same_job(out: Path, resumed: Path, config: RunConfig, workers: int) -> None:
    """UsageError where a run that has come to something is to go on as another."""
    if last_saved_step(out) is None and not (out / "summary.json").is_file():
        return
    asked = dataclasses.replace(config.for_workers(workers), width=config.taken_width)
    if different := changed_for_good(read_config(resumed), asked):
        raise of_another_job(out, different)


def _train_config(
    arguments: tuple[str, ...], servers: int | None, resumed: Path | None, trusts: bool, elastic: bool
) -> RunConfig:  # fmt: skip
    """Parse what follows --, as `hvdtrain train` would.

    Args:
        servers: None where -s is not given.
        resumed: the config.toml of the run that the job goes on with.
        trusts: import what code that names.
    """
    launch_options = {name for option in launch.params for name in option.opts}
    for name in (argument.split("=")[0] for argument in arguments):
        if name in launch_options:
            raise UsageError(f"{name} is for launch: give {'-s' if name in NUM_SERVERS else name} before --")

    @click.command("train", cls=GroupedCommand)
    @train_options("servers", mode="ps-sync" if servers else "allreduce")
    @click.pass_context
    def train(ctx: click.Context, **options: Any) -> RunConfig:
        options["servers"] = servers or 0
        if resumed:
            given = given_options(ctx, options) | ({"servers"} if servers is not None else set())
            options = resumed_options(resumed, options, given)
            check_trusted(options, given, trusts, resumed)
        if elastic:
            check_elastic(RunConfig(**options))
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

    It ends the process that `launch` recorded, which lets the ranks save a snapshot and leave, or cancels the job that
    it handed to a scheduler. `hvdtrain launch --resume --out RUN` goes on with it.
    """
    record = read_record(out.absolute(), launcher)
    if not record:
        raise UsageError(f"{out}: no job that `hvdtrain launch` started is running there")
    was_running = (
        cancel(record, STOP_TIMEOUT_S) if "job" in record else end_process(out.absolute(), record, STOP_TIMEOUT_S)
    )
    forget(out.absolute(), record)
    if not was_running:
        raise UsageError(f"{out}: its job has ended already")
    click.echo(f"{out}: its job has ended")
