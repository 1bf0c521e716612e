"""Drawn objects on a turntable, named and sized like COIL-100's images, but free to use.

An object is a heap of coloured balls. The camera looks from the side, without perspective, so that
a ball is a disc at every angle. Discs are painted from the back to the front. With noise, each view
is seen through coloured squares of its own, so that objects are hard to tell apart.
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
DOTS = 4  # dots of a pixel in each direction, for smooth edges
REACH = 1.5  # distance from the axis to the edge of the frame; every ball lies within it
# The discs that shade a ball: size and brightness. The light comes from the upper left.
SHADES = ((1.0, 0.6), (0.8, 0.8), (0.5, 1.0))
SQUARES = 32  # squares of noise in each direction, which an image shrunk to as many pixels keeps


def view(seed: int, number: int, angle: int, noise: float = 0.0) -> bytes:
    """Draws a view of an object, as a PNG of 128x128 pixels in RGB.

    Coordinates are rounded to whole dots, so that the same seed gives the same pixels everywhere.

    Args:
        seed: The seed of the data set.
        number: The number of the object.
        angle: Degrees by which the table is turned.
        noise: The share of the noise in each pixel, from 0 to 1.
    """
    from PIL import Image, ImageDraw

    random = Random(f"turntable {seed} {number}")
    discs = []  # depth, across, down, radius, colour
    for _ in range(random.randint(6, 12)):
        radius = random.uniform(0.2, 0.5)
        around = math.radians(random.uniform(0, 360) + angle)
        away = random.uniform(0, 0.9)
        down = random.uniform(-0.9, 0.9)
        colour = [random.randint(0, 255) for _ in range(3)]
        discs.append((away * math.sin(around), away * math.cos(around), down, radius, colour))
    image = Image.new("RGB", (SIDE * DOTS, SIDE * DOTS))
    draw = ImageDraw.Draw(image)
    scale = SIDE * DOTS / 2 / REACH
    for _, across, down, radius, colour in sorted(discs):
        for size, light in SHADES:
            shift = REACH - (1 - size) * radius / 2
            x = round((across + shift) * scale)
            y = round((down + shift) * scale)
            r = round(size * radius * scale)
            fill = tuple(round(light * channel) for channel in colour)
            draw.ellipse((x - r, y - r, x + r, y + r), fill=fill)
    seen = image.reduce(DOTS)
    if noise:
        drawn = Random(f"turntable {seed} {number} noise {angle}").randbytes(3 * SQUARES**2)
        squares = Image.frombytes("RGB", (SQUARES, SQUARES), drawn)
        squares = squares.resize((SIDE, SIDE), Image.Resampling.NEAREST)
        seen = Image.blend(seen, squares, noise)
    return png(seen)


def open_source(recipe: Recipe, images_from: Path | None) -> Source:
    """Opens the views of objects 1 to `objects`, with names such as `obj7__355.png`."""
    seed = recipe.options["seed"]
    views = recipe.options["views"]
    noise = recipe.options["noise"]
    items = []
    for number in range(1, recipe.options["objects"] + 1):
        label = f"obj{number}"
        for i in range(views):
            angle = 360 * i // views
            name = f"{label}__{angle}.png"
            handle = Generated(partial(view, seed, number, angle, noise))
            items.append(Item(label, name, group=label, angle=angle, handle=handle))
    return Source(lambda: items)
