"""Pretrained weights, of torchvision or of a file."""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hvdtrain import models
from hvdtrain.base.errors import Failure, UsageError
from hvdtrain.base.formatting import with_noun
from hvdtrain.models.checkpoint import State, listed, read_states

# What wrappers put into the names of a model's tensors: torch.compile, FSDP, checkpointed layers and
# DataParallel anywhere, Lightning at the beginning.
WRAPPERS = {
    "module",
    "_orig_mod",
    "_fsdp_wrapped_module",
    "_checkpoint_wrapped_module",
    "_forward_module",
}
OUTER = {"model", "net"}
COUNTER = ".num_batches_tracked"  # of batch norm, which checkpoints of before torch 0.4.1 lack


@dataclass(frozen=True)
class _Match:
    """Tensors of a file beside those of a model.

    Attributes:
        tensors: By the model's names. Shapes may differ.
        fitting: The names of those that have the model's shape.
        removed: Parts that were taken off names in the file, as `module._orig_mod.`.
        added: Parts of the model's names that names in the file lack.
    """

    tensors: dict[str, torch.Tensor]
    fitting: list[str]
    removed: list[str]
    added: list[str]


def load_pretrained(model: nn.Module, name: str, source: str) -> list[str]:
    """Copies the weights that fit, by name and shape, into the model.

    A checkpoint may have them under any key, and wrappers' parts in their names.

    Args:
        model: The model.
        name: The name of the model.
        source: `imagenet` (torchvision's IMAGENET1K_V1, downloaded once) or a .pth, .pt or
            .safetensors file.

    Returns:
        Lines for a person: where the weights were found, if not under their names in the file
        itself, and each parameter that was not loaded, with the reason.

    Raises:
        UsageError: The file is missing, is no file of weights, or nothing in it fits; or weights are
            NaN or infinite.
        Failure: The download failed, or left a broken file.
    """
    if "://" in source:
        raise UsageError(f"--pretrained {source} is a URL: download the file, and give its path")
    states = [State("", _imagenet(name))] if source == "imagenet" else read_states(Path(source))
    current = model.state_dict()
    matches = [match_names(state.tensors, current) for state in states]
    most = max(len(match.fitting) for match in matches)
    if not most:
        raise UsageError(
            f"--pretrained {source}: {_why_nothing_fits(states, matches, current, name)}"
        )
    equal = [number for number, match in enumerate(matches) if len(match.fitting) == most]
    state, match = states[equal[0]], matches[equal[0]]
    taken = {key: match.tensors[key] for key in match.fitting}
    _check_finite(taken, source)
    model.load_state_dict(taken, strict=False)
    others = [states[number].place for number in equal[1:]]
    lines = [f"--pretrained {source}: {line}" for line in _found(state, match, others)]
    counters = [key for key in current if key.endswith(COUNTER) and key not in match.tensors]
    if counters:
        lines.append(
            f"--pretrained skipped {counters[0]} and all like it ({len(counters):,}): not in {source}"
        )
    for key, values in current.items():
        if key in counters:
            continue
        if key not in match.tensors:
            lines.append(f"--pretrained skipped {key}: not in {source}")
        elif key not in match.fitting:
            there = tuple(match.tensors[key].shape)
            lines.append(
                f"--pretrained skipped {key}: {there} in {source}, {tuple(values.shape)} here"
            )
    return lines


def _check_finite(tensors: Mapping[str, torch.Tensor], source: str) -> None:
    """Raises UsageError if weights are NaN or infinite, from which nothing can be trained."""
    bad = [key for key, values in tensors.items() if not bool(values.isfinite().all())]
    if not bad:
        return
    values = tensors[bad[0]]
    count = int(values.numel() - values.isfinite().sum())
    others = f", and so are values of {with_noun(len(bad) - 1, 'other tensor')}" if bad[1:] else ""
    raise UsageError(
        f"--pretrained {source}: {count:,} of the {values.numel():,} values of {bad[0]} are NaN or "
        f"infinite{others}: training from them cannot work. Give a checkpoint of before they "
        "diverged, or download the file again"
    )


def match_names(loaded: Mapping[str, torch.Tensor], current: Mapping[str, torch.Tensor]) -> _Match:
    """Returns which tensors of a file are which of a model.

    Equal names count first. The others are compared without the parts that wrappers add, on both
    sides.
    """
    tensors = {key: loaded[key] for key in current if key in loaded}
    bare_names: dict[str, list[str]] = {}
    for key in current:
        _, bare = _unwrapped(key)
        bare_names.setdefault(bare, []).append(key)
    removed: set[str] = set()
    added: set[str] = set()
    for key, values in loaded.items():
        wrapping, bare = _unwrapped(key)
        own = bare_names.get(bare, [])
        if key in current or len(own) != 1 or own[0] in tensors:
            continue
        tensors[own[0]] = values
        own_wrapping, _ = _unwrapped(own[0])
        removed.add(wrapping)
        added.add(own_wrapping)
    tensors |= _of_old_densenets(loaded, current, tensors)
    fitting = [key for key, values in tensors.items() if values.shape == current[key].shape]
    prefix = _other_prefix(loaded, current, more_than=len(fitting))
    if prefix:
        tensors |= {key: loaded[prefix + key] for key in current if prefix + key in loaded}
        fitting = [key for key, values in tensors.items() if values.shape == current[key].shape]
        removed.add(prefix)
    return _Match(tensors, fitting, sorted(removed - {""}), sorted(added - {""}))


def _of_old_densenets(
    loaded: Mapping[str, torch.Tensor],
    current: Mapping[str, torch.Tensor],
    known: Mapping[str, torch.Tensor],
) -> dict[str, torch.Tensor]:
    """Returns the tensors whose names have a dot before a number where the model's have none.

    DenseNets of torch before 0.4 have `norm.1` and `conv.2` for `norm1` and `conv2`.

    Args:
        loaded: The tensors of a file.
        current: Those of the model.
        known: Those of the model that have been found.
    """
    renamed = {}
    for key, values in loaded.items():
        _, bare = _unwrapped(key)
        name = re.sub(r"\b(norm|conv|relu)\.([12])\b", r"\1\2", bare)
        if name != bare and name in current and name not in known:
            renamed[name] = values
    return renamed


def _other_prefix(
    loaded: Mapping[str, torch.Tensor], current: Mapping[str, torch.Tensor], more_than: int
) -> str:
    """Returns the prefix with which most tensors of a file are the model's.

    So a file may have the model as a part of another, as `backbone.` or `encoder_q.0.`. The prefix
    is empty unless half of the model's tensors fit, and more than so many.
    """
    fits: Counter[str] = Counter()
    for key, values in loaded.items():
        parts = key.split(".")
        for number in range(1, len(parts)):
            name = ".".join(parts[number:])
            if name in current and current[name].shape == values.shape:
                fits[key.removesuffix(name)] += 1
    [(prefix, count)] = fits.most_common(1) or [("", 0)]
    return prefix if count > more_than and 2 * count >= len(current) else ""


def _unwrapped(key: str) -> tuple[str, str]:
    """Returns the parts that wrappers have added to a tensor's name, and the name without them."""
    added: list[str] = []
    bare: list[str] = []
    for part in key.split("."):
        is_outer = not bare and part in OUTER
        if part in WRAPPERS or is_outer:
            added.append(f"{part}.")
        else:
            bare.append(part)
    return ("".join(added), ".".join(bare)) if bare else ("", key)


def _found(state: State, match: _Match, others: list[str]) -> list[str]:
    """Returns lines about where weights were found."""
    lines = []
    if state.place:
        beside = f"; what {' and '.join(others)} has would fit too" if others else ""
        lines.append(f"the weights are those of its key {state.place}{beside}")
    if match.removed:
        lines.append(f"names were read without {' and '.join(match.removed)}")
    if match.added:
        lines.append(f"names were read as if they had {' and '.join(match.added)}")
    return lines


def _why_nothing_fits(
    states: list[State], matches: list[_Match], current: Mapping[str, torch.Tensor], name: str
) -> str:
    """Returns why no tensor of a file fits, with names of both sides."""
    state, match = max(zip(states, matches, strict=True), key=lambda pair: len(pair[1].tensors))
    for key, values in match.tensors.items():
        shapes = f"{key} is {tuple(values.shape)} there, and {tuple(current[key].shape)} here"
        remedy = "" if models.is_own(name) else ": published weights need --width 1"
        return f"nothing in it fits {name} by shape: {shapes}{remedy}"
    place = f"under {state.place}" if state.place else "in it"
    there = listed(list(state.tensors)) or "nothing"
    return (
        f"nothing in it fits {name} by name: {place} there is {there}; "
        f"the model has {listed(list(current))}"
    )


def cached_weights(name: str) -> Path:
    """Returns where torch keeps torchvision's weights of a model; the file need not exist."""
    return Path(torch.hub.get_dir(), "checkpoints", _published(name).url.rsplit("/", 1)[1])


def _published(name: str) -> Any:
    """Returns torchvision's entry of a model's weights."""
    from torchvision.models import get_model_weights

    return get_model_weights(models.family(name).IMAGENET_WEIGHTS[name]).IMAGENET1K_V1


def _imagenet(name: str) -> dict[str, torch.Tensor]:
    """Returns torchvision's weights by name, after downloading them if they are missing."""
    weights = _published(name)
    cached = cached_weights(name)
    try:
        return weights.get_state_dict(progress=False, check_hash=True, weights_only=True)
    except OSError as error:
        raise Failure(
            f"cannot download {weights.url} ({error}): fetch it elsewhere and put it at {cached} "
            "on every host, or give --pretrained FILE"
        ) from None
    except Exception:  # the file in torch's cache is truncated, or is something else
        raise Failure(
            f"the downloaded weights are broken: remove {cached} and repeat the command"
        ) from None
