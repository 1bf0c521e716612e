"""What counts as an image folder, and what its hash stands for."""

import os
import shutil
from pathlib import Path

import pytest
from PIL import Image

from hvdtrain.base.errors import UsageError
from hvdtrain.data import image
from hvdtrain.data.contact_sheet import draw
from hvdtrain.data.find import find_dataset
from hvdtrain.data.folder import content_hash, scan
from hvdtrain.data.loader import labels
from hvdtrain.data.names import order_of_numbers
from hvdtrain.data.packing import pack

GOOD = [
    "TrainData/cat/1.png",
    "TrainData/dog/1.png",
    "ValidationData/cat/2.png",
    "ValidationData/dog/2.png",
]


def make(root: Path, files: list[str]) -> Path:
    """A folder with a real image of its own colour at each path; a path that ends with / is an
    empty folder.
    """
    for number, name in enumerate(files):
        path = root / name
        (path if name.endswith("/") else path.parent).mkdir(parents=True, exist_ok=True)
        if name.endswith(".csv"):
            path.write_text("file_name,label\n")
        elif not name.endswith("/"):
            Image.new("RGB", (4, 4), (number, 0, 0)).save(path)
    return root


def test_samples_are_sorted_by_class_and_file_name(tmp_path):
    root = make(
        tmp_path, ["TrainData/dog/b.png", "TrainData/dog/a.JPG", "TrainData/cat/z.webp", *GOOD]
    )
    images = scan(root)
    assert images.classes == ("cat", "dog")
    assert [(p.relative_to(root / "TrainData").as_posix(), label) for p, label in images.train] == [
        ("cat/1.png", 0),
        ("cat/z.webp", 0),
        ("dog/1.png", 1),
        ("dog/a.JPG", 1),
        ("dog/b.png", 1),
    ]
    assert list(images.validation) == [(root / GOOD[2], 0), (root / GOOD[3], 1)]


def test_the_list_is_a_sequence_and_needs_no_paths(tmp_path):
    root = make(tmp_path, [*GOOD, *(f"TrainData/dog/{number:03}.png" for number in range(40))])
    train = scan(root).train
    everything = list(train)
    assert len(train) == len(everything) == 42
    assert [train[i] for i in range(-42, 42)] == everything * 2
    assert train[1:40:7] == tuple(everything[1:40:7]) and train[-3:] == tuple(everything[-3:])
    assert labels(train).tolist() == [label for _, label in everything]
    assert list(train.paths()) == [os.fsencode(path) for path, _ in everything]
    with pytest.raises(IndexError):
        train[42]
    assert len(train.names) + 8 * len(train.ends) < 42 * 20  # bytes: a million take 20 MB


def test_odd_names_are_listed(tmp_path):
    odd = os.fsdecode(b"Schr\xc3\xa4ube \xff & 'x'.PNG")  # bytes that are no UTF-8 among them
    root = make(tmp_path, [*GOOD, "TrainData/cat/a b\nc.png", "TrainData/cat/\u00e4.png"])
    shutil.copy(root / GOOD[0], root / "TrainData" / "cat" / odd)
    train = scan(root).train
    paths = [path for path, _ in train]
    assert {path.name for path in paths} == {"1.png", "a b\nc.png", "\u00e4.png", odd}
    assert list(train.paths()) == [os.fsencode(path) for path in paths]
    assert all(path.is_file() for path in paths)
    assert content_hash(scan(root)).startswith("sha256:")


def test_hidden_files_and_what_is_no_image_are_passed_over(tmp_path):
    root = make(
        tmp_path,
        [*GOOD, "TrainData/cat/.hidden.png", "TrainData/.git/1.png", "TrainData/cat/folder.png/"],
    )
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
        (
            ["train/metadata.csv", "train/1.png", *GOOD[2:]],
            ["train/metadata.csv' is not read", "train/<class>/"],
        ),
        (
            ["train/cat/tabby/1.png", "train/dog/1.png", *GOOD[2:]],
            ["class 'cat' has images only in folders", "deeper", "folder --source /"],
        ),
        (GOOD[0::2], ["one class only, 'cat'"]),
        (
            [*GOOD, "ValidationData/emu/1.png"],
            ["ValidationData of '", "has classes that TrainData has not: emu. Give TrainData"],
        ),
        (
            [*GOOD[:2], "ValidationData/Dog/1.png"],
            ["has classes that TrainData has not: Dog ('Dog' is 'dog' there)"],
        ),
        (
            [*GOOD, *(f"ValidationData/x{i}/1.png" for i in range(9))],
            ["TrainData has not: x0, x1, x2, x3, x4 and 4 more"],
        ),
        (
            [*GOOD, "TrainData/ant/", "ValidationData/ant/1.png"],
            ["class 'ant' has no images in '", "TrainData", "Remove the folder if it is no class"],
        ),
        (
            [*GOOD[:2], "ValidationData/cat/", "ValidationData/dog/"],
            ["class 'cat' has no images in '", "ValidationData"],
        ),
        ([f"photos/{name}" for name in GOOD], ["photos' has a training part: give that folder"]),
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
        ("train", "val", "test"),
        ("training", "validation", "testing"),
        ("Train", "valid", "eval"),
        ("train", "dev", "evaluation"),
        ("train", "ValidationData", ""),
        ("train", "test", ""),
    ],
)
def test_parts_may_be_called_as_hugging_face_calls_them(train, validation, test, tmp_path):
    parts = [part for part in (train, validation, test) if part]
    make(
        tmp_path,
        [f"{part}/{name}/{part}.png" for part in parts for name in ("cat", "dog")]
        + ["notes/cat/1.png"],
    )
    found = scan(tmp_path)
    assert found.classes == ("cat", "dog")
    assert [path.name for path, _ in found.train] == [f"{train}.png"] * 2
    assert [path.name for path, _ in found.validation] == [f"{validation}.png"] * 2
    assert [path.name for path, _ in found.test] == ([f"{test}.png"] * 2 if test else [])
    told = [note for note in found.notes if note.startswith("there is no validation part: test ")]
    assert len(told) == (validation == "test")


def test_test_images_of_no_class_are_left_out_and_that_is_said(tmp_path):
    """As Kaggle's `test/unknown/` beside good train/ and val/."""
    found = scan(make(tmp_path, [*GOOD, "test/unknown/1.png"]))
    assert (len(found.train), found.test) == (2, ())
    [note] = found.notes
    assert note == (
        "the images in test are left out: some are in folders of no class of the training part "
        "(unknown)"
    )


@pytest.mark.parametrize("empty", ["ValidationData/ant/", "ValidationData/ant/notes.txt", ""])
def test_a_class_without_validation_images_is_trained_on_and_told(empty, tmp_path):
    root = make(tmp_path, [*GOOD, "TrainData/ant/1.png", *([empty] if empty.endswith("/") else [])])
    if empty.endswith(".txt"):
        (root / empty).parent.mkdir()
        (root / empty).write_text("none yet")
    found = scan(root)
    assert found.classes == ("ant", "cat", "dog")
    assert list(found.validation) == [(root / GOOD[2], 1), (root / GOOD[3], 2)]
    assert labels(found.validation).tolist() == [1, 2]
    assert [found.validation[index] for index in (0, 1, -1)] == [
        (root / GOOD[2], 1),
        (root / GOOD[3], 2),
        (root / GOOD[3], 2),
    ]
    told = "ValidationData has no images of 1 of the 3 classes: ant; accuracy is that of the others"
    assert [note for note in found.notes if note == told] == [told]
    assert content_hash(found).startswith("sha256:")


def test_what_systems_leave_is_no_class_and_no_image_and_is_counted(tmp_path):
    root = make(
        tmp_path,
        [
            *GOOD,
            "TrainData/__MACOSX/cat/1.png",
            "TrainData/#recycle/1.png",
            "TrainData/$RECYCLE.BIN/1.png",
            "ValidationData/.ipynb_checkpoints/1.png",
            "TrainData/cat/@eaDir/1.png/SYNOPHOTO_THUMB_XL.png",
            "ValidationData/@eaDir/1.png",
            "__MACOSX/TrainData/cat/1.png",
        ],
    )
    for name in ("TrainData/cat/Thumbs.db", "TrainData/dog/desktop.ini", "TrainData/cat/._1.png"):
        (root / name).write_bytes(b"\0\5\x16\7")
    found = scan(root)
    assert found.classes == ("cat", "dog")
    assert (len(found.train), len(found.validation)) == (2, 2)
    [note] = found.notes
    assert note == (
        "passed over: 9 hidden file(s) and folder(s), or left by systems: #recycle, $RECYCLE.BIN, "
        "._1.png, .ipynb_checkpoints, @eaDir and 3 more"
    )


def test_every_ending_of_a_format_is_taken_and_no_file_is_opened(tmp_path, monkeypatch):
    endings = ("jfif", "jpe", "JPG", "pjpeg", "dib", "apng", "mpo")
    root = make(tmp_path, GOOD)
    for ending in endings:
        shutil.copy(root / GOOD[0], root / "TrainData" / "cat" / f"x.{ending}")
    monkeypatch.setattr(image, "is_image_file", None)
    found = scan(root)
    assert len(found.train) == 2 + len(endings) and not found.notes


def test_names_without_an_ending_are_looked_into(tmp_path):
    root = make(tmp_path, GOOD)
    for name in ("0001", "a.jpg?w=300", "b.jpg-large", "c.2019"):
        shutil.copy(root / GOOD[0], root / "TrainData" / "cat" / name)
    (root / "TrainData" / "cat" / "README").write_text("no image")
    found = scan(root)
    assert len(found.train) == 6
    [note] = found.notes
    assert "not used: 1 file(s) or folder(s): TrainData/cat/README" in note


def test_a_class_is_the_same_however_its_accents_are_written(tmp_path):
    """macOS writes them apart from their letters."""
    composed, apart = "Schr\u00e4ube", "Schra\u0308ube"
    root = make(tmp_path, [*GOOD, f"TrainData/{composed}/1.png", f"ValidationData/{apart}/1.png"])
    found = scan(root)
    assert found.classes == (composed, "cat", "dog") and not found.notes
    assert found.validation[0] == (root / "ValidationData" / apart / "1.png", 0)
    assert found.validation[0][0].is_file()


def test_classes_that_differ_in_how_accents_are_written_are_told(tmp_path):
    composed, apart = "Schr\u00e4ube", "Schra\u0308ube"
    parts = ("TrainData", "ValidationData")
    root = make(tmp_path, [f"{part}/{name}/1.png" for part in parts for name in (composed, apart)])
    found = scan(root)
    assert len(found.classes) == 2 and [label for _, label in found.validation] == [0, 1]
    [note] = found.notes
    assert note.startswith(f"2 classes are called '{composed}', with their accents")


def test_a_class_in_latin_1_is_trained_on_named_as_it_reads_and_not_packed(tmp_path):
    root = make(tmp_path / "photos", [*GOOD, "TrainData/tea/1.png", "ValidationData/tea/1.png"])
    odd = os.fsdecode(b"caf\xe9")
    for part in ("TrainData", "ValidationData"):
        (root / part / "tea").rename(root / part / odd)
    found = scan(root)
    assert set(found.classes) == {odd, "cat", "dog"}
    [note] = found.notes
    assert "the name of class 'café' is not UTF-8" in note and "`convmv -f latin1" in note
    with pytest.raises(UsageError, match="the name of class 'café' is not UTF-8"):
        pack(found, str(tmp_path / "packed"), 2**20, False, lambda *_: None)
    draw(found, 2, tmp_path / "sheet.png")
    assert (tmp_path / "sheet.png").is_file()


def test_tiny_imagenet_as_it_is_is_refused_with_the_way_on(tmp_path):
    root = make(tmp_path, [*GOOD[:2], "ValidationData/images/val_0.png"])
    (root / "ValidationData" / "val_annotations.txt").write_text("val_0.png\tcat\n")
    words = r"have their classes in val_annotations.txt: `hvdtrain data build folder --source "
    with pytest.raises(UsageError, match=words):
        scan(root)


def test_a_part_alone_is_refused_with_the_folder_that_it_is_of(tmp_path):
    make(tmp_path, GOOD)
    words = f"'{tmp_path}/TrainData' is a part by its name: give '{tmp_path}'"
    with pytest.raises(UsageError, match=words):
        scan(tmp_path / "TrainData")


def test_tiny_imagenet_without_its_table_is_refused_by_the_tables_name(tmp_path):
    root = make(tmp_path, [*GOOD[:2], "ValidationData/images/val_0.png"])
    words = r"'.*ValidationData/images' are in no class folders, and val_annotations.txt.* copy it"
    with pytest.raises(UsageError, match=words):
        scan(root)


def test_a_class_of_damaged_images_is_not_called_empty(tmp_path):
    more = [f"TrainData/{name}/{k}.png" for name in ("ant", "cat") for k in (5, 6)]
    root = make(tmp_path, [*GOOD, *more, "ValidationData/ant/1.png"])
    ants = {"TrainData/ant/5.png", "TrainData/ant/6.png"}
    with pytest.raises(UsageError, match="all 2 images of class 'ant' in .* are damaged, and --sk"):
        scan(root, ants)
    assert len(scan(root, {"TrainData/ant/5.png"}).train) == 5
    notes = scan(root, {"ValidationData/ant/1.png"}).notes
    assert notes[1:] == ("the only image of class 'ant' in ValidationData is damaged",)
    with pytest.raises(UsageError, match="the only image of class 'ant' in .* is damaged"):
        scan(root, {"ValidationData/ant/1.png", *GOOD[2:]})


def test_a_folder_that_is_called_as_a_data_set_is_passed_over_and_that_is_said(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(make(tmp_path, [f"synthetic/{name}" for name in GOOD]))
    [note] = find_dataset("synthetic").notes
    assert note == (
        "synthetic is the built-in data set, and not the folder of that name here: --dataset "
        "./synthetic is that"
    )
    assert find_dataset("./synthetic").notes == ()


def test_classes_that_are_numbers_are_sorted_as_text_and_that_is_said():
    """As in CSAILVision/places365#22, whose checkpoint has other classes then."""
    [line] = order_of_numbers(("0", "1", "10", "100", "11", "2"))
    assert line.startswith("classes are in the order of text (0, 1, 10, 100 …)")
    assert line.endswith("rename them, as 000")
    for classes in (("0", "1", "2"), ("00", "01", "10"), ("1", "10", "cat"), ("²", "10")):
        assert order_of_numbers(classes) == []


def test_test_images_without_classes_are_left_alone(tmp_path):
    found = scan(make(tmp_path, [*GOOD, "test/1.png", "test/2.png"]))
    assert found.test == ()
    assert found.notes == ("the images in test are left out: they are in no class folders",)


def test_what_is_no_folder_is_refused(tmp_path):
    (tmp_path / "archive.zip").write_bytes(b"PK")
    for name, words in (
        ("nowhere", r"there is no folder '.*hvdtrain data list"),
        ("archive.zip", r"is not a folder.* `hvdtrain data build folder --source .*archive.zip "),
        ("x" * 300, "cannot read '.*xxx': File name too long"),
    ):
        with pytest.raises(UsageError, match=words):
            scan(tmp_path / name)
