"""When a training reached its target: after how many seconds, and how many samples."""

import math
from typing import NamedTuple

from hvdtrain.runs.read import Run
from hvdtrain.runs.schema import Evaluation


class Target(NamedTuple):
    """What a training is to reach.

    Attributes:
        value: the accuracy, or the loss.
        is_loss: whether it is a loss, of which less is better.
    """

    value: float
    is_loss: bool = False

    @property
    def what(self) -> str:
        return "loss" if self.is_loss else "accuracy"

    @property
    def words(self) -> str:
        return f"a loss of {self.value:g}" if self.is_loss else f"{self.value:g}"

    def figure(self, evaluation: Evaluation) -> float | None:
        """Returns what is compared with the target; None where it was not measured."""
        return evaluation.val_loss if self.is_loss else evaluation.val_accuracy

    def is_reached_by(self, figure: float) -> bool:
        return figure <= self.value if self.is_loss else figure >= self.value


def target_of(run: Run) -> Target | None:
    """Returns the target of a training; None if it has none."""
    summary = run.summary
    if summary.target_loss:
        return Target(summary.target_loss, is_loss=True)
    return None if summary.target_accuracy is None else Target(summary.target_accuracy)


class Reach(NamedTuple):
    """How long a training took to its target.

    Attributes:
        seconds: of training, without evaluations, until the target was reached, or until training
            ended without it.
        samples: that all workers trained on until then.
        is_reached: whether the target was reached. If not, it takes longer than `seconds`.
    """

    seconds: float
    samples: float
    is_reached: bool

    @property
    def s_per_sample(self) -> float:
        return self.seconds / self.samples if self.samples else 0.0


def reach_of(run: Run) -> Reach | None:
    """Returns when a training reached its target; None if it had none.

    Accuracy is measured at evaluations. Between the last one below the target and the first one
    that reaches it, accuracy is taken to grow evenly, and a loss to fall evenly.
    """
    summary = run.summary
    target = target_of(run)
    if target is None or run.manifest.sprint or not summary.wall_s:
        return None
    before = None
    for evaluation in summary.evaluations:
        figure = target.figure(evaluation)
        if figure is None or not math.isfinite(figure):
            continue
        if not target.is_reached_by(figure):
            before = (evaluation, figure)
            continue
        if before is None:
            return Reach(evaluation.train_s, evaluation.samples, True)
        last, last_figure = before
        part = (target.value - last_figure) / (figure - last_figure)
        seconds = last.train_s + part * (evaluation.train_s - last.train_s)
        samples = last.samples + part * (evaluation.samples - last.samples)
        return Reach(seconds, samples, True)
    return Reach(summary.wall_s, summary.samples or 0.0, False)


def seconds_to_target(run: Run) -> float | None:
    """Returns the seconds of training until the target was reached; None if it was not."""
    reach = reach_of(run)
    return reach.seconds if reach and reach.is_reached else None


def samples_to_target(run: Run) -> float | None:
    """Returns the samples trained on until the target was reached; None if it was not."""
    reach = reach_of(run)
    return reach.samples if reach and reach.is_reached else None
