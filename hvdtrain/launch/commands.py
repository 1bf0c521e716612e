"""`hvdtrain launch`, `hvdtrain stop` and `hvdtrain hosts`."""

import json
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import click

from hvdtrain import modes, recipes
from hvdtrain.config import RunConfig, config_options
from hvdtrain.errors import Failure, UsageError, unknown
from hvdtrain.launch import testbed
from hvdtrain.launch.hosts import Host, needed, parse, parse_file
from hvdtrain.launch.preflight import SSH, look_at
from hvdtrain.launch.processes import end_recorded, myself, reason, sigterm_unwinds, started
from hvdtrain.launch.recipe import Job, Start, expand, train_program
from hvdtrain.runfolder import check_free


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


@click.command(context_settings={"ignore_unknown_options": True})
@click.option(
    "--launcher", default="local", show_default=True, metavar="NAME",
    help="How ranks are started: local, ssh, mpi, slurm, sge, yarn, kubernetes, or a recipe of your own in launchers/.",
)  # fmt: skip
@click.option("--num-workers", "-n", "workers", type=click.IntRange(1), required=True, help="Workers.")
@click.option(
    "--num-servers", "-s", "servers", type=click.IntRange(0), default=0, help="Parameter servers, beside the workers."
)
@host_options
@click.option(
    "--sync-dst-dir", metavar="DIR", help="First copy this folder to DIR on every host, with rsync, and run there."
)
@click.option("--out", default="", help="Run folder, new or empty  [default: runs/launch-TIME].")
@click.option("--dry-run", is_flag=True, help="Print what would run, and run nothing.")
@click.argument("train_options", nargs=-1, type=click.UNPROCESSED, metavar="-- TRAIN OPTIONS")
def launch(
    launcher: str, workers: int, servers: int, hosts: str | None, hostfile: Path | None, sync_dst_dir: str | None,
    out: str, dry_run: bool, train_options: tuple[str, ...],
) -> None:  # fmt: skip
    """Start a job of so many workers and servers.

    \b
      hvdtrain launch -n 2 -- --mode allreduce --epochs 3
      hvdtrain launch --launcher ssh -n 3 -s 1 -H node1:2,node2:2 -- --mode ps-async
      hvdtrain launch --launcher slurm -n 8 --dry-run -- --mode allreduce --dataset s3://bucket/coil

    What follows -- is for `hvdtrain train`; without --mode it is allreduce, and with servers ps-sync. Servers, the
    first ranks, are spread over the hosts. Hosts are looked at before anything starts: ssh, the same versions, clocks,
    interface, memory.
    """
    if launcher not in recipes.names("launchers"):
        raise unknown("launcher", launcher, recipes.names("launchers"))
    config = _train_config(train_options, servers)
    config.check_workers(workers)
    listed = given_hosts(hosts, hostfile)
    if sync_dst_dir and not listed:
        raise UsageError("--sync-dst-dir copies to hosts: give -H or --hostfile")
    folder = Path(out or f"runs/launch-{time.strftime('%Y%m%d-%H%M%S')}").absolute()
    used = needed(listed, workers + servers) if listed else []
    start = prepare(launcher, config, workers, used, folder, look=not dry_run)
    if dry_run:
        click.echo(start.shown())
        return
    check_free(folder, others_log=False)
    if sync_dst_dir:
        synchronise(used, sync_dst_dir)
    log_file(folder).parent.mkdir(parents=True, exist_ok=True)
    running = stop_file(folder)
    running.write_text(json.dumps({"launcher": launcher, **myself()}))
    code = follow(start, folder)
    if code:
        running.unlink()
        failure = Failure(f"the job failed: {reason(log_file(folder), code)}")
        failure.exit_code = code if code > 0 else 128 - code  # a starter that a signal ended
        raise failure
    if "stop" in recipes.load("launchers", launcher):  # a scheduler has it now
        job = log_file(folder).read_text().split()[-1]
        running.write_text(json.dumps({"launcher": launcher, "job": job}))
    else:
        running.unlink()


def prepare(
    launcher: str, config: RunConfig, workers: int, hosts: Sequence[Host], out: Path, look: bool = True
) -> Start:
    """How a training job is started.

    Args:
        hosts: with the slots it takes; empty where the launcher finds hosts itself.
        look: whether to check the hosts first.

    Raises:
        UsageError: a host cannot run it, or the launcher needs hosts.
    """
    environment = {}
    interface = ""
    if set(testbed.nodes()) & {host.name for host in hosts}:
        interface = testbed.LINK
        environment["HVDTRAIN_OVER_TCP"] = "1"  # rpc would find the shared memory that these hosts have in common
    if hosts and look:
        interface = look_at(hosts, Path.cwd()) or interface
    if config.servers and hosts:  # horovodrun numbers ranks host by host
        environment["HVDTRAIN_SLOTS"] = ",".join(str(host.slots) for host in hosts)
    program = train_program(config.absolute(), out)
    ranks, survives = workers + config.servers, modes.survives(config.mode)
    job = Job(ranks, program, config.servers, hosts, out, interface, survives, environment)
    return expand(launcher, job)


def log_file(out: Path) -> Path:
    """What a launched job's starter and ranks print, beside the run folder."""
    return out.with_name(f"{out.name}.launch") / "log"


def stop_file(out: Path) -> Path:
    """What a launched job is ended by, while it runs or a scheduler has it."""
    return log_file(out).with_name("running.json")


def follow(start: Start, out: Path) -> int:
    """Run a job to its end, showing what it prints; its exit code. Ctrl-C and SIGTERM end it on all hosts."""
    log = log_file(out)
    with sigterm_unwinds(), started(start, log) as process, log.open("rb") as printed:
        while True:
            ended = process.poll() is not None
            sys.stdout.buffer.write(printed.read())
            sys.stdout.flush()
            if ended:
                return process.returncode
            time.sleep(0.1)


def synchronise(hosts: Sequence[Host], target: str) -> None:
    """Copy this folder to every host. Failure where one copy fails."""
    for host in hosts:
        words = ["rsync", "-az", "--delete", "--exclude", ".git", "--exclude", ".venv", "--exclude", "runs"]
        done = subprocess.run([*words, "./", f"{host.name}:{target}/"], capture_output=True, text=True)
        if done.returncode:
            raise Failure(f"cannot copy to {host.name}:{target}: {done.stderr.strip().splitlines()[-1:]}")


def _train_config(words: tuple[str, ...], servers: int) -> RunConfig:
    """What follows --, as `hvdtrain train` would take it."""

    @click.command("launch … -- TRAIN OPTIONS")
    @config_options("servers", mode="ps-sync" if servers else "allreduce")
    def train(**options: object) -> RunConfig:
        return RunConfig(**options, servers=servers).check()  # type: ignore[arg-type]

    return train.main(list(words), standalone_mode=False)


@click.command()
@click.argument("out", metavar="RUN", type=click.Path(path_type=Path))
def stop(out: Path) -> None:
    """End the job that `hvdtrain launch` started with --out RUN, on all its hosts.

    It ends the process that `launch` recorded, which ends the ranks, or cancels the job that it handed to a scheduler.
    """
    file = stop_file(out.absolute())
    try:
        known = json.loads(file.read_text())
    except (OSError, ValueError):
        raise UsageError(f"{out}: no job that `hvdtrain launch` started is running there") from None
    if "job" in known:
        words = [word.replace("{job}", known["job"]) for word in recipes.load("launchers", known["launcher"])["stop"]]
        done = subprocess.run(words, capture_output=True, text=True)
        if done.returncode:
            raise Failure(f"`{shlex.join(words)}` failed: {(done.stderr or done.stdout).strip()[-200:]}")
    elif not end_recorded(known):
        file.unlink()
        raise UsageError(f"{out}: its job has ended already")
    file.unlink(missing_ok=True)
    click.echo(f"{out}: its job has ended")


@click.group("hosts")
def hosts_() -> None:
    """Make hosts on this machine, joined by a network as slow as you like, to try jobs over several hosts.

    \b
      sudo hvdtrain hosts up --count 2 --rate 1gbit
      hvdtrain compare -H node1:2,node2:2 --modes allreduce,ps-async --steps 20
      hvdtrain hosts run node1 ip addr
      sudo hvdtrain hosts down

    node1 … nodeN are network namespaces with a name and an sshd each, which share this machine's files, cores and
    memory. `ssh node1` works from here and between them.
    """


@hosts_.command()
@click.option("--count", type=int, default=2, show_default=True, help="How many.")
@click.option("--rate", default="1gbit", show_default=True, help="Of each host's link, each way, in tc's words.")
def up(count: int, rate: str) -> None:
    """Make node1 … nodeN, in place of what there was."""
    testbed.up(count, rate)
    click.echo(f"{', '.join(testbed.nodes())} are up, {rate} each way; `hvdtrain hosts down` removes them")


@hosts_.command()
def down() -> None:
    """Remove the hosts, and end what runs on them."""
    testbed.down()
    click.echo("no hosts are left")


@hosts_.command(context_settings={"ignore_unknown_options": True})
@click.argument("node")
@click.argument("words", nargs=-1, required=True, type=click.UNPROCESSED, metavar="COMMAND…")
@click.pass_context
def run(ctx: click.Context, node: str, words: tuple[str, ...]) -> None:
    """Run a command on a host, in this folder; the exit code is the command's."""
    if node not in testbed.nodes():
        raise unknown("host", node, testbed.nodes() or ["none is up; see `hvdtrain hosts up --help`"])
    ctx.exit(subprocess.run([*SSH, node, f"cd {shlex.quote(str(Path.cwd()))} && {shlex.join(words)}"]).returncode)
