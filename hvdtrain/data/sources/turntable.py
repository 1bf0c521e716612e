"""Draws objects on a turntable, named and sized like COIL-100's images, but free to use.

An object is a heap of coloured balls. The camera looks from the side, without perspective: a ball is a disc at every
angle, and painted from the back to the front they hide each other as they should.
"""

import math
from functools import partial
from pathlib import Path
from random import Random

from hvdtrain.data.image import png
from hvdtrain.data.recipe import Recipe
from hvdtrain.data.selection import Generated, Item
from hvdtrain.data.sources import Source

IS_GENERATED = True
SIDE = 128  # pixels, as in COIL-100
DOTS = 4  # of a pixel, in each direction: smooth edges
REACH = 1.5  # from the axis to the edge of the frame, in which no part of a ball is further away
SHADES = ((1.0, 0.6), (0.8, 0.8), (0.5, 1.0))  # discs of a ball: size, and light, which comes from the upper left


def view(seed: int, number: int, angle: int) -> bytes:
    """A PNG, 128x128 RGB, of object `number` of a seed with the table turned by `angle` degrees.

    Coordinates are rounded to whole dots, so the same seed gives the same pixels everywhere.
    """
    from PIL import Image, ImageDraw

    random = Random(f"turntable {seed} {number}")
    discs = []  # depth, across, down, radius, colour
    for _ in range(random.randint(6, 12)):
        radius, around = random.uniform(0.2, 0.5), math.radians(random.uniform(0, 360) + angle)
        away, down = random.uniform(0, 0.9), random.uniform(-0.9, 0.9)
        colour = [random.randint(0, 255) for _ in range(3)]
        discs.append((away * math.sin(around), away * math.cos(around), down, radius, colour))
    image = Image.new("RGB", (SIDE * DOTS, SIDE * DOTS))
    draw = ImageDraw.Draw(image)
    scale = SIDE * DOTS / 2 / REACH
    for _, across, down, radius, colour in sorted(discs):
        for size, light in SHADES:
            shift = REACH - (1 - size) * radius / 2
            x, y, r = (round(length * scale) for length in (across + shift, down + shift, size * radius))
            draw.ellipse((x - r, y - r, x + r, y + r), fill=tuple(round(light * channel) for channel in colour))
    return png(image.reduce(DOTS))


def open_source(recipe: Recipe, images_from: Path | None) -> Source:
    """The views of objects 1 to `objects`: `obj7__355.png`."""
    objects, views = recipe.options["objects"], recipe.options["views"]
    items = []
    for number in range(1, objects + 1):
        for angle in (360 * i // views for i in range(views)):
            label, handle = f"obj{number}", Generated(partial(view, recipe.options["seed"], number, angle))
            items.append(Item(label, f"{label}__{angle}.png", group=label, angle=angle, handle=handle))
    return Source(lambda: items)
