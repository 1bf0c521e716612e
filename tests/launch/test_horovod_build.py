"""The copy of Horovod's source that is compiled."""

import importlib
import re
from pathlib import Path

import pytest

BUILD = Path(__file__).parents[2] / "launchers" / "horovod-build"


@pytest.fixture
def losses(monkeypatch):
    monkeypatch.syspath_prepend(BUILD)
    return importlib.import_module("hvdtrain_horovod_build.losses")


def source_of(folder, losses):
    """A source that holds what is replaced, and another file."""
    for name, patches in losses.PATCHES.items():
        path = folder / name
        path.parent.mkdir(parents=True)
        path.write_text("before\n" + "\nbetween\n".join(patches) + "\nafter\n", encoding="utf-8")
    (folder / "CMakeLists.txt").write_text("as it is", encoding="utf-8")
    (folder / "build" / "mended").mkdir(parents=True)
    return folder


def test_the_copy_is_mended_and_the_source_is_left_alone(tmp_path, losses):
    source = source_of(tmp_path / "source", losses)
    before = {path: path.read_bytes() for path in source.rglob("*.cc")}
    copy = source / "build" / "mended"
    for _ in range(2):  # a build may be tried again
        assert losses.mended_source(source, copy) == copy
    assert {path: path.read_bytes() for path in before} == before
    assert (copy / "CMakeLists.txt").samefile(source / "CMakeLists.txt")
    assert not (copy / "build").exists()
    for name, patches in losses.PATCHES.items():
        whole = "before\n" + "\nbetween\n".join(patches.values()) + "\nafter\n"
        assert (copy / name).read_text(encoding="utf-8") == whole


def test_another_horovod_is_refused(tmp_path, losses):
    source = source_of(tmp_path / "source", losses)
    (source / "horovod/common/operations.cc").write_text("", encoding="utf-8")
    with pytest.raises(SystemExit, match=re.escape("is this Horovod 0.28.1?")):
        losses.mended_source(source, source / "build" / "mended")
