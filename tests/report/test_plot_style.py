"""Colours that stand beside each other are told apart, by everybody."""

from itertools import pairwise

import numpy as np
import pytest

from hvdtrain import modes
from hvdtrain.plot_style import STEP_PARTS

# What people with protanopia, deuteranopia and tritanopia see of linear RGB (Machado et al., 2009), and what others do.
SEEN = [np.array(rows).reshape(3, 3) for rows in (
    [0.152286, 1.052583, -0.204868, 0.114503, 0.786281, 0.099216, -0.003882, -0.048116, 1.051998],
    [0.367322, 0.860646, -0.227968, 0.280085, 0.672501, 0.047413, -0.011820, 0.042940, 0.968881],
    [1.255528, -0.076749, -0.178779, -0.078411, 0.930809, 0.147602, 0.004733, 0.691367, 0.303900],
    [1, 0, 0, 0, 1, 0, 0, 0, 1],
)]  # fmt: skip
TO_XYZ = np.array([[0.4125, 0.3576, 0.1804], [0.2127, 0.7152, 0.0722], [0.0193, 0.1192, 0.9503]])


def lab(colour, seen):
    encoded = np.array([int(colour[at : at + 2], 16) for at in (1, 3, 5)]) / 255
    linear = np.where(encoded <= 0.04045, encoded / 12.92, ((encoded + 0.055) / 1.055) ** 2.4)
    relative = TO_XYZ @ np.clip(seen @ linear, 0, 1) / TO_XYZ.sum(1)
    x, y, z = np.where(relative > 0.008856, np.cbrt(relative), 7.787 * relative + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def distance(one, other):
    """CIE76, of whoever sees the least."""
    return min(float(np.linalg.norm(lab(one, seen) - lab(other, seen))) for seen in SEEN)


BESIDE = [*pairwise(STEP_PARTS), ("backward", "optimizer"), ("optimizer", "metrics"), ("metrics", "data")]


@pytest.mark.parametrize(("one", "other"), BESIDE)
def test_parts_of_a_step_that_lie_beside_each_other_look_different(one, other):
    assert distance(STEP_PARTS[one][1], STEP_PARTS[other][1]) >= 20


def test_any_two_modes_look_different():
    colours = [modes.declared(name).colour for name in modes.names()]
    assert min(distance(one, other) for i, one in enumerate(colours) for other in colours[:i]) >= 20
