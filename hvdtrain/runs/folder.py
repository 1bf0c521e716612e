"""The run folder: claims, so that nothing is overwritten, and its JSON files."""

import contextlib
import difflib
import json
import os
import shlex
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hvdtrain.base.config.run_config import RunConfig
from hvdtrain.base.config.untrusted import LARGEST_CONFIG, is_url, parse_toml, read_whole
from hvdtrain.base.config.writing import check_folder, write_whole
from hvdtrain.base.errors import Failure, UsageError
from hvdtrain.base.formatting import some_of
from hvdtrain.base.system.locks import check_filelock, lock, unlock
from hvdtrain.base.system.own_code import is_code

CONFIG = "config.toml"
# Bytes. With less free space a failed job could probably not write.
LEAST_DISK = 2**20


def launch_folder(run: Path) -> Path:
    """Returns the folder beside a run folder in which `launch` keeps its log, record and scripts.

    Raises:
        UsageError: the run folder is /, which has nothing beside it.
    """
    if not run.name:
        raise UsageError(f"{run} cannot be a run folder: choose a folder inside another folder")
    return run.with_name(f"{run.name}.launch")


def leave_file(run: Path) -> Path:
    """Returns the file that asks a run's first worker to leave when it exists."""
    return launch_folder(run) / "leave"


def check_free(folder: Path, others_log: bool = False) -> None:
    """Checks that the folder is empty, or does not exist.

    Args:
        others_log: allow logs/, which the job's ranks on other hosts may have begun: they do not
            wait for the claim.

    Raises:
        UsageError: the folder holds something, or cannot be read.
    """
    try:
        if folder.is_file():
            raise UsageError(f"--out {folder} is a file: choose a folder")
        names = {entry.name for entry in folder.iterdir()} if folder.exists() else set()
    except OSError as error:
        raise UsageError(f"--out {folder} cannot be used: {error.strerror}") from None
    if others_log:
        names -= {"logs"}
    if not names:
        return
    state = "is not empty"
    if is_begun(folder):
        state = "holds a run, which --resume goes on with"
    elif (folder / "runs").is_dir() and (folder / "logs").is_dir():
        shown = shlex.quote(str(folder))
        state = f"holds a comparison, which `hvdtrain report {shown}` shows"
    raise UsageError(f"--out {folder} {state}: choose another folder, or remove it yourself")


def refuse_links(folder: Path) -> None:
    """Checks that a run folder and its launch folder hold regular files and folders alone.

    A stranger may have made a symbolic link, so that a file of this user is overwritten, or a FIFO,
    so that a job waits for ever.

    Raises:
        UsageError: they hold anything else.
    """
    beside = launch_folder(folder)
    for path in [*folder.rglob("*"), beside, *beside.rglob("*")]:
        try:
            mode = path.lstat().st_mode
        except FileNotFoundError:  # another `launch` may remove its lock
            continue
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            kind = "a symbolic link" if stat.S_ISLNK(mode) else "no regular file"
            raise UsageError(f"{path} is {kind}, which no run has: remove it, if the run is yours")


def refuse_others(*folders: Path) -> None:
    """Checks that no other user may write in the folders, and so choose what is read there and run.

    A folder is this user's if a file that this process creates there has the same owner, also on a
    file system that maps root to nobody. Members of this user's primary group count as this user,
    whose umask may be 002. Folders that do not exist are skipped.

    Raises:
        UsageError: a folder is another user's, or others may write in it.
    """
    for path in folders:
        try:
            status = path.stat()
            with tempfile.TemporaryFile(dir=path) as file:
                user = os.fstat(file.fileno()).st_uid
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            raise unwritable(path, error) from None
        if status.st_uid != user:
            raise UsageError(
                f"--out: {path} belongs to another user, who could change what runs: choose another "
                "folder"
            )
        others = stat.S_IWOTH
        if status.st_gid != os.getegid():
            others |= stat.S_IWGRP
        if status.st_mode & others:
            remedy = f"`chmod go-w {shlex.quote(str(path))}`, or choose another"
            raise UsageError(
                f"--out: other users may write in {path}, and change what runs: {remedy}"
            )


def check_writable(folder: Path) -> None:
    """Checks that the folder, or the nearest folder above it that exists, can be written in.

    Raises:
        UsageError: it cannot.
    """
    try:
        nearest = next(path for path in (folder, *folder.parents) if path.exists())
        check_folder(nearest)
    except OSError as error:
        raise unwritable(folder, error) from None


def unwritable(folder: Path, error: OSError) -> UsageError:
    return UsageError(f"--out {folder} cannot be written: {error.strerror}; choose another folder")


def in_use(folder: Path, why: str, error: BlockingIOError) -> UsageError:
    by_hand = f"; if that has ended, remove {error.filename}" if error.filename else ""
    return UsageError(f"--out {folder} is in use: {why}{by_hand}")


def name_one_of(folder: Path) -> str:
    """Returns the end of an error about a folder that is no run folder, but may hold some.

    The end names one of the runs in the folder. It is empty if there are none.
    """
    configs = [*folder.glob(f"*/{CONFIG}"), *folder.glob(f"runs/*/{CONFIG}")]
    if not configs:
        return ""
    return f"; name one of the runs in it, such as {min(file.parent for file in configs)}"


def check_can_resume(folder: Path, begins: bool) -> None:
    """Checks that a folder has a run to go on with, or is one where a run is meant to begin.

    Args:
        begins: whether options are given with which a run can begin.

    Raises:
        UsageError: the folder's name is probably mistyped. The message names runs beside it.
    """
    if is_begun(folder):
        return
    beside = [path.parent for path in folder.parent.glob(f"*/{CONFIG}")]
    similar = difflib.get_close_matches(folder.name, [run.name for run in beside], n=3)
    if begins and not (similar and not folder.exists()):
        return
    runs = [str(folder.parent / name) for name in similar] or sorted(map(str, beside))
    named = f": there is {some_of(runs, 3)}" if runs else ""
    is_free = not folder.is_dir() or not any(folder.iterdir())
    advice = "; to begin one there, leave out --resume" if is_free else f": it has no {CONFIG}"
    raise UsageError(
        f"--resume: there is no run in {folder} to go on with{name_one_of(folder) or named}{advice}"
    )


def is_begun(folder: Path) -> bool:
    """Returns whether a run was begun in the folder."""
    return (folder / CONFIG).is_file()


def how_to_go_on(folder: Path, command: str) -> str:
    """Returns what to type to continue a run that was ended.

    Args:
        command: `launch` or `train`.
    """
    step = last_saved_step(folder)
    options = _options(folder)
    if options.get("script", "none") != "none":
        return "a script's job cannot be resumed: give the same command with another --out"
    trust = " --trust-model" if _names_code_or_url(options) else ""
    resume = f"`{resume_command(folder, command)}{trust}`"
    if step is not None:
        return f"{resume} goes on after step {step}"
    if is_begun(folder):
        return f"nothing had been saved: {resume} begins it again"
    return "nothing had been saved: give the same command again"


def resume_command(folder: Path, command: str) -> str:
    """Returns the command that continues a run. It trusts no code that the run folder names.

    Args:
        folder: the run folder, as it is to be typed.
        command: `launch` or `train`.
    """
    return shlex.join(["hvdtrain", command, "--resume", "--out", str(folder)])


def _names_code_or_url(options: dict[str, Any]) -> bool:
    """Returns whether a run is resumed only if the user trusts what its folder names."""
    dataset = str(options.get("dataset", ""))
    return is_url(dataset) or is_code(dataset) or is_code(str(options.get("model", "")))


def _options(folder: Path) -> dict[str, Any]:
    """Returns the options of the run in a folder; empty if they cannot be read."""
    try:
        return parse_toml(read_whole(folder / CONFIG, LARGEST_CONFIG).decode())
    except (OSError, ValueError):
        return {}


def has_full_disk(folder: Path) -> bool:
    """Returns whether the disk is so full that a job probably failed by it."""
    return shutil.disk_usage(folder).free < LEAST_DISK


def last_saved_step(folder: Path) -> int | None:
    """Returns the step of a run's last snapshot, which may be damaged; None if there is none."""
    names = [path.name for path in (folder / "snapshots").glob("step-*")]
    numbers = [name.removeprefix("step-") for name in names]
    return max((int(number) for number in numbers if number.isdecimal()), default=None)


def claim(
    folder: Path, config: RunConfig, workers: int, job: str, others_log: bool, resuming: bool
) -> None:
    """Claims the run folder for this job, as long as this process lives, and writes config.toml.

    Args:
        job: the job's name, by which other ranks recognise the claim.
        others_log: see check_free.
        resuming: whether the job continues the run in the folder.

    Raises:
        UsageError: the folder is not free, is unsafe, or another job has claimed it. Of two jobs
            that claim it at once, one succeeds.
    """
    check_filelock()
    refuse_others(folder)
    if resuming:
        refuse_links(folder)
    else:
        check_free(folder, others_log)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(0o755, exist_ok=True)
        lock(folder / CONFIG)  # the system releases it when this process ends
        if not resuming and (folder / CONFIG).stat().st_size:
            raise BlockingIOError  # another job has come first
    except BlockingIOError as error:
        raise in_use(folder, "another job has claimed it, and is at work there", error) from None
    except OSError as error:
        raise unwritable(folder, error) from None
    (folder / "snapshots").mkdir(exist_ok=True)
    # The file is replaced as a whole, by one that is locked too. A rank that begins now reads the
    # old file or the new one.
    new = folder / f"{CONFIG}.part"
    config.write(new, workers=workers, job=job)
    lock(new, replaces=True)
    new.replace(folder / CONFIG)


def hold(folder: Path) -> None:
    """Takes over the claim of a process that was lost, as long as this process lives."""
    # This process may hold the lock already, or the system may not have released it yet.
    with contextlib.suppress(OSError, Failure):
        lock(folder / CONFIG)


def is_claimed(folder: Path) -> bool:
    """Returns whether a job is at work in the folder, as far as this host's locks tell."""
    try:
        if is_begun(folder):
            with locked(folder / CONFIG):
                return False
    except BlockingIOError:
        return True
    except OSError:  # this user may not open the file
        return False
    return False


@contextlib.contextmanager
def locked(file: Path) -> Iterator[None]:
    """Holds the file's lock within the block.

    Raises:
        BlockingIOError: another process holds it.
    """
    held = lock(file)
    try:
        yield
    finally:
        unlock(held)


def wait_for_claim(folder: Path, job: str, limit_s: float) -> None:
    """Blocks until the job's first worker has claimed the folder.

    If the ranks have met, it has claimed it. Otherwise it may still prepare; if it fails, the
    starter ends this rank.

    Raises:
        Failure: the folder's config.toml does not name the job after `limit_s` seconds.
    """
    ends = time.monotonic() + limit_s
    while _job_in(folder) != job:
        if time.monotonic() > ends:
            raise Failure(
                f"{folder / CONFIG} does not name this job ({job}) after {limit_s:g} s: its first "
                "worker has not claimed the folder, or something changed the file"
            )
        time.sleep(0.05)


def _job_in(folder: Path) -> str | None:
    """Returns the job that has claimed the folder; None if config.toml does not say."""
    with contextlib.suppress(OSError, ValueError):
        config = parse_toml(read_whole(folder / CONFIG, LARGEST_CONFIG).decode())
        job: str | None = config.get("job")
        return job
    return None


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Writes the file as a whole or not at all, since readers may look at any moment."""
    write_whole(path, json.dumps(values, indent=2) + "\n")
