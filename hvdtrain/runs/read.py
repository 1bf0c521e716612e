"""Run folders as values: what each job wrote, and whether it finished."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from hvdtrain import modes
from hvdtrain.config.run_config import WIRES
from hvdtrain.errors import UsageError
from hvdtrain.formatting import with_noun
from hvdtrain.runs.folder import name_one_of
from hvdtrain.runs.schema import Manifest, RunStart, Step, Summary, UnreadableFile, read, read_steps

T = TypeVar("T")
_RUN_FILES = ("manifest.json", "summary.json", "config.toml")


class Kind(NamedTuple):
    """What is compared. Runs of the same kind are repeats of each other.

    Attributes:
        variant: the options of the mode and of its messages that are not as they are by default: `zmq`, `backup 1`; of
            one process, first what it computed with: `2 cores`, `1 of 2 cores`, `GPU`.
    """

    mode: str
    workers: int
    servers: int
    variant: str = ""

    @property
    def family(self) -> str:
        """Which answer it stands for; empty for one process that had a part of its machine, scaling's baseline."""
        if self.mode not in modes.names():
            return modes.SERVERS if self.servers else modes.RING
        family = modes.declared(self.mode).family
        return "" if family == modes.ONE_MACHINE and " of " in self.variant else family

    @property
    def is_distributed(self) -> bool:
        return self.family in (modes.RING, modes.SERVERS)

    @property
    def label(self) -> str:
        """`one machine, 2 cores`, `allreduce ×2`, `ps-sync ×2+1, zmq` (two workers and one server)."""
        size = f"{self.mode} ×{self.workers}" + (f"+{self.servers}" if self.servers else "")
        if self.family in (modes.ONE_MACHINE, ""):
            size = modes.ONE_MACHINE if self.family else "one process"
        return ", ".join(filter(None, [size, self.variant]))

    @property
    def order(self) -> tuple[Any, ...]:
        """Sorts one process first, then rings, then parameter servers, each by size."""
        names = modes.names()
        return (names.index(self.mode) if self.mode in names else len(names), *self)


_UNREAD, _NO_SUMMARY = Manifest(mode="unread", workers=1, servers=0, repeat=0), Summary()


@dataclass(frozen=True)
class Run:
    """One job's folder.

    Attributes:
        manifest, summary: its files; without a figure where they could not be read.
        problem: why the run is left out of tables (it failed, it was killed), or empty.
    """

    folder: Path
    manifest: Manifest = _UNREAD
    summary: Summary = _NO_SUMMARY
    problem: str = ""

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def is_finished(self) -> bool:
        return not self.problem

    @cached_property
    def kind(self) -> Kind:
        manifest = self.manifest
        variant = ", ".join(_option_words(name, value) for name, value in manifest.options.items())
        kind = Kind(manifest.mode, manifest.workers, manifest.servers, variant)
        if kind.family != modes.ONE_MACHINE:
            return kind
        return kind._replace(variant=", ".join(filter(None, [_computed_with(manifest), variant])))

    @property
    def local_steps(self) -> int:
        """From one exchange of all weights to the next."""
        return self._number("local_steps")

    @property
    def fragments(self) -> int:
        """In so many parts all weights are exchanged."""
        return self._number("fragments")

    @property
    def wire(self) -> str:
        """What carried servers' messages."""
        return str(self.manifest.options.get("wire", WIRES[0]))

    def _number(self, option: str) -> int:
        """The value of an option of the mode that is a number from 1, by default 1."""
        value = self.manifest.options.get(option)
        return value if isinstance(value, int) and value > 0 else 1

    def read_steps(self) -> tuple[dict[str, list[Step]], list[str]]:
        """The steps of each `rankN` from its metrics, and what is missing or was left out, a line each."""
        ranks: dict[str, list[Step]] = {}
        notes = []
        for path in sorted(self.folder.glob("metrics.rank*.jsonl")):
            steps, unreadable = read_steps(path)
            ranks[path.name.split(".")[1]] = steps
            if unreadable:
                notes.append(f"{self.name}: unreadable lines of {path.name} left out: {unreadable}")
        first = self.kind.servers
        files = [f"metrics.{rank}.jsonl" for n in range(self.kind.workers) if (rank := f"rank{first + n}") not in ranks]
        if files:
            notes.append(f"{self.name}: the steps of some workers are missing: there is no {', '.join(files)}")
        return ranks, notes


def _option_words(name: str, value: Any) -> str:
    words = name.replace("_", " ")
    if isinstance(value, bool):
        return words if value else f"no {words}"
    return value if isinstance(value, str) and value != "none" else f"{words} {value}"


def _computed_with(manifest: Manifest) -> str:
    """The part of its machine that one process had; empty where that was not recorded."""
    threads, cores = manifest.threads_per_worker, manifest.hardware.cores_usable or manifest.hardware.cores
    if (manifest.device or "").startswith("cuda"):
        return "GPU"
    if not threads or not cores or threads >= cores:
        return with_noun(min(threads, cores or threads), "core") if threads else ""
    return f"{threads} of {with_noun(cores, 'core')}"


def load_run(folder: Path) -> Run:
    """Read a run folder. A run that failed or was killed is a Run with a `problem`.

    Raises:
        UsageError: it is no run folder, or its manifest cannot be read; it says what is missing.
    """
    if not folder.is_dir():
        raise UsageError(f"{folder} is not a folder" if folder.exists() else f"there is no folder {folder}")
    try:
        manifest = read(folder, Manifest)
    except UnreadableFile as error:
        raise UsageError(f"{folder} is no readable run folder: {error}{name_one_of(folder)}") from None
    try:
        summary = read(folder, Summary)
    except UnreadableFile as error:
        return Run(folder, manifest, problem=f"the run has not finished: {error}")
    problem, present = "", {life.rank for life in summary.membership if not life.why}
    if summary.status != "done":
        problem = f"the run ended with status {summary.status!r}"
    elif lost := [rank for rank in summary.lost_workers if rank not in present]:  # and did not come back
        problem = f"it finished without ranks {lost}, which died on the way"
    elif sum(not life.why for life in summary.membership) > manifest.workers:
        problem = f"more than its {with_noun(manifest.workers or 0, 'worker')} were there at the end: others had joined"
    else:
        problem = resumed_otherwise(manifest)
    return Run(folder, manifest, summary, problem)


def resumed_otherwise(manifest: Manifest) -> str:
    """That a run was not started in the same way each time, and in which; empty where it was."""
    told = []
    for field in (name for name in RunStart.__struct_fields__ if name != "after_step"):
        values = list(dict.fromkeys(_start_words(getattr(start, field)) for start in manifest.parts))
        if len(values) > 1:
            told.append(f"{field.replace('_', ' ')} {', then '.join(values)}")
    return f"it was resumed in another way: {'; '.join(told)}" if told else ""


def _start_words(value: Any) -> str:
    if isinstance(value, dict):  # the ranks of each host
        return ", ".join(f"{name} ({' '.join(map(str, ranks))})" for name, ranks in value.items())
    return "not recorded" if value is None else str(value)


def find_runs(paths: Iterable[Path]) -> list[Run]:
    """The runs in these folders, each once, in order of kind and repeat.

    A path is a run folder, a folder of run folders, or what `hvdtrain compare` made (runs in `runs/`). An unreadable
    run is a Run with a `problem` if it was found in a folder of runs, and an error if the path names it.

    Raises:
        UsageError: a path that holds no run.
    """
    runs: dict[Path, Run] = {}
    for path in paths:
        if not path.is_dir() or _is_run(path):
            runs.setdefault(path.resolve(), load_run(path))
            continue
        inner = path / "runs" if (path / "runs").is_dir() else path
        folders = [f for f in sorted(inner.glob("[!.]*")) if f.is_dir() and _is_run(f)]
        if not folders:
            files = ", ".join(_RUN_FILES[:2])
            raise UsageError(f"no run in {path}: a run folder holds {files} and metrics.rank0.jsonl")
        for folder in folders:
            try:
                run = load_run(folder)
            except UsageError as error:
                run = Run(folder, problem=str(error))
            runs.setdefault(folder.resolve(), run)
    return sorted(runs.values(), key=lambda run: (run.manifest is _UNREAD, run.kind.order, run.manifest.repeat))


def finished_by_kind(runs: Sequence[Run]) -> dict[Kind, list[Run]]:
    """The finished runs by kind, kinds in display order and runs in order of repeat."""
    finished = (run for run in runs if run.is_finished)
    ordered = sorted(finished, key=lambda run: (run.kind.order, run.manifest.repeat, run.name))
    return grouped(ordered, lambda run: run.kind)


def grouped(values: Iterable[T], key: Callable[[T], Any]) -> dict[Any, list[T]]:
    """Those with the same key, by that, in their order."""
    groups: dict[Any, list[T]] = {}
    for value in values:
        groups.setdefault(key(value), []).append(value)
    return groups


def display_names(runs: Sequence[Run]) -> dict[Path, str]:
    """What to call each run, by folder: the folder's name, or its whole path where several have that name."""
    count = Counter(run.name for run in runs)
    return {run.folder: run.name if count[run.name] == 1 else str(run.folder) for run in runs}


def _is_run(folder: Path) -> bool:
    return any((folder / file).exists() for file in _RUN_FILES) or any(folder.glob("metrics.rank*.jsonl"))
