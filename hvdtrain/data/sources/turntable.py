"""Renders views of textured solids on a turntable, named and sized like COIL-100's images, but free to use.

The camera is orthographic and looks slightly down, so all rays of a view have the same direction, and a whole view
takes a few array operations. Everything is computed in float64: rounding differences between processors are far below
one step of 8-bit colour, so the same seed gives the same pixels everywhere.
"""

import math
import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.data.image import png
from hvdtrain.data.selection import Item
from hvdtrain.data.sources._solids import FAR, PATTERNS, REACH, SOLIDS, Array
from hvdtrain.data.sources._turntable_objects import Part, design, rotation
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


def _extent(part: Part, axis: Array) -> tuple[float, float]:
    """The smallest and largest coordinate of a part along `axis` [3]."""
    middle, along = part.centre @ axis, part.axes.T @ axis
    reach = REACH[part.solid]
    return float(middle - reach(-along, part.shape)), float(middle + reach(along, part.shape))


@dataclass(frozen=True)
class Camera:
    """Where the rays of all views of an object start: their positions [n] across and up the image plane."""

    across: Array
    up: Array

    @classmethod
    def facing(cls, parts: tuple[Part, ...]) -> "Camera":
        """The camera whose frame the object just fills, at whatever angle the table is turned."""
        turns = [rotation(0, -angle) for angle in range(0, 360, 5)]
        across = [edge for turn in turns for part in parts for edge in _extent(part, turn @ RIGHT)]
        up = [edge for turn in turns for part in parts for edge in _extent(part, turn @ UP)]
        middle = (max(up) + min(up)) / 2
        scale = max(*map(abs, across), max(up) - middle) / FILL
        rays = SIDE * OVERSAMPLE
        steps = ((np.arange(rays) + 0.5) / rays * 2 - 1) * scale
        return cls(steps, middle - steps)


def view(parts: tuple[Part, ...], camera: Camera, angle: float) -> NDArray[np.uint8]:
    """The object with the table turned by `angle` degrees: [SIDE, SIDE, 3]."""
    turn = rotation(0, -angle)  # from the room into the object's coordinates
    right, up, forward = turn @ RIGHT, turn @ UP, turn @ FORWARD
    rays = len(camera.across)
    nearest, owner = np.full((rays, rays), FAR), np.full((rays, rays), -1)
    cast = []
    for i, part in enumerate(parts):
        # Cast only the rays that can hit this part: those within its extent.
        (left, rightmost), (low, high) = _extent(part, right), _extent(part, up)
        window = (_between(camera.up, low, high), _between(camera.across, left, rightmost))
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
        # glibc returns large blocks to the system when they are freed, and each new temporary array costs page faults
        # again. Freeing one block of this size raises glibc's threshold above our arrays' sizes: twice as fast.
        np.empty(24 << 20, np.uint8)
        cores = len(os.sched_getaffinity(0))
        wanted: dict[int, list[int]] = {}
        for item in items:
            wanted.setdefault(item.handle, []).append(item.angle)
        # In threads: numpy releases the interpreter lock, and forking after MPI has started is unsafe.
        with ThreadPoolExecutor(cores) as pool:
            remaining = iter(wanted.items())
            pending = deque(pool.submit(_render, self.seed, *views) for views in islice(remaining, 2 * cores))
            while pending:
                yield from pending.popleft().result()
                pending.extend(pool.submit(_render, self.seed, *views) for views in islice(remaining, 1))


def _render(seed: int, number: int, angles: Sequence[int]) -> list[bytes]:
    parts = design(seed, number)
    camera = Camera.facing(parts)
    return [png(view(parts, camera, angle)) for angle in angles]


def open_source(recipe: "Recipe", options: Mapping[str, Any], images_from: Path | None) -> Turntable:
    if images_from:
        raise UsageError(f"{recipe.name} takes no images from elsewhere: drop --archive or --source")
    return Turntable(options["seed"], options["objects"], options["views"])
