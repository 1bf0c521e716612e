"""What a trained model says of every image of one part of a data set."""

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

from hvdtrain.config import RunConfig
from hvdtrain.data.folder import ImageFolder, Samples
from hvdtrain.data.loader import Loader
from hvdtrain.device import choose_device, set_up
from hvdtrain.errors import UsageError
from hvdtrain.evaluation import in_batches
from hvdtrain.feed import Normalise, feed
from hvdtrain.models.layers import Network
from hvdtrain.precision import autocast
from hvdtrain.work import image_side, initial_model
from hvdtrain.world import World


@dataclass(frozen=True)
class Answers:
    """One row an image, in the order of the data set.

    Attributes:
        classes: their names.
        samples: the images; side: in pixels, as the model saw them.
        labels, predicted: [images] int64, the true class and the answer, which has the highest score.
        confidence: [images] float64, the probability that the model gave to its answer.
        losses: [images] float64, cross-entropy.
        among5: [images] bool, whether the true class is among the five highest scores.
    """

    classes: tuple[str, ...]
    samples: Samples
    side: int
    labels: np.ndarray
    predicted: np.ndarray
    confidence: np.ndarray
    losses: np.ndarray
    among5: np.ndarray

    @property
    def loss(self) -> float:
        return float(self.losses.mean())

    @property
    def top1(self) -> float:
        return float((self.labels == self.predicted).mean())

    @property
    def top5(self) -> float | None:
        """None with fewer than six classes, where every answer would be among the five."""
        return float(self.among5.mean()) if len(self.classes) > 5 else None

    @cached_property
    def confusion(self) -> np.ndarray:
        """How many images of a class (row) were taken for each class (column): [classes, classes] int64."""
        counts = np.zeros((len(self.classes), len(self.classes)), np.int64)
        np.add.at(counts, (self.labels, self.predicted), 1)
        return counts

    @cached_property
    def mistakes(self) -> list[int]:
        """The images with a wrong answer, the most confident first."""
        wrong = np.flatnonzero(self.labels != self.predicted)
        return wrong[np.argsort(-self.confidence[wrong], kind="stable")].tolist()

    def name(self, image: int) -> str:
        """`class/file`, as it lies in its part of the data set."""
        return f"{self.classes[self.labels[image]]}/{_readable(self.samples[image][0].name)}"


def ask(
    config: RunConfig, weights: Path, own: ImageFolder, samples: Samples, progress: Callable[[int, int], None]
) -> Answers:
    """Show every sample to the model once.

    Args:
        weights: a file of the model's weights, in safetensors' format.
        own: the data set that the model was trained on, which decides its classes and the side of its images.
        progress: told how many images of how many are done.

    Raises:
        UsageError: the file is missing, or holds no weights of this model.
    """
    threads = config.threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    if config.precision == "tf32" and not torch.cuda.is_available():  # it was trained elsewhere
        config = dataclasses.replace(config, precision="fp32")
    device = choose_device(config, World())
    set_up(config)
    model = _load(config, weights, len(own.classes), device)
    side = image_side(config, own)
    loader, normalise = Loader(samples, side, threads), Normalise(config, device)
    parts = []
    with torch.inference_mode():
        for share, (images, labels) in feed(loader.batches(in_batches(range(len(samples)))), device):
            with autocast(config.precision, device):
                scores = model(normalise(images)).float()
            confidence, predicted = F.softmax(scores.double(), 1).max(1)
            losses = F.cross_entropy(scores, labels, reduction="none").double()
            best = scores.topk(min(5, scores.shape[1])).indices
            columns = (labels, predicted, confidence, losses, (best == labels[:, None]).any(1))
            parts.append([column.cpu().numpy() for column in columns])
            for number in share.indices:
                progress(number + 1, len(samples))
    labels_, predicted_, confidence_, losses_, among5 = map(np.concatenate, zip(*parts, strict=True))
    classes = tuple(map(_readable, own.classes))
    return Answers(classes, samples, side, labels_, predicted_, confidence_, losses_, among5)


def _readable(name: str) -> str:
    """A file's name that can be printed and written: bytes that are no UTF-8 are spelled out."""
    return name.encode(errors="backslashreplace").decode()


def _load(config: RunConfig, weights: Path, classes: int, device: torch.device) -> Network:
    """The model in evaluation mode."""
    model = initial_model(config, classes).to(device)
    try:
        model.load_state_dict(load_file(weights, device=str(device)))
    except (OSError, SafetensorError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        if not weights.exists():
            reason = "it is not there: a run that has not finished has none yet, and goes on with --resume"
        raise UsageError(f"{weights} cannot be read as the weights of {config.model}: {reason}") from None
    return model.eval()
