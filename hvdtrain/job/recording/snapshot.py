"""Snapshots: all that a run needs to go on as if it had never stopped.

A snapshot is a folder, `snapshots/step-00000120/`, which is complete or not there. It holds:

- `weights.safetensors` and `optimizer.safetensors`;
- `worker3.safetensors` and so on, where each worker has a state of its own;
- `state.json`, with the step, the history, the configuration, and the checksums of the other files.

Random numbers need no place in it: what happens at a step depends on the seed, the step and the
worker alone.

A snapshot is written as `step-00000120.part`. Each worker writes its file, and tells the worker
that leads. That worker writes the other files, and renames the folder when all are there. Hosts
share the folder, and a file system may show one host's files to another late. So the worker that
leads does not look for files: it is told of them.
"""

import contextlib
import json
import os
import re
import shutil
import struct
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from hvdtrain.base.config.untrusted import parse_json, read_whole, regular
from hvdtrain.base.errors import Failure, UsageError
from hvdtrain.base.numerics.optimizers import COUNT
from hvdtrain.job.coordination.synchroniser import NO_STATE, OwnState

Tensors = Mapping[str, torch.Tensor]
# The parts of an optimizer's state: where each begins in the flat vectors, and its tensors.
Parts = Iterable[tuple[int, Tensors]]
WEIGHTS = "weights.safetensors"
OPTIMIZER = "optimizer.safetensors"
STATE = "state.json"
# The best model so far is in snapshots/. Each snapshot has the best model of its time.
BEST = "best.safetensors"
WORKER_FILE = re.compile(r"worker(0|[1-9][0-9]{0,5})\.safetensors")
FORMAT = 3
UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError)
CHUNK = 2**22  # bytes read at a time
HEADER = 2**18  # bytes kept free for the header, which is known when all parts are written


class WorkerFile(NamedTuple):
    """A worker's file in a snapshot.

    Attributes:
        worker: the number of the worker.
        checksum: the file's checksum; empty if the worker has nothing to save, and no file.
        problem: why the file could not be written; empty if there was no problem.
    """

    worker: int
    checksum: str = ""
    problem: str = ""

    @property
    def name(self) -> str:
        return f"worker{self.worker}.safetensors"


@dataclass(frozen=True)
class Snapshot:
    """A whole snapshot. Its tensors are mapped from the files, and read when they are used.

    Attributes:
        folder: the folder of the snapshot.
        step: the last step before the snapshot.
        weights: the model's state_dict.
        optimizer: flat float32 vectors over the trained parameters, in their order, and one-element
            counts.
        state: the rest of the run's state: see `save`.
        own: the state of this worker alone: see own_state.
    """

    folder: Path
    step: int
    weights: Tensors
    optimizer: Tensors
    state: dict[str, Any]
    own: OwnState = NO_STATE

    def own_state(self, worker: int, check: bool) -> OwnState:
        """Returns the state that a worker alone had.

        A worker that the job did not have then gets the state of another worker.

        Args:
            worker: the number of the worker.
            check: whether to read all of the file, against its checksum.

        Raises:
            Failure: the file is damaged.
        """
        checksums = self.state["checksums"]
        matches = [WORKER_FILE.fullmatch(name) for name in checksums]
        owners = sorted(int(match[1]) for match in matches if match)
        if not owners:
            return NO_STATE
        is_own = worker in owners
        owner = worker if is_own else owners[worker % len(owners)]
        file = self.folder / WorkerFile(owner).name
        try:
            if check and _checksum(file) != checksums[file.name]:
                raise ValueError("it is not what was written")
            return OwnState(load_file(regular(file)), is_own)
        except UNREADABLE as error:
            raise Failure(f"{file} cannot be resumed from: {_reason(error)}") from None


def save_own(run: Path, step: int, worker: int, parts: Parts, elements: int) -> WorkerFile:
    """Writes the state that a worker alone has into a snapshot.

    The file is on disk when this returns.

    Args:
        run: the run folder.
        step: the step of the snapshot.
        worker: the number of the worker.
        parts: the state. It is written part by part, so that the worker holds no second copy of all
            of it.
        elements: the number of elements of each vector.

    Returns:
        What the worker that leads needs for `save`.
    """
    parts = iter(parts)
    first = next(parts, None)
    if first is None:
        # There is nothing to save, and the folder may be out of this worker's reach.
        return WorkerFile(worker)
    # An iterator of a list, unlike the list, does not hold the first part until the end.
    all_parts = chain(iter([first]), parts)
    del first
    unfinished = _unfinished(run, step)
    file = unfinished / WorkerFile(worker).name
    try:
        unfinished.mkdir(exist_ok=True)
        _write_parts(file, all_parts, elements)
        _sync(file)
        return WorkerFile(worker, _checksum(file))
    except FileNotFoundError:
        problem = (
            f"{unfinished.parent} is not there: a run folder is on storage that all workers share"
        )
        return WorkerFile(worker, problem=problem)
    except OSError as error:
        return WorkerFile(worker, problem=_reason(error))


def save(
    run: Path,
    step: int,
    weights: Tensors,
    optimizer: Parts,
    elements: int,
    state: dict[str, Any],
    keep: int,
    worker_files: Sequence[WorkerFile] = (),
) -> None:
    """Writes a snapshot, and removes old ones. The snapshot is on disk when this returns.

    Args:
        run: the run folder.
        step: the step of the snapshot.
        weights: the model's state_dict.
        optimizer: the optimizer's state. It is written part by part, so that no process holds all
            of it.
        elements: the number of elements of each of the optimizer's vectors.
        state: the rest of the run's state, in types of JSON.
        keep: how many snapshots to keep.
        worker_files: the files that workers have written, or could not write.

    Raises:
        OSError: the snapshot cannot be written. Nothing of it is left, and older snapshots are as
            they were.
    """
    folder = _folder(run, step)
    unfinished = _unfinished(run, step)
    snapshots = folder.parent
    sums_of_workers = {file.name: file.checksum for file in worker_files if file.checksum}
    try:
        for file in worker_files:
            if file.problem:
                raise OSError(0, f"worker {file.worker}: {file.problem}")
        unfinished.mkdir(exist_ok=True)
        # A start that was killed, or a worker that was lost, may have left files.
        for left in unfinished.glob("*.safetensors"):
            if left.name not in sums_of_workers:
                left.unlink()
        write_tensors(unfinished / WEIGHTS, weights)
        _write_parts(unfinished / OPTIMIZER, optimizer, elements)
        # The disk writes both files while they are read for their checksums.
        with ThreadPoolExecutor() as pool:
            flushed = [pool.submit(_sync, unfinished / name) for name in (WEIGHTS, OPTIMIZER)]
            sums = {name: _checksum(unfinished / name) for name in (WEIGHTS, OPTIMIZER)}
            for done in flushed:
                done.result()
        if (snapshots / BEST).exists():
            # On a file system without links the snapshot has no best model.
            with contextlib.suppress(OSError):
                os.link(snapshots / BEST, unfinished / BEST)
        facts = {"format": FORMAT, "step": step, "checksums": sums | sums_of_workers}
        text = json.dumps({**facts, **state})
        checksum = _labelled(zlib.crc32(text.encode()))
        (unfinished / STATE).write_text(f"{text}\n{checksum}\n", encoding="utf-8")
        _sync(unfinished / STATE)
        if folder.exists():  # the run was resumed from an earlier snapshot
            shutil.rmtree(folder)
        unfinished.rename(folder)
        _sync(snapshots)
    except OSError:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    for old in _complete(run)[keep:]:
        shutil.rmtree(old, ignore_errors=True)


def _sync(path: Path) -> None:
    """Flushes a file's content, or a folder's names, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_tensors(path: Path, tensors: Tensors) -> None:
    """Writes a safetensors file, whole or not at all.

    The format has no shared tensors, so a weight that layers share is written for each of them.

    Raises:
        OSError: the file cannot be written.
    """
    unfinished = path.with_suffix(".writing")
    written: dict[str, torch.Tensor] = {}
    seen: set[tuple[int, torch.Size]] = set()
    for name, tensor in tensors.items():
        place = tensor.data_ptr(), tensor.shape
        written[name] = tensor.detach().cpu().contiguous()
        if place in seen:
            written[name] = written[name].clone()
        seen.add(place)
    try:
        save_file(written, unfinished)
    except SafetensorError as error:
        unfinished.unlink(missing_ok=True)
        raise _os_error(error, path) from None
    # safetensors makes files that only their owner can read.
    unfinished.chmod(path.parent.stat().st_mode & 0o666)
    unfinished.rename(path)


def _os_error(error: SafetensorError, path: Path) -> OSError:
    """Returns the OSError, such as a full disk, that safetensors has met as it wrote a file."""
    code = re.search(r"os error (\d+)", str(error))
    if not code:
        return OSError(0, str(error), str(path))
    number = int(code[1])
    return OSError(number, os.strerror(number), str(path))


def _write_parts(path: Path, parts: Parts, elements: int) -> None:
    """Writes a safetensors file of flat float32 vectors, and the largest COUNT, from their parts.

    The parts may come in any order. Elements that no part has are zero. The vectors are in the
    order in which their names first come. The header, with the names, is written at the end.

    Args:
        path: the file.
        parts: the parts of the vectors.
        elements: the number of elements of each vector.
    """
    places: dict[str, int] = {}
    count: torch.Tensor | None = None
    with path.open("wb") as file:
        for start, state in parts:
            for name, values in state.items():
                if name == COUNT:
                    count = values if count is None else torch.maximum(count, values)
                    continue
                place = places.setdefault(name, 4 * elements * len(places))
                file.seek(HEADER + place + 4 * start)
                file.write(values.numpy().data)
        end = 4 * elements * len(places)
        file.truncate(HEADER + end)  # the last part may be missing
        entries = {
            name: _entry(elements, place, place + 4 * elements) for name, place in places.items()
        }
        if count is not None:
            entries[COUNT] = _entry(1, end, end + 4)
            file.seek(HEADER + end)
            file.write(count.numpy().data)
        text = json.dumps(entries).encode()
        file.seek(0)
        # The format allows spaces behind its JSON.
        file.write(struct.pack("<Q", HEADER - 8) + text.ljust(HEADER - 8))


def _entry(elements: int, begin: int, end: int) -> dict[str, Any]:
    """Returns a float32 vector's entry in the header of a safetensors file."""
    return {"dtype": "F32", "shape": [elements], "data_offsets": [begin, end]}


def latest(run: Path, report: Callable[[str], None], check: bool = True) -> Snapshot | None:
    """Returns the last snapshot that is whole; None if there are no snapshots.

    Args:
        run: the run folder.
        report: called with a line for each damaged snapshot.
        check: whether to read all files, against their checksums.

    Raises:
        UsageError: there are snapshots, and not one is whole.
    """
    folders = _complete(run)
    for folder in folders:
        try:
            return _read(folder, lambda name: check)
        except UNREADABLE as error:
            report(f"{folder} is damaged, and passed over: {_reason(error)}")
    if folders:
        raise UsageError(
            f"none of the {len(folders)} snapshots in {run / 'snapshots'} is whole: "
            "train anew elsewhere"
        )
    return None


def mapped(run: Path, step: int, check: bool) -> Snapshot:
    """Returns the snapshot of a step that another process has found whole.

    Args:
        run: the run folder.
        step: the step of the snapshot.
        check: whether to read the files that all workers need against their checksums. For other
            files see Snapshot.own_state.

    Raises:
        Failure: the snapshot is not the same as this host reads it.
    """
    folder = _folder(run, step)
    try:
        return _read(folder, lambda name: check and name in (WEIGHTS, OPTIMIZER))
    except UNREADABLE as error:
        raise Failure(
            f"{folder} is not here what the first worker reads: {_reason(error)}"
        ) from None


def roll_back(run: Path, snapshot: Snapshot) -> None:
    """Makes the snapshots of a run as they were at a snapshot.

    Later snapshots are removed, and the best model is the best model of that time.
    """
    for folder in _complete(run):
        if folder.name > snapshot.folder.name:
            shutil.rmtree(folder)
    for unfinished in (run / "snapshots").glob("step-*.part"):
        shutil.rmtree(unfinished, ignore_errors=True)
    if (snapshot.folder / BEST).exists():
        best = run / "snapshots" / BEST
        best.unlink(missing_ok=True)
        os.link(snapshot.folder / BEST, best)


def _complete(run: Path) -> list[Path]:
    """Returns the folders of complete snapshots, the latest first."""
    folders = [
        path
        for path in (run / "snapshots").glob("step-*")
        if path.suffix != ".part" and path.is_dir()
    ]
    return sorted(folders, reverse=True)


def _folder(run: Path, step: int) -> Path:
    return run / "snapshots" / f"step-{step:08}"


def _unfinished(run: Path, step: int) -> Path:
    return _folder(run, step).with_suffix(".part")


def _reason(error: Exception) -> str:
    """Returns what was wrong, in a phrase."""
    reason = getattr(error, "strerror", None) or str(error)
    if isinstance(error, FileNotFoundError) and error.filename:
        return f"{Path(error.filename).name}: {reason}"
    return reason


def _read(folder: Path, is_checked: Callable[[str], bool]) -> Snapshot:
    """Returns a snapshot, or raises one of UNREADABLE.

    Args:
        folder: the folder of the snapshot.
        is_checked: whether to read the file of a name against its checksum.
    """
    lines = read_whole(folder / STATE).decode().splitlines()
    text, checksum, *_ = [*lines, "", ""]
    if _labelled(zlib.crc32(text.encode())) != checksum:
        raise ValueError(f"{STATE} is not what was written")
    state = parse_json(text)
    if state["format"] != FORMAT:
        raise ValueError(f"it is of format {state['format']}, which this version does not read")
    checksums = state["checksums"]
    if not {WEIGHTS, OPTIMIZER} <= checksums.keys():
        raise ValueError(f"{STATE} has no checksum of the weights or of the optimizer's state")
    for name, expected in checksums.items():
        # The name could be a path to anywhere.
        if name not in (WEIGHTS, OPTIMIZER) and not WORKER_FILE.fullmatch(name):
            raise ValueError(f"{STATE} names a file that no snapshot has")
        if is_checked(name) and _checksum(folder / name) != expected:
            raise ValueError(f"{name} is not what was written")
    weights = load_file(regular(folder / WEIGHTS))
    optimizer = load_file(regular(folder / OPTIMIZER))
    return Snapshot(folder, state["step"], weights, optimizer, state)


def _checksum(path: Path) -> str:
    """Returns the file's CRC-32: it shows damage, not forgery, and is faster than a disk."""
    total = 0
    with regular(path).open("rb") as file:
        while chunk := file.read(CHUNK):
            total = zlib.crc32(chunk, total)
    return _labelled(total)


def _labelled(crc: int) -> str:
    return f"crc32:{crc:08x}"
