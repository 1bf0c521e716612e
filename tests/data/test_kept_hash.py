"""The hash of a data set is found once, and again as soon as a file has changed."""

import os
import threading
import time

import pytest
from helpers.jobs import JOB, hvdtrain, make_images

from hvdtrain.data import kept_hash
from hvdtrain.data.folder import content_hash, scan
from hvdtrain.data.kept_hash import kept_content_hash


@pytest.fixture
def readings(monkeypatch, tmp_path):
    """How often all images were read; with a cache of the test's own, and files that count as old enough."""
    monkeypatch.setenv("HVDTRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(kept_hash, "SETTLED_S", -3600.0)
    done = []

    def counted(folder):
        done.append(folder.root)
        time.sleep(0.1)  # so that others come meanwhile
        return content_hash(folder)

    monkeypatch.setattr(kept_hash, "content_hash", counted)
    return done


@pytest.fixture
def root(tmp_path):
    make_images(tmp_path / "data", 3, 2, 8)
    return tmp_path / "data"


def test_images_are_read_once_while_they_stay(readings, root):
    found = kept_content_hash(scan(root))
    assert found == content_hash(scan(root))
    assert kept_content_hash(scan(root)) == found
    assert readings == [root]


def replace(image):
    """By one of as many bytes, with its date: as `rsync --times` would."""
    before = image.stat()
    content = bytearray(image.read_bytes())
    content[-1] ^= 1
    image.with_name("new").write_bytes(content)
    os.utime(image.with_name("new"), ns=(before.st_atime_ns, before.st_mtime_ns))
    image.with_name("new").rename(image)
    assert (image.stat().st_size, image.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)


@pytest.mark.parametrize(
    "change",
    [
        replace,
        lambda image: image.write_bytes(image.read_bytes() + b"x"),
        lambda image: image.rename(image.with_name("other.png")),
        lambda image: image.rename(image.parent.with_name("b") / "other.png"),
        lambda image: image.unlink(),
        lambda image: image.with_name("more.png").write_bytes(image.read_bytes()),
    ],
    ids=["replaced by one with its size and date", "longer", "renamed", "of another class", "gone", "one more"],
)
def test_a_change_is_found(change, readings, root):
    before = kept_content_hash(scan(root))
    change(root / "TrainData" / "a" / "1.png")
    after = kept_content_hash(scan(root))
    assert after != before and after == content_hash(scan(root))
    assert len(readings) == 2


def test_files_that_were_just_written_are_not_trusted_to_stay(readings, root, monkeypatch):
    monkeypatch.setattr(kept_hash, "SETTLED_S", 3600.0)
    assert kept_content_hash(scan(root)) == kept_content_hash(scan(root))
    assert len(readings) == 2


def test_several_that_ask_at_the_same_time_read_once(readings, root):
    found = []
    asking = [threading.Thread(target=lambda: found.append(kept_content_hash(scan(root)))) for _ in range(4)]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join()
    assert found == [content_hash(scan(root))] * 4
    assert len(readings) == 1


@pytest.mark.parametrize("kept", ["", "{}", '{"listing": 3}', "null"])
def test_what_was_kept_and_cannot_be_read_is_found_again(kept, readings, root, tmp_path):
    found = kept_content_hash(scan(root))
    [file] = (tmp_path / "cache" / "hashes").iterdir()
    file.write_text(kept)
    assert kept_content_hash(scan(root)) == found == kept_content_hash(scan(root))
    assert len(readings) == 2


def test_without_a_cache_nothing_is_kept_and_nothing_fails(readings, root, monkeypatch):
    monkeypatch.setenv("HVDTRAIN_CACHE", "/proc/no/such")
    assert kept_content_hash(scan(root)) == kept_content_hash(scan(root)) == content_hash(scan(root))
    assert len(readings) == 2


WRITTEN_DOWN = """
from hvdtrain.data import kept_hash
from hvdtrain.world import torch_group
kept_hash.SETTLED_S = -3600.0
read, open_store = kept_hash.content_hash, torch_group.open_store
def log(line):
    with open("order", "a") as file:
        file.write(line + "\\n")
def reading(folder):
    log("reads")
    found = read(folder)
    log("has read")
    return found
def waiting(*arguments):
    log("waits for others")
    return open_store(*arguments)
kept_hash.content_hash, torch_group.open_store = reading, waiting
"""


@pytest.mark.timeout(120)
def test_of_a_host_one_rank_reads_and_nobody_waits_for_others_before_it_has(root, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = ["--mode", "ddp", "--model", "cnn", "--dataset", "./data", "--image-size", "28", "--batch-size", "4"]
    done = hvdtrain("train", *JOB[4:], *options, "--out", "run", ranks=2, first=WRITTEN_DOWN,
                    env={"HVDTRAIN_CACHE": str(tmp_path / "cache")})  # fmt: skip
    assert done.returncode == 0, done.stdout
    order = (tmp_path / "order").read_text().splitlines()
    assert order == ["reads", "has read", "waits for others", "waits for others"]
