"""A trained model's predictions for every image of one part of a data set."""

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

from hvdtrain.config.run_config import RunConfig
from hvdtrain.config.untrusted import regular
from hvdtrain.data.folder import ImageFolder, Samples
from hvdtrain.data.loader import open_loader
from hvdtrain.errors import UsageError
from hvdtrain.formatting import printable
from hvdtrain.numerics.precision import autocast
from hvdtrain.rank.work import evaluation_resize, image_side, initial_model, trial_inputs
from hvdtrain.training.device import choose_device, set_up
from hvdtrain.training.evaluation import in_batches
from hvdtrain.training.feed import Normalise, feed
from hvdtrain.world.place import World


@dataclass(frozen=True)
class Predictions:
    """A row for each image, in the order of the data set.

    Attributes:
        classes: names of the classes.
        samples: the images.
        labels, predicted: [images] int64, the true class, and the class with the highest score.
        confidence: [images] float64, the probability of the predicted class.
        loss: the mean cross-entropy.
        top5: the share of images whose true class is among the five with the highest scores; None with fewer than six
            classes, where it would always be 1.
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
        return float((self.labels == self.predicted).mean())

    @cached_property
    def mistakes(self) -> list[int]:
        """The images with a wrong prediction, the most confident first."""
        wrong = np.flatnonzero(self.labels != self.predicted)
        return wrong[np.argsort(-self.confidence[wrong], kind="stable")].tolist()

    def name(self, image: int) -> str:
        """The image's path in its part of the data set, `class/file`."""
        return f"{self.classes[self.labels[image]]}/{printable(self.samples[image][0].name)}"


def predict(
    config: RunConfig, weights: Path, trained_on: ImageFolder, samples: Samples, progress: Callable[[int, int], None]
) -> Predictions:
    """Predict the class of every sample.

    Args:
        weights: a safetensors file of the model's weights.
        trained_on: the data set that the model was trained on, which determines its classes and the side of images.
        progress: called with the number of images that are done, and of all images.

    Raises:
        UsageError: the file is missing, or has no weights of this model.
    """
    threads = config.threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    if config.precision == "tf32" and not torch.cuda.is_available():  # it was trained on another machine
        config = dataclasses.replace(config, precision="fp32")
    device = choose_device(config, World())
    set_up(config)
    model = initial_model(config, len(trained_on.classes), trial_inputs(config, trained_on)).to(device).eval()
    try:
        model.load_state_dict(load_file(regular(weights), device=str(device)))
    except (OSError, SafetensorError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UsageError(f"{weights} cannot be read as the weights of {config.model}: {reason}") from None
    side = image_side(config, trained_on)
    loader = open_loader(samples, side, threads, resize=evaluation_resize(config, side))
    normalise = Normalise(config, device)
    batches = []
    with torch.inference_mode():
        for share, (images, labels) in feed(loader.batches(in_batches(range(len(samples)))), device):
            with autocast(config.precision, device):
                scores = model(normalise(images)).float()
            confidence, predicted = F.softmax(scores.double(), 1).max(1)
            losses = F.cross_entropy(scores, labels, reduction="none").double()
            top5 = scores.topk(min(5, scores.shape[1])).indices
            columns = (labels, predicted, confidence, losses, (top5 == labels[:, None]).any(1))
            batches.append([column.cpu().numpy() for column in columns])
            progress(share.indices[-1] + 1, len(samples))
    classes = tuple(map(printable, trained_on.classes))
    true, answers, sure, cross_entropy, hits = map(np.concatenate, zip(*batches, strict=True))
    top5_share = float(hits.mean()) if len(classes) > 5 else None
    return Predictions(classes, samples, true, answers, sure, float(cross_entropy.mean()), top5_share)
