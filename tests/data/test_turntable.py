"""The drawn objects: named and sized like COIL-100, each different."""

import io

import numpy as np
import pytest
from PIL import Image

from hvdtrain.data.build import build
from hvdtrain.data.folder import scan
from hvdtrain.data.sources import turntable


def test_views_are_named_and_sized_like_coil_100(small):
    images = scan(small)
    assert images.classes == ("obj1", "obj2", "obj3")
    names = {path.name for path, _ in (*images.train, *images.validation)}
    assert names == {f"obj{n}__{angle}.png" for n in (1, 2, 3) for angle in range(0, 360, 36)}
    for path, _ in images.train:
        with Image.open(path) as image:
            assert (image.mode, image.size, image.format) == ("RGB", (128, 128), "PNG")
            assert image.getpixel((0, 0)) == (0, 0, 0)


def picture(seed, number, angle, noise=0.0):
    drawn = turntable.view(seed, number, angle, noise)
    return np.asarray(Image.open(io.BytesIO(drawn))).astype(int)


@pytest.mark.parametrize("number", range(1, 21))
def test_an_object_is_in_the_frame_and_looks_different_from_other_sides(number):
    views = [picture(0, number, angle) for angle in (0, 60, 90, 200)]
    lit = np.any([view.any(axis=2) for view in views], axis=0)
    rows, columns = np.flatnonzero(lit.any(axis=1)), np.flatnonzero(lit.any(axis=0))
    assert max(np.ptp(rows), np.ptp(columns)) > 64  # of 128 pixels
    assert min(rows[0], columns[0]) > 0 and max(rows[-1], columns[-1]) < 127  # nothing is cut off
    for view in views[1:]:
        assert np.abs(view - views[0])[lit].mean() > 8  # of 255


def test_objects_and_seeds_look_different():
    pictures = [picture(seed, number, 30) for number in (1, 2, 19) for seed in (0, 1)]
    for i, one in enumerate(pictures):
        for other in pictures[:i]:
            assert np.abs(one - other).mean() > 8


def test_noise_is_another_in_each_view_and_the_same_each_time():
    clean = picture(0, 1, 30)
    noisy = picture(0, 1, 30, 0.7)
    assert np.array_equal(noisy, picture(0, 1, 30, 0.7))
    squares = noisy - 0.3 * clean  # what is left is 0.7 times the square's colour
    others = picture(0, 1, 35, 0.7) - 0.3 * picture(0, 1, 35)
    assert np.abs(squares - others).mean() > 20
    assert np.ptp(squares[:4, :4], axis=(0, 1)).max() <= 2  # one square, but for rounding
    assert 0 <= squares.min() + 1 and squares.max() <= 0.7 * 255 + 1


def test_a_noisy_turntable_is_built_by_its_name(tmp_path):
    images = scan(build("noisy-turntable", tmp_path / "out", objects=2, views=4))
    assert (len(images.train), len(images.validation)) == (4, 4)
