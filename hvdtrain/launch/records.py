"""Which job was launched into a run folder, and whether it still runs: a file beside the folder says whom to ask."""

import contextlib
import os
import re
import shlex
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hvdtrain.config import recipes
from hvdtrain.config.recipes import Launcher
from hvdtrain.config.untrusted import parse_json, read_whole
from hvdtrain.errors import Failure, UsageError, unknown
from hvdtrain.launch.filling import Filler
from hvdtrain.runs.folder import launch_folder, unwritable, write_json
from hvdtrain.system.locks import locked_by, open_locked

REPLY_TIMEOUT_S = 30.0  # of a scheduler
LOOK_EVERY_S = 0.5
Record = Mapping[str, Any]
NAME = r"hvdtrain[a-z0-9-]*"  # a pattern of a job's name, which is filled into a scheduler's commands: never an option


def job_record_file(out: Path) -> Path:
    """The file by which `hvdtrain stop` finds a job: it exists while the job runs or a scheduler has it."""
    return launch_folder(out) / "running.json"


def secrets_file(out: Path) -> Path:
    """The script through which ranks get variables that no command line may show, while the job runs."""
    return launch_folder(out) / "environment"


def read_record(out: Path, given: Launcher | None = None) -> dict[str, Any]:
    """What `launch` recorded of a job: `launcher`, with the `job` and the `name` that its scheduler knows, and the
    `recipe`; or with the `pid` and `host` of the process that sees to it. Empty where there is no record, or a broken
    one, or one with another thing in place of a job: anybody may have written it.

    Args:
        given: a recipe. One outside launchers/ has to be: the record has its name alone.

    Raises:
        UsageError: there is no launcher of that name here.
    """
    try:
        record = parse_json(read_whole(job_record_file(out)))
    except (OSError, ValueError):
        return {}
    if not isinstance(record, dict) or not isinstance(record.get("launcher"), str):
        return {}
    if "job" not in record:
        return record if isinstance(record.get("pid"), int) and isinstance(record.get("host"), str) else {}
    name, known = record["launcher"], recipes.names("launchers")
    if given and given.name == name:
        record["recipe"] = given
    elif name in known:  # never a file that a record names
        record["recipe"] = recipes.launcher(name)
    elif name.endswith(recipes.SUFFIX):
        raise UsageError(f"{out} was launched by a recipe outside launchers/, {name!a}: give --launcher and its file")
    else:
        raise unknown(f"launcher in {job_record_file(out)}:", name, known)
    return record if _names_a_job(record) else {}


def _names_a_job(record: Record) -> bool:
    """Whether the commands of its scheduler may be given what a record has."""
    patterns = {"name": NAME, "job": record["recipe"].job}
    values = {name: record[name] for name in patterns if name in record}
    return all(isinstance(value, str) and re.fullmatch(patterns[name], value) for name, value in values.items())


@contextlib.contextmanager
def claimed(out: Path, recipe: Launcher) -> Iterator[dict[str, Any]]:
    """In the block no other `launch` has the run folder: it has this process's record.

    Yields:
        A dict: what the block puts into it is the record of the job that a scheduler has by then; else none is kept.

    Raises:
        UsageError: another job has the folder, or may have it.
        Failure: the record names no job.
    """
    file, job = job_record_file(out), dict[str, Any]()
    with _locked(out):
        if still := why_occupied(out, earlier := read_record(out, recipe)):
            or_remove = "" if is_running(out, earlier) else f"; if it has ended, remove {file}"
            raise UsageError(f"--out {out}: {still}; `hvdtrain stop {out}` ends it{or_remove}")
        write_json(file, {"launcher": recipe.name, "pid": os.getpid(), "host": socket.gethostname()})
        held = file.open()  # by which others know that this process has written it
    try:
        yield job
        if job and not _names_a_job({"recipe": recipe, **job}):
            raise Failure(
                f"{recipe.name} has printed {job['job']!a}, which names no job: see {file.with_name('log')}, end what "
                f"has begun yourself, and mend `job` in {recipe.file}"
            )
    except BaseException:
        job.clear()
        raise
    finally:
        held.close()
        if job:
            write_json(file, {"launcher": recipe.name, **job})
        else:
            file.unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                file.parent.rmdir()


def forget(out: Path, record: Record) -> None:
    """Remove what is kept of a job that has ended, unless another has been launched there since."""
    with _locked(out):
        if read_record(out, record.get("recipe")) == record:
            secrets_file(out).unlink(missing_ok=True)  # of a job that a scheduler has had
            job_record_file(out).unlink(missing_ok=True)


@contextlib.contextmanager
def _locked(out: Path) -> Iterator[None]:
    """Wait until no other process looks whose job a run folder has, to change that."""
    path = job_record_file(out).with_suffix(".lock")
    try:
        file = open_locked(path)
    except OSError as error:
        raise unwritable(out, error) from None
    with locked_by(file, path):
        yield


def is_running(out: Path, record: Record) -> bool:
    """Whether the process that wrote a run folder's record runs, as far as this host can tell: it has the file open.

    Its number alone would not say that: numbers are used again, and anybody can write one down.
    """
    try:
        if record["host"] == socket.gethostname():
            for opened in Path(f"/proc/{record['pid']}/fd").iterdir():
                with contextlib.suppress(FileNotFoundError):
                    if os.path.samefile(opened, job_record_file(out)):
                        return True
    except PermissionError:  # another user's
        return True
    except (KeyError, OSError):
        pass
    return False


def why_occupied(out: Path, record: Record) -> str:
    """Who has the job still, or may have it, in words that go on "--out RUN: "; empty if it has ended."""
    if "job" in record:
        return _scheduler_has(record)
    if is_running(out, record):
        return "its job is still running"
    if record and record["host"] != socket.gethostname():
        return f"a job was launched into it on {record['host']}, and this host cannot tell whether it still runs"
    return ""


def _scheduler_has(record: Record) -> str:
    """As `why_occupied`. A scheduler that does not answer is taken to have the job."""
    recipe = record["recipe"]
    has = f"{record['launcher']} has its job {record['job']}"
    if not recipe.status_command:
        return has
    command = Filler(recipe.file, {"name": "", **record}).command(recipe.status_command)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=REPLY_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return f"{has}, unless it has ended: `{shlex.join(command)}` gives no answer here"
    says_nothing = done.returncode == 0 and not done.stdout.strip()
    return "" if says_nothing or re.search(recipe.finished_pattern, done.stdout + done.stderr) else has


def cancel(record: Record, timeout_s: float) -> bool:
    """Have the scheduler end its job, and wait until it has; False if the job has ended already.

    Raises:
        Failure: the scheduler refuses, or still has the job after the time.
    """
    recipe = record["recipe"]
    command = Filler(recipe.file, {"name": "", **record}).command(recipe.stop)
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise Failure(f"`{shlex.join(command)}` cannot be started ({error.strerror}): stop it where it can") from None
    if done.returncode:
        if not _scheduler_has(record):
            return False
        raise Failure(f"`{shlex.join(command)}` failed: {(done.stderr or done.stdout).strip()[-200:]}")
    deadline = time.monotonic() + timeout_s
    while recipe.status_command and (still := _scheduler_has(record)):
        if time.monotonic() > deadline:
            raise Failure(f"`{shlex.join(command)}` was done {timeout_s:.0f} s ago, and {still}: try again")
        time.sleep(LOOK_EVERY_S)
    return True
