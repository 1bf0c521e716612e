"""What counts as an image folder, and what its hash stands for."""

import os
import shutil
from pathlib import Path

import pytest
from PIL import Image

from hvdtrain.data.folder import content_hash, scan
from hvdtrain.data.loader import labels
from hvdtrain.errors import UsageError

GOOD = ["TrainData/cat/1.png", "TrainData/dog/1.png", "ValidationData/cat/2.png", "ValidationData/dog/2.png"]


def make(root: Path, files: list[str]) -> Path:
    """A folder with a real image of its own colour at each path; a path that ends with / is an empty folder."""
    for number, name in enumerate(files):
        path = root / name
        (path if name.endswith("/") else path.parent).mkdir(parents=True, exist_ok=True)
        if name.endswith(".csv"):
            path.write_text("file_name,label\n")
        elif not name.endswith("/"):
            Image.new("RGB", (4, 4), (number, 0, 0)).save(path)
    return root


def test_samples_are_sorted_by_class_and_file_name(tmp_path):
    root = make(tmp_path, ["TrainData/dog/b.png", "TrainData/dog/a.JPG", "TrainData/cat/z.webp", *GOOD])
    images = scan(root)
    assert images.classes == ("cat", "dog")
    assert [(p.relative_to(root / "TrainData").as_posix(), label) for p, label in images.train] == [
        ("cat/1.png", 0), ("cat/z.webp", 0), ("dog/1.png", 1), ("dog/a.JPG", 1), ("dog/b.png", 1),
    ]  # fmt: skip
    assert list(images.validation) == [(root / GOOD[2], 0), (root / GOOD[3], 1)]


def test_the_list_is_a_sequence_and_needs_no_paths(tmp_path):
    root = make(tmp_path, [*GOOD, *(f"TrainData/dog/{number:03}.png" for number in range(40))])
    train = scan(root).train
    everything = list(train)
    assert len(train) == len(everything) == 42
    assert [train[i] for i in range(-42, 42)] == everything * 2
    assert train[1:40:7] == tuple(everything[1:40:7]) and train[-3:] == tuple(everything[-3:])
    assert labels(train).tolist() == [label for _, label in everything]
    with pytest.raises(IndexError):
        train[42]
    assert len(train.names) + 8 * len(train.ends) < 42 * 20  # bytes: a million take 20 MB


def test_odd_names_are_listed(tmp_path):
    odd = os.fsdecode(b"Schr\xc3\xa4ube \xff & 'x'.PNG")  # bytes that are no UTF-8 among them
    root = make(tmp_path, [*GOOD, "TrainData/cat/a b\nc.png", "TrainData/cat/\u00e4.png"])
    shutil.copy(root / GOOD[0], root / "TrainData" / "cat" / odd)
    paths = [path for path, _ in scan(root).train]
    assert {path.name for path in paths} == {"1.png", "a b\nc.png", "\u00e4.png", odd}
    assert all(path.is_file() for path in paths)
    assert content_hash(scan(root)).startswith("sha256:")


def test_hidden_files_and_what_is_no_image_are_passed_over(tmp_path):
    root = make(tmp_path, [*GOOD, "TrainData/cat/.hidden.png", "TrainData/.git/1.png", "TrainData/cat/folder.png/"])
    (root / "TrainData/cat/notes.txt").write_text("not an image")
    (root / "TrainData/README").write_text("not a class")
    (root / "TrainData/cat/loop.png").symlink_to("loop.png")
    (root / "dataset.toml").write_text("")
    images = scan(root)
    assert images.classes == ("cat", "dog")
    assert len(images.train) == 2


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ([], ["no folder train:", "train/<class>/", "`hvdtrain data build folder --source "]),
        (GOOD[:2], ["no folder val:", "`hvdtrain data build folder --source "]),
        (
            ["TrainData/", "ValidationData/"],
            ["TrainData' has no class folders", "`hvdtrain data build "],
        ),
        ([*GOOD, "train/cat/1.png"], ["has TrainData and train, which mean the same"]),
        (["train/metadata.csv", "train/1.png", *GOOD[2:]], ["train/metadata.csv' is not read", "train/<class>/"]),
        (["train/cat/tabby/1.png", "train/dog/1.png", *GOOD[2:]], ["class 'cat' has images only in folders", "deeper"]),
        (GOOD[0::2], ["one class only, 'cat'"]),
        ([*GOOD, "TrainData/cow/1.png"], ["only in TrainData: cow"]),
        ([*GOOD, "ValidationData/emu/1.png"], ["only in ValidationData: emu"]),
        ([*GOOD[:2], "ValidationData/Dog/1.png"], ["only in TrainData: cat, dog", "only in ValidationData: Dog"]),
        ([*GOOD, "TrainData/ant/1.png", "ValidationData/ant/"], ["class 'ant' has no images", "ValidationData"]),
        ([*GOOD, *(f"TrainData/x{i}/1.png" for i in range(9))], ["only in TrainData: x0, x1, x2, x3, x4 and 4 more"]),
    ],
)
def test_a_folder_of_another_shape_is_refused_in_one_line(tmp_path, files, words):
    with pytest.raises(UsageError) as refusal:
        scan(make(tmp_path, files))
    message = str(refusal.value)
    assert all(word in message for word in [*words, str(tmp_path)])
    assert "\n" not in message


@pytest.mark.parametrize(
    ("train", "validation", "test"),
    [
        ("train", "val", "test"), ("training", "validation", "testing"), ("Train", "valid", "eval"),
        ("train", "dev", "evaluation"), ("train", "ValidationData", ""), ("train", "test", ""),
    ],
)  # fmt: skip
def test_parts_may_be_called_as_hugging_face_calls_them(train, validation, test, tmp_path):
    parts = [part for part in (train, validation, test) if part]
    make(tmp_path, [f"{part}/{name}/{part}.png" for part in parts for name in ("cat", "dog")] + ["notes/cat/1.png"])
    found = scan(tmp_path)
    assert found.classes == ("cat", "dog")
    assert [path.name for path, _ in found.train] == [f"{train}.png"] * 2
    assert [path.name for path, _ in found.validation] == [f"{validation}.png"] * 2
    assert [path.name for path, _ in found.test] == ([f"{test}.png"] * 2 if test else [])


def test_test_images_without_classes_are_left_alone(tmp_path):
    assert scan(make(tmp_path, [*GOOD, "test/1.png", "test/2.png"])).test == ()


def test_what_is_no_folder_is_refused(tmp_path):
    (tmp_path / "archive.zip").write_bytes(b"PK")
    for name, words in (
        ("nowhere", r"there is no folder '.*hvdtrain data list"), ("archive.zip", "is not a folder"),
        ("x" * 300, "cannot read '.*xxx': File name too long"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=words):
            scan(tmp_path / name)
