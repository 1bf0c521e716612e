"""Damaged images of a folder: named with the remedy, or found before training and left out."""

import json
import os

import pytest
from helpers.archives import picture
from helpers.foretold import BESIDE_TESTS
from helpers.forked_jobs import forks_first
from helpers.jobs import hvdtrain

from hvdtrain.base.errors import UsageError
from hvdtrain.data import bad_images
from hvdtrain.data.find import find_dataset
from hvdtrain.data.identity import identity

JOB = (
    "--threads",
    "1",
    "--width",
    "0.1",
    "--steps",
    "4",
    "--batch-size",
    "8",
    "--image-size",
    "32",
)


@pytest.fixture
def photos(tmp_path, monkeypatch):
    """Eight images to train with and four to validate, of which the second cat is cut off."""
    monkeypatch.setenv("HVDTRAIN_CACHE", str(tmp_path / "cache"))
    for part, count in (("train", 4), ("val", 2)):
        for first, name in enumerate(("cat", "it's a dog")):
            folder = tmp_path / "photos" / part / name
            folder.mkdir(parents=True)
            for number in range(count):
                (folder / f"{number} é.jpg").write_bytes(
                    picture(10 * first + number, (40, 50), "JPEG")
                )
    bad = tmp_path / "photos/train/cat/1 é.jpg"
    bad.write_bytes(bad.read_bytes()[:300])
    return tmp_path / "photos"


def test_a_damaged_image_is_named_with_the_option_that_leaves_it_out(photos, tmp_path):
    done = hvdtrain("train", *JOB, "--dataset", str(photos), "--out", tmp_path / "bad")
    assert done.returncode == 1
    last = done.stdout.strip().splitlines()[-1]
    assert "1 é.jpg is " in last and "--skip-bad leaves such images out" in last
    done = hvdtrain(
        "train", *JOB, "--dataset", str(photos), "--skip-bad", "--out", tmp_path / "run"
    )
    assert done.returncode == 0, done.stdout
    assert "--skip-bad left out 1 damaged image:\n  train/cat/1 é.jpg\n" in done.stdout
    manifest = json.loads((tmp_path / "run/manifest.json").read_text())
    assert (manifest["train_samples"], manifest["bad_images"]["count"]) == (7, 1)
    assert manifest["bad_images"]["first"] == ["train/cat/1 é.jpg"]


def test_images_are_looked_at_once_and_again_when_one_has_changed(photos, monkeypatch):
    looked = []
    look = bad_images.digest_or_problem
    monkeypatch.setattr(
        bad_images, "digest_or_problem", lambda path: looked.append(path) or look(path)
    )
    first, again = (
        find_dataset(str(photos), skip_bad=True),
        find_dataset(str(photos), skip_bad=True),
    )
    assert (
        len(looked) == 12 and len(first.train) == len(again.train) == 7 and first.bad == again.bad
    )
    whole = photos / "train/cat/1 é.jpg"
    whole.write_bytes(picture(1, (40, 50), "JPEG"))
    os.utime(whole, ns=(1, 1))
    mended = find_dataset(str(photos), skip_bad=True)
    assert len(looked) == 24 and len(mended.train) == 8 and identity(mended) != identity(first)


def test_a_comparison_and_its_report_name_what_was_left_out(photos, tmp_path):
    options = ["--modes", "single,ddp", "-n", "1", "--steps", "4", "--repeats", "1", "--skip-bad"]
    small = ["--threads", "1", "--width", "0.1", "--batch-size", "8", "--image-size", "32"]
    out = tmp_path / "compared"
    words = [*options, *small, "--dataset", str(photos), "--out", out]
    done = hvdtrain("compare", *words, first=forks_first() + BESIDE_TESTS)
    assert done.returncode == 0, done.stdout
    assert "--skip-bad left out 1 damaged image:\n  train/cat/1 é.jpg\n" in done.stdout
    told = "--skip-bad left out 1 damaged image: train/cat/1 é.jpg"
    assert told in (out / "report.md").read_text()


def test_a_cache_that_cannot_be_written_is_said_with_the_variable_that_moves_it(
    photos, tmp_path, monkeypatch
):
    """As in a home that is read-only."""
    (tmp_path / "home").write_text("a file, in which there can be no folder")
    monkeypatch.delenv("HVDTRAIN_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for find in (lambda: find_dataset("digits"), lambda: find_dataset(str(photos), skip_bad=True)):
        with pytest.raises(UsageError, match=r"cannot write in .*HVDTRAIN_CACHE=FOLDER moves"):
            find()
