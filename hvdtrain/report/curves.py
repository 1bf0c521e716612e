"""Training loss over time and samples, thinned and smoothed for a plot."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

POINTS = 50  # of one curve: enough to see its shape, few enough for a small file


@dataclass(frozen=True)
class Curve:
    """Points of one run's training loss: seconds of training, samples of all workers so far, mean loss."""

    seconds: list[float]
    samples: list[float]
    loss: list[float]


def loss_curve(ranks: Mapping[str, Sequence[Mapping[str, Any]]]) -> Curve:
    """The loss of all workers together.

    Their steps are put in order of time and cut into at most POINTS equal parts, none smaller than the number
    of workers; a point is the mean of a part, where a step weighs as much as it has samples.
    """
    steps = [step for steps in ranks.values() for step in steps if step["loss"] is not None and step["samples"] > 0]
    steps.sort(key=lambda step: step["time"])
    part = max(len(ranks), -(-len(steps) // POINTS))
    curve, seen = Curve([], [], []), 0.0
    for start in range(0, len(steps), max(1, part)):
        window = steps[start : start + part]
        weight = sum(step["samples"] for step in window)
        curve.seconds.append(sum(step["time"] for step in window) / len(window))
        curve.samples.append(seen + weight / 2)
        curve.loss.append(sum(step["loss"] * step["samples"] for step in window) / weight)
        seen += weight
    return curve
