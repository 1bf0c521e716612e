"""Records of launched jobs: which job a run folder has, and whether it still runs.

A file beside the folder has the record.
"""

import contextlib
import json
import os
import re
import shlex
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import click

from hvdtrain.base.config import recipes
from hvdtrain.base.config.recipes import Launcher
from hvdtrain.base.config.untrusted import LARGEST_DOCUMENT, parse_json, read_whole
from hvdtrain.base.errors import Failure, UsageError, unknown
from hvdtrain.base.system.locks import locked_by, open_locked
from hvdtrain.launch.filling import Filler
from hvdtrain.runs.folder import launch_folder, unwritable

REPLY_TIMEOUT_S = 30.0  # how long a scheduler may take to answer
LOOK_EVERY_S = 0.5
LOOK_THERE = ": look for it there, and end it"  # of a job whose number is not known here
Record = Mapping[str, Any]
# A job's name. It is filled into a scheduler's commands, where it must not look like an option.
NAME = r"hvdtrain[a-z0-9-]*"


def job_record_file(out: Path) -> Path:
    """Returns the file by which `hvdtrain stop` finds a job.

    It exists while the job runs or a scheduler has it.
    """
    return launch_folder(out) / "running.json"


def secrets_file(out: Path) -> Path:
    """Returns the script through which ranks get variables that no command line may show."""
    return launch_folder(out) / "environment"


def read_record(out: Path, given: Launcher | None = None) -> dict[str, Any]:
    """Returns the record of a job.

    Args:
        out: the run folder.
        given: the recipe that was given. A recipe outside launchers/ has to be given, since the
            record has its name alone.

    Returns:
        `launcher`, and `pid` and `host` of the process that supervises the job. The record of a job
        for a scheduler has `name` before that process hands it over, and the `recipe`; afterwards
        it has `job`, which the scheduler told, in place of the process. Empty if there is no
        record, or anything else, since anybody may have written the file.

    Raises:
        UsageError: there is no launcher of that name here.
    """
    try:
        record = parse_json(read_whole(job_record_file(out), LARGEST_DOCUMENT))
    except (OSError, ValueError):
        return {}
    if not isinstance(record, dict) or not isinstance(record.get("launcher"), str):
        return {}
    has_process = isinstance(record.get("pid"), int) and isinstance(record.get("host"), str)
    if "job" not in record and not has_process:
        return {}
    if not _is_for_scheduler(record):
        return record
    record["recipe"] = _recipe_of_job(out, record["launcher"], given)
    return record if _names_a_job(record) else {}


def _recipe_of_job(out: Path, name: str, given: Launcher | None) -> Launcher:
    known = recipes.names("launchers")
    if given and given.name == name:
        return given
    if name in known:  # never a file that a record names
        return recipes.launcher(name)
    if name.endswith(recipes.SUFFIX):
        raise UsageError(
            f"{out} was launched by a recipe outside launchers/, {name!a}: give --launcher and its "
            "file"
        )
    raise unknown(f"launcher in {job_record_file(out)}:", name, known)


def _is_for_scheduler(record: Record) -> bool:
    return "job" in record or "name" in record


def _names_a_job(record: Record) -> bool:
    """Returns whether the record's values may be filled into commands of its scheduler."""
    for key, pattern in (("name", NAME), ("job", record["recipe"].job)):
        if key not in record:
            continue
        value = record[key]
        if not isinstance(value, str) or not re.fullmatch(pattern, value):
            return False
    return True


class Claim:
    """A run folder's record, while this process holds the folder.

    Attributes:
        record: the record's content.
        is_kept: whether the record stays when this process ends, because a scheduler has the job,
            or may have it.
    """

    def __init__(self, out: Path, recipe: Launcher) -> None:
        self.out = out
        self.recipe = recipe
        self.is_kept = False
        self.record: dict[str, Any] = {
            "launcher": recipe.name,
            "pid": os.getpid(),
            "host": socket.gethostname(),
        }
        self.held: IO[str] | None = None
        self._write()

    def will_hand_over(self, name: str) -> None:
        """Records the job's name before it is handed over to its scheduler.

        From then on the scheduler may have the job, whatever becomes of this process.
        """
        self.record["name"] = name
        self.is_kept = True
        with _locked(self.out):
            self._write()

    def was_refused(self) -> None:
        """Notes that the scheduler says that it has not taken the job.

        A scheduler that knows jobs by our names for them is asked again, since a cluster in a cloud
        may exist all the same.
        """
        self.is_kept = self.recipe.knows_names
        if not self.is_kept or not self.recipe.status_command:
            return
        try:
            self.is_kept = _scheduler_knows({"recipe": self.recipe, **self.record})
        except OSError:  # the scheduler's command is not on this machine
            self.is_kept = False
        except subprocess.TimeoutExpired:
            self.is_kept = True

    def was_handed_over(self, job: str) -> None:
        """Records that the scheduler has the job.

        Args:
            job: the scheduler's name or number for the job.

        Raises:
            Failure: it does not look like one.
        """
        record = {"launcher": self.recipe.name, "job": job, "name": self.record["name"]}
        if not _names_a_job({"recipe": self.recipe, **record}):
            log = job_record_file(self.out).with_name("log")
            raise Failure(
                f"{self.recipe.name} has printed {job!a}, which names no job: see {log}, end what "
                f"has begun yourself, and mend `job` in {self.recipe.file}"
            )
        self.record = record
        with _locked(self.out):
            self._write()

    def _write(self) -> None:
        """Writes the record and keeps the file open, which shows others that this process runs.

        The record has to be locked: who looks for the open file while another file takes its place
        may find neither.
        """
        path = job_record_file(self.out)
        unfinished = path.with_suffix(".part")
        unfinished.write_text(json.dumps(self.record, indent=2) + "\n", encoding="utf-8")
        file = unfinished.open(encoding="utf-8")
        unfinished.replace(path)
        if self.held:
            self.held.close()
        self.held = file


@contextlib.contextmanager
def claimed(out: Path, recipe: Launcher) -> Iterator[Claim]:
    """Claims the run folder for this process, by its record, during the block.

    Raises:
        UsageError: another job has the folder, or may have it.
    """
    file = job_record_file(out)
    with _locked(out):
        earlier = read_record(out, recipe)
        reason = why_occupied(out, earlier)
        if reason:
            or_remove = "" if is_running(out, earlier) else f"; if it has ended, remove {file}"
            raise UsageError(f"--out {out}: {reason}{_how_to_end(out, earlier)}{or_remove}")
        claim = Claim(out, recipe)
    try:
        yield claim
    finally:
        if claim.held:
            claim.held.close()
        if not claim.is_kept:
            file.unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                file.parent.rmdir()
        elif "job" not in claim.record:
            unsure = {"recipe": recipe, **claim.record}
            click.echo(f"hvdtrain: {_may_have(unsure)}{_how_to_end(out, unsure)}", err=True)


def _how_to_end(out: Path, record: Record) -> str:
    """Returns the end of a sentence about a job that a run folder has, or may have."""
    is_unknown = "job" not in record and "name" in record and not record["recipe"].knows_names
    if is_unknown and not is_running(out, record):
        return LOOK_THERE
    return f"; `hvdtrain stop {out}` ends it"


def forget(out: Path, record: Record) -> None:
    """Removes the files of a job that has ended, unless another was launched there since."""
    with _locked(out):
        if read_record(out, record.get("recipe")) == record:
            secrets_file(out).unlink(missing_ok=True)  # left by a job that a scheduler had
            job_record_file(out).unlink(missing_ok=True)


@contextlib.contextmanager
def _locked(out: Path) -> Iterator[None]:
    """Locks the record of a run folder. Blocks while another process reads or changes it."""
    path = job_record_file(out).with_suffix(".lock")
    try:
        file = open_locked(path)
    except OSError as error:
        raise unwritable(out, error) from None
    with locked_by(file, path):
        yield


def is_running(out: Path, record: Record) -> bool:
    """Returns whether the process that wrote the record runs, as far as this host can tell.

    A running process has the file open. A pid alone would not prove that it runs: pids are used
    again, and anybody can write one down.
    """
    try:
        if record["host"] == socket.gethostname():
            for opened in Path(f"/proc/{record['pid']}/fd").iterdir():
                with contextlib.suppress(FileNotFoundError):
                    if os.path.samefile(opened, job_record_file(out)):
                        return True
    except PermissionError:  # the process is another user's
        return True
    except (KeyError, OSError):
        pass
    return False


def why_occupied(out: Path, record: Record) -> str:
    """Returns who still has the job, or may have it, in words that continue "--out RUN: ".

    Empty if the job has ended.
    """
    if "job" in record:
        return _scheduler_has(record)
    if is_running(out, record):
        return "its job is still running"
    if record and record["host"] != socket.gethostname():
        return (
            f"a job was launched into it on {record['host']}, "
            "and this host cannot tell whether it still runs"
        )
    return _may_have(record) if _is_for_scheduler(record) else ""


def _may_have(record: Record) -> str:
    """Returns the words about a job with an interrupted submission.

    Its scheduler may know nothing of it yet, and start it later.
    """
    return f"{record['launcher']} may have its job {record['name']}, which was being handed over"


def _scheduler_has(record: Record) -> str:
    """Returns, like `why_occupied`, that a scheduler has the job, also if it does not answer."""
    has = f"{record['launcher']} has its job {record.get('job') or record['name']}"
    if not record["recipe"].status_command:
        return has
    try:
        return has if _scheduler_knows(record) else ""
    except (OSError, subprocess.TimeoutExpired):
        command = _filled(record, record["recipe"].status_command)
        return f"{has}, unless it has ended: `{shlex.join(command)}` gives no answer here"


def _scheduler_knows(record: Record) -> bool:
    """Returns whether a scheduler says that it has a job.

    Raises:
        OSError, subprocess.TimeoutExpired: the scheduler does not answer.
    """
    recipe = record["recipe"]
    command = _filled(record, recipe.status_command)
    done = subprocess.run(
        command, capture_output=True, encoding="utf-8", errors="replace", timeout=REPLY_TIMEOUT_S
    )
    says_nothing = done.returncode == 0 and not done.stdout.strip()
    return not says_nothing and not re.search(recipe.finished_pattern, done.stdout + done.stderr)


def _filled(record: Record, template: Sequence[Any]) -> list[str]:
    """Returns a command of the recipe for a job."""
    values = {"name": record.get("name", ""), "job": record.get("job", "")}
    return Filler(record["recipe"].file, values).command(template)


def _check_name(record: Record) -> None:
    """Checks that the scheduler's name of the job is the record's. Numbers may be of any job.

    Raises:
        Failure: it is another name, or the scheduler does not answer.
    """
    command = _filled(record, record["recipe"].name_command)
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=REPLY_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        raise Failure(
            f"`{shlex.join(command)}` does not say what job {record['job']} is called: try again"
        ) from None
    named = done.stdout.strip()
    if named != record.get("name"):
        raise Failure(
            f"{record['launcher']} calls its job {record['job']} {named!a}, and the run folder's "
            f"is {record.get('name')!a}: it is another job; end yours yourself"
        )


def cancel(record: Record, timeout_s: float) -> bool:
    """Asks the scheduler to end the job, and blocks until it has.

    Returns:
        False if the job has ended already.

    Raises:
        Failure: the scheduler has another name for the job, refuses, or still has the job after
            `timeout_s` seconds.
    """
    recipe = record["recipe"]
    if "job" not in record and not recipe.knows_names:
        raise Failure(f"{_may_have(record)}{LOOK_THERE}")
    if recipe.name_command and _scheduler_has(record):
        _check_name(record)
    command = _filled(record, recipe.stop)
    try:
        done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace")
    except OSError as error:
        raise Failure(
            f"`{shlex.join(command)}` cannot be started ({error.strerror}): stop it where it can"
        ) from None
    if done.returncode:
        if not _scheduler_has(record):
            return False
        raise Failure(
            f"`{shlex.join(command)}` failed: {(done.stderr or done.stdout).strip()[-200:]}"
        )
    if not recipe.status_command:
        return True
    deadline = time.monotonic() + timeout_s
    while still := _scheduler_has(record):
        if time.monotonic() > deadline:
            raise Failure(
                f"`{shlex.join(command)}` was done {timeout_s:.0f} s ago, and {still}: try again"
            )
        time.sleep(LOOK_EVERY_S)
    return True
