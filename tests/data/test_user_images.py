"""A user's own photographs, odd ones among them: what becomes of each is said."""

import io
import os
import re
import tomllib
import zipfile

import pytest
from click.testing import CliRunner
from helpers import archives
from PIL import Image

from hvdtrain.base.errors import Failure, UsageError
from hvdtrain.data.build import build
from hvdtrain.data.commands import data
from hvdtrain.data.find import find_dataset
from hvdtrain.data.folder import scan

CLASSES = ("Nut & bolt", "Schräube", "washer")


@pytest.fixture
def photos(tmp_path):
    """Ten images a class; in the class washer, one deeper down."""
    files = {}
    for i, name in enumerate(CLASSES):
        files |= {f"{name}/a{k}.png": archives.picture(100 * i + k) for k in range(0, 10, 2)}
        files |= {
            f"{name}/IMG {k}.JPG": archives.picture(100 * i + k, kind="JPEG")
            for k in range(1, 10, 2)
        }
    return archives.lay_out(
        tmp_path / "my photos", files | {"washer/more/deep/d.png": archives.picture(999)}
    )


def parts(folder):
    """{class: (training, validation)}: names of files."""
    return {
        name: tuple(
            sorted(os.listdir(folder / part / name)) for part in ("TrainData", "ValidationData")
        )
        for name in os.listdir(folder / "TrainData")
    }


def invoke(*words):
    return CliRunner().invoke(data, [str(word) for word in words])


def test_classes_are_the_first_level_and_all_below_belongs_to_them(photos, tmp_path):
    out = build(
        "folder",
        tmp_path / "out",
        images_from=photos,
        validation=0.3,
        licence="mine, all rights reserved",
    )
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
    archives.lay_out(
        photos,
        {
            "washer/.DS_Store": b"x",
            ".Trash/washer/0.png": b"x",
            "washer/notes.txt": b"x",
            "a.png": archives.picture(1),
            "washer/a.gif": b"GIF89a",
            "washer/b.GIF": b"GIF89a",
            "README": b"x",
        },
    )
    (photos / "washer" / "gone.png").symlink_to(tmp_path / "nowhere")
    os.mkfifo(photos / "washer" / "pipe.png")
    result = invoke("build", "folder", "--source", photos, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    left = "a.png, washer/a.gif, washer/b.GIF, .Trash, README and 2 more"
    told = [
        f"left out: 3 images and 4 other file(s) or folder(s): {left}",
        "left out: 2 images: washer/gone.png, washer/pipe.png (no regular files, but broken links, "
        "pipes or devices: put files in their place)",
    ]
    assert result.stdout.splitlines()[1:] == told
    assert tomllib.loads((tmp_path / "out" / "dataset.toml").read_text())["notes"] == told


def test_all_bad_images_are_listed_at_once_and_can_be_left_out(photos, tmp_path):
    huge = io.BytesIO()
    Image.new("1", (8001, 8001)).save(huge, "PNG")
    bad = {
        "washer/broken.jpg": (photos / "washer" / "IMG 1.JPG").read_bytes()[:-40],
        "washer/empty.png": b"",
        "Schräube/gif.png": b"GIF89a",
        "Schräube/huge.png": huge.getvalue(),
        "only bad/0.png": b"",
    }
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
    archives.lay_out(
        photos,
        {
            "washer/more_deep_d.png": archives.picture(1000),
            "washer/IMG 1.jpg": archives.picture(1001, kind="JPEG"),
            f"washer/{'x' * 100}/{'y' * 100}/{'z' * 100}.png": archives.picture(1002),
        },
    )
    odd = os.fsdecode(b"caf\xe9.png")
    (photos / "washer" / odd).write_bytes(archives.picture(1003))
    train, held_out = parts(build("folder", tmp_path / "out", images_from=photos))["washer"]
    names = train + held_out
    assert len(names) == len({name.casefold() for name in names}) == 15
    with_hash = [
        name
        for name in names
        if re.fullmatch("[0-9a-f]{16}_(d|more_deep_d|IMG 1|z+).(png|jpg)", name, re.I)
    ]
    assert len(with_hash) == 5 and {odd, "IMG 3.JPG"} <= set(names)


def test_parts_of_the_source_are_kept(tmp_path):
    source = (
        archives.lay_out(tmp_path / "in", archives.plain(["cat", "dog"], 5, 2)) / "imagenette2-160"
    )
    archives.lay_out(
        source,
        {"readme/a.png": archives.picture(5), "val/dog/0.png": archives.picture(0, kind="JPEG")},
    )
    out = build("folder", tmp_path / "out", images_from=source)
    sizes = {name: (len(train), len(held_out)) for name, (train, held_out) in parts(out).items()}
    assert sizes == {"cat": (5, 2), "dog": (5, 3)}
    assert tomllib.loads((out / "dataset.toml").read_text())["notes"] == [
        "left out: 1 image: readme/a.png"
    ]


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (
            {"a.png": 1, "b.png": 2},
            "has no images in class folders: it needs a folder for each class",
        ),
        (
            {"cat/1.png": 1, "cat/2.png": 2},
            "has no images in class folders: it needs a folder for each class",
        ),
        (
            {"cat/1.png": 1, "cat/2.png": 2, "dog/1.png": 3, "dog/2.png": 3},
            "class 'dog' has 1 image that differs",
        ),
        (
            {"cat/1.png": 1, "cat/2.png": 2, "Cat/1.png": 3, "Cat/2.png": 4},
            "are one folder where case does not count",
        ),
    ],
)
def test_what_makes_no_data_set_is_refused(files, words, tmp_path):
    source = archives.lay_out(
        tmp_path / "in", {name: archives.picture(number) for name, number in files.items()}
    )
    with pytest.raises((UsageError, Failure), match=words):
        build("folder", tmp_path / "out", images_from=source)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_without_a_source_it_says_how(monkeypatch, tmp_path):
    monkeypatch.setenv("HVDTRAIN_CACHE", str(tmp_path))
    for make in (lambda: build("folder", tmp_path / "out"), lambda: find_dataset("folder")):
        with pytest.raises(
            UsageError, match="`hvdtrain data build folder --source FOLDER --out NEW`"
        ):
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
        # red above, blue below
        assert image.getpixel((10, 4))[0] > 200 and image.getpixel((10, 25))[2] > 200


def test_copies_are_on_one_side_and_what_two_classes_have_is_trained_on(tmp_path):
    pixels = {
        f"{name}/{k}.png": archives.picture(k // 3 + 10 * i)
        for i, name in enumerate("ab")
        for k in range(30)
    }
    source = archives.lay_out(
        tmp_path / "in", pixels | {f"{name}/both.png": archives.picture(99) for name in "ab"}
    )
    for seed in range(3):
        dataset = scan(
            build("folder", tmp_path / str(seed), images_from=source, seed=seed, validation=0.3)
        )
        train, held_out = (
            {path.read_bytes() for path, _ in part} for part in (dataset.train, dataset.validation)
        )
        assert not train & held_out and len(held_out) == 6
        assert archives.picture(99) in train


@pytest.mark.parametrize("kind", ["zip", "tar", "tgz"])
def test_an_archive_is_read_as_its_folder_is(photos, kind, tmp_path):
    files = {
        f"my photos/{path.relative_to(photos)}": path.read_bytes()
        for path in sorted(photos.rglob("*.*"))
        if path.is_file()
    }
    files |= {"__MACOSX/my photos/washer/._a0.png": b"x", "my photos/washer/Thumbs.db": b"x"}
    archive = tmp_path / f"photos.{kind}"
    if kind == "zip":
        archive.write_bytes(archives.zipped(files))
    else:
        archive.write_bytes(archives.tarred(files, "w:gz" if kind == "tgz" else "w"))
    plain = build("folder", tmp_path / "plain", images_from=photos)
    result = invoke("build", "folder", "--source", archive, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert parts(tmp_path / "out") == parts(plain)
    assert "left out: 2 file(s) or folder(s): __MACOSX/my photos/washer/._a0.png" in result.stdout


def test_a_damaged_image_in_a_compressed_tar_is_left_out_too(photos, tmp_path):
    files = {
        str(path.relative_to(photos)): path.read_bytes()
        for path in sorted(photos.rglob("*.*"))
        if path.is_file()
    }
    files["washer/broken.png"] = files["washer/a0.png"][:60]
    (tmp_path / "photos.tgz").write_bytes(archives.tarred(files, "w:gz"))
    options = ["--source", tmp_path / "photos.tgz", "--out", tmp_path / "out"]
    assert "washer/broken.png" in str(invoke("build", "folder", *options).exception)
    result = invoke("build", "folder", *options, "--skip-bad")
    assert result.exit_code == 0 and "left out: washer/broken.png is " in result.stdout
    assert len(list(scan(tmp_path / "out").images)) == 31


def test_a_zip_of_macos_has_its_names(tmp_path):
    """It writes UTF-8, and does not say so."""
    names = [f"{name}/{number}.png" for name in ("Schräube", "螺栓") for number in range(4)]
    content = archives.zipped({name: archives.picture(number) for number, name in enumerate(names)})
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        assert archive.infolist()[0].flag_bits == 0x800
    for signature, place in ((b"PK\1\2", 8), (b"PK\3\4", 6)):
        pieces = content.split(signature)
        for number, piece in enumerate(pieces[1:], 1):
            pieces[number] = piece[: place - 4] + b"\0\0" + piece[place - 2 :]
        content = signature.join(pieces)
    (tmp_path / "photos.zip").write_bytes(content)
    with zipfile.ZipFile(tmp_path / "photos.zip") as archive:
        assert "Schräube/0.png" not in archive.namelist()
    out = build("folder", tmp_path / "out", images_from=tmp_path / "photos.zip")
    assert scan(out).classes == ("Schräube", "螺栓")


def test_a_zip_of_powershell_has_folders(tmp_path):
    """It writes backslashes between them."""
    with zipfile.ZipFile(tmp_path / "photos.zip", "w") as archive:
        for number, name in enumerate(("cat", "dog") * 4):
            for path in (f"photos\\{name}\\", f"photos\\{name}\\{number}.png"):
                info = zipfile.ZipInfo(path)
                info.create_system = 0
                if path.endswith("g"):
                    archive.writestr(info, archives.picture(number))
                elif path not in archive.namelist():
                    archive.writestr(info, b"")
    out = build("folder", tmp_path / "out", images_from=tmp_path / "photos.zip")
    assert scan(out).classes == ("cat", "dog") and len(list(scan(out).images)) == 8
    assert tomllib.loads((out / "dataset.toml").read_text())["notes"] == []


def zipped_as(encoding, names):
    """A zip of images whose names are in this encoding, which it does not say."""
    encoded = [name.encode(encoding) for name in names]
    numbers = [f"{number:0{len(name)}}" for number, name in enumerate(encoded)]
    content = archives.zipped({number: archives.picture(int(number)) for number in numbers})
    for number, name in zip(numbers, encoded, strict=True):
        content = content.replace(number.encode(), name)
    return content


def in_class(*classes):
    return [f"{name}/{number}.png" for name in classes for number in range(4)]


def test_a_zip_of_other_encodings_never_gets_other_letters(tmp_path):
    """GBK as of zhuojg/chinese-calligraphy-dataset#2, Shift-JIS as of nih-at/libzip#212, where ソ
    has a backslash's byte.
    """
    for encoding, name, words in (
        ("latin-1", "café", "class 'café' is not UTF-8 .*`unzip -O gbk`"),
        ("latin-1", "Málaga", "class 'Málaga' is not UTF-8"),
        ("gbk", "猫咪", "is not UTF-8 .*gbk or cp932"),
        ("cp932", "ソフト", "is not UTF-8 .*gbk or cp932"),
    ):
        (tmp_path / "photos.zip").write_bytes(zipped_as(encoding, in_class(name, "tea")))
        with pytest.raises(UsageError, match=words):
            build("folder", tmp_path / "out", images_from=tmp_path / "photos.zip")
        assert not (tmp_path / "out").exists()


def test_a_zip_of_dos_is_read_and_that_is_said(tmp_path):
    (tmp_path / "photos.zip").write_bytes(zipped_as("cp437", in_class("Schräube", "Señor")))
    out = build("folder", tmp_path / "out", images_from=tmp_path / "photos.zip")
    assert scan(out).classes == ("Schräube", "Señor")
    [note] = tomllib.loads((out / "dataset.toml").read_text(encoding="utf-8"))["notes"]
    assert note.startswith("names in photos.zip are not UTF-8, and were read as those of DOS: Schr")
    assert "`unzip -O cp932`" in note


def test_a_class_in_latin_1_is_named_as_it_reads(photos, tmp_path):
    odd = photos / os.fsdecode(b"caf\xe9")
    (photos / "washer").rename(odd)
    result = invoke("build", "folder", "--source", photos, "--out", tmp_path / "out")
    assert "the name of class 'café' is not UTF-8" in str(result.exception)


def test_names_that_tell_no_format_are_images_by_their_content(photos, tmp_path):
    odd = {"0001": "PNG", "a.jpg?w=300": "JPEG", "b.jpg-large": "JPEG", "c.jfif": "JPEG"}
    archives.lay_out(
        photos,
        {
            f"washer/{name}": archives.picture(500 + k, kind=kind)
            for k, (name, kind) in enumerate(odd.items())
        },
    )
    (photos / "washer" / "notes").write_bytes(b"BM is not an image")
    out = build("folder", tmp_path / "out", images_from=photos)
    train, held_out = parts(out)["washer"]
    assert set(odd) <= set(train + held_out) and "notes" not in train + held_out
    assert len(list(scan(out).images)) == 35
