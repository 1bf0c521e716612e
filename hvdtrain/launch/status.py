"""`hvdtrain status`: how far a job is, from what it has written so far."""

import contextlib
import re
import time
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import click

from hvdtrain.config.recipes import Launcher
from hvdtrain.coordination.membership_log import who_is_lost
from hvdtrain.errors import UsageError
from hvdtrain.formatting import with_noun
from hvdtrain.launch.hosts import RECIPE_OF_JOB, parse_hosts, rank_of_process
from hvdtrain.launch.job_log import failure_reason, log_text
from hvdtrain.launch.records import is_running, read_record, why_occupied
from hvdtrain.launch.supervise import log_file
from hvdtrain.runs.folder import CONFIG, has_full_disk, is_claimed, last_saved_step, name_one_of
from hvdtrain.runs.live import last_steps, metrics_file, samples_per_s
from hvdtrain.runs.request import config_of
from hvdtrain.runs.schema import Manifest, Summary, find, read_lives

STOPPED = "not running, and not finished"
LINE_LENGTH = 160  # shown of the last line


@click.command()
@click.argument("out", metavar="RUN", type=click.Path(path_type=Path))
@RECIPE_OF_JOB
def status(out: Path, launcher: Launcher | None) -> None:
    """Tell how far the job with run folder RUN is: state, step, epoch, samples/s and its last line.

    It reads what the job has written, so it works on any host that sees the folder, and for any starter.
    """
    for line in status_lines(out.absolute(), out, launcher):
        click.echo(line)


def status_lines(run: Path, shown: Path, launcher: Launcher | None = None) -> Iterator[str]:
    """What is known of a run, a line each. UsageError where there is no run.

    Args:
        shown: the run folder as the user calls it.
        launcher: the recipe that was given.
    """
    if not (run / CONFIG).is_file() and not log_file(run).parent.is_dir():
        raise UsageError(f"{shown}: no run was begun there{name_one_of(run)}")
    manifest, record = find(run, Manifest), read_record(run, launcher)
    summary = find(run, Summary) or Summary()
    files = sorted(run.glob("metrics.rank*.jsonl"))
    workers = {file: steps for file in files if (steps := last_steps(file))}
    state = _state(run, shown, summary, record)
    yield f"{shown}: {state}{_how(manifest)}"
    lives = read_lives(run) if manifest and manifest.servers else []  # else they are of a start with another mode
    came_to = {life.rank: rows[-1]["step"] for life in lives if (rows := workers.get(metrics_file(run, life.rank)))}
    if lost := who_is_lost(lives, came_to):
        yield lost
    if summary.status == "done":
        yield (
            f"{summary.steps} steps in {_duration(summary.wall_s or 0)} of training, "
            f"{summary.samples_per_s or 0:.0f} samples/s, validation accuracy {summary.val_accuracy or 0:.4f}"
        )
    elif workers:
        row = max((steps[-1] for steps in workers.values()), key=itemgetter("step"))
        running = [metrics_file(run, life.rank) for life in lives if not life.why]
        rate = samples_per_s(steps for file, steps in workers.items() if file in running or not lives)
        total = None
        with contextlib.suppress(UsageError):
            total = config_of(run).total_steps(manifest.train_samples) if manifest and manifest.train_samples else None
        speed = f", {rate:.0f} samples/s lately" if rate else ""
        loss = f", loss {row['loss']:.4f}" if isinstance(row.get("loss"), float) else ""
        yield f"step {row['step']}{f' of {total}' if total else ''}, epoch {row['epoch']}{speed}{loss}"
        newest = max(file.stat().st_mtime for file in workers)
        yield f"last step {_duration(time.time() - newest)} ago, after {_duration(row['time'])} of training"
    if (saved := last_saved_step(run)) is not None:
        yield f"last snapshot after step {saved}"
    if state.startswith(STOPPED) and (reason := failure_reason(_log(run), None, partial(_rank_of, manifest))):
        yield f"reason: {reason}"
    elif not _asked_to_leave(run) and (last := _last_line(run)):
        yield f"last line: {last}"


def _state(run: Path, shown: Path, summary: Summary, record: dict[str, Any]) -> str:
    if summary.status == "done":
        return "finished"
    since = _since(run)
    still = why_occupied(run, record)
    if "job" in record and still:
        return f"handed to {record['launcher']} as job {record['job']}{since}"
    if is_claimed(run) or is_running(run, record):
        has_steps = any(run.glob("metrics.rank*.jsonl"))
        return f"{'training' if has_steps else 'starting'}{since}"
    if still:
        return f"launched on {record['host']}{since}: ask there whether it still runs"
    ended = f"stopped on request at step {step}" if (step := _asked_to_leave(run)) else STOPPED
    full = ", on a disk that is full (make room there)" if has_full_disk(log_file(run).parent.parent) else ""
    if last_saved_step(run) is None:
        return f"{ended}{full}: no snapshot to go on from"
    return f"{ended}{full}; `hvdtrain launch --resume --out {shown}` goes on with it"


def _log(run: Path) -> Path:
    """What the job's ranks have printed last: a scheduler's log, where one has had it."""
    return max(log_file(run).parent.glob("*log"), key=lambda log: log.stat().st_mtime, default=log_file(run))


def _asked_to_leave(run: Path) -> str:
    """The step at which the ranks left because they were asked to; empty where they were not."""
    match = re.search(r"ended by SIGTERM at step (\d+)", log_text(_log(run)))
    return match[1] if match else ""


def _rank_of(manifest: Manifest | None, process: int) -> int:
    """The rank of a process by its starter's number: see hosts.rank_of_process."""
    if not manifest or not manifest.launch or not manifest.servers or manifest.starter != "horovodrun":
        return process
    with contextlib.suppress(UsageError, IndexError):  # the manifest may be a stranger's
        return rank_of_process([host.slots for host in parse_hosts(",".join(manifest.launch.hosts))], process)
    return process


def _how(manifest: Manifest | None) -> str:
    """` (ps-sync with 2 workers and 1 server, by ssh on a:2, b:1)`, as far as it is known yet."""
    if not manifest:
        return ""
    servers = f" and {with_noun(manifest.servers, 'server')}" if manifest.servers else ""
    launched = manifest.launch
    by = f", by {launched.launcher if launched else manifest.starter}".replace(", by alone", "")
    on = f" on {', '.join(launched.hosts)}" if launched and launched.hosts else ""
    return f" ({manifest.mode} with {with_noun(manifest.workers, 'worker')}{servers}{by}{on})"


def _since(run: Path) -> str:
    """When the job was last started, as ` since 2026-11-21 14:03:22`."""
    for file in (run / CONFIG, log_file(run)):
        if file.is_file():
            return time.strftime(" since %F %T", time.localtime(file.stat().st_mtime))
    return ""


def _last_line(run: Path) -> str:
    """What the job has printed last, a scheduler's into a log of its scheduler; nothing where that is elsewhere."""
    lines = []
    with contextlib.suppress(OSError, ValueError):  # where there is none
        logs = [*log_file(run).parent.glob("*log")] or [log for log in run.glob("logs/*.err") if log.stat().st_size]
        text = log_text(max(logs, key=lambda log: log.stat().st_mtime))
        lines = re.sub(r"(?m)^(.*Warning: .*)\n\s+.*", r"\1", text).splitlines()  # without the code that warns
    return next((line.strip()[:LINE_LENGTH] for line in reversed(lines) if re.search(r"\w", line)), "")


def _duration(seconds: float) -> str:
    """`0:00:52`"""
    return str(timedelta(seconds=round(seconds)))
