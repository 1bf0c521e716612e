"""`hvdtrain status`: the progress of a job, from the files that it has written so far."""

import contextlib
import re
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import click

from hvdtrain.base.config.recipes import Launcher
from hvdtrain.base.errors import UsageError
from hvdtrain.base.formatting import with_noun
from hvdtrain.launch.hosts import RECIPE_OF_JOB, parse_hosts, rank_of_process
from hvdtrain.launch.job_log import failure_reason, log_text
from hvdtrain.launch.records import is_running, read_record, why_occupied
from hvdtrain.launch.supervise import log_file
from hvdtrain.runs.folder import (
    CONFIG,
    has_full_disk,
    is_claimed,
    last_saved_step,
    name_one_of,
    resume_command,
)
from hvdtrain.runs.live import last_steps, metrics_file, samples_per_s
from hvdtrain.runs.membership_log import who_is_gone
from hvdtrain.runs.request import read_run_config
from hvdtrain.runs.schema import Life, Manifest, Summary, find, read_lives

STOPPED = "not running, and not finished"
LINE_LENGTH = 160  # how much is shown of the last line


@click.command()
@click.argument("out", metavar="RUN", type=click.Path(path_type=Path))
@RECIPE_OF_JOB
def status(out: Path, launcher: Launcher | None) -> None:
    """Tell how far the job with run folder RUN is: state, step, epoch, samples/s and its last line.

    It reads what the job has written, so it works on any host that sees the folder, and for any
    starter.
    """
    for line in status_lines(out.absolute(), out, launcher):
        click.echo(line)


def status_lines(run: Path, shown: Path, launcher: Launcher | None = None) -> Iterator[str]:
    """Yields the lines about a run.

    Args:
        run: the run folder.
        shown: the run folder as the user calls it.
        launcher: the recipe that was given.

    Raises:
        UsageError: there is no run.
    """
    if not (run / CONFIG).is_file() and not log_file(run).parent.is_dir():
        raise UsageError(f"{shown}: no run was begun there{name_one_of(run)}")
    manifest = find(run, Manifest)
    record = read_record(run, launcher)
    summary = find(run, Summary) or Summary()
    steps_of = _last_steps_of_workers(run)
    state = _state(run, shown, summary, record)
    yield f"{shown}: {state}{_how(manifest)}"
    # Without servers there may be lives of an earlier start with another mode.
    lives = read_lives(run) if manifest and manifest.servers else []
    gone = _who_is_gone(run, lives, steps_of)
    if gone:
        yield gone
    if summary.status == "done":
        accuracy = ""
        if summary.val_accuracy is not None:  # a script may report none
            accuracy = f", validation accuracy {summary.val_accuracy:.4f}"
        yield (
            f"{summary.steps} steps in {_duration(summary.wall_s or 0)} of training, "
            f"{summary.samples_per_s or 0:.0f} samples/s{accuracy}"
        )
    elif steps_of:
        yield from _progress_lines(run, manifest, lives, steps_of)
    saved = last_saved_step(run)
    if saved is not None:
        yield f"last snapshot after step {saved}"
    yield from _log_lines(run, state, manifest)


def _last_steps_of_workers(run: Path) -> dict[Path, list[dict[str, Any]]]:
    """Returns the last steps of each worker that has any, by its metrics file."""
    steps_of = {}
    for file in sorted(run.glob("metrics.rank*.jsonl")):
        steps = last_steps(file)
        if steps:
            steps_of[file] = steps
    return steps_of


def _log_lines(run: Path, state: str, manifest: Manifest | None) -> Iterator[str]:
    """Yields why a stopped job failed, or else the last line of its log."""
    reason = ""
    if state.startswith(STOPPED):
        reason = failure_reason(_log(run), None, partial(_rank_of, manifest))
    if reason:
        yield f"reason: {reason}"
    elif not _asked_to_leave(run):
        last = _last_line(run)
        if last:
            yield f"last line: {last}"


def _who_is_gone(
    run: Path, lives: Sequence[Life], steps_of: Mapping[Path, list[dict[str, Any]]]
) -> str:
    came_to = {}
    for life in lives:
        steps = steps_of.get(metrics_file(run, life.rank))
        if steps:
            came_to[life.rank] = steps[-1]["step"]
    return who_is_gone(lives, came_to)


def _progress_lines(
    run: Path,
    manifest: Manifest | None,
    lives: Sequence[Life],
    steps_of: Mapping[Path, list[dict[str, Any]]],
) -> Iterator[str]:
    """Yields lines about a run that has not finished: step, epoch, throughput, loss, age."""
    furthest = max((steps[-1] for steps in steps_of.values()), key=itemgetter("step"))
    running = [metrics_file(run, life.rank) for life in lives if not life.why]
    rate = samples_per_s(steps for file, steps in steps_of.items() if file in running or not lives)
    total = _total_steps(run, manifest)
    line = f"step {furthest['step']}"
    if total:
        line += f" of {total}"
    line += f", epoch {furthest['epoch']}"
    if rate:
        line += f", {rate:.0f} samples/s lately"
    if isinstance(furthest.get("loss"), float):
        line += f", loss {furthest['loss']:.4f}"
    yield line
    newest = max(file.stat().st_mtime for file in steps_of)
    age = _duration(time.time() - newest)
    yield f"last step {age} ago, after {_duration(furthest['time'])} of training"


def _total_steps(run: Path, manifest: Manifest | None) -> int | None:
    """Returns how many steps the run has; None if time decides, or it is not known."""
    if not manifest or not manifest.train_samples:
        return None
    with contextlib.suppress(UsageError):
        return read_run_config(run).total_steps(manifest.train_samples)
    return None


def _state(run: Path, shown: Path, summary: Summary, record: dict[str, Any]) -> str:
    if summary.status == "done":
        return "finished"
    since = _since(run)
    occupied = why_occupied(run, record)
    if "job" in record and occupied:
        return f"handed to {record['launcher']} as job {record['job']}{since}"
    if is_claimed(run) or is_running(run, record):
        if "name" in record:
            return f"being handed to {record['launcher']}{since}"
        has_steps = any(run.glob("metrics.rank*.jsonl"))
        return f"{'training' if has_steps else 'starting'}{since}"
    if occupied and "name" in record and record["host"] == socket.gethostname():
        return occupied
    if occupied:
        return f"launched on {record['host']}{since}: ask there whether it still runs"
    last_step = _asked_to_leave(run)
    ended = f"stopped on request at step {last_step}" if last_step else STOPPED
    if has_full_disk(log_file(run).parent.parent):
        ended += ", on a disk that is full (make room there)"
    if last_saved_step(run) is None:
        return f"{ended}: no snapshot to go on from"
    return (
        f"{ended}; `{resume_command(shown, 'launch')}` continues it, with "
        "the same --launcher, -H and --sync-dst-dir if there were any"
    )


def _log(run: Path) -> Path:
    """Returns the log with the latest output of ranks, which may be a scheduler's."""
    logs = log_file(run).parent.glob("*log")
    return max(logs, key=lambda log: log.stat().st_mtime, default=log_file(run))


def _asked_to_leave(run: Path) -> str:
    """Returns the step at which the ranks left on request; empty if they did not."""
    match = re.search(r"ended by SIGTERM at step (\d+)", log_text(_log(run)))
    return match[1] if match else ""


def _rank_of(manifest: Manifest | None, process: int) -> int:
    """Returns the rank of a process by its starter's number: see hosts.rank_of_process."""
    if not manifest or not manifest.launch or not manifest.servers:
        return process
    if manifest.starter != "horovodrun":
        return process
    with contextlib.suppress(UsageError, IndexError):  # the manifest may be a stranger's
        hosts = parse_hosts(",".join(manifest.launch.hosts))
        return rank_of_process([host.slots for host in hosts], process)
    return process


def _how(manifest: Manifest | None) -> str:
    """Returns ` (ps-sync with 2 workers and 1 server, by ssh on a:2, b:1)`, as far as known."""
    if not manifest:
        return ""
    words = f"{manifest.mode} with {with_noun(manifest.workers, 'worker')}"
    if manifest.servers:
        words += f" and {with_noun(manifest.servers, 'server')}"
    launched = manifest.launch
    starter = launched.launcher if launched else manifest.starter
    if starter != "alone":
        words += f", by {starter}"
    if launched and launched.hosts:
        words += f" on {', '.join(launched.hosts)}"
    return f" ({words})"


def _since(run: Path) -> str:
    """Returns when the job was last started, as ` since 2026-11-21 14:03:22`."""
    for file in (run / CONFIG, log_file(run)):
        if file.is_file():
            return time.strftime(" since %F %T", time.localtime(file.stat().st_mtime))
    return ""


def _last_line(run: Path) -> str:
    """Returns the last line that the job has printed; empty if its log is elsewhere."""
    try:
        logs = [*log_file(run).parent.glob("*log")]
        if not logs:
            logs = [log for log in run.glob("logs/*.err") if log.stat().st_size]
        if not logs:
            return ""
        text = log_text(max(logs, key=lambda log: log.stat().st_mtime))
    except OSError:  # a log was removed meanwhile
        return ""
    last = ""
    previous = ""
    for line in text.splitlines():
        # An indented line after a warning shows the code that warns.
        is_code = "Warning: " in previous and line[:1].isspace()
        if not is_code and re.search(r"\w", line):
            last = line
        previous = line
    return last.strip()[:LINE_LENGTH]


def _duration(seconds: float) -> str:
    """Returns `0:00:52`."""
    return str(timedelta(seconds=round(seconds)))
