"""What an earlier `hvdtrain compare` left in its folder.

Finished runs stay if they are of the same experiment.
"""

import contextlib
import dataclasses
import os
import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from hvdtrain.base.config.file import read_config
from hvdtrain.base.config.run_config import RunConfig, flag, in_words
from hvdtrain.base.errors import UsageError
from hvdtrain.base.world.host import versions
from hvdtrain.comparing.grid import SPANNED, Planned
from hvdtrain.reporting import check_out
from hvdtrain.runs.folder import (
    CONFIG,
    check_free,
    in_use,
    is_claimed,
    locked,
    refuse_others,
    unwritable,
)
from hvdtrain.runs.read import Run, find_runs
from hvdtrain.runs.request import with_absolute_paths

# How long the ranks of a killed comparison may take to end.
KILLED_JOB_END_S = 30.0
# The folders in a comparison's folder that runs go to.
OWN_FOLDERS = (
    "runs",
    "logs",
    "pilot",
    "rates",
    "unfinished",
    "disturbed",
)
_REPORT = ("report.html", "report.md", "results.csv", "verdict.json")
# Fields that may differ between the runs of a comparison, or that change nothing about a run.
_APART = {*SPANNED, "mode", "servers", "repeat", "sprint", "log_every", "timeout"}


def find_finished(folder: Path) -> dict[Hashable, Run]:
    """Returns the finished runs of the comparison in a folder; empty if the folder is new.

    Returns:
        The runs, by a key that is unique to each run.

    Raises:
        UsageError: the folder holds something else, or runs of a version with other options.
    """
    if not _is_comparison(folder):
        check_free(folder)
        return {}
    if any((folder / name).exists() for name in _REPORT):
        check_out(folder)
    try:
        runs = find_runs([folder])
    # There is no run.
    except UsageError:
        return {}
    finished = {}
    for run in runs:
        if run.is_finished:
            config = RunConfig(**read_config(run.folder / CONFIG))
            finished[_key(config, run.kind.workers, _number_of_hosts(run))] = run
    return finished


def _is_comparison(folder: Path) -> bool:
    try:
        has_folders = (folder / "runs").is_dir() and (folder / "logs").is_dir()
        return has_folders and not (folder / CONFIG).exists()
    except OSError:
        return False


def _number_of_hosts(run: Run) -> int:
    """Returns how many hosts a run's launcher was given."""
    launch = run.manifest.launch
    return len(launch.hosts) if launch else 0


def _key(config: RunConfig, workers: int, hosts: int) -> Hashable:
    """Returns a key that is unique to each run of a comparison.

    Args:
        config: the run's configuration.
        workers: the number of workers.
        hosts: the number of hosts. The key says only whether they are several.
    """
    spanned = [getattr(config, name) for name in SPANNED]
    return (
        config.mode,
        workers,
        config.servers,
        config.repeat,
        bool(config.sprint),
        config.threads,
        hosts > 1,
        *spanned,
    )


def match(earlier: Mapping[Hashable, Run], runs: Sequence[Planned], folder: Path) -> set[str]:
    """Returns the names of the planned runs that are finished.

    Args:
        earlier: see find_finished.
        runs: the planned runs.
        folder: the comparison's folder.

    Raises:
        UsageError: the folder has a run of the same name that does something else.
    """
    kept = set()
    by_name = {run.name: run for run in earlier.values()}
    for run in runs:
        as_written = with_absolute_paths(run.config)
        if _key(as_written, run.workers, len(run.hosts)) in earlier:
            kept.add(run.name)
        elif run.name in by_name:
            made_with = RunConfig(**read_config(by_name[run.name].folder / CONFIG))
            raise UsageError(
                f"--out {folder}: {run.name} is there already, and was made "
                f"{_difference(made_with, as_written)}: name both values, by commas, or another folder"
            )
    return kept


def _difference(made_with: RunConfig, asked: RunConfig) -> str:
    """Returns what differs of two runs with one name."""
    words = []
    for field in dataclasses.fields(RunConfig):
        if field.name not in (*SPANNED, "threads"):
            continue
        before = in_words(field, getattr(made_with, field.name))
        now = in_words(field, getattr(asked, field.name))
        if before != now:
            words.append(f"with {flag(field.name)} {before}, not {now}")
    return "; ".join(words) or "on one host, or on several"


def experiment(config: RunConfig, sprint_s: float, contenders: Sequence[Planned]) -> dict[str, Any]:
    """Returns what all runs of a comparison have in common, for ComparisonState.set_experiment.

    Args:
        config: what the contenders were planned from, with the threads that were given.
        sprint_s: how long a sprint lasts.
        contenders: the contenders that were asked for.
    """
    config = with_absolute_paths(config)
    common: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        if field.name not in _APART:
            common[flag(field.name)] = in_words(field, getattr(config, field.name))
    # The configuration may say `auto`.
    common["--width"] = contenders[0].config.effective_width
    common["--sprint"] = sprint_s
    hosts: set[str] = set()
    for run in contenders:
        hosts.update(host.name for host in run.hosts)
    common["hosts"] = ",".join(sorted(hosts)) or "none"
    common["--launcher"] = contenders[0].launcher.name
    return common | versions() | {"hvdtrain": version("hvdtrain")}


def set_aside(folder: Path, begun: Path) -> Path | None:
    """Moves what is left of a run that was begun out of the way of its next start.

    Args:
        folder: the comparison's folder.
        begun: the run's folder.

    Returns:
        Where it is now; None if there was nothing.

    Raises:
        UsageError: the run's job is still running.
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
    number = 1
    while (unfinished / f"{begun.name}-{number}").exists():
        number += 1
    place = unfinished / f"{begun.name}-{number}"
    begun.rename(place)
    log = folder / "logs" / f"{begun.name}.log"
    if log.is_file():
        os.replace(log, place / "compare.log")
    return place


@contextlib.contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Makes the folder, and keeps other comparisons out of it while the block runs.

    Raises:
        UsageError: another comparison is at work there, or the folder cannot be written, or the
            folder or one in it is another user's, or others may write in it.
    """
    refuse_others(folder, *(folder / name for name in OWN_FOLDERS))
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
