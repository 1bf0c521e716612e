"""Weights in a file, as people save them: alone, or in a checkpoint beside other things."""

import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from hvdtrain.base.errors import UsageError

_SUFFIXES = {".pth", ".pt", ".bin", ".ckpt", ".safetensors"}
MOST_NESTED = 4  # dictionaries in dictionaries that are looked through
MOST_LISTED = 6  # keys in a message
# Where a checkpoint has several dictionaries of tensors that fit alike, the first of these counts.
USUAL_KEYS = ("model_state_dict", "state_dict", "model", "module", "net", "network", "weights")
ALONE = 'save the weights alone, where the model is: torch.save(model.state_dict(), "weights.pth")'


@dataclass(frozen=True)
class State:
    """A dictionary of tensors in a checkpoint.

    Attributes:
        place: The keys that lead to it, as `model` or `state.ema`; empty if the file is the
            dictionary.
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
            f"--pretrained {path}: holds no dictionary of names and plain tensors"
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
        files = [file for file in path.rglob("*") if file.suffix in _SUFFIXES]
        found = listed(sorted(str(file.relative_to(path)) for file in files))
        has = f"it has {found}" if found else "give a .pth, .pt or .safetensors file"
        raise UsageError(f"--pretrained {path}: is a folder, and no such file: {has}")
    if not path.is_file():
        raise UsageError(
            f"--pretrained {path}: no such file; give `imagenet` or a .pth, .pt or .safetensors "
            "file"
        )
    with path.open("rb") as file:
        begin = file.read(64)
    if wrong := _other_kind(begin):
        raise UsageError(f"--pretrained {path}: {wrong}")
    try:
        if path.suffix == ".safetensors" or _is_safetensors(begin):
            return load_file(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # such as of a file's version of pickle
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a malicious or damaged file may cause any error
        raise UsageError(f"--pretrained {path}: {_reason(error)}") from None


def _is_safetensors(begin: bytes) -> bool:
    """Returns whether a file that begins so is of safetensors, whatever it is called."""
    return begin[8:9] == b"{" and int.from_bytes(begin[:8], "little") < 2**27


def _other_kind(begin: bytes) -> str:
    """Returns what a file is that begins so, if it is known not to be weights of torch."""
    if not begin:
        return "is empty, as a full disk or a killed program leaves a file: copy it again"
    if begin.startswith(b"version https://git-lfs"):
        return "is Git LFS's pointer to the weights: fetch them with `git lfs pull`"
    if begin.lstrip()[:9].lower() in (b"<!doctype", b"<html") or b"<html" in begin.lower():
        return "is a web page, as a download leaves that asked for a login: fetch the file again"
    if begin.startswith(b"\x89HDF"):
        return f"is HDF5, as Keras writes it, and not torch's: {ALONE}"
    return ""


def _reason(error: Exception) -> str:
    """Returns in a line why torch could not load a file."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error))
    if "TorchScript" in text:
        return f"is a TorchScript archive, which holds code: {ALONE}"
    refused = re.search(r"nsupported (?:global: )?(?:GLOBAL|class) (\S+)", text)
    if refused:
        return f"holds more than tensors ({refused[1]}), and might run code: {ALONE}"
    first = (text.strip().split("\n") or [""])[0][:120]
    if "Weights only load failed" in text:
        detail = re.search(r"WeightsUnpickler error:\s*(.*)", text)
        first = detail[1][:120] if detail else "it is damaged"
    cut = re.search(r"central directory|unexpected EOF|Ran out of input|deserializing header", text)
    hint = "; the file is probably cut short: copy or download it again" if cut else ""
    return f"not a file of plain weights: {type(error).__name__} {first}{hint}"


def _states(value: Any, place: str, depth: int = 0) -> Iterator[State]:
    """Yields the dictionaries of tensors in a value, outer ones first."""
    if not isinstance(value, Mapping) or depth > MOST_NESTED:
        return
    tensors = {key: item for key, item in value.items() if isinstance(key, str) and _is_plain(item)}
    if tensors or (not value and not depth):
        yield State(place, tensors)
    for key, item in value.items():
        if isinstance(key, str):
            yield from _states(item, f"{place}.{key}".removeprefix("."), depth + 1)


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
