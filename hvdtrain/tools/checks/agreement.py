"""The tolerance between two trainings that compute the same, for `verify` and for tests."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from numpy import ndarray as Vector

# The largest `distance` of two trainings that compute the same. They differ by rounding, u = 2^-24
# in float32. As a fraction of the distance that training moves the weights:
#
# - Gradients: a sum of K products is off by some u√K (Higham & Mary, 2019,
#   doi:10.1137/18M1226312). K is thousands for a gradient, over all layers and positions, which
#   gives 5e-6 of a step. Over several steps the fraction is the same or smaller, because errors
#   differ. It grows if the learning rate is so high that a small difference in weights grows from
#   step to step.
# - Weights: T steps round them T times, by u√T of their norm in all. If training moves them by a
#   hundredth of their norm, that is 1e-5 of the distance.
# - Adam moves a weight as far for a small gradient as for a large one. A weight whose gradient is
#   no more than rounding moves at random: see ROUNDING_ONLY.
#
# So the tolerance is some ten times what rounding does to models without kinks (smooth.py), and a
# fifth of what SGD makes of gradients that are off by 1e-3. Adam does not notice a constant factor.
TOLERANCE = 2e-4

# The share of weights that is left out of a `distance` of optimizers that normalize gradients. If
# gradients are off by a share δ, about δ of the weights have gradients that are no more than
# rounding. Each of these weights may move by as much as any other weight, in any direction, so they
# alone make a distance of √δ: 7e-4 for δ = 5e-7. One such weight of 500,000 makes one above
# TOLERANCE. If a share s is left out, a distance of δ/√s remains: 2e-5.
ROUNDING_ONLY = 1e-3


def distance(weights: "Vector", reference: "Vector", initial: "Vector", optimizer: str) -> float:
    """Returns |weights - reference| / |reference - initial|, in the Euclidean norm.

    For other optimizers than SGD, the share ROUNDING_ONLY of the weights, rounded down, is left out
    of the numerator: the weights that differ most.

    Args:
        weights: The weights, [n] float64, as `flat` returns them.
        reference: The weights to compare with, [n] float64.
        initial: The weights before training, [n] float64.
        optimizer: The name of the optimizer.
    """
    import numpy as np

    differences = np.abs(weights - reference)
    if optimizer != "sgd":
        compared = len(differences) - int(ROUNDING_ONLY * len(differences))
        differences = np.sort(differences)[:compared]
    return float(np.linalg.norm(differences) / np.linalg.norm(reference - initial))


def flat(tensors: Mapping[str, "Vector"], names: Iterable[str]) -> "Vector":
    """Returns the concatenation of the arrays with these names, [n] float64."""
    import numpy as np

    return np.concatenate([tensors[name].ravel().astype(np.float64) for name in names])
