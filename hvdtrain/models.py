"""VGG (Simonyan & Zisserman, 2015, arXiv:1409.1556, table 1) and VGG-F, at any width and for any image size >= 32.

Parameters are named as in torchvision, so that its weights load.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from hvdtrain.errors import Failure, UsageError

# Convolutions before each of the five poolings, and their channels: the paper's columns A, B, D and E. torchvision has
# them too, but every rank of every job would spend 1.3 s and 200 MB on importing it.
DEPTHS = {"11": (1, 1, 2, 2, 2), "13": (2, 2, 2, 2, 2), "16": (2, 2, 3, 3, 3), "19": (2, 2, 4, 4, 4)}
CHANNELS = (64, 128, 256, 512, 512)

# VGG-F is VGG-16 whose last layer (4096 -> 1000) gives way to a funnel: two more layers between 4096 and the
# number of classes (github.com, "Distributed VGG-F", which gives no widths). We narrow by four each time.
FUNNEL = (1024, 256)


class VGG(nn.Module):
    """A VGG whose channels and head are scaled by `width`; images of [n, 3, side >= 32, side >= 32] float32.

    Args:
        name: one of config.MODELS.
        classes: outputs.
        width: 1 gives the published layers; each is rounded to a whole number of at least 1.
        dropout: probability after the two wide layers of the head.
    """

    def __init__(self, name: str, classes: int, width: float = 1.0, dropout: float = 0.0) -> None:
        super().__init__()
        base = "vgg16" if name == "vggf" else name

        def scaled(n: int) -> int:
            return max(1, round(n * width))

        features: list[nn.Module] = []
        inputs = 3
        for depth, channels in zip(DEPTHS[base.removeprefix("vgg").removesuffix("_bn")], CHANNELS, strict=True):
            for _ in range(depth):
                features.append(nn.Conv2d(inputs, scaled(channels), kernel_size=3, padding=1))
                inputs = scaled(channels)
                features += [nn.BatchNorm2d(inputs)] if base.endswith("_bn") else []
                features.append(nn.ReLU(inplace=True))
            features.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*features)
        self.avgpool = nn.AdaptiveAvgPool2d(7)
        wide = scaled(4096)
        head: list[nn.Module] = []
        for inputs in (scaled(512) * 7 * 7, wide):
            head += [nn.Linear(inputs, wide), nn.ReLU(inplace=True), nn.Dropout(dropout)]
        for outputs in FUNNEL if name == "vggf" else ():
            head += [nn.Linear(wide, scaled(outputs)), nn.ReLU(inplace=True)]
            wide = scaled(outputs)
        self.classifier = nn.Sequential(*head, nn.Linear(wide, classes))
        for module in self.modules():
            # torchvision gives linear layers a fixed deviation of 0.01, right for 4096 inputs alone; He et al.
            # (2015, arXiv:1502.01852, eq. 10) gives the same signal at every width and through the funnel.
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.kaiming_normal_(module.weight, mode="fan_in", nonlinearity="relu")
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Class scores [n, classes]."""
        return self.classifier(torch.flatten(self.avgpool(self.features(images)), 1))


def load_pretrained(model: VGG, name: str, source: str) -> list[str]:
    """Copy the weights that fit, by name and shape, into the model.

    Args:
        source: `imagenet` (torchvision's IMAGENET1K_V1, downloaded once) or a .pth, .pt or .safetensors file.

    Returns:
        What was left as it was, a line each; empty when every parameter was loaded.

    Raises:
        UsageError: the file is missing, is no file of weights, or nothing in it fits.
        Failure: the download failed, or left a broken file.
    """
    given = _imagenet(name) if source == "imagenet" else _read_weights(Path(source))
    own = model.state_dict()
    fits = {k: v for k, v in given.items() if k in own and v.shape == own[k].shape}
    if not fits:
        raise UsageError(f"--pretrained {source}: nothing in it fits {name} at this width")
    model.load_state_dict(fits, strict=False)
    skipped = []
    for k, v in own.items():
        if k not in given:
            skipped.append(f"{k}: not in {source}")
        elif k not in fits:
            skipped.append(f"{k}: {tuple(given[k].shape)} in {source}, {tuple(v.shape)} here")
    return skipped


def _imagenet(name: str) -> dict[str, torch.Tensor]:
    from torchvision.models import get_model_weights

    weights = get_model_weights("vgg16" if name == "vggf" else name).IMAGENET1K_V1
    try:
        return weights.get_state_dict(progress=False, check_hash=True, weights_only=True)
    except OSError as error:
        raise Failure(f"cannot download {weights.url} ({error}): fetch it elsewhere, give --pretrained FILE") from None
    except Exception:  # a copy cut short, or not what its name says
        kept = Path(torch.hub.get_dir(), "checkpoints", weights.url.rsplit("/", 1)[1])
        raise Failure(f"the downloaded weights are broken: remove {kept} and try again") from None


def _read_weights(path: Path) -> dict[str, torch.Tensor]:
    if not path.is_file():
        raise UsageError(f"--pretrained {path}: no such file; give `imagenet` or a .pth, .pt or .safetensors file")
    state: Any
    try:
        if path.suffix == ".safetensors":
            state = load_file(path)
        else:
            state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever a hostile or broken file provokes, it is the file that is at fault
        reason = str(error).strip().split("\n")[0][:120]
        raise UsageError(f"--pretrained {path}: not a file of plain weights: {type(error).__name__} {reason}") from None
    if isinstance(state, dict):
        state = state.get("state_dict", state)
    if not isinstance(state, dict) or not all(isinstance(k, str) and _is_plain(v) for k, v in state.items()):
        raise UsageError(f"--pretrained {path}: holds no dictionary of names and plain tensors")
    return {k.removeprefix("module."): v for k, v in state.items()}


def _is_plain(value: Any) -> bool:
    """Whether this is a tensor that a parameter can be a copy of."""
    if not isinstance(value, torch.Tensor) or value.is_quantized or value.is_complex():
        return False
    return value.layout == torch.strided and value.device.type == "cpu"
