"""What an earlier `hvdtrain compare` left in its folder: finished runs stay, if they are of the same experiment."""

import contextlib
import dataclasses
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdtrain import modes
from hvdtrain.compare.grid import Planned
from hvdtrain.config.file import read_config
from hvdtrain.config.run_config import LENGTHS, RunConfig, flag, in_words
from hvdtrain.errors import UsageError
from hvdtrain.report import check_out
from hvdtrain.runs.folder import CONFIG, check_free, in_use, is_claimed, locked, unwritable
from hvdtrain.runs.read import Run, load_run
from hvdtrain.runs.request import with_absolute_paths
from hvdtrain.world.host import versions

KILLED_JOB_END_S = 30.0  # how long the ranks of a comparison that was killed may take to end
_REPORT = ("report.html", "report.md", "results.csv", "verdict.json")
# Fields that tell the runs of a comparison apart, and fields that change nothing about a run, or follow from others.
_AXES = ("mode", "servers", "model", "batch_size", "slow", "staleness", "backup", "wire", "repeat")
_NO_MATTER = ("log_every", "timeout", "seed", "shares")


@dataclass(frozen=True)
class Earlier:
    """A finished run of an earlier comparison in the same folder."""

    run: Run
    config: RunConfig

    @property
    def key(self) -> tuple[Any, ...]:
        return _key(self.config, self.run.kind.workers)


def _key(config: RunConfig, workers: int) -> tuple[Any, ...]:
    """What no two runs of a comparison have in common."""
    alone = config.threads if _is_one_machine(config) else None
    return (workers, bool(config.sprint), alone, *(getattr(config, name) for name in _AXES))


def _is_one_machine(config: RunConfig) -> bool:
    return modes.declared(config.mode).family == modes.ONE_MACHINE


def find_finished(folder: Path) -> list[Earlier]:
    """The finished runs of the comparison in this folder, none where the folder is new.

    Raises:
        UsageError: the folder holds something else, or runs of a version with other options.
    """
    try:
        is_comparison = (folder / "runs").is_dir() and (folder / "logs").is_dir() and not (folder / CONFIG).exists()
    except OSError:
        is_comparison = False
    if not is_comparison:
        check_free(folder)
        return []
    if any((folder / name).exists() for name in _REPORT):
        check_out(folder)
    found = []
    for run_folder in sorted((folder / "runs").iterdir()):
        try:
            run = load_run(run_folder)
        except UsageError:  # it had only begun, and is made again
            continue
        if run.is_finished:
            found.append(Earlier(run, RunConfig(**read_config(run_folder / CONFIG))))
    return found


def match(earlier: Sequence[Earlier], runs: Sequence[Planned], folder: Path) -> dict[str, Path]:
    """The folders of those planned runs that are finished, by their names.

    Raises:
        UsageError: the runs that are there were made with other options, on other hosts or with other versions, so that
            they could not be compared with those that are planned.
    """
    by_key, by_name = {one.key: one for one in earlier}, {one.run.name: one for one in earlier}
    kept = {}
    for run in runs:
        asked = with_absolute_paths(run.config)
        one = by_key.get(_key(asked, run.workers))
        if one:
            kept[run.name] = one.run.folder
        elif other := by_name.get(run.name):  # a run's name does not have what all runs of its comparison share
            axes = [name for name in (*_AXES, *sorted(LENGTHS), "threads") if name not in ("mode", "servers")]
            differ = [name for name in axes if getattr(other.config, name) != getattr(asked, name)]
            were, are = (" ".join(f"{flag(n)} {getattr(of, n)}" for n in differ) for of in (other.config, asked))
            raise UsageError(
                f"--out {folder}: {run.name} is there already, with {were} in place of {are}: name both, by commas, or "
                "another folder"
            )
        same_mode = [other for other in earlier if other.config.mode == asked.mode]
        others = [one] if one else [*earlier[:1], *same_mode[:1]]
        for other in others:
            if different := [*_other_options(other, asked), *_otherwise_made(other, run, is_same=other is one)]:
                raise UsageError(
                    f"--out {folder} has runs that could not be compared: {other.run.name} was made with "
                    f"{'; '.join(different)}: name another folder, or repeat what it was made with"
                )
    return kept


def _other_options(earlier: Earlier, asked: RunConfig) -> list[str]:
    """In what its options differ from those asked, a phrase each."""
    before = earlier.config
    skipped = {*_AXES, *_NO_MATTER}
    if before.mode != asked.mode:
        skipped |= {name for mode in modes.names() for name in modes.declared(mode).options}
    if bool(before.sprint) != bool(asked.sprint):
        skipped |= LENGTHS | {"record"}
    if _is_one_machine(before) or _is_one_machine(asked):
        skipped |= {"threads"}
    found = [
        f"{flag(f.name)} {in_words(f, getattr(before, f.name))}, not {in_words(f, getattr(asked, f.name))}"
        for f in dataclasses.fields(RunConfig)
        if f.name not in skipped and not _is_same(f.name, before, asked)
    ]
    if before.seed - before.repeat != asked.seed - asked.repeat:
        seeds = [config.seed - config.repeat + 1 for config in (before, asked)]
        found.append(f"--seed {seeds[0]}, not {seeds[1]}")
    return found


def _is_same(name: str, before: RunConfig, asked: RunConfig) -> bool:
    if name == "lr" and before.batch_size != asked.batch_size:  # with --lr-scaling it follows from the batch
        return True
    if name == "width":  # ranks write down which one `auto` was
        return before.taken_width == asked.taken_width
    return getattr(before, name) == getattr(asked, name)


def _otherwise_made(earlier: Earlier, run: Planned, is_same: bool) -> list[str]:
    """In what it was launched otherwise, or by other software; is_same: it is this very run."""
    manifest, here = earlier.run.manifest, versions()
    found = [
        f"{name} {version}, not {here.get(name)}"
        for name, version in manifest.versions.items()
        if version != here.get(name)
    ]
    launched = manifest.launch
    if launched and launched.launcher not in (None, run.launcher):
        found.append(f"--launcher {launched.launcher}, not {run.launcher}")
    hosts = [str(host) for host in run.hosts]
    if is_same and launched and launched.hosts != hosts:
        found.append(f"hosts {','.join(launched.hosts) or 'none'}, not {','.join(hosts) or 'none'}")
    return found


def check_images(earlier: Sequence[Earlier], images: str, dataset: str) -> None:
    """UsageError where the data set is not what the runs that are there were trained on.

    Args:
        images: the hash of its content.
    """
    for one in earlier:
        if one.run.manifest.dataset_hash != images:
            raise UsageError(
                f"--dataset {dataset} is not what {one.run.folder} was trained on: name another folder with --out"
            )


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
