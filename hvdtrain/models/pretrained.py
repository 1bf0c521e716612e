"""Loads pretrained weights: torchvision's, or a file's."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from hvdtrain import models
from hvdtrain.errors import Failure, UsageError


def load_pretrained(model: nn.Module, name: str, source: str) -> list[str]:
    """Copy the weights that fit, by name and shape, into the model.

    Args:
        source: `imagenet` (torchvision's IMAGENET1K_V1, downloaded once) or a .pth, .pt or .safetensors file.

    Returns:
        The parameters that were not loaded, and why, a line each.

    Raises:
        UsageError: the file is missing, is no file of weights, or nothing in it fits.
        Failure: the download failed, or left a broken file.
    """
    loaded = _imagenet(name) if source == "imagenet" else _read_weights(Path(source))
    current = model.state_dict()
    fits = {k: v for k, v in loaded.items() if k in current and v.shape == current[k].shape}
    if not fits:
        raise UsageError(
            f"--pretrained {source}: nothing in it fits {name} at this width, by name and shape: published weights "
            "need --width 1"
        )
    model.load_state_dict(fits, strict=False)
    skipped = []
    for k, v in current.items():
        if k not in loaded:
            skipped.append(f"{k}: not in {source}")
        elif k not in fits:
            skipped.append(f"{k}: {tuple(loaded[k].shape)} in {source}, {tuple(v.shape)} here")
    return skipped


def cached_weights(name: str) -> Path:
    """Where torch keeps torchvision's weights of a model, which need not exist yet."""
    return Path(torch.hub.get_dir(), "checkpoints", _published(name).url.rsplit("/", 1)[1])


def _published(name: str) -> Any:
    from torchvision.models import get_model_weights

    return get_model_weights(models.family(name).IMAGENET_WEIGHTS[name]).IMAGENET1K_V1


def _imagenet(name: str) -> dict[str, torch.Tensor]:
    weights, cached = _published(name), cached_weights(name)
    try:
        return weights.get_state_dict(progress=False, check_hash=True, weights_only=True)
    except OSError as error:
        raise Failure(
            f"cannot download {weights.url} ({error}): fetch it elsewhere and put it at {cached} on every host, or "
            "give --pretrained FILE"
        ) from None
    except Exception:  # the file in torch's cache is truncated, or is something else
        raise Failure(f"the downloaded weights are broken: remove {cached} and repeat the command") from None


def _read_weights(path: Path) -> dict[str, torch.Tensor]:
    if not path.is_file():
        raise UsageError(f"--pretrained {path}: no such file; give `imagenet` or a .pth, .pt or .safetensors file")
    state: Any
    try:
        if path.suffix == ".safetensors":
            state = load_file(path)
        else:
            state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a malicious or damaged file may cause any: each is the file's fault
        reason = str(error).strip().split("\n")[0][:120]
        raise UsageError(f"--pretrained {path}: not a file of plain weights: {type(error).__name__} {reason}") from None
    if isinstance(state, dict):
        state = state.get("state_dict", state)
    if not isinstance(state, dict) or not all(isinstance(k, str) and _is_plain(v) for k, v in state.items()):
        raise UsageError(f"--pretrained {path}: holds no dictionary of names and plain tensors")
    return {k.removeprefix("module."): v for k, v in state.items()}


def _is_plain(value: Any) -> bool:
    """Whether this is a tensor that can be copied into a parameter."""
    if not isinstance(value, torch.Tensor) or value.is_quantized or value.is_complex():
        return False
    return value.layout == torch.strided and value.device.type == "cpu"
