"""A folder of images, and what it is packed into."""

import pytest
from helpers import archives
from helpers.packed_sets import IN_A_GROUP, pack

from hvdtrain.data import packing


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("folder")
    for part, first in (("TrainData", 0), ("ValidationData", 100)):
        for i, name in enumerate(("cat", "dog")):
            files = {
                f"{k}.{k}.png": archives.picture(first + 20 * i + k, (40, 36)) for k in range(12)
            }
            archives.lay_out(root / part / name, files)
    return root


@pytest.fixture
def few_rows(monkeypatch):
    monkeypatch.setattr(packing, "GROUP_ROWS", range(IN_A_GROUP, IN_A_GROUP + 1))


@pytest.fixture
def out(folder, tmp_path, monkeypatch, few_rows):
    """A folder that was packed in small files; with an empty cache."""
    monkeypatch.setenv("HVDTRAIN_CACHE", str(tmp_path / "cache"))
    assert pack(folder, tmp_path / "packed") == IN_A_GROUP
    return tmp_path / "packed"
