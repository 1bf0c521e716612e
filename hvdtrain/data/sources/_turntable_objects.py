"""The design of the turntable's objects: a handful of solids each, with textures, all drawn from a seed."""

import colorsys
import math
from dataclasses import dataclass
from random import Random

import numpy as np

from hvdtrain.data.sources._solids import PATTERNS, Array


@dataclass(frozen=True)
class Part:
    """One solid of an object: the points centre + axes @ q for q in the unit solid, with its texture."""

    solid: str  # a key of SOLIDS
    shape: float  # of a frustum or a torus, as in _solids.py
    centre: Array  # [3]
    axes: Array  # [3, 3]
    pattern: str  # a key of PATTERNS
    wave: Array  # [4, 3] directions of the pattern, scaled by its frequency
    phase: Array  # [4]
    colours: Array  # [2, 3] in 0..1


# The shapes of objects, each a tuple of (solid, shape, centre, half sizes, lean about x, turn about z); in degrees.
Form = tuple[tuple[str, float, tuple[float, float, float], tuple[float, float, float], float, float], ...]
FORMS: tuple[Form, ...] = (
    (("box", 0, (0, 0, 0), (0.9, 0.5, 0.7), 0, 0),),
    (("sphere", 0, (0, 0, 0), (0.8, 0.8, 0.8), 0, 0),),
    (
        ("frustum", 1, (0, 0, 0), (0.6, 0.6, 0.9), 0, 0),
        ("torus", 0.2, (0.65, 0, 0.05), (0.45, 0.45, 0.45), 90, 0),
    ),
    (("frustum", 0, (0, 0, 0), (0.75, 0.75, 0.95), 0, 0),),
    (("torus", 0.38, (0, 0, 0), (0.7, 0.7, 0.7), 78, 0),),
    (("box", 0, (0, 0, -0.35), (0.6, 0.5, 0.45), 0, 0), ("frustum", 0, (0, 0, 0.5), (0.85, 0.75, 0.4), 0, 0)),
    (("sphere", 0, (0, 0, 0), (1.0, 0.55, 0.5), 8, 0),),
    (
        ("frustum", 0.55, (0, 0, -0.1), (0.7, 0.7, 0.6), 0, 0),
        ("sphere", 0, (0.1, 0, 0.6), (0.45, 0.4, 0.42), 0, 0),
    ),
    (("frustum", 1, (0, 0, 0), (0.4, 0.4, 1.0), 90, 0),),
    (
        ("box", 0, (0, 0, -0.4), (0.75, 0.7, 0.35), 0, 0),
        ("box", 0, (0.1, -0.1, 0.3), (0.45, 0.4, 0.5), 0, 35),
    ),
    (
        ("torus", 0.4, (0, 0, -0.3), (0.65, 0.65, 0.65), 0, 0),
        ("frustum", 0, (0, 0, 0.2), (0.5, 0.5, 0.8), 6, 0),
    ),
    (
        ("sphere", 0, (-0.45, 0, -0.1), (0.6, 0.6, 0.6), 0, 0),
        ("sphere", 0, (0.5, 0, 0.1), (0.45, 0.45, 0.5), 0, 0),
    ),
    (("frustum", 0.6, (0, 0, 0), (0.65, 0.65, 0.85), 180, 0),),
    (("box", 0, (0, 0, 0), (0.3, 0.3, 1.0), 0, 20), ("box", 0, (0, 0, 0.2), (0.9, 0.25, 0.25), 0, 20)),
    (
        ("frustum", 1, (0, 0, -0.55), (0.8, 0.8, 0.2), 0, 0),
        ("sphere", 0, (0, 0, 0.1), (0.45, 0.65, 0.6), 20, 0),
    ),
    (
        ("sphere", 0, (0, 0, 0), (0.55, 0.7, 0.95), 15, 0),
        ("torus", 0.15, (0, 0, 0), (0.75, 0.75, 0.75), 25, 0),
    ),
    (("frustum", 1, (0, 0, 0), (0.3, 0.3, 0.9), 90, 0), ("frustum", 1, (0, 0, 0), (0.3, 0.3, 0.9), 90, 90)),
    (("box", 0, (0, 0, 0), (0.75, 0.75, 0.75), 35, 45),),
)


def rotation(lean: float, turn: float) -> Array:
    a, b = math.radians(lean), math.radians(turn)
    about_x = np.array([[1, 0, 0], [0, math.cos(a), -math.sin(a)], [0, math.sin(a), math.cos(a)]])
    about_z = np.array([[math.cos(b), -math.sin(b), 0], [math.sin(b), math.cos(b), 0], [0, 0, 1]])
    return about_z @ about_x


def _pick_colours(random: Random, hue: float) -> Array:
    """A strong colour and a second one: another hue, or a light or dark shade of the same hue."""
    first = colorsys.hsv_to_rgb(hue % 1, random.uniform(0.4, 1), random.uniform(0.65, 1))
    other = random.choice([0.0, 0.33, 0.5, 0.62])
    if other:
        second = colorsys.hsv_to_rgb((hue + other) % 1, random.uniform(0.4, 1), random.uniform(0.55, 1))
    else:
        second = colorsys.hsv_to_rgb(hue % 1, random.uniform(0, 0.25), random.choice([0.15, 1.0]))
    return np.array([first, second])


def design(seed: int, number: int) -> tuple[Part, ...]:
    """Object `number` (from 1) of a seed."""
    random = Random(f"turntable {seed} {number}")
    # The golden ratio spreads the hues of any number of objects evenly.
    hue = Random(f"turntable {seed}").random() + number * 0.618034
    form = FORMS[(number - 1) % len(FORMS)]
    stretch = np.array([random.uniform(0.82, 1.18) for _ in range(3)])
    patterns = random.sample(sorted(PATTERNS), len(form))
    parts = []
    for i, (solid, shape, centre, half, lean, turn) in enumerate(form):
        # A torus keeps its proportions: its distance function holds for uniform scaling alone.
        size = np.array(half) * (stretch.mean() if solid == "torus" else stretch)
        # The pattern's directions are far from vertical, so that the texture moves when the table turns.
        turns = [random.uniform(0, 360) + 120 * k for k in range(4)]
        wave = np.array([rotation(random.uniform(-35, 35), angle)[:, 1] for angle in turns])
        wave[2] = rotation(random.uniform(-20, 20), 0)[:, 2]
        frequency = random.uniform(6, 11)
        parts.append(
            Part(
                solid=solid,
                shape=shape,
                centre=np.array(centre) * stretch,
                axes=rotation(lean, turn) * size,
                pattern=patterns[i],
                wave=wave * frequency,
                phase=np.array([random.uniform(0, 2 * math.pi) for _ in range(4)]),
                colours=_pick_colours(random, hue + 0.4 * i),
            )
        )
    return tuple(parts)
