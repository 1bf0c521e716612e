"""Weights in a file, as people save them: alone, or in a checkpoint beside other things."""

import re
import shlex
import warnings
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import load_file

from hvdtrain.base.config.untrusted import LARGEST_DOCUMENT, parse_json, read_whole
from hvdtrain.base.errors import UsageError

_SUFFIXES = {".pth", ".pt", ".bin", ".ckpt", ".safetensors"}
MOST_NESTED = 4  # dictionaries in dictionaries that are looked through
MOST_LISTED = 6  # keys in a message
# Where a checkpoint has several dictionaries of tensors that fit alike, the first of these counts.
USUAL_KEYS = ("model_state_dict", "state_dict", "model", "module", "net", "network", "weights")
ALONE = 'save the weights alone, where the model is: torch.save(model.state_dict(), "weights.pth")'
# Hugging Face's libraries cut large checkpoints into files, and write an index of them.
INDEX_SUFFIX = ".index.json"
_SHARD = re.compile(r"(.+)-\d{5}-of-(\d{5})(\.safetensors|\.bin)")
_BEGIN = 512  # bytes of a file by which its kind is known


@dataclass(frozen=True)
class State:
    """A dictionary of tensors in a checkpoint.

    Attributes:
        place: The keys that lead to it, as `model`, `state.ema` or `0.model`, where 0 is the first
            of a list; empty if the file is the dictionary.
        tensors: By name.
    """

    place: str
    tensors: dict[str, torch.Tensor]


def read_states(path: Path) -> list[State]:
    """Returns the dictionaries of tensors in a file. The likeliest weights are first.

    Nothing but plain values is unpickled, so that no code in the file runs.

    Raises:
        UsageError: The file is missing, or has no such dictionary.
    """
    content = _read(path)
    states = list(_states(content, ""))
    if not states:
        raise UsageError(
            f"--pretrained {path} holds no dictionary of names and plain tensors"
            f"{_described(content)}"
        )
    return sorted(states, key=_usual_place)


def listed(names: list[str]) -> str:
    """Returns names for a message: the first ones, and how many more there are."""
    more = f" and {len(names) - MOST_LISTED:,} more" if len(names) > MOST_LISTED else ""
    return ", ".join(names[:MOST_LISTED]) + more


def _read(path: Path) -> Any:
    """Returns the content of a file of weights. Raises UsageError if it cannot be read."""
    if path.is_dir():
        raise UsageError(f"--pretrained {path} {_what_a_folder_is(path)}")
    if not path.is_file():
        raise UsageError(
            f"--pretrained {path}: no such file; give `imagenet` or a .pth, .pt or .safetensors "
            "file"
        )
    if path.name.endswith(INDEX_SUFFIX):
        return _read_shards(path)
    if path.suffix == ".distcp" or path.name in (".metadata", "data.pkl"):
        raise UsageError(f"--pretrained {path.parent} {_what_a_folder_is(path.parent)}")
    shard = _SHARD.fullmatch(path.name)
    if shard and int(shard[2]) > 1:
        index = f"{shard[1]}{shard[3]}{INDEX_SUFFIX}"
        raise UsageError(
            f"--pretrained {path} is one of {int(shard[2])} files of a checkpoint: give the index "
            f"of them, {index}, which lies beside them"
        )
    return _read_file(path)


def _read_file(path: Path) -> Any:
    """Returns the content of one file. Raises UsageError if it cannot be read."""
    with path.open("rb") as file:
        begin = file.read(_BEGIN)
    if wrong := _other_kind(path, begin):
        raise UsageError(f"--pretrained {path} {wrong}")
    try:
        if path.suffix == ".safetensors" or _is_safetensors(begin):
            return load_file(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # such as of a file's version of pickle
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a malicious or damaged file may cause any error
        raise UsageError(f"--pretrained {path} {_reason(error, begin)}") from None


class _Index(msgspec.Struct):
    """The content of an index: for each tensor the name of its file."""

    weight_map: dict[str, str]


def _read_shards(index: Path) -> dict[str, Any]:
    """Returns the tensors of all files that an index names.

    Raises:
        UsageError: The index cannot be read, or a file is missing, or cannot be read.
    """
    try:
        content = parse_json(read_whole(index, LARGEST_DOCUMENT))
        names = sorted(set(msgspec.convert(content, _Index).weight_map.values()))
    except (OSError, ValueError) as error:  # ValidationError is a ValueError
        raise UsageError(
            f"--pretrained {index} is no index of a checkpoint's files: {error}"
        ) from None
    tensors: dict[str, Any] = {}
    for name in names:
        file = index.with_name(Path(name).name)  # a stranger's index names no other folder
        if not file.is_file():
            raise UsageError(f"--pretrained {index} names {file.name}, which is not beside it")
        content = _read_file(file)
        if isinstance(content, Mapping):
            tensors |= content
    return tensors


def _what_a_folder_is(path: Path) -> str:
    """Returns what a folder is in place of a file of weights, and what to do."""
    place = shlex.quote(str(path))
    if (path / ".metadata").is_file():
        return (
            "is a checkpoint of torch.distributed: make a file of it with `python -m "
            f"torch.distributed.checkpoint.format_utils dcp_to_torch {place} weights.pth`"
        )
    if (path / "data.pkl").is_file():
        parent = shlex.quote(str(path.absolute().parent))
        name = shlex.quote(path.name)
        return (
            "is the inside of a .pth file, which is a zip that a program has unpacked: pack it "
            f"again, `(cd {parent} && python -m zipfile -c weights.pth {name}/)`"
        )
    files = [file for file in path.rglob("*") if _may_be_given(file)]
    found = listed(sorted(str(file.relative_to(path)) for file in files))
    return (
        f"is a folder: give a file in it, {found}"
        if found
        else ("is a folder without a .pth, .pt or .safetensors file")
    )


def _may_be_given(file: Path) -> bool:
    """Returns whether a file may be one of weights by its name."""
    if file.name == "data.pkl" or file.name.endswith(INDEX_SUFFIX):
        return True
    return file.suffix in _SUFFIXES and not _SHARD.fullmatch(file.name)


def _is_safetensors(begin: bytes) -> bool:
    """Returns whether a file that begins so is of safetensors, whatever it is called."""
    return begin[8:9] == b"{" and int.from_bytes(begin[:8], "little") < 2**27


def _other_kind(path: Path, begin: bytes) -> str:
    """Returns what a file is that begins so, if it is known not to be weights of torch."""
    if not begin:
        return "is empty, as a full disk or a killed program leaves a file: copy it again"
    if begin.startswith(b"version https://git-lfs"):
        return "is Git LFS's pointer to the weights: fetch them with `git lfs pull`"
    if begin.lstrip()[:9].lower() in (b"<!doctype", b"<html") or b"<html" in begin.lower():
        return "is a web page, as a download leaves that asked for a login: fetch the file again"
    if begin.startswith(b"\x89HDF"):
        return f"is HDF5, as Keras writes it, and not torch's: {ALONE}"
    if begin.startswith(b"\x93NUMPY"):
        return f"is an array of numpy, without names: {ALONE}"
    if begin.startswith(b"\x1f\x8b") or begin[257:262] == b"ustar":
        return "is an archive: unpack it, and give the file of weights in it"
    return _other_zip(path) if begin.startswith(b"PK\3\4") else ""


def _other_zip(path: Path) -> str:
    """Returns what a zip holds that is not torch's; empty for torch's, and for one cut short."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except (zipfile.BadZipFile, OSError, ValueError):
        return ""
    if any(name.split("/")[-1] == "data.pkl" for name in names):
        return ""
    if all(name.endswith(".npy") for name in names):
        return f"is numpy's .npz: {ALONE}"
    return f"is a zip with {listed(sorted(names))}: unpack it, and give the file of weights in it"


def _reason(error: Exception, begin: bytes) -> str:
    """Returns in a line why torch could not load a file that begins so."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error))
    if "TorchScript" in text:
        return f"is a TorchScript archive, which holds code: {ALONE}"
    refused = re.search(r"nsupported (?:global: )?(?:GLOBAL|class) (\S+)", text)
    if refused:
        return f"holds more than tensors ({refused[1]}), and might run code: {ALONE}"
    if re.match(rb"\x80[\3-\5]", begin) or "Unsupported operand 149" in text:
        return f"is a pickle of another version than torch's, which might run code: {ALONE}"
    first = (text.strip().split("\n") or [""])[0][:120]
    cut = re.search(r"central directory|unexpected EOF|Ran out of input|deserializing header", text)
    if cut:
        what = f"{type(error).__name__} {first}"
        return (
            f"is not a file of plain weights: {what}; the file is probably cut short: copy or "
            "download it again"
        )
    return (
        f"is no file that torch.save or safetensors writes, or is damaged (it begins with "
        f"{begin[:8]!r}): copy or download it again, or give another"
    )


def _states(value: Any, place: str, depth: int = 0) -> Iterator[State]:
    """Yields the dictionaries of tensors in a value, outer ones first."""
    if depth > MOST_NESTED:
        return
    if isinstance(value, Mapping):
        tensors = {
            key: item for key, item in value.items() if isinstance(key, str) and _is_plain(item)
        }
        if tensors or (not value and not depth):
            yield State(place, tensors)
    for key, item in _inner(value):
        yield from _states(item, f"{place}.{key}".removeprefix("."), depth + 1)


def _inner(value: Any) -> Iterable[tuple[Any, Any]]:
    """Returns what a dictionary or list holds, with its keys or indices."""
    if isinstance(value, Mapping):
        return value.items()
    return enumerate(value[:MOST_LISTED]) if isinstance(value, list | tuple) else ()


def _usual_place(state: State) -> int:
    last = state.place.rsplit(".", 1)[-1]
    return USUAL_KEYS.index(last) if last in USUAL_KEYS else len(USUAL_KEYS)


def _is_plain(value: Any) -> bool:
    """Returns whether a value is a tensor that can be copied into a parameter."""
    if not isinstance(value, torch.Tensor) or value.is_quantized or value.is_complex():
        return False
    return value.layout == torch.strided and value.device.type == "cpu"


def _described(content: Any) -> str:
    """Describes what there is in place of weights."""
    if not isinstance(content, Mapping):
        return f", but a {type(content).__name__}"
    keys = [f"{key} ({type(value).__name__})" for key, value in content.items()]
    return f": its keys are {listed(keys)}"
