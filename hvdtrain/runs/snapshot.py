"""Snapshots: all that a run needs to go on as if it had never stopped, in a folder that is complete or not there.

`snapshots/step-00000120/` holds `weights.safetensors`, `optimizer.safetensors` and `state.json`, which has the step,
the history, what the configuration was, and checksums of the other two. Random numbers need no place in it: what
happens at a step depends on the seed, the step and the worker alone.
"""

import contextlib
import json
import os
import re
import shutil
import struct
import zlib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from hvdtrain.config.untrusted import parse_json, read_whole, regular
from hvdtrain.errors import Failure, UsageError
from hvdtrain.numerics.optimizers import COUNT

Tensors = Mapping[str, torch.Tensor]
Parts = Iterable[tuple[int, Tensors]]  # where each begins in the flat vector, and the optimizer's state from there on
WEIGHTS, OPTIMIZER, STATE = "weights.safetensors", "optimizer.safetensors", "state.json"
BEST = "best.safetensors"  # in snapshots/, and as it was then in each snapshot
FORMAT = 2
UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError)
CHUNK = 2**22  # bytes read at a time
HEADER = 2**18  # bytes that are kept free for what is known when all parts are written


@dataclass(frozen=True)
class Snapshot:
    """A snapshot that was found whole. Its tensors are in the files, mapped: what nobody looks at is not read.

    Attributes:
        step: the last that is in it.
        weights: the model's state_dict.
        optimizer: flat float32 vectors over the trained parameters, in their order, and one-element counts.
        state: what else was saved, as `save` was given it.
    """

    folder: Path
    step: int
    weights: Tensors
    optimizer: Tensors
    state: dict[str, Any]


def save(
    run: Path, step: int, weights: Tensors, optimizer: Parts, elements: int, state: dict[str, Any], keep: int
) -> None:
    """Write a snapshot, and remove all but the last `keep`; on disk when this returns.

    Args:
        optimizer: written one by one, so that no process holds all of it.
        elements: of each of the optimizer's vectors.

    Raises:
        OSError: it cannot be written; nothing of it is left, and those before it are as they were.
    """
    folder = _folder(run, step)
    snapshots = folder.parent
    unfinished = folder.with_suffix(".part")
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        write_tensors(unfinished / WEIGHTS, weights)
        _write_parts(unfinished / OPTIMIZER, optimizer, elements)
        with ThreadPoolExecutor() as pool:  # the disk writes both while they are read
            flushed = [pool.submit(_sync, unfinished / name) for name in (WEIGHTS, OPTIMIZER)]
            sums = {name: _checksum(unfinished / name) for name in (WEIGHTS, OPTIMIZER)}
            for done in flushed:
                done.result()
        if (snapshots / BEST).exists():
            with contextlib.suppress(OSError):  # a file system without links: the best model is not part of it then
                os.link(snapshots / BEST, unfinished / BEST)
        text = json.dumps({"format": FORMAT, "step": step, "checksums": sums, **state})
        (unfinished / STATE).write_text(f"{text}\n{_labelled(zlib.crc32(text.encode()))}\n")
        _sync(unfinished / STATE)
        if folder.exists():  # of a run that was resumed from an earlier one
            shutil.rmtree(folder)
        unfinished.rename(folder)
        _sync(snapshots)
    except OSError:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    for old in _complete(run)[keep:]:
        shutil.rmtree(old, ignore_errors=True)


def _sync(path: Path) -> None:
    """Have a file's content, or the names in a folder, survive a crash of the machine."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_tensors(path: Path, tensors: Tensors) -> None:
    """Write a safetensors file, whole or not at all. OSError where it cannot be. A weight that layers share is there
    for each of them, as the format wants it.
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
    except SafetensorError as error:  # which it raises for a full disk too
        unfinished.unlink(missing_ok=True)
        number = int(code[1]) if (code := re.search(r"os error (\d+)", str(error))) else 0
        raise OSError(number, os.strerror(number) if number else str(error), str(path)) from None
    unfinished.chmod(path.parent.stat().st_mode & 0o666)  # safetensors lets nobody else read it
    unfinished.rename(path)


def _write_parts(path: Path, parts: Parts, elements: int) -> None:
    """Write a safetensors file of flat float32 vectors, and of the largest COUNT, from their parts in any order.

    What no part has is zero. A vector's place is behind those that came before it; its name is written at last.
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
        file.truncate(HEADER + end)  # where the last part is missing
        entries = {
            name: {"dtype": "F32", "shape": [elements], "data_offsets": [place, place + 4 * elements]}
            for name, place in places.items()
        }
        if count is not None:
            entries[COUNT] = {"dtype": "F32", "shape": [1], "data_offsets": [end, end + 4]}
            file.seek(HEADER + end)
            file.write(count.numpy().data)
        text = json.dumps(entries).encode()
        file.seek(0)
        file.write(struct.pack("<Q", HEADER - 8) + text.ljust(HEADER - 8))  # the format allows spaces behind its JSON


def latest(run: Path, report: Callable[[str], None], check: bool = True) -> Snapshot | None:
    """The last snapshot that is whole, or None where there is none; `report` gets a line for each that is not.

    Args:
        check: against the checksums, for which all of it is read.

    Raises:
        UsageError: there are snapshots, and not one is whole.
    """
    folders = _complete(run)
    for folder in folders:
        try:
            return _read(folder, check)
        except UNREADABLE as error:
            report(f"{folder} is damaged, and passed over: {_reason(error)}")
    if folders:
        raise UsageError(f"none of the {len(folders)} snapshots in {run / 'snapshots'} is whole: train anew elsewhere")
    return None


def mapped(run: Path, step: int, check: bool) -> Snapshot:
    """The snapshot of a step that another process has found whole.

    Args:
        check: that it is so as this host reads it.

    Raises:
        Failure: it is not.
    """
    folder = _folder(run, step)
    try:
        return _read(folder, check)
    except UNREADABLE as error:
        raise Failure(f"{folder} is not here what the first worker reads: {_reason(error)}") from None


def roll_back(run: Path, snapshot: Snapshot) -> None:
    """Make a run folder as it was at a snapshot: what came later is removed, and the best model is that of then."""
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
    """The snapshots' folders, the latest first."""
    return sorted((p for p in (run / "snapshots").glob("step-*") if p.suffix != ".part" and p.is_dir()), reverse=True)


def _folder(run: Path, step: int) -> Path:
    return run / "snapshots" / f"step-{step:08}"


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def _read(folder: Path, check: bool) -> Snapshot:
    text, checksum, *_ = [*read_whole(folder / STATE).decode().splitlines(), "", ""]
    if _labelled(zlib.crc32(text.encode())) != checksum:
        raise ValueError(f"{STATE} is not what was written")
    state = parse_json(text)
    if state["format"] != FORMAT:
        raise ValueError(f"it is of format {state['format']}, which this version does not read")
    for name, expected in state["checksums"].items():
        if check and _checksum(folder / name) != expected:
            raise ValueError(f"{name} is not what was written")
    weights, optimizer = (load_file(regular(folder / name)) for name in (WEIGHTS, OPTIMIZER))
    return Snapshot(folder, state["step"], weights, optimizer, state)


def _checksum(path: Path) -> str:
    """The file's CRC-32: against damage, not against forgery, and faster than a disk."""
    total = 0
    with regular(path).open("rb") as file:
        while chunk := file.read(CHUNK):
            total = zlib.crc32(chunk, total)
    return _labelled(total)


def _labelled(crc: int) -> str:
    return f"crc32:{crc:08x}"
