"""What says that two runs had the same images: without reading many, another as soon as images are
added or renamed.
"""

import json
import os
import shutil
import tomllib

import pytest
from click.testing import CliRunner
from helpers.jobs import make_images

from hvdtrain.base.config.run_config import RunConfig
from hvdtrain.base.world.place import World
from hvdtrain.data import file_states
from hvdtrain.data import identity as identities
from hvdtrain.data.commands import data
from hvdtrain.data.folder import content_hash, scan
from hvdtrain.data.identity import identity


@pytest.fixture
def unread(monkeypatch):
    """Whoever reads all images fails."""
    monkeypatch.setattr(identities, "content_hash", None)


@pytest.fixture
def root(tmp_path):
    make_images(tmp_path / "data", 3, 2, 8)
    return tmp_path / "data"


def spoil(image):
    """Change a file, and not its size."""
    content = bytearray(image.read_bytes())
    content[-1] ^= 1
    image.write_bytes(content)


@pytest.mark.parametrize(
    "change",
    [
        spoil,
        lambda image: image.rename(image.with_name("other.png")),
        lambda image: image.rename(image.parent.with_name("b") / "other.png"),
        lambda image: image.unlink(),
        lambda image: image.with_name("more.png").write_bytes(image.read_bytes()),
    ],
    ids=["changed", "renamed", "of another class", "gone", "one more"],
)
@pytest.mark.parametrize("size", ["small", "large"])
def test_a_change_makes_another_data_set(size, change, root, tmp_path, monkeypatch):
    if size == "large":
        monkeypatch.setattr(identities, "READ_FILES", 0)
    before = identity(scan(root))
    assert before.startswith("sample:") if size == "large" else before == content_hash(scan(root))
    assert identity(scan(shutil.copytree(root, tmp_path / "copy"))) == before
    change(root / "TrainData" / "a" / "1.png")
    assert identity(scan(root)) != before


@pytest.mark.parametrize("limit", ["READ_FILES", "READ_BYTES"])
def test_of_a_large_folder_a_sample_is_read(limit, unread, root, monkeypatch):
    monkeypatch.setattr(identities, limit, 9)
    monkeypatch.setattr(identities, "SAMPLE", 2)
    before = identity(scan(root))
    spoil(root / "TrainData" / "a" / "1.png")  # not among the two of the part
    assert identity(scan(root)) == before
    spoil(root / "TrainData" / "a" / "0.png")
    assert identity(scan(root)) != before


def test_a_large_built_folder_and_copies_of_it_have_what_it_was_built_with(
    unread, small, tmp_path, monkeypatch
):
    monkeypatch.setattr(identities, "READ_FILES", 0)
    built = tomllib.loads((small / "dataset.toml").read_text())["content"]["hash"]
    copy = shutil.copytree(small, tmp_path / "copy")
    assert built == content_hash(scan(small)) == identity(scan(small)) == identity(scan(copy))
    spoil(next(scan(copy).images))
    assert identity(scan(copy)).startswith("sample:")
    result = CliRunner().invoke(data, ["check", str(copy)])
    assert "WRONG: the images are not those that it was built with" in result.stdout


@pytest.fixture
def kept(root, tmp_path, monkeypatch):
    """The cache keeps the hash of few images too, however lately they have changed."""
    monkeypatch.setenv("HVDTRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(identities, "KEPT_IMAGES", 1)
    monkeypatch.setattr(file_states, "SETTLED_S", -3600.0)
    return identity(scan(root))


def change_time_of(image, before):
    """Set the time of writing to what it was: that of the last change is another."""
    os.utime(image, ns=(before.st_atime_ns, before.st_mtime_ns))
    while image.stat().st_ctime_ns == before.st_ctime_ns:  # the clock of files is coarse
        os.utime(image, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_images_are_read_once_a_host_until_a_file_changes(kept, root, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(identities, "content_hash", None)
        assert identity(scan(root)) == kept
    image = root / "TrainData" / "a" / "1.png"
    before = image.stat()
    spoil(image)
    change_time_of(image, before)
    assert image.stat().st_mtime_ns == before.st_mtime_ns
    assert identity(scan(root)) == content_hash(scan(root)) != kept


def test_a_cache_that_is_spoiled_or_cannot_be_written_is_none(kept, root, tmp_path, monkeypatch):
    [file] = (tmp_path / "cache" / "hashes").iterdir()
    for content in ("[", "{}", '["a", "b"]', "[1, 2]"):
        file.write_text(content)
        assert identity(scan(root)) == kept
    (tmp_path / "a file").touch()
    monkeypatch.setenv("HVDTRAIN_CACHE", str(tmp_path / "a file" / "cache"))
    assert identity(scan(root)) == kept


def test_a_file_that_may_change_again_unnoticed_is_read_each_time(
    kept, root, tmp_path, monkeypatch
):
    monkeypatch.setattr(file_states, "SETTLED_S", 3600.0)
    monkeypatch.setenv("HVDTRAIN_CACHE", str(tmp_path / "another"))
    assert identity(scan(root)) == kept and not (tmp_path / "another").exists()


def test_a_server_looks_at_no_images(tmp_path):
    from hvdtrain.job.rank.prepare import prepare
    from hvdtrain.job.training.resume import is_finished

    config = RunConfig(mode="ps-async", servers=1, dataset=str(tmp_path / "nosuch"), epochs=3)
    world = World("mpirun", rank=0, size=3, local_rank=0, local_size=3, servers=1)
    assert not prepare(config, world, tmp_path / "run", 1, resuming=False).finished
    (tmp_path / "run").mkdir()
    config.write(tmp_path / "run" / "config.toml")
    # three epochs of 64 samples in batches of 32 have 6 steps
    for steps, finished in (
        (6, True),
        (5, False),
    ):
        summary = {"steps": steps, "wall_s": 1.0, "evaluations": []}
        (tmp_path / "run" / "summary.json").write_text(json.dumps(summary))
        (tmp_path / "run" / "manifest.json").write_text(json.dumps({"train_samples": 64}))
        assert is_finished(tmp_path / "run", config, None) == finished
        assert prepare(config, world, tmp_path / "run", 1, resuming=True).finished == finished
