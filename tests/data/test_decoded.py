"""Decoded images of an earlier process: the same pixels, and none of files that have changed."""

import os

import pytest
import torch
from helpers.jobs import make_images
from PIL import Image

from hvdtrain.data import decoded, file_states
from hvdtrain.data.folder import scan
from hvdtrain.data.loader import Loader

SIDE = 32
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache, which keeps few images too, however lately their files have changed."""
    monkeypatch.setenv("HVDTRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(decoded, "KEPT_IMAGES", 1)
    monkeypatch.setattr(file_states, "SETTLED_S", -3600.0)
    return tmp_path / "cache" / "decoded"


@pytest.fixture
def root(tmp_path):
    make_images(tmp_path / "data", 3, 2, 8)
    return tmp_path / "data"


@pytest.fixture
def opened(monkeypatch):
    """The numbers of the images that were decoded."""
    numbers = []
    decode = Loader._decode

    def note(self, index, *rest):
        numbers.append(index)
        return decode(self, index, *rest)

    monkeypatch.setattr(Loader, "_decode", note)
    return numbers


def load(root, side=SIDE, **options):
    return Loader(scan(root).train, side, 2, **options).cache


def files(cache):
    return sorted(cache.iterdir()) if cache.exists() else []


def test_an_earlier_process_has_decoded_the_images(root, cache, opened):
    first = load(root)
    assert len(opened) == 6
    again = load(root)
    assert torch.equal(again, first) and len(opened) == 6
    assert first[:, 0, 0, 0].tolist() == [0, 1, 2, 0, 1, 2]
    assert len(files(cache)) == 1


@pytest.mark.parametrize("soon", [(), [1]])
def test_few_steps_need_no_image_that_was_decoded_earlier(root, opened, soon):
    load(root)
    opened.clear()
    assert torch.equal(load(root, soon=soon), load(root))
    assert opened == []


def test_a_file_that_has_changed_is_decoded_again(root, opened):
    load(root)
    image = root / "TrainData" / "a" / "1.png"
    before = image.stat()
    Image.new("RGB", (8, 8), (7, 0, 0)).save(image)
    assert image.stat().st_size == before.st_size
    os.utime(image, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert load(root)[1, 0, 0, 0] == 7
    assert len(opened) == 12


def test_images_of_another_size_or_other_code_are_others(root, cache, opened, monkeypatch):
    load(root)
    load(root, side=33)
    load(root, resize=40)
    monkeypatch.setattr(decoded.PIL, "__version__", "0")
    load(root)
    monkeypatch.setattr(decoded, "_CODE", b"other code")
    load(root)
    monkeypatch.setattr(decoded.ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    load(root)
    assert len(opened) == 36
    assert len(files(cache)) == 6


def test_no_other_user_reads_or_writes_what_is_kept(root, cache, opened, monkeypatch):
    first = load(root)
    [file] = files(cache)
    assert file.stat().st_mode & 0o077 == 0
    link = file.with_name("link")
    file.rename(link)
    file.symlink_to(link)
    assert torch.equal(load(root), first) and len(opened) == 12
    file.unlink()
    os.mkfifo(file)
    assert torch.equal(load(root), first) and len(opened) == 18
    file.unlink()
    load(root)
    uid = os.geteuid()
    monkeypatch.setattr(decoded.os, "geteuid", lambda: uid + 1)
    assert torch.equal(load(root), first) and len(opened) == 30


@pytest.mark.parametrize(
    "spoil",
    [
        lambda content: b"",
        lambda content: content[:-1],
        lambda content: content[:-1] + bytes([content[-1] ^ 1]),
        lambda content: bytes(len(content)),
    ],
    ids=["empty", "cut off", "other pixels", "zeros"],
)
def test_a_file_of_the_cache_that_is_spoiled_is_none(root, cache, opened, spoil):
    first = load(root)
    [file] = files(cache)
    file.write_bytes(spoil(file.read_bytes()))
    assert torch.equal(load(root), first) and len(opened) == 12
    assert torch.equal(load(root), first) and len(opened) == 12  # it is whole again


def test_a_cache_that_cannot_be_written_is_none(root, tmp_path, monkeypatch):
    (tmp_path / "a file").touch()
    monkeypatch.setenv("HVDTRAIN_CACHE", str(tmp_path / "a file" / "cache"))
    assert torch.equal(load(root), load(root))


def test_what_is_not_kept(root, cache, monkeypatch):
    load(root, soon=range(5))
    with monkeypatch.context() as patch:
        patch.setattr(decoded, "KEPT_IMAGES", 7)
        load(root)
    with monkeypatch.context() as patch:
        patch.setattr(decoded, "MOST_BYTES", 6 * 3 * SIDE * SIDE - 1)
        load(root)
    with monkeypatch.context() as patch:
        patch.setattr(file_states, "SETTLED_S", 3600.0)
        load(root)
    assert files(cache) == []
    load(root)
    assert len(files(cache)) == 1


def test_images_that_change_while_they_are_decoded_are_not_kept(root, cache):
    samples = scan(root).train
    kept = decoded.decoded_images(samples, SIDE, 0)
    pixels = load(root, soon=())
    (root / "TrainData" / "a" / "1.png").touch()
    kept.write(pixels)
    assert files(cache) == []


def test_the_oldest_make_room(root, cache, monkeypatch):
    monkeypatch.setattr(decoded, "MOST_FILES", 2)
    written = []
    for side in (32, 33, 34):
        load(root, side=side)
        [new] = set(files(cache)) - set(written)
        os.utime(new, (side, side))
        written.append(new)
    assert files(cache) == sorted(written[1:])
