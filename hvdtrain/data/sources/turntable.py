"""Draws views of coloured solids on a turntable, named and sized like COIL-100's images, but free to use.

An object is a tower of prisms and their like, whose sides each have a colour. The camera is orthographic and looks
slightly down, so that what stands higher hides what is below it: painted from the bottom up, sides that face away left
out, a picture needs no depths. Corners are rounded to whole dots, so the same seed gives the same pixels everywhere.
"""

import colorsys
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.data.image import png
from hvdtrain.data.selection import Item
from hvdtrain.errors import UsageError

if TYPE_CHECKING:
    from hvdtrain.data.recipe import Recipe

SIDE = 128  # pixels, as in COIL-100
DOTS = 4  # of a pixel, in each direction: smooth edges
FILL = 0.94  # part of the frame that an object fills, like COIL-100's normalised views
ELEVATION = math.radians(24)  # of the camera above the turntable
# Of x to the right, y away from the camera and z up.
LIGHT = np.array([-0.45, -0.70, 0.55]) / np.linalg.norm([-0.45, -0.70, 0.55])
FORWARD = np.array([0.0, math.cos(ELEVATION), -math.sin(ELEVATION)])
UP = np.array([0.0, math.sin(ELEVATION), math.cos(ELEVATION)])

Face = tuple[NDArray[np.float64], NDArray[np.float64]]  # corners [n, 3], anticlockwise from outside; colour [3] in 0..1


def design(seed: int, number: int) -> list[Face]:
    """The faces of object `number` (from 1) of a seed, from the bottom up, without those that nobody sees."""
    random = Random(f"turntable {seed} {number}")
    # The golden ratio spreads the hues of any number of objects evenly.
    hue = Random(f"turntable {seed}").random() + number * 0.618034
    faces: list[Face] = []
    height = 0.0
    for _ in range(random.randint(2, 4)):
        sides = random.choice((3, 4, 5, 6, 20))
        corners = random.uniform(0, 2 * math.pi) + 2 * math.pi * np.arange(sides) / sides
        circle = np.stack([np.cos(corners), np.sin(corners), 0 * corners], axis=1)
        middle = np.array([random.uniform(-0.25, 0.25), random.uniform(-0.25, 0.25), height])
        height += random.uniform(0.3, 0.9)
        low = middle + random.uniform(0.4, 1) * circle
        high = [middle[0], middle[1], height] + random.uniform(0.1, 1) * circle
        for i in range(sides):
            faces.append((np.stack([low[i - 1], low[i], high[i], high[i - 1]]), _colour(random, hue)))
        faces.append((high, _colour(random, hue)))
        hue += random.choice((0.0, 0.33, 0.5))
    return faces


def _colour(random: Random, hue: float) -> NDArray[np.float64]:
    hue = (hue + random.uniform(-0.06, 0.06)) % 1
    return np.array(colorsys.hsv_to_rgb(hue, random.random(), random.uniform(0.4, 1)))


def view(faces: Sequence[Face], angle: float) -> NDArray[np.uint8]:
    """The object with the table turned by `angle` degrees: [SIDE, SIDE, 3]. At every angle it just fits the frame."""
    from PIL import Image, ImageDraw

    points = np.concatenate([corners for corners, _ in faces])
    reach = np.hypot(points[:, 0], points[:, 1])
    top = (points[:, 2] * UP[2] + reach * UP[1]).max()
    bottom = (points[:, 2] * UP[2] - reach * UP[1]).min()
    scale = SIDE * DOTS * FILL / max(2 * reach.max(), top - bottom)
    a = math.radians(angle)
    turn = np.array([[math.cos(a), -math.sin(a), 0], [math.sin(a), math.cos(a), 0], [0, 0, 1]])
    image = Image.new("RGB", (SIDE * DOTS, SIDE * DOTS))
    draw = ImageDraw.Draw(image)
    for corners, colour in faces:
        turned = corners @ turn.T
        normal = np.cross(turned[1] - turned[0], turned[2] - turned[1])
        if normal @ FORWARD < 0:
            lit = 0.4 + 0.6 * max(0.0, normal @ LIGHT / np.linalg.norm(normal))
            across = SIDE * DOTS / 2 + turned[:, 0] * scale
            down = SIDE * DOTS / 2 - (turned @ UP - (top + bottom) / 2) * scale
            outline = np.rint(np.stack([across, down], axis=1)).astype(int)
            shade = np.rint(255 * lit * colour).astype(int)
            draw.polygon([(x, y) for x, y in outline.tolist()], fill=tuple(shade.tolist()))
    return np.asarray(image.reduce(DOTS))


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
        self.seed = seed
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
        for item in items:
            yield png(view(design(self.seed, item.handle), item.angle))


def open_source(recipe: "Recipe", options: Mapping[str, Any], images_from: Path | None) -> Turntable:
    if images_from:
        raise UsageError(f"{recipe.name} takes no images from elsewhere: drop --archive or --source")
    return Turntable(options["seed"], options["objects"], options["views"])
