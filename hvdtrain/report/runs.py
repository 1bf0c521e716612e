"""Run folders as values: what each job wrote, and whether it finished."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from hvdtrain.errors import UsageError
from hvdtrain.report.run_files import UnreadableFile, read_manifest, read_steps, read_summary

_RUN_FILES = ("manifest.json", "summary.json", "config.toml")
_MODE_ORDER = ("single", "allreduce", "ddp", "ps-sync", "ps-ssp", "ps-async")  # others follow by name


class Kind(NamedTuple):
    """What is compared. Runs of the same kind are repeats of each other."""

    mode: str
    workers: int
    servers: int

    @property
    def label(self) -> str:
        """`single`, `allreduce ×2`, `ps-sync ×2+1` (two workers and one server)."""
        if self.mode == "single":
            return self.mode
        return f"{self.mode} ×{self.workers}" + (f"+{self.servers}" if self.servers else "")

    @property
    def order(self) -> tuple[int, str, int, int]:
        """Sorts the baseline first, then rings, then parameter servers, each by size."""
        is_known = self.mode in _MODE_ORDER
        return (_MODE_ORDER.index(self.mode) if is_known else len(_MODE_ORDER), *self)


@dataclass(frozen=True)
class Run:
    """One job's folder.

    Attributes:
        manifest, summary: the parsed files; empty where they could not be read.
        problem: why the run is left out of tables (it failed, it was killed), or empty.
    """

    folder: Path
    manifest: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    problem: str = ""

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def is_finished(self) -> bool:
        return not self.problem

    @property
    def kind(self) -> Kind:
        return Kind(self.manifest["mode"], self.manifest["workers"], self.manifest["servers"])

    @property
    def repeat(self) -> int:
        return self.manifest["repeat"]

    @property
    def starts(self) -> list[dict[str, Any]]:
        """How the run was computed each time it was started: once, and again whenever it was resumed."""
        parts = self.manifest.get("parts")
        return [part for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []

    def read_steps(self) -> tuple[dict[str, list[dict[str, Any]]], list[str]]:
        """The steps of each `rankN` from its metrics, and what is missing or was left out, a line each.

        A step has at least `time` (seconds), `samples` (this rank's in this step) and `loss` (None where there
        were no samples).
        """
        ranks: dict[str, list[dict[str, Any]]] = {}
        notes = []
        for path in sorted(self.folder.glob("metrics.rank*.jsonl")):
            steps, unreadable = read_steps(path)
            ranks[path.name.split(".")[1]] = steps
            if unreadable:
                notes.append(f"{self.name}: unreadable lines of {path.name} left out: {unreadable}")
        if len(ranks) < self.manifest["workers"]:
            notes.append(f"{self.name}: the steps of {len(ranks)} of {self.manifest['workers']} workers were found")
        return ranks, notes


def load_run(folder: Path) -> Run:
    """Read a run folder. A run that failed or was killed is a Run with a `problem`.

    Raises:
        UsageError: it is no run folder, or its manifest cannot be read; it says what is missing.
    """
    if not folder.is_dir():
        raise UsageError(f"{folder} is not a folder" if folder.exists() else f"there is no folder {folder}")
    try:
        manifest = read_manifest(folder)
    except UnreadableFile as error:
        raise UsageError(f"{folder} is no readable run folder: {error}") from None
    try:
        summary = read_summary(folder)
    except UnreadableFile as error:
        return Run(folder, manifest, problem=f"the run has not finished: {error}")
    if summary.get("status") != "done":
        return Run(folder, manifest, summary, f"the run ended with status {summary.get('status')!r}")
    if lost := summary.get("lost_workers"):
        return Run(folder, manifest, summary, f"it finished without ranks {lost}, which died on the way")
    run = Run(folder, manifest, summary)
    setups = [_describe_start(start) for start in run.starts]
    if len(set(setups)) > 1:
        return Run(folder, manifest, summary, f"it was resumed in another way: {', then '.join(setups)}")
    return run


def _describe_start(start: dict[str, Any]) -> str:
    """How and where a run was computed after one of its starts; older versions did not record all of it."""
    words = [f"{start.get('mode')} on {start.get('workers')} worker(s) and {start.get('servers')} server(s)"]
    words += [f"{start['threads_per_worker']} thread(s) each"] if "threads_per_worker" in start else []
    words += [f"on {start['device']}"] if "device" in start else []
    words += [f"messages by {start['backend']}"] if "backend" in start else []
    if isinstance(hosts := start.get("hosts"), dict):
        words += [f"on {', '.join(f'{name} (ranks {_format_ranks(ranks)})' for name, ranks in hosts.items())}"]
    words += [f"over {start['interface']}"] if start.get("interface") not in (None, "", "lo") else []
    return ", ".join(words)


def _format_ranks(ranks: Any) -> str:
    return " ".join(map(str, ranks)) if isinstance(ranks, list) else str(ranks)


def find_runs(paths: Iterable[Path]) -> list[Run]:
    """The runs in these folders, each once, in order of kind and repeat.

    A path is a run folder, a folder of run folders, or what `hvdtrain compare` made (runs in `runs/`). An unreadable
    run is a Run with a `problem` if it was found in a folder of runs, and an error if the path names it.

    Raises:
        UsageError: a path that holds no run.
    """
    found: dict[Path, Run] = {}
    for path in paths:
        if not path.is_dir() or _is_run(path):
            found.setdefault(path.resolve(), load_run(path))
            continue
        inner = path / "runs" if (path / "runs").is_dir() else path
        folders = [f for f in sorted(inner.glob("[!.]*")) if f.is_dir() and _is_run(f)]
        if not folders:
            files = ", ".join(_RUN_FILES[:2])
            raise UsageError(f"no run in {path}: a run folder holds {files} and metrics.rank0.jsonl")
        for folder in folders:
            found.setdefault(folder.resolve(), _load_or_note_problem(folder))
    return sorted(found.values(), key=lambda run: (run.kind.order, run.repeat) if run.manifest else _LAST)


_LAST = (Kind("", 0, 0).order, 0)


def finished_by_kind(runs: Sequence[Run]) -> dict[Kind, list[Run]]:
    """The finished runs by kind, kinds in display order and runs in order of repeat."""
    groups: dict[Kind, list[Run]] = {}
    for run in sorted((r for r in runs if r.is_finished), key=lambda r: (r.kind.order, r.repeat, r.name)):
        groups.setdefault(run.kind, []).append(run)
    return groups


def display_names(runs: Sequence[Run]) -> dict[Path, str]:
    """What to call each run, by folder: the folder's name, or its whole path where several have that name."""
    count = Counter(run.name for run in runs)
    return {run.folder: run.name if count[run.name] == 1 else str(run.folder) for run in runs}


def _load_or_note_problem(folder: Path) -> Run:
    try:
        return load_run(folder)
    except UsageError as error:
        return Run(folder, problem=str(error))


def _is_run(folder: Path) -> bool:
    return any((folder / file).exists() for file in _RUN_FILES) or any(folder.glob("metrics.rank*.jsonl"))
