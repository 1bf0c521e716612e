"""Predictions of a trained model for every image of one part of a data set."""

import dataclasses
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file

from hvdtrain.base.config.run_config import RunConfig
from hvdtrain.base.config.untrusted import regular
from hvdtrain.base.errors import UsageError
from hvdtrain.base.formatting import printable
from hvdtrain.base.numerics.precision import autocast
from hvdtrain.base.world.place import World
from hvdtrain.data.folder import ImageFolder, Samples
from hvdtrain.data.loader import open_loader
from hvdtrain.job.training.device import choose_device, set_up
from hvdtrain.job.training.evaluation import in_batches
from hvdtrain.job.training.feed import Normalise, feed
from hvdtrain.job.training.model import evaluation_resize, image_side, initial_model, trial_inputs


@dataclass(frozen=True)
class Predictions:
    """Predictions for images, in the order of the data set.

    Attributes:
        classes: The names of the classes.
        samples: The images.
        labels: The true classes, [images] int64.
        predicted: The classes with the highest score, [images] int64.
        confidence: The probabilities of the predicted classes, [images] float64.
        loss: The mean cross-entropy.
        top5: The share of images that have their true class among the five with the highest scores;
            None with fewer than six classes, where it would always be 1.
    """

    classes: tuple[str, ...]
    samples: Samples
    labels: np.ndarray
    predicted: np.ndarray
    confidence: np.ndarray
    loss: float
    top5: float | None

    @property
    def top1(self) -> float:
        """The share of images with a right prediction."""
        return float((self.labels == self.predicted).mean())

    @cached_property
    def mistakes(self) -> list[int]:
        """The indices of images with a wrong prediction, the most confident first."""
        wrong = np.flatnonzero(self.labels != self.predicted)
        return wrong[np.argsort(-self.confidence[wrong], kind="stable")].tolist()

    def name(self, image: int) -> str:
        """Returns the path of an image in its part of the data set, `class/file`."""
        return f"{self.classes[self.labels[image]]}/{printable(self.samples[image][0].name)}"


def predict(
    config: RunConfig,
    weights: Path,
    trained_on: ImageFolder,
    samples: Samples,
    progress: Callable[[int, int], None],
) -> Predictions:
    """Predicts the class of every sample.

    Args:
        config: The configuration of the run.
        weights: A safetensors file of the model's weights.
        trained_on: The data set that the model was trained on, which determines the classes and the
            side of images.
        samples: The samples to predict.
        progress: Called with the number of images that are done, and of all images.

    Raises:
        UsageError: The file is missing, or has no weights of this model.
    """
    threads = config.threads if config.threads > 0 else len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    # The run may have been trained on another machine.
    if config.precision == "tf32" and not torch.cuda.is_available():
        config = dataclasses.replace(config, precision="fp32")
    device = choose_device(config, World())
    set_up(config)
    inputs = trial_inputs(config, trained_on)
    model = initial_model(config, len(trained_on.classes), inputs).to(device)
    model.eval()
    try:
        model.load_state_dict(load_file(regular(weights), device=str(device)))
    except (OSError, SafetensorError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UsageError(
            f"{weights} cannot be read as the weights of {config.model}: {reason}"
        ) from None
    side = image_side(config, trained_on)
    loader = open_loader(samples, side, threads, resize=evaluation_resize(config, side))
    normalise = Normalise(config, device)
    shares = in_batches(range(len(samples)))
    batches = []
    with torch.inference_mode():
        for share, (images, labels) in feed(loader.batches(shares), device):
            with autocast(config.precision, device):
                scores = model(normalise(images)).float()
            confidence, predicted = F.softmax(scores.double(), 1).max(1)
            losses = F.cross_entropy(scores, labels, reduction="none").double()
            likeliest = scores.topk(min(5, scores.shape[1])).indices
            is_among_five = (likeliest == labels[:, None]).any(1)
            columns = (labels, predicted, confidence, losses, is_among_five)
            batches.append([column.cpu().numpy() for column in columns])
            progress(share.indices[-1] + 1, len(samples))
    # From columns of each batch to columns of all images.
    true, answers, probabilities, cross_entropy, hits = map(
        np.concatenate, zip(*batches, strict=True)
    )
    classes = tuple(map(printable, trained_on.classes))
    return Predictions(
        classes=classes,
        samples=samples,
        labels=true,
        predicted=answers,
        confidence=probabilities,
        loss=float(cross_entropy.mean()),
        top5=float(hits.mean()) if len(classes) > 5 else None,
    )
