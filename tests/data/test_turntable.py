"""The rendered objects: named and sized like COIL-100, each different, whatever is asked for beside them."""

import io

import numpy as np
import pytest
from PIL import Image

from hvdtrain.data.build import build
from hvdtrain.data.folder import scan
from hvdtrain.data.sources import turntable


def test_views_are_named_and_sized_like_coil_100(small):
    found = scan(small)
    assert found.classes == ("obj1", "obj2", "obj3")
    names = {path.name for path, _ in (*found.train, *found.validation)}
    assert names == {f"obj{n}__{angle}.png" for n in (1, 2, 3) for angle in range(0, 360, 36)}
    for path, _ in found.train:
        with Image.open(path) as image:
            assert (image.mode, image.size, image.format) == ("RGB", (128, 128), "PNG")
            assert image.getpixel((0, 0)) == (0, 0, 0)


def images(seed, objects, views):
    """{file name: encoded image} of a whole source."""
    source = turntable.Turntable(seed, objects, views)
    items = source.items(source.labels)
    return dict(zip([item.name for item in items], source.contents(items), strict=True))


def test_the_default_angles_are_coils():
    angles = sorted(int(name.split("__")[1][:-4]) for name in images(0, objects=2, views=72))
    assert angles == sorted(2 * list(range(0, 360, 5)))


def test_an_object_does_not_depend_on_how_many_there_are():
    few, many = images(5, objects=2, views=3), images(5, objects=9, views=3)
    assert len(many) == 27
    assert few.items() <= many.items()


def shown(number, angle, seed=0):
    source = turntable.Turntable(seed, number + 1, views=360)
    item = source.items([f"obj{number}"])[angle]
    return np.asarray(Image.open(io.BytesIO(next(source.contents([item]))))).astype(int)


@pytest.mark.parametrize("number", range(1, 21))
def test_an_object_fills_the_frame_and_looks_different_from_other_sides(number):
    views = [shown(number, angle) for angle in (0, 60, 90, 200)]
    lit = np.any([view.any(axis=2) for view in views], axis=0)
    rows, columns = np.flatnonzero(lit.any(axis=1)), np.flatnonzero(lit.any(axis=0))
    assert max(np.ptp(rows), np.ptp(columns)) > 100  # of 128 pixels
    assert min(rows[0], columns[0]) > 0 and max(rows[-1], columns[-1]) < 127  # nothing is cut off
    for view in views[1:]:
        assert np.abs(view - views[0])[lit].mean() > 8  # of 255


def test_objects_and_seeds_look_different():
    pictures = [shown(number, 30, seed) for number in (1, 2, 19) for seed in (0, 1)]
    for i, picture in enumerate(pictures):
        for other in pictures[:i]:
            assert np.abs(picture - other).mean() > 8


def test_a_flat_folder_is_like_coils_archive(tmp_path):
    folder = build("turntable", tmp_path / "coil-100", objects=2, views=4, flat=True)
    assert sorted(path.name for path in folder.glob("*.png")) == sorted(
        f"obj{n}__{angle}.png" for n in (1, 2) for angle in (0, 90, 180, 270)
    )
    assert [path for path in folder.iterdir() if path.is_dir()] == []
