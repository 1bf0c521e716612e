"""`hvdtrain launch` and `hvdtrain stop`."""

import dataclasses
import json
import shlex
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from hvdtrain import modes, recipes
from hvdtrain.config import RunConfig, config_options, given_options, resumed_options, started_workers
from hvdtrain.errors import Failure, UsageError, unknown
from hvdtrain.launch import copies, testbed
from hvdtrain.launch.follow import LEAVING_S, log_file, see_to_its_end, stop_file
from hvdtrain.launch.hosts import Host, needed, parse, parse_file
from hvdtrain.launch.memory import rank_mb
from hvdtrain.launch.preflight import Needs, look_at
from hvdtrain.launch.processes import end_recorded, myself, still_runs
from hvdtrain.launch.recipe import Job, Start, expand, train_program
from hvdtrain.runfolder import CONFIG, check_free


def host_options(command: Callable) -> Callable:
    """Decorator: -H and --hostfile."""
    command = click.option(
        "--hostfile", type=click.Path(path_type=Path), metavar="FILE",
        help="Hosts from a file: `name slots=2` or `name:2` a line.",
    )(command)  # fmt: skip
    return click.option("--hosts", "-H", metavar="A:1,B:1", help="Hosts, each with how many ranks it takes.")(command)


def given_hosts(hosts: str | None, hostfile: Path | None) -> list[Host]:
    """The hosts of -H or --hostfile; none where neither is given."""
    if hosts and hostfile:
        raise UsageError("-H and --hostfile exclude each other: give one")
    return parse(hosts) if hosts else parse_file(hostfile) if hostfile else []


# Options of `launch` that one is tempted to give to the job.
_OURS = set("--out --resume --servers -s -n -H --hosts --hostfile --launcher --dry-run --retries".split())


@click.command(context_settings={"ignore_unknown_options": True})
@click.option(
    "--launcher", default="local", show_default=True, metavar="NAME",
    help="How ranks are started: local, ssh, mpi, slurm, sge, yarn, kubernetes, or a recipe of your own in launchers/.",
)  # fmt: skip
@click.option(
    "--num-workers", "-n", "workers", type=click.IntRange(1), help="Workers; with --resume, by default as before."
)
@click.option(
    "--num-servers", "-s", "servers", type=click.IntRange(0), help="Parameter servers, beside the workers; likewise."
)
@host_options
@click.option(
    "--sync-dst-dir", metavar="DIR",
    help="First make DIR on every host a copy of this folder, with rsync, and run there. DIR must be new, empty, or an "
    "earlier copy. Hidden files, runs and data are left out.",
)  # fmt: skip
@click.option("--sync-data", is_flag=True, help="Copy the folder of --dataset, too, to DIR/data, and read it there.")
@click.option(
    "--network-interface", "interface", default="", metavar="NAME",
    help="By which hosts reach each other  [default: the one with the address that their names mean].",
)  # fmt: skip
@click.option("--out", default="", help="Run folder, new or empty  [default: runs/launch-TIME].")
@click.option("--resume", is_flag=True, help="Go on with the run in --out after its last snapshot.")
@click.option(
    "--retries", type=click.IntRange(0), default=0, show_default=True, metavar="R",
    help="Start the job again so many times if it fails: it goes on after its last snapshot.",
)  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Print what would run, and run nothing.")
@click.argument("train_options", nargs=-1, type=click.UNPROCESSED, metavar="-- TRAIN OPTIONS")
def launch(
    launcher: str, workers: int | None, servers: int | None, hosts: str | None, hostfile: Path | None,
    sync_dst_dir: str | None, sync_data: bool, interface: str, out: str, resume: bool, retries: int, dry_run: bool,
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
    if launcher not in recipes.names("launchers"):
        raise unknown("launcher", launcher, recipes.names("launchers"))
    if resume and not out:
        raise UsageError("--resume needs --out: the folder of the run to go on with")
    before = Path(out) / CONFIG if resume and (Path(out) / CONFIG).is_file() else None
    config = _train_config(train_options, servers, before)
    servers = config.servers
    workers = workers or (started_workers(before) if before else None)
    if not workers:
        raise UsageError("-n is missing: how many workers?")
    recipe = recipes.load("launchers", launcher)
    handed_over = "script" in recipe or "stop" in recipe
    if retries and handed_over:
        raise UsageError(f"--retries is for jobs that `launch` sees to their end: {launcher} takes them over")
    config.for_workers(workers).check_workers(workers)
    listed = given_hosts(hosts, hostfile)
    if sync_dst_dir and not listed:
        raise UsageError("--sync-dst-dir copies to hosts: give -H or --hostfile")
    if sync_data and not sync_dst_dir:
        raise UsageError("--sync-data copies to DIR/data on every host: give --sync-dst-dir DIR")
    used = needed(listed, workers + servers) if listed else []
    names = [host.name for host in used]
    target = copies.target(sync_dst_dir) if sync_dst_dir else ""
    wanted = [copies.Copy(Path.cwd(), target, copies.CODE)] if target else []
    if sync_data:
        wanted.append(copies.Copy(copies.data_folder(config), f"{target}/data", copies.DATA))
        config = dataclasses.replace(config, dataset=wanted[-1].folder)
    folder = Path(out or f"runs/launch-{time.strftime('%Y%m%d-%H%M%S')}").absolute()
    if not resume:
        check_free(folder)
    if not dry_run:
        for copy in wanted:
            copy.make(names)
    start = prepare(
        launcher, config, workers, used, folder, look=not dry_run, starts_in=target,
        interface=interface, resuming=True, whole=before is not None,
    )  # fmt: skip
    if dry_run:
        click.echo("".join(f"{line}\n" for copy in wanted for line in copy.shown(names)) + start.shown())
        return
    log = log_file(folder)
    log.parent.mkdir(parents=True, exist_ok=True)
    running = stop_file(folder)
    if still_runs(_recorded(running)):
        raise UsageError(f"--out {folder}: its job is still running; `hvdtrain stop {out}` ends it")
    running.write_text(json.dumps({"launcher": launcher, **myself()}))
    try:
        see_to_its_end(start, folder, workers, servers, retries, leaves_results=not handed_over)
    except BaseException:
        running.unlink(missing_ok=True)
        raise
    if "stop" in recipe:  # a scheduler has it now
        running.write_text(json.dumps({"launcher": launcher, "job": log.read_text().split()[-1]}))
    else:
        running.unlink(missing_ok=True)


def prepare(
    launcher: str, config: RunConfig, workers: int, hosts: Sequence[Host], out: Path, look: bool = True,
    starts_in: str = "", interface: str = "", resuming: bool = False, whole: bool = False,
) -> Start:  # fmt: skip
    """How a training job is started.

    Args:
        hosts: with the slots it takes; empty where the launcher finds hosts itself.
        look: whether to check the hosts first, where the launcher needs them: a scheduler knows its own.
        starts_in: the folder on the hosts in which ranks start; by default the same as here.
        interface: by which hosts reach each other; by default one is chosen.
        whole: whether ranks are told all options, since what is in the run folder has others.
        resuming: whether the job goes on with what it finds in the run folder, when it is started again too.

    Raises:
        UsageError: a host cannot run it, or the launcher needs hosts.
    """
    config = config.absolute()
    environment = {}
    if set(testbed.nodes()) & {host.name for host in hosts}:
        interface = interface or testbed.LINK
        environment["HVDTRAIN_OVER_TCP"] = "1"  # rpc would find the shared memory that these hosts have in common
    if hosts and look and recipes.load("launchers", launcher).get("hosts") == "needed":
        files = [path for path in (config.dataset, config.pretrained) if path.startswith("/")]
        by_name = config.mode != "allreduce"  # Horovod has addresses from its starter
        needs = Needs(starts_in or str(Path.cwd()), out, files, rank_mb(config, workers), by_name, interface)
        interface = look_at(hosts, needs) or interface
    if interface:  # torch's processes listen on it alone then
        environment |= {"TP_SOCKET_IFNAME": interface, "GLOO_SOCKET_IFNAME": interface}
    if config.servers and hosts:  # horovodrun numbers ranks host by host
        environment["HVDTRAIN_SLOTS"] = ",".join(str(host.slots) for host in hosts)
    program = [*train_program(config, out, whole), *(["--resume"] if resuming else [])]
    ranks, survives = workers + config.servers, modes.survives(config.mode)
    job = Job(ranks, program, config.servers, hosts, out, interface, starts_in, survives, environment)
    return expand(launcher, job)


def _train_config(words: tuple[str, ...], servers: int | None, file: Path | None) -> RunConfig:
    """What follows --, as `hvdtrain train` would take it.

    Args:
        servers: None where nothing is said of them.
        file: the config.toml of the run that the job goes on with.
    """
    for name in (word.split("=")[0] for word in words):
        if name in _OURS:
            raise UsageError(f"{name} is for launch: give {'-s' if name == '--servers' else name} before --")

    @click.command("train")
    @config_options("servers", mode="ps-sync" if servers else "allreduce")
    @click.pass_context
    def train(ctx: click.Context, **options: Any) -> RunConfig:
        options["servers"] = servers or 0
        if file:
            given = given_options(ctx, options) | ({"servers"} if servers is not None else set())
            options = resumed_options(file, options, given)
        if modes.has_servers(options["mode"]) and not options["servers"]:
            raise UsageError(f"--mode {options['mode']} needs a server: add -s 1 before --")
        return RunConfig(**options).check()

    config = train.main(list(words), prog_name="hvdtrain train", standalone_mode=False)
    if not isinstance(config, RunConfig):  # --help has been shown
        raise SystemExit(0)
    return config


def _recorded(file: Path) -> dict[str, Any]:
    """What `launch` wrote down of a job; nothing where it did not, or nobody can read it."""
    try:
        known = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    if not isinstance(known, dict):
        return {}
    kinds = {"launcher": str, "job": str} if "job" in known else {"launcher": str, "pid": int, "host": str}
    return known if all(isinstance(known.get(name), kind) for name, kind in kinds.items()) else {}


@click.command()
@click.argument("out", metavar="RUN", type=click.Path(path_type=Path))
def stop(out: Path) -> None:
    """End the job that `hvdtrain launch` started with --out RUN, on all its hosts.

    It ends the process that `launch` recorded, which lets the ranks save a snapshot and leave, or cancels the job that
    it handed to a scheduler. `hvdtrain launch --resume --out RUN` goes on with it.
    """
    file = stop_file(out.absolute())
    known = _recorded(file)
    if not known:
        raise UsageError(f"{out}: no job that `hvdtrain launch` started is running there")
    if "job" in known:
        words = [word.replace("{job}", known["job"]) for word in recipes.load("launchers", known["launcher"])["stop"]]
        done = subprocess.run(words, capture_output=True, text=True)
        if done.returncode:
            raise Failure(f"`{shlex.join(words)}` failed: {(done.stderr or done.stdout).strip()[-200:]}")
    elif not end_recorded(known, LEAVING_S):
        file.unlink()
        raise UsageError(f"{out}: its job has ended already")
    file.unlink(missing_ok=True)
    click.echo(f"{out}: its job has ended")
