"""What says that two runs had the same images: found without reading many, another as soon as a file has changed."""

import json
import os
import shutil
import subprocess
import threading
import time
import tomllib

import pytest
from click.testing import CliRunner
from helpers.jobs import JOB, hvdtrain, make_images

from hvdtrain.config.run_config import RunConfig
from hvdtrain.data import identity as identities
from hvdtrain.data.commands import data
from hvdtrain.data.folder import content_hash, scan
from hvdtrain.data.identity import identity
from hvdtrain.world.place import World


@pytest.fixture
def readings(monkeypatch, tmp_path):
    """How often all images were read; with a cache of the test's own, and files that count as old enough."""
    monkeypatch.setenv("HVDTRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(identities, "SETTLED_S", -3600.0)
    done = []

    def counted(folder):
        done.append(folder.root)
        time.sleep(0.1)  # so that others come meanwhile
        return content_hash(folder)

    monkeypatch.setattr(identities, "content_hash", counted)
    return done


@pytest.fixture
def root(tmp_path):
    make_images(tmp_path / "data", 3, 2, 8)
    return tmp_path / "data"


@pytest.fixture
def large(monkeypatch):
    """Every folder counts as a large one."""
    monkeypatch.setattr(identities, "READ_FILES", 0)


def test_a_small_folder_is_read_once_while_it_stays(readings, root):
    found = identity(scan(root))
    assert found == content_hash(scan(root))
    assert identity(scan(root)) == found
    assert readings == [root]


@pytest.mark.parametrize("limit", ["READ_FILES", "READ_BYTES"])
def test_a_large_folder_is_not_read(limit, readings, root, monkeypatch):
    """Neither are its images: they could be anything of this size."""
    monkeypatch.setattr(identities, limit, 9)
    for path in scan(root).images:
        path.write_bytes(b"x" * 20)
    found = identity(scan(root))
    assert found.startswith("listing:") and identity(scan(root)) == found
    assert readings == []


def test_a_copy_of_a_large_folder_that_keeps_times_has_its_identity(readings, root, large, tmp_path):
    for number, path in enumerate(scan(root).images):
        os.utime(path, (1e9, 1e9 + number + number / 7))
    found = identity(scan(root))
    subprocess.run(["cp", "-a", root, tmp_path / "copy"], check=True)
    assert identity(scan(tmp_path / "copy")) == found
    shutil.copytree(root, tmp_path / "later", copy_function=shutil.copyfile)
    assert identity(scan(tmp_path / "later")) != found
    (tmp_path / "copy" / "TrainData" / "a" / "1.png").touch()
    assert identity(scan(tmp_path / "copy")) != found


def test_a_link_more_to_each_file_changes_nothing(readings, root, large, tmp_path):
    """It does change the file's time of change."""
    found = identity(scan(root))
    time.sleep(0.02)
    subprocess.run(["cp", "-al", root, tmp_path / "linked"], check=True)
    assert identity(scan(root)) == found


@pytest.mark.parametrize("copy", ["cp", "cp -a"])
@pytest.mark.parametrize("size", ["small", "large"])
def test_what_was_built_is_read_by_nobody_on_any_host(size, copy, readings, small, tmp_path, monkeypatch):
    monkeypatch.setattr(identities, "READ_FILES", 10**6 if size == "small" else 0)
    built = tomllib.loads((small / "dataset.toml").read_text())["content"]
    assert built["hash"] == content_hash(scan(small))
    subprocess.run([*copy.split(), "-r", small, tmp_path / "copy"], check=True)
    for folder in (small, tmp_path / "copy"):
        assert identity(scan(folder)) == identity(scan(folder)) == built["hash"]
    assert readings == []


def test_what_was_built_and_changed_since_is_another(readings, small, large, tmp_path):
    copy = shutil.copytree(small, tmp_path / "copy")
    before = identity(scan(copy))
    [first, second, *_] = scan(copy).images
    content = bytearray(first.read_bytes())
    content[-1] ^= 1
    first.write_bytes(content)  # of its size: its time alone tells
    os.utime(first, (2e9, 2e9))
    changed = identity(scan(copy))
    assert changed != before and changed.startswith("listing:")
    result = CliRunner().invoke(data, ["check", str(copy)])
    assert "WRONG: the images are not those that it was built with" in result.stdout
    second.unlink()
    assert identity(scan(copy)) not in (before, changed)


def test_a_large_folder_that_was_checked_is_known_by_its_contents(readings, root, large):
    before = identity(scan(root))
    assert "the same image is in two parts" in CliRunner().invoke(data, ["check", str(root)]).stdout  # it did read them
    assert identity(scan(root)) == content_hash(scan(root)) != before


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
    before = identity(scan(root))
    change(root / "TrainData" / "a" / "1.png")
    after = identity(scan(root))
    assert after != before and after == content_hash(scan(root))
    assert len(readings) == 2


def test_files_that_were_just_written_are_not_trusted_to_stay(readings, root, monkeypatch):
    monkeypatch.setattr(identities, "SETTLED_S", 3600.0)
    assert identity(scan(root)) == identity(scan(root))
    assert len(readings) == 2


def test_several_that_ask_at_the_same_time_look_once(readings, root, monkeypatch):
    looks, look = [], identities.look
    monkeypatch.setattr(identities, "look", lambda folder: looks.append(folder) or time.sleep(0.1) or look(folder))
    found = []
    asking = [threading.Thread(target=lambda: found.append(identity(scan(root)))) for _ in range(4)]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join()
    assert found == [content_hash(scan(root))] * 4
    assert (len(readings), len(looks)) == (1, 1)


@pytest.mark.parametrize("kept", ["", "{}", '{"identity": 3}', "null"])
def test_what_was_kept_and_cannot_be_read_is_found_again(kept, readings, root, tmp_path):
    found = identity(scan(root))
    [file] = (tmp_path / "cache" / "identities").iterdir()
    file.write_text(kept)
    assert identity(scan(root)) == found == identity(scan(root))
    assert len(readings) == 2


def test_without_a_cache_nothing_is_kept_and_nothing_fails(readings, root, monkeypatch):
    monkeypatch.setenv("HVDTRAIN_CACHE", "/proc/no/such")
    assert identity(scan(root)) == identity(scan(root)) == content_hash(scan(root))
    assert len(readings) == 2


def test_a_server_looks_at_no_images(tmp_path):
    from hvdtrain.rank.work import prepare
    from hvdtrain.training.resume import is_finished

    config = RunConfig(mode="ps-async", servers=1, dataset=str(tmp_path / "nosuch"), epochs=3)
    world = World("mpirun", rank=0, size=3, local_rank=0, local_size=3, servers=1)
    assert not prepare(config, world, tmp_path / "run", 1, resuming=False).finished
    (tmp_path / "run").mkdir()
    config.write(tmp_path / "run" / "config.toml")
    for steps, finished in ((6, True), (5, False)):  # three epochs of 64 samples in batches of 32 have 6 steps
        summary = {"steps": steps, "wall_s": 1.0, "evaluations": []}
        (tmp_path / "run" / "summary.json").write_text(json.dumps(summary))
        (tmp_path / "run" / "manifest.json").write_text(json.dumps({"train_samples": 64}))
        assert is_finished(tmp_path / "run", config, None) == finished
        assert prepare(config, world, tmp_path / "run", 1, resuming=True).finished == finished


WRITTEN_DOWN = """
from hvdtrain.data import identity
from hvdtrain.coordination.meeting import Meeting
identity.SETTLED_S = -3600.0
read, wait = identity.content_hash, Meeting.wait_until_all_are_ready
def log(line):
    with open("order", "a") as file:
        file.write(line + "\\n")
def reading(folder):
    log("reads")
    found = read(folder)
    log("has read")
    return found
def waiting(meeting):
    log("waits for others")
    wait(meeting)
identity.content_hash, Meeting.wait_until_all_are_ready = reading, waiting
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
