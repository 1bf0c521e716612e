"""The run folder: claiming it, so that nothing is overwritten, and writing its JSON files."""

import contextlib
import json
import shlex
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hvdtrain.config.run_config import RunConfig
from hvdtrain.config.untrusted import parse_toml, read_whole
from hvdtrain.errors import Failure, UsageError
from hvdtrain.system.locks import lock, unlock

CONFIG = "config.toml"
LEAST_DISK = 2**20  # bytes


def launch_folder(run: Path) -> Path:
    """The folder beside a run's in which `launch` keeps what concerns the job: its log, its record, its scripts."""
    return run.with_name(f"{run.name}.launch")


def leave_file(run: Path) -> Path:
    """The file that asks a run's first worker to leave."""
    return launch_folder(run) / "leave"


def check_free(folder: Path, others_log: bool = False) -> None:
    """UsageError where the folder holds anything already, or cannot be looked at.

    Args:
        others_log: the job's ranks on other hosts, which do not wait for the claim, may have begun logs/ in it.
    """
    try:
        if folder.is_file():
            raise UsageError(f"--out {folder} is a file: choose a folder")
        names = {entry.name for entry in folder.iterdir()} if folder.exists() else set()
    except OSError as error:
        raise UsageError(f"--out {folder} cannot be used: {error.strerror}") from None
    if names - ({"logs"} if others_log else set()):
        what = "is not empty"
        if is_begun(folder):
            what = "holds a run, which --resume goes on with"
        elif (folder / "runs").is_dir():
            what = f"holds a comparison, which `hvdtrain report {folder}` shows"
        raise UsageError(f"--out {folder} {what}: choose another folder, or remove it yourself")


def refuse_links(folder: Path) -> None:
    """UsageError where a run folder, or the one beside it that `launch` writes in, has a symbolic link or a FIFO: a
    stranger may have made it, to have a file of this user's written over, or a job wait for ever.
    """
    of_launch = launch_folder(folder)
    for path in [*folder.rglob("*"), of_launch, *of_launch.rglob("*")]:
        with contextlib.suppress(FileNotFoundError):  # another `launch` may remove its lock
            mode = path.lstat().st_mode
            if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
                kind = "a symbolic link" if stat.S_ISLNK(mode) else "no regular file"
                raise UsageError(f"{path} is {kind}, which no run has: remove it, if the run is yours")


def check_writable(folder: Path) -> None:
    """UsageError where the folder cannot be made, or nothing be written there; if it is not there, it is not then."""
    made = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise unwritable(folder, error) from None
    finally:
        for parent in made:
            with contextlib.suppress(OSError):
                parent.rmdir()


def unwritable(folder: Path, error: OSError) -> UsageError:
    return UsageError(f"--out {folder} cannot be written: {error.strerror}; choose another folder")


def in_use(folder: Path, why: str, error: BlockingIOError) -> UsageError:
    by_hand = f"; if that has ended, remove {error.filename}" if error.filename else ""
    return UsageError(f"--out {folder} is in use: {why}{by_hand}")


def name_one_of(folder: Path) -> str:
    """The end of an error about a folder that is no run's: which of those in it to name; empty where it has none."""
    within = sorted(file.parent for file in [*folder.glob(f"*/{CONFIG}"), *folder.glob(f"runs/*/{CONFIG}")])
    return f"; name one of the runs in it, such as {within[0]}" if within else ""


def is_begun(folder: Path) -> bool:
    """Whether a run was begun in the folder."""
    return (folder / CONFIG).is_file()


def how_to_go_on(folder: Path, command: str) -> str:
    """What to type where a run was ended: `launch` or `train` goes on with it."""
    resume = f"`hvdtrain {command} --resume --out {shlex.quote(str(folder))}`"
    if (step := last_saved_step(folder)) is not None:
        return f"{resume} goes on after step {step}"
    remedy = f"{resume} begins it again" if is_begun(folder) else "give the same command again"
    return f"nothing had been saved: {remedy}"


def has_full_disk(folder: Path) -> bool:
    """Whether a job that failed could probably not write there."""
    return shutil.disk_usage(folder).free < LEAST_DISK


def last_saved_step(folder: Path) -> int | None:
    """The step of a run's last snapshot, which may be damaged; None where there is none."""
    steps = [int(path.name[5:]) for path in (folder / "snapshots").glob("step-*") if path.name[5:].isdecimal()]
    return max(steps, default=None)


def claim(folder: Path, config: RunConfig, workers: int, job: str, others_log: bool, resuming: bool) -> None:
    """Make the run folder this job's, as long as this process lives. Of two jobs that want it, one gets a UsageError.

    Args:
        resuming: go on with the run that is there.
    """
    if resuming:
        refuse_links(folder)
    else:
        check_free(folder, others_log)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock(folder / CONFIG)  # until this process ends, however it does
        if not resuming and (folder / CONFIG).stat().st_size:
            raise BlockingIOError  # it was another's meanwhile
    except BlockingIOError as error:
        raise in_use(folder, "another job has claimed it, and is at work there", error) from None
    except OSError as error:
        raise unwritable(folder, error) from None
    (folder / "snapshots").mkdir(exist_ok=True)
    # Replaced whole, by a file that is locked too: a rank that begins now reads what was there, or this.
    new = folder / f"{CONFIG}.part"
    config.write(new, workers=workers, job=job)
    lock(new, replaces=True)
    new.replace(folder / CONFIG)


def hold(folder: Path) -> None:
    """Go on holding a claimed folder, if whoever has claimed it is lost, as long as this process lives."""
    with contextlib.suppress(OSError):  # it is this process's, or that of one that has only just been lost
        lock(folder / CONFIG)


def is_claimed(folder: Path) -> bool:
    """Whether a job is at work in the folder, as far as this host's locks tell."""
    try:
        if is_begun(folder):
            with locked(folder / CONFIG):
                pass
    except OSError as error:  # or it is one that nobody may open
        return isinstance(error, BlockingIOError)
    return False


@contextlib.contextmanager
def locked(file: Path) -> Iterator[None]:
    """Hold the file's lock. BlockingIOError where another process does."""
    held = lock(file)
    try:
        yield
    finally:
        unlock(held)


def wait_for_claim(folder: Path, job: str, seconds: float) -> None:
    """Return when the job's first worker has claimed the folder; Failure if it does not within the time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, ValueError):
            if parse_toml(read_whole(folder / CONFIG).decode()).get("job") == job:
                return
        time.sleep(0.05)
    raise Failure(f"the first worker did not claim {folder} within {seconds:.0f} s")


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Write whole or not at all: readers may look at any moment."""
    unfinished = path.with_suffix(".part")
    unfinished.write_text(json.dumps(values, indent=2) + "\n")
    unfinished.replace(path)
