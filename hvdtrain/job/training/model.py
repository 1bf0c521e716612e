"""The model and its samples as training finds them, for whatever trains, checks or measures one."""

from contextlib import nullcontext
from typing import cast

import torch
from torch import nn

from hvdtrain import models
from hvdtrain.base.config.run_config import RunConfig
from hvdtrain.base.errors import UsageError
from hvdtrain.base.system.own_code import is_code
from hvdtrain.data.folder import ImageFolder
from hvdtrain.data.image_side import native_side
from hvdtrain.data.loader import example
from hvdtrain.data.storage import locked
from hvdtrain.models.layers import Network
from hvdtrain.models.own import read_early
from hvdtrain.models.pretrained import cached_weights, load_pretrained
from hvdtrain.runs.request import choice

# How published weights were tested: images of 256 pixels, cut to their middle 224.
PUBLISHED_SIDE = 224
PUBLISHED_RESIZE = 256


def trial_inputs(config: RunConfig, data: ImageFolder) -> torch.Tensor | None:
    """Returns two samples, [2, …], with which a model is tried before anything begins.

    None where the model and the data are built in: they need no trial.
    """
    if not (models.is_own(config.model) or is_code(config.dataset)):
        return None
    return example(data.train, image_side(config, data), 2)


def initial_model(config: RunConfig, classes: int, inputs: torch.Tensor | None = None) -> nn.Module:
    """Returns the model before training: its weights depend on the seed alone.

    Args:
        inputs: see trial_inputs.

    Raises:
        UsageError: the model cannot be trained here, or not on such samples.
    """
    torch.manual_seed(config.seed)
    model = models.make(config.model, classes, config.effective_width, config.dropout, inputs)
    if config.freeze == "features":
        cast(Network, model).features.requires_grad_(False)
    return model


def waits_for(config: RunConfig, model: nn.Module, inputs: torch.Tensor | None) -> str:
    """Returns what waits for fresh weights: each `layer`, or the `step`.

    A user's forward may read weights before the layer that has them begins. Then the step waits.

    Raises:
        UsageError: layers were to wait, and this model cannot.
    """
    wait_for = choice(config, "wait_for")
    if wait_for != "layer" or inputs is None:
        return wait_for
    name = read_early(model, inputs)
    if not name:
        return wait_for
    if config.wait_for == "layer":
        raise UsageError(
            f"--wait-for layer: {config.model} reads its parameter {name} before the layer that "
            "has it begins: take --wait-for step"
        )
    return "step"


def load_weights(model: nn.Module, config: RunConfig) -> list[str]:
    """Loads pretrained weights into the model; returns lines about them, such as what was skipped.

    Of several processes of a host one downloads a file that is not there yet.
    """
    file = cached_weights(config.model) if config.pretrained == "imagenet" else None
    is_missing = file is not None and not file.exists()
    with locked(file) if file and is_missing else nullcontext():
        return load_pretrained(model, config.model, config.pretrained)


def image_side(config: RunConfig, data: ImageFolder) -> int:
    """Returns the side, in pixels, of the images that a job trains on; 0 of a user's own data."""
    if is_code(config.dataset):
        return 0
    return config.image_size or native_side(data)


def evaluation_resize(config: RunConfig, side: int) -> int:
    """Returns `resize` of data.loader.Loader for evaluations; 0 where images are not resized first.

    Published weights were tested on the middle of images of 256 pixels.
    """
    is_published = config.pretrained == "imagenet" and side == PUBLISHED_SIDE
    return PUBLISHED_RESIZE if is_published else 0
