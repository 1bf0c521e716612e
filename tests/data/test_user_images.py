"""A user's own photographs, odd ones among them: what becomes of each is said."""

import io
import os
import re
import tomllib

import pytest
from click.testing import CliRunner
from helpers import archives
from PIL import Image

from hvdtrain.data.build import build
from hvdtrain.data.commands import data
from hvdtrain.data.find import find_dataset
from hvdtrain.data.folder import scan
from hvdtrain.errors import Failure, UsageError

CLASSES = ("Nut & bolt", "Schräube", "washer")


@pytest.fixture
def photos(tmp_path):
    """Ten images a class; in the class washer, one deeper down."""
    files = {}
    for i, name in enumerate(CLASSES):
        files |= {f"{name}/a{k}.png": archives.picture(100 * i + k) for k in range(0, 10, 2)}
        files |= {f"{name}/IMG {k}.JPG": archives.picture(100 * i + k, kind="JPEG") for k in range(1, 10, 2)}
    return archives.lay_out(tmp_path / "my photos", files | {"washer/more/deep/d.png": archives.picture(999)})


def parts(folder):
    """{class: (training, validation)}: names of files."""
    return {
        name: tuple(sorted(os.listdir(folder / part / name)) for part in ("TrainData", "ValidationData"))
        for name in os.listdir(folder / "TrainData")
    }


def invoke(*words):
    return CliRunner().invoke(data, [str(word) for word in words])


def test_classes_are_the_first_level_and_all_below_belongs_to_them(photos, tmp_path):
    out = build("folder", tmp_path / "out", images_from=photos, validation=0.3, licence="mine, all rights reserved")
    made = parts(out)
    sizes = {name: (len(train), len(held_out)) for name, (train, held_out) in made.items()}
    assert sizes == {"Nut & bolt": (7, 3), "Schräube": (7, 3), "washer": (8, 3)}
    assert "more_deep_d.png" in made["washer"][0] + made["washer"][1]
    manifest = tomllib.loads((out / "dataset.toml").read_text())
    assert manifest["licence"] == "mine, all rights reserved"
    assert "ImageNet" not in (out / "dataset.toml").read_text()
    assert "70 % training, 30 % validation" in manifest["split"]
    assert manifest["notes"] == []


def test_what_is_left_out_is_counted_and_told(photos, tmp_path):
    archives.lay_out(photos, {
        "washer/.DS_Store": b"x", ".Trash/washer/0.png": b"x", "washer/notes.txt": b"x", "a.png": archives.picture(1),
        "washer/a.gif": b"GIF89a", "washer/b.GIF": b"GIF89a", "README": b"x",
    })  # fmt: skip
    (photos / "washer" / "gone.png").symlink_to(tmp_path / "nowhere")
    result = invoke("build", "folder", "--source", photos, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    left = ".Trash, README, a.png, washer/.DS_Store, washer/a.gif and 3 more"
    told = [f"left out: 8 file(s) and folder(s): {left}"]
    assert result.stdout.splitlines()[1:] == told
    assert tomllib.loads((tmp_path / "out" / "dataset.toml").read_text())["notes"] == told


def test_all_bad_images_are_listed_at_once_and_can_be_left_out(photos, tmp_path):
    huge = io.BytesIO()
    Image.new("1", (8001, 8001)).save(huge, "PNG")
    bad = {
        "washer/broken.jpg": (photos / "washer" / "IMG 1.JPG").read_bytes()[:-40], "washer/empty.png": b"",
        "Schräube/gif.png": b"GIF89a", "Schräube/huge.png": huge.getvalue(), "only bad/0.png": b"",
    }  # fmt: skip
    archives.lay_out(photos, bad)
    with pytest.raises(Failure) as refused:
        build("folder", tmp_path / "out", images_from=photos)
    first, *lines = refused.value.args
    assert "5 of the 36 images in " in first and "--skip-bad" in first
    assert {line.split(" is ")[0].split(" has ")[0] for line in lines} == set(bad)
    assert {path.name for path in tmp_path.iterdir()} == {"my photos"}
    result = invoke("build", "folder", "--source", photos, "--skip-bad", "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "left out: 1 class(es) of which no image can be used: only bad" in result.stdout
    assert all(f"left out: {name} " in result.stdout for name in bad)
    assert len(list(scan(tmp_path / "out").images)) == 31
    assert invoke("check", tmp_path / "out").exit_code == 0


def test_names_that_would_meet_are_told_apart(photos, tmp_path):
    archives.lay_out(photos, {
        "washer/more_deep_d.png": archives.picture(1000), "washer/IMG 1.jpg": archives.picture(1001, kind="JPEG"),
        f"washer/{'x' * 100}/{'y' * 100}/{'z' * 100}.png": archives.picture(1002),
    })  # fmt: skip
    odd = os.fsdecode(b"caf\xe9.png")
    (photos / "washer" / odd).write_bytes(archives.picture(1003))
    train, held_out = parts(build("folder", tmp_path / "out", images_from=photos))["washer"]
    names = train + held_out
    assert len(names) == len({name.casefold() for name in names}) == 15
    with_hash = [name for name in names if re.fullmatch("[0-9a-f]{16}_(d|more_deep_d|IMG 1|z+).(png|jpg)", name, re.I)]
    assert len(with_hash) == 5 and {odd, "IMG 3.JPG"} <= set(names)


def test_parts_of_the_source_are_kept(tmp_path):
    source = archives.lay_out(tmp_path / "in", archives.plain(["cat", "dog"], 5, 2)) / "imagenette2-160"
    archives.lay_out(source, {"readme/a.png": archives.picture(5), "val/dog/0.png": archives.picture(0, kind="JPEG")})
    out = build("folder", tmp_path / "out", images_from=source)
    sizes = {name: (len(train), len(held_out)) for name, (train, held_out) in parts(out).items()}
    assert sizes == {"cat": (5, 2), "dog": (5, 3)}
    assert tomllib.loads((out / "dataset.toml").read_text())["notes"] == [
        "left out: 1 file(s) and folder(s): readme/a.png"
    ]


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"a.png": 1, "b.png": 2}, "has no images in class folders: it needs a folder for each class"),
        ({"cat/1.png": 1, "cat/2.png": 2}, "has no images in class folders: it needs a folder for each class"),
        ({"cat/1.png": 1, "cat/2.png": 2, "dog/1.png": 3, "dog/2.png": 3}, "class 'dog' has 1 image that differs"),
        ({"cat/1.png": 1, "cat/2.png": 2, "Cat/1.png": 3, "Cat/2.png": 4}, "are one folder where case does not count"),
    ],
)
def test_what_makes_no_data_set_is_refused(files, words, tmp_path):
    source = archives.lay_out(tmp_path / "in", {name: archives.picture(number) for name, number in files.items()})
    with pytest.raises((UsageError, Failure), match=words):
        build("folder", tmp_path / "out", images_from=source)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_without_a_source_it_says_how(monkeypatch, tmp_path):
    monkeypatch.setenv("HVDTRAIN_CACHE", str(tmp_path))
    for make in (lambda: build("folder", tmp_path / "out"), lambda: find_dataset("folder")):
        with pytest.raises(UsageError, match="`hvdtrain data build folder --source FOLDER --out NEW`"):
            make()


def photograph(orientation):
    """Left half red, right half blue, as it is stored; of 90 x 60 pixels."""
    image = Image.new("RGB", (90, 60), "red")
    image.paste("blue", (45, 0, 90, 60))
    exif = image.getexif()
    exif[0x0112] = orientation
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", exif=exif)
    return buffer.getvalue()


def test_an_image_that_is_made_smaller_is_turned_as_its_camera_was(photos, tmp_path):
    archives.lay_out(photos, {"washer/turned.jpg": photograph(6)})
    out = build("folder", tmp_path / "out", images_from=photos, resize=20)
    [turned] = [path for path in scan(out).images if path.name == "turned.jpg"]
    with Image.open(turned) as image:
        assert image.size == (20, 30) and image.getexif().get(0x0112, 1) == 1
        assert image.getpixel((10, 4))[0] > 200 and image.getpixel((10, 25))[2] > 200  # red above, blue below


def test_copies_are_on_one_side_and_what_two_classes_have_is_trained_on(tmp_path):
    pixels = {f"{name}/{k}.png": archives.picture(k // 3 + 10 * i) for i, name in enumerate("ab") for k in range(30)}
    source = archives.lay_out(tmp_path / "in", pixels | {f"{name}/both.png": archives.picture(99) for name in "ab"})
    for seed in range(3):
        dataset = scan(build("folder", tmp_path / str(seed), images_from=source, seed=seed, validation=0.3))
        train, held_out = ({path.read_bytes() for path, _ in part} for part in (dataset.train, dataset.validation))
        assert not train & held_out and len(held_out) == 6
        assert archives.picture(99) in train
