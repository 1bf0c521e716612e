"""What an earlier `hvdtrain compare` left in its folder: finished runs stay, if they are of the same experiment."""

import contextlib
import dataclasses
import os
import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hvdtrain import modes
from hvdtrain.comparing.grid import SPANNED, Planned
from hvdtrain.config.file import read_config
from hvdtrain.config.run_config import RunConfig, flag, in_words
from hvdtrain.errors import UsageError
from hvdtrain.report import check_out
from hvdtrain.runs.folder import CONFIG, check_free, in_use, is_claimed, locked, unwritable
from hvdtrain.runs.read import find_runs
from hvdtrain.runs.request import with_absolute_paths
from hvdtrain.world.host import versions

KILLED_JOB_END_S = 30.0  # how long the ranks of a comparison that was killed may take to end
_REPORT = ("report.html", "report.md", "results.csv", "verdict.json")
# Fields that tell the runs of a comparison apart, or change nothing about one.
_APART = {*SPANNED, "mode", "servers", "repeat", "sprint", "threads", "log_every", "timeout"}


def _key(config: RunConfig, workers: int) -> Hashable:
    """What no two runs of a comparison have in common."""
    alone = config.threads if modes.declared(config.mode).family == modes.ONE_MACHINE else None
    spanned = (getattr(config, name) for name in SPANNED)
    return (config.mode, workers, config.servers, config.repeat, bool(config.sprint), alone, *spanned)


def find_finished(folder: Path) -> dict[Hashable, Path]:
    """The folders of the finished runs of the comparison in this folder, none where that is new.

    Raises:
        UsageError: the folder holds something else, or runs of a version with other options.
    """
    try:
        is_comparison = (folder / "runs").is_dir() and (folder / "logs").is_dir() and not (folder / CONFIG).exists()
    except OSError:
        is_comparison = False
    if not is_comparison:
        check_free(folder)
        return {}
    if any((folder / name).exists() for name in _REPORT):
        check_out(folder)
    try:
        finished = [run for run in find_runs([folder]) if run.is_finished]
    except UsageError:  # there is none
        return {}
    return {_key(RunConfig(**read_config(run.folder / CONFIG)), run.kind.workers): run.folder for run in finished}


def match(earlier: Mapping[Hashable, Path], runs: Sequence[Planned], folder: Path) -> dict[str, Path]:
    """The folders of those planned runs that are finished, by their names.

    Raises:
        UsageError: a run of the same name is there, of something else.
    """
    kept, names = {}, {path.name for path in earlier.values()}
    for run in runs:
        if path := earlier.get(_key(run.config, run.workers)):
            kept[run.name] = path
        elif run.name in names:
            spanned = ", ".join(f"{flag(name)} {getattr(run.config, name)}" for name in (*SPANNED, "threads"))
            raise UsageError(
                f"--out {folder}: {run.name} is there already, and not with {spanned}: name both values, by commas, "
                "or another folder"
            )
    return kept


def asked(config: RunConfig, sprint_s: float, contenders: Sequence[Planned]) -> dict[str, Any]:
    """What all runs of a comparison have in common, for Record.ask; threads as far as they are known."""
    config = with_absolute_paths(config)
    fields = {flag(f.name): in_words(f, getattr(config, f.name)) for f in dataclasses.fields(config)
              if f.name not in _APART}  # fmt: skip
    fields["--width"] = contenders[0].config.taken_width  # `auto` is decided
    threads = next((run.config.threads for run in contenders if run.family != modes.ONE_MACHINE), 0)
    hosts = sorted({host.name for run in contenders for host in run.hosts})
    where = {"hosts": ",".join(hosts) or "none", "--launcher": contenders[0].launcher.name}
    return fields | {"--sprint": sprint_s} | ({"--threads": threads} if threads else {}) | where | versions()


def set_aside(folder: Path, begun: Path) -> Path | None:
    """Move what is left of a run that was begun out of the way of its next start; where to, or None if there is none.

    Args:
        folder: the comparison's.
        begun: the run's.

    Raises:
        UsageError: its job still runs.
    """
    if not begun.exists():
        return None
    deadline = time.monotonic() + KILLED_JOB_END_S
    while is_claimed(begun):
        if time.monotonic() > deadline:
            raise UsageError(f"{begun}: its job is still at work there: end it, or wait for it")
        time.sleep(0.2)
    unfinished = folder / "unfinished"
    unfinished.mkdir(exist_ok=True)
    places = (unfinished / f"{begun.name}-{number}" for number in range(1, 10**6))
    place = next(place for place in places if not place.exists())
    begun.rename(place)
    log = folder / "logs" / f"{begun.name}.log"
    if log.is_file():
        os.replace(log, place / "compare.log")
    return place


@contextlib.contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Make the folder, and be the one comparison at work there.

    Raises:
        UsageError: another one is, or the folder cannot be written.
    """
    with contextlib.ExitStack() as stack:
        try:
            (folder / "runs").mkdir(parents=True, exist_ok=True)
            (folder / "logs").mkdir(exist_ok=True)
            stack.enter_context(locked(folder / "logs" / ".lock"))
        except BlockingIOError as error:
            raise in_use(folder, "another comparison is at work there", error) from None
        except OSError as error:
            raise unwritable(folder, error) from None
        yield
