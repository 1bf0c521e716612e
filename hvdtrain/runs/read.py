"""Runs as values: what is in a run folder's files, and whether the job finished."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from hvdtrain.base import modes
from hvdtrain.base.config.run_config import WIRES
from hvdtrain.base.errors import UsageError
from hvdtrain.base.formatting import with_noun
from hvdtrain.runs.folder import name_one_of
from hvdtrain.runs.launched import Launched
from hvdtrain.runs.membership_log import LEFT
from hvdtrain.runs.schema import (
    Manifest,
    RunStart,
    Step,
    Summary,
    UnreadableFile,
    find,
    read,
    read_steps,
)

T = TypeVar("T")
_RUN_FILES = ("manifest.json", "summary.json", "config.toml")


class Kind(NamedTuple):
    """One of the configurations that are compared. Runs of the same kind are repeats.

    Attributes:
        mode: the name of the mode.
        workers: the number of workers.
        servers: the number of servers.
        variant: the options of the mode and of its messages that are not at their defaults, as
            `zmq` or `backup 1`. For one process, first the hardware that it computed with, as
            `2 cores`, `1 of 2 cores` or `GPU`.
        one_machine: whether it stands for one machine in the comparison that it is in: a ring on
            one host beside runs over several hosts, or one process on a part of its machine beside
            one on all of it.
    """

    mode: str
    workers: int
    servers: int
    variant: str = ""
    one_machine: bool = False

    @property
    def family(self) -> str:
        """The family of modes for which the kind competes.

        It is empty for one process on a part of its machine that does not stand for the machine.
        """
        if self.one_machine:
            return modes.ONE_MACHINE
        if self.mode not in modes.names():
            return modes.SERVERS if self.servers else modes.RING
        had_part_of_machine = " of " in self.variant
        if self.is_one_process and had_part_of_machine:
            return ""
        return modes.declared(self.mode).family

    @property
    def is_one_process(self) -> bool:
        """Whether it is one process, as in mode `single`."""
        is_known = self.mode in modes.names()
        return is_known and modes.declared(self.mode).family == modes.ONE_MACHINE

    @property
    def is_distributed(self) -> bool:
        """Whether it is a ring or servers, and does not stand for one machine."""
        return self.family in (modes.RING, modes.SERVERS)

    @property
    def label(self) -> str:
        """The kind in words.

        For example `one process, 2 cores`, `allreduce ×2`, `allreduce ×2 on one host`, or
        `ps-sync ×2+1, zmq` for two workers and one server.
        """
        if self.is_one_process:
            size = "one process"
        elif self.servers:
            size = f"{self.mode} ×{self.workers}+{self.servers}"
        else:
            size = f"{self.mode} ×{self.workers}"
        if self.one_machine and not self.is_one_process:
            size += " on one host"
        return ", ".join(filter(None, [size, self.variant]))

    @property
    def order(self) -> tuple[Any, ...]:
        """A key that sorts one machine first, then rings, then parameter servers, each by size."""
        names = modes.names()
        place = names.index(self.mode) if self.mode in names else len(names)
        return (self.is_distributed, place, *self)


_UNREAD = Manifest(mode="unread", workers=1, servers=0, repeat=0)
_NO_SUMMARY = Summary()


@dataclass(frozen=True)
class Run:
    """One job, as its run folder tells it.

    Attributes:
        folder: the run folder.
        manifest: the content of manifest.json, with defaults if it could not be read.
        summary: the content of summary.json, with defaults if it could not be read.
        problem: why tables leave the run out, such as that it failed or was killed; else empty.
        one_machine: whether the run stands for one machine in its comparison. That is a ring on one
            host, if other runs use several hosts. It is also one process on some of its host's
            cores, if another process has all of them.
    """

    folder: Path
    manifest: Manifest = _UNREAD
    summary: Summary = _NO_SUMMARY
    problem: str = ""
    one_machine: bool = False

    @property
    def name(self) -> str:
        """The name of the run folder."""
        return self.folder.name

    @property
    def is_finished(self) -> bool:
        """Whether the job came to its end with all workers."""
        return not self.problem

    @cached_property
    def kind(self) -> Kind:
        """The configuration of which this run is a repeat."""
        manifest = self.manifest
        variant = ", ".join(_option_words(name, value) for name, value in manifest.options.items())
        kind = Kind(manifest.mode, manifest.workers, manifest.servers, variant, self.one_machine)
        if not kind.is_one_process:
            return kind
        parts = filter(None, [_computed_with(manifest), variant])
        return kind._replace(variant=", ".join(parts))

    @property
    def hosts_used(self) -> int:
        """The number of hosts that the run used."""
        return max(1, len(self.manifest.hardware.hosts))

    @property
    def on_gpu(self) -> bool:
        """Whether the workers computed on GPUs."""
        return (self.manifest.device or "").startswith("cuda")

    @property
    def local_steps(self) -> int:
        """The number of steps from one exchange of all weights to the next."""
        return self._number("local_steps")

    @property
    def fragments(self) -> int:
        """The number of parts in which all weights are exchanged."""
        return self._number("fragments")

    @property
    def wire(self) -> str:
        """The wire that carried servers' messages."""
        return str(self.manifest.options.get("wire", WIRES[0]))

    @property
    def spins(self) -> bool:
        """Whether processes spin while they wait, as with MPI.

        If so, the cost of messages cannot be derived from processor time.
        """
        return self.manifest.backend == "horovod-mpi"

    @property
    def waits_for_layers(self) -> bool:
        """Whether a layer's forward waits for the layer's weights, and no step waits for all."""
        if self.manifest.compile or self.local_steps > 1:
            return False
        if self.manifest.wait_for is None and self.kind.mode in modes.names():
            return modes.declared(self.kind.mode).wait_for[:1] == ("layer",)
        return self.manifest.wait_for == "layer"

    def _number(self, option: str) -> int:
        """Returns the value of an option of the mode that is a number from 1; 1 by default."""
        value = self.manifest.options.get(option)
        return value if isinstance(value, int) and 0 < value <= 10**6 else 1

    def read_steps(self) -> tuple[dict[str, list[Step]], list[str]]:
        """Reads the steps of each worker from its metrics.

        Returns:
            The steps of each `rankN`, and a note for each file that is missing or in which lines
            are unreadable.
        """
        ranks: dict[str, list[Step]] = {}
        notes = []
        for path in sorted(self.folder.glob("metrics.rank*.jsonl")):
            steps, unreadable = read_steps(path)
            ranks[path.name.split(".")[1]] = steps
            if unreadable:
                notes.append(f"{self.name}: unreadable lines of {path.name} left out: {unreadable}")
        first = self.kind.servers
        workers = [f"rank{rank}" for rank in range(first, first + self.kind.workers)]
        missing = [f"metrics.{worker}.jsonl" for worker in workers if worker not in ranks]
        if missing:
            notes.append(
                f"{self.name}: the steps of some workers are missing: "
                f"there is no {', '.join(missing)}"
            )
        return ranks, notes


def _option_words(name: str, value: Any) -> str:
    words = name.replace("_", " ")
    if isinstance(value, bool):
        return words if value else f"no {words}"
    if isinstance(value, str) and value != "none":
        return value
    return f"{words} {value}"


def _computed_with(manifest: Manifest) -> str:
    """Returns the part of its machine that one process had; empty if that was not recorded."""
    if (manifest.device or "").startswith("cuda"):
        return "GPU"
    threads = manifest.threads_per_worker
    cores = manifest.hardware.cores_usable or manifest.hardware.cores
    if not threads:
        return ""
    if not cores:
        return with_noun(threads, "core")
    if threads >= cores:
        return with_noun(min(threads, cores), "core")
    return f"{threads} of {with_noun(cores, 'core')}"


def load_run(folder: Path) -> Run:
    """Reads a run folder. A run that failed or was killed is a Run with a `problem`.

    Raises:
        UsageError: the folder is no run folder, or its manifest cannot be read. The message says
            what is missing.
    """
    if not folder.exists():
        raise UsageError(f"there is no folder {folder}")
    if not folder.is_dir():
        raise UsageError(f"{folder} is not a folder")
    try:
        manifest = read(folder, Manifest)
    except UnreadableFile as error:
        raise UsageError(
            f"{folder} cannot be read as a run folder: {error}{name_one_of(folder)}"
        ) from None
    try:
        summary = read(folder, Summary)
    except UnreadableFile as error:
        return Run(folder, manifest, problem=f"the run has not finished: {error}")
    return Run(folder, manifest, summary, _problem(manifest, summary))


def _problem(manifest: Manifest, summary: Summary) -> str:
    """Returns why a run with a summary is left out of tables; empty if it is not."""
    if summary.status != "done":
        return f"the run ended with status {summary.status!r}"
    gone = _gone(summary)
    if gone:
        return f"it finished without {gone}"
    present = sum(not life.why for life in summary.membership)
    if present > manifest.workers:
        workers = with_noun(manifest.workers or 0, "worker")
        return f"more than its {workers} were there at the end: others had joined"
    return resumed_otherwise(manifest)


def _gone(summary: Summary) -> str:
    """Returns which workers were not there at the end, and why; empty if all were there."""
    # The reason why the last life of each rank has ended.
    reasons = dict.fromkeys(summary.lost_workers, "lost")
    reasons |= {life.rank: life.why for life in summary.membership}
    left = [rank for rank, why in reasons.items() if why == LEFT]
    died = [rank for rank, why in reasons.items() if why not in ("", LEFT)]
    phrases = []
    if died:
        phrases.append(f"ranks {died}, which died on the way")
    if left:
        phrases.append(f"ranks {left}, which left on the way")
    return ", and ".join(phrases)


def resumed_otherwise(manifest: Manifest) -> str:
    """Returns what differs between the starts of a resumed run; empty if nothing does."""
    changes = []
    for field in RunStart.__struct_fields__:
        if field == "after_step":
            continue
        values = dict.fromkeys(_start_words(getattr(start, field)) for start in manifest.parts)
        if len(values) > 1:
            changes.append(f"{field.replace('_', ' ')} {', then '.join(values)}")
    return f"it was resumed in another way: {'; '.join(changes)}" if changes else ""


def _start_words(value: Any) -> str:
    if value is None:
        return "not recorded"
    if isinstance(value, dict):  # the ranks of each host
        return ", ".join(f"{name} ({' '.join(map(str, ranks))})" for name, ranks in value.items())
    return str(value)


def find_runs(paths: Iterable[Path]) -> list[Run]:
    """Returns the runs in these folders, each once, in order of kind and repeat.

    An unreadable run is a Run with a `problem` if it was found in a folder of runs.

    Args:
        paths: run folders, folders of run folders, or folders of `hvdtrain compare`, which have
            their runs in `runs/`.

    Raises:
        UsageError: a path holds no run, or names an unreadable one.
    """
    runs: dict[Path, Run] = {}
    for path in paths:
        if not path.is_dir() or _is_run(path):
            runs.setdefault(path.resolve(), load_run(path))
            continue
        inner = path / "runs" if (path / "runs").is_dir() else path
        visible = sorted(inner.glob("[!.]*"))
        folders = [entry for entry in visible if entry.is_dir() and _is_run(entry)]
        if not folders:
            raise UsageError(
                f"no run in {path}: a run folder holds manifest.json, summary.json "
                "and metrics.rank0.jsonl"
            )
        for folder in folders:
            try:
                run = load_run(folder)
            except UsageError as error:
                run = Run(folder, problem=str(error))
            runs.setdefault(folder.resolve(), run)
    return sorted(runs.values(), key=_order)


def _order(run: Run) -> tuple[Any, ...]:
    is_unread = run.manifest is _UNREAD
    return (is_unread, run.kind.order, run.manifest.repeat)


def finished_by_kind(runs: Sequence[Run]) -> dict[Kind, list[Run]]:
    """Returns the finished runs by kind: kinds in display order, runs in order of repeat."""
    finished = (run for run in runs if run.is_finished)
    ordered = sorted(finished, key=lambda run: (run.kind.order, run.manifest.repeat, run.name))
    return grouped(ordered, lambda run: run.kind)


def grouped(values: Iterable[T], key: Callable[[T], Any]) -> dict[Any, list[T]]:
    """Returns the values by key, in their order."""
    groups: dict[Any, list[T]] = {}
    for value in values:
        groups.setdefault(key(value), []).append(value)
    return groups


def display_names(runs: Sequence[Run]) -> dict[Path, str]:
    """Returns a name for each run, by folder.

    It is the folder's name, or the whole path if several folders have that name.
    """
    count = Counter(run.name for run in runs)
    return {run.folder: run.name if count[run.name] == 1 else str(run.folder) for run in runs}


def _is_run(folder: Path) -> bool:
    if any((folder / file).exists() for file in _RUN_FILES):
        return True
    return any(folder.glob("metrics.rank*.jsonl"))


def last_launch(run: Path) -> Launched | None:
    """Returns how the job of a run folder was launched last; None if its manifest does not say."""
    manifest = find(run, Manifest)
    if manifest and manifest.launch and manifest.launch.launcher:
        return manifest.launch
    return None
