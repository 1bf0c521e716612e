"""A run's loss over time and samples, thinned to few enough points for a plot."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hvdtrain.runs.schema import Step

MAX_POINTS = 50  # of one curve: enough to see its shape, few enough for a small file


@dataclass(frozen=True)
class LossCurve:
    """Points of a run's training loss: seconds of training, samples of all workers so far, mean loss."""

    seconds: list[float]
    samples: list[float]
    loss: list[float]


def loss_curve(ranks: Mapping[str, Sequence[Step]]) -> LossCurve:
    """The loss of all workers together.

    Their steps are sorted by time and cut into at most MAX_POINTS equal windows, none smaller than the number of
    workers. A point is the mean over a window, weighted by samples.
    """
    steps = [step for steps in ranks.values() for step in steps if step.loss is not None and step.samples > 0]
    steps.sort(key=lambda step: step.time)
    window_size = max(len(ranks), -(-len(steps) // MAX_POINTS))
    curve, samples_before = LossCurve([], [], []), 0.0
    for start in range(0, len(steps), max(1, window_size)):
        window = steps[start : start + window_size]
        samples = sum(step.samples for step in window)
        curve.seconds.append(sum(step.time for step in window) / len(window))
        curve.samples.append(samples_before + samples / 2)
        curve.loss.append(sum((step.loss or 0.0) * step.samples for step in window) / samples)
        samples_before += samples
    return curve
