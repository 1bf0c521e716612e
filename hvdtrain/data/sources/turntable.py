"""Views of textured solids on a turntable, rendered here: named and sized like COIL-100, free to use.

An object is a handful of solids, each an affine image of a unit solid of `solids.py`. The camera is orthographic and
looks slightly down, so every ray of a view has the same direction and a whole view is a few array operations.
Everything is computed in float64: what two kinds of processor round differently is far below one step of 8-bit
colour, so the same seed gives the same pixels on all of them.
"""

import colorsys
import math
import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.data.image import png
from hvdtrain.data.select import Item
from hvdtrain.data.sources.solids import FAR, PATTERNS, REACH, SOLIDS, Array
from hvdtrain.errors import UsageError

if TYPE_CHECKING:
    from hvdtrain.data.recipe import Recipe

SIDE = 128  # pixels, as in COIL-100
OVERSAMPLE = 2  # rays per pixel and direction: smooth edges
FILL = 0.94  # part of the frame that an object fills, like COIL-100's normalised views
ELEVATION = math.radians(24)  # of the camera above the turntable
LIGHT = np.array([-0.45, 0.55, -0.70]) / np.linalg.norm([-0.45, 0.55, -0.70])  # right, up, forward
RIGHT = np.array([1.0, 0.0, 0.0])
UP = np.array([0.0, math.sin(ELEVATION), math.cos(ELEVATION)])
FORWARD = np.array([0.0, math.cos(ELEVATION), -math.sin(ELEVATION)])


@dataclass(frozen=True)
class Part:
    """One solid of an object: the points centre + axes @ q for q in the unit solid, with its texture."""

    solid: str  # a key of SOLIDS
    shape: float  # of a frustum or a torus, as in solids.py
    centre: Array  # [3]
    axes: Array  # [3, 3]
    pattern: str  # a key of PATTERNS
    wave: Array  # [4, 3] directions of the pattern, scaled by its frequency
    phase: Array  # [4]
    colours: Array  # [2, 3] in 0..1


# ---- What the objects are. Solid, shape, centre, half sizes, lean about x and turn about z in degrees.
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


def _rotation(lean: float, turn: float) -> Array:
    a, b = math.radians(lean), math.radians(turn)
    about_x = np.array([[1, 0, 0], [0, math.cos(a), -math.sin(a)], [0, math.sin(a), math.cos(a)]])
    about_z = np.array([[math.cos(b), -math.sin(b), 0], [math.sin(b), math.cos(b), 0], [0, 0, 1]])
    return about_z @ about_x


def _colours(random: Random, hue: float) -> Array:
    """A strong colour and one to go with it: another hue, or light or dark of the same."""
    first = colorsys.hsv_to_rgb(hue % 1, random.uniform(0.4, 1), random.uniform(0.65, 1))
    other = random.choice([0.0, 0.33, 0.5, 0.62])
    if other:
        second = colorsys.hsv_to_rgb((hue + other) % 1, random.uniform(0.4, 1), random.uniform(0.55, 1))
    else:
        second = colorsys.hsv_to_rgb(hue % 1, random.uniform(0, 0.25), random.choice([0.15, 1.0]))
    return np.array([first, second])


def design(seed: int, number: int) -> tuple[Part, ...]:
    """Object `number` (from 1) of a seed: depends on nothing else."""
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
        # Directions a good way from vertical, so that the texture moves when the table turns.
        turns = [random.uniform(0, 360) + 120 * k for k in range(4)]
        wave = np.array([_rotation(random.uniform(-35, 35), angle)[:, 1] for angle in turns])
        wave[2] = _rotation(random.uniform(-20, 20), 0)[:, 2]
        frequency = random.uniform(6, 11)
        parts.append(
            Part(
                solid=solid,
                shape=shape,
                centre=np.array(centre) * stretch,
                axes=_rotation(lean, turn) * size,
                pattern=patterns[i],
                wave=wave * frequency,
                phase=np.array([random.uniform(0, 2 * math.pi) for _ in range(4)]),
                colours=_colours(random, hue + 0.4 * i),
            )
        )
    return tuple(parts)


def _extent(part: Part, axis: Array) -> tuple[float, float]:
    """The smallest and largest coordinate of a part along `axis` [3]."""
    middle, along = part.centre @ axis, part.axes.T @ axis
    reach = REACH[part.solid]
    return float(middle - reach(-along, part.shape)), float(middle + reach(along, part.shape))


@dataclass(frozen=True)
class Camera:
    """Where the rays of all views of an object start: their positions across and up the image plane, [n] each."""

    across: Array
    up: Array

    @classmethod
    def facing(cls, parts: tuple[Part, ...]) -> "Camera":
        """The camera whose frame the object just fills, whatever way the table is turned."""
        turns = [_rotation(0, -angle) for angle in range(0, 360, 5)]
        across = [edge for turn in turns for part in parts for edge in _extent(part, turn @ RIGHT)]
        up = [edge for turn in turns for part in parts for edge in _extent(part, turn @ UP)]
        middle = (max(up) + min(up)) / 2
        scale = max(*map(abs, across), max(up) - middle) / FILL
        rays = SIDE * OVERSAMPLE
        steps = ((np.arange(rays) + 0.5) / rays * 2 - 1) * scale
        return cls(steps, middle - steps)


def view(parts: tuple[Part, ...], camera: Camera, angle: float) -> NDArray[np.uint8]:
    """The object with the table turned by `angle` degrees: [SIDE, SIDE, 3]."""
    turn = _rotation(0, -angle)  # from the room into the object's coordinates
    right, up, forward = turn @ RIGHT, turn @ UP, turn @ FORWARD
    rays = len(camera.across)
    nearest, owner = np.full((rays, rays), FAR), np.full((rays, rays), -1)
    cast = []
    for i, part in enumerate(parts):
        # Only the rays that can meet this part.
        (left, end), (low, high) = _extent(part, right), _extent(part, up)
        window = (_between(camera.up, low, high), _between(camera.across, left, end))
        inverse = np.linalg.inv(part.axes)
        columns = (inverse @ right)[:, None] * camera.across[window[1]]
        rows = (inverse @ up)[:, None] * camera.up[window[0]] + (inverse @ (-10 * forward - part.centre))[:, None]
        starts = rows[:, :, None] + columns[:, None, :]
        direction = inverse @ forward
        distance = SOLIDS[part.solid][0](starts.reshape(3, -1), direction, part.shape).reshape(starts.shape[1:])
        owner[window] = np.where(distance < nearest[window], i, owner[window])
        nearest[window] = np.minimum(distance, nearest[window])
        cast.append((window, starts, direction, distance))
    colour = np.zeros((3, rays, rays))
    for i, (window, starts, direction, distance) in enumerate(cast):
        own = np.flatnonzero(owner[window] == i)
        hits = starts.reshape(3, -1).take(own, axis=1) + direction[:, None] * distance.ravel().take(own)
        shaded = np.zeros((3, distance.size))
        shaded[:, own] = _shade(parts[i], hits, right, up, forward)
        colour[:, *window] += shaded.reshape(starts.shape)
    quarters = colour[:, 0::2] + colour[:, 1::2]
    pixels = (quarters[:, :, 0::2] + quarters[:, :, 1::2]) * (255 / OVERSAMPLE**2)
    return np.ascontiguousarray(np.rint(np.minimum(pixels, 255)).astype(np.uint8).transpose(1, 2, 0))


def _between(positions: Array, low: float, high: float) -> slice:
    inside = np.flatnonzero((positions >= low) & (positions <= high))
    return slice(inside[0], inside[-1] + 1) if inside.size else slice(0)


def _shade(part: Part, hits: Array, right: Array, up: Array, forward: Array) -> Array:
    """Colours [3, n] of hit points [3, n] of a part: its texture, lit from the upper left of the camera."""
    normal = np.linalg.inv(part.axes).T @ SOLIDS[part.solid][1](hits, part.shape)
    nx, ny, nz = normal
    normal /= np.sqrt(nx * nx + ny * ny + nz * nz)
    light = LIGHT[0] * right + LIGHT[1] * up + LIGHT[2] * forward
    half = (light - forward) / np.linalg.norm(light - forward)
    size = np.sqrt((part.axes**2).sum(axis=0))
    weight = PATTERNS[part.pattern]((part.wave * size) @ hits + part.phase[:, None])
    first, second = part.colours[:, :, None]
    shine = np.maximum(half @ normal, 0)
    for _ in range(5):
        shine = shine * shine  # to the 32nd: Blinn's highlight
    return (first + (second - first) * weight) * (0.28 + 0.75 * np.maximum(light @ normal, 0)) + 0.25 * shine


class Turntable:
    """The views of objects 1..objects: `obj7__355.png`, 128x128 RGB.

    Raises:
        UsageError: fewer than two objects or views, or views less than 1 degree apart.
    """

    titles: Mapping[str, str] = {}
    identity = ""

    def __init__(self, seed: int, objects: int, views: int) -> None:
        if objects < 2:
            raise UsageError(f"{objects} object(s) cannot be told apart: at least 2")
        if not 2 <= views <= 360:
            raise UsageError(f"{views} views do not work: from 2 to 360, at whole degrees (72 is every 5 degrees)")
        self.seed, self.views = seed, views
        self.angles = [360 * i // views for i in range(views)]
        self.labels = [f"obj{number}" for number in range(1, objects + 1)]

    def items(self, labels: Sequence[str]) -> list[Item]:
        return [
            Item(label, f"{label}__{angle}.png", group=label, angle=angle, handle=number)
            for number, label in enumerate(self.labels, 1)
            if label in labels
            for angle in self.angles
        ]

    def contents(self, items: Sequence[Item]) -> Iterator[bytes]:
        # Raises the size above which the C library returns freed memory to the system at once, and has every
        # temporary array paid for in page faults again: twice as fast.
        np.empty(24 << 20, np.uint8)
        cores = len(os.sched_getaffinity(0))
        wanted: dict[int, list[int]] = {}
        for item in items:
            wanted.setdefault(item.handle, []).append(item.angle)
        # Threads, since numpy works outside the interpreter lock: nothing is forked in a process that may hold MPI.
        with ThreadPoolExecutor(cores) as pool:
            left = iter(wanted.items())
            ahead = deque(pool.submit(_render, self.seed, *one) for one in islice(left, 2 * cores))
            while ahead:
                yield from ahead.popleft().result()
                ahead.extend(pool.submit(_render, self.seed, *one) for one in islice(left, 1))


def _render(seed: int, number: int, angles: Sequence[int]) -> list[bytes]:
    parts = design(seed, number)
    camera = Camera.facing(parts)
    return [png(view(parts, camera, angle)) for angle in angles]


def open_source(recipe: "Recipe", options: Mapping[str, Any], place: Path | None) -> Turntable:
    if place:
        raise UsageError(f"{recipe.name} takes no images from elsewhere: drop --archive or --source")
    return Turntable(options["seed"], options["objects"], options["views"])
