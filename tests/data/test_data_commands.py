"""`hvdtrain data`: what it says, what it refuses, and what it imports."""

import os
import re

import pytest
from click.testing import CliRunner
from helpers import archives
from helpers.processes import run_python
from PIL import Image

from hvdtrain.base.config import recipes
from hvdtrain.base.errors import Failure, UsageError
from hvdtrain.data.commands import data


def invoke(*arguments):
    return CliRunner().invoke(data, [str(argument) for argument in arguments])


def test_list_shows_every_recipe():
    result = invoke("list")
    assert result.exit_code == 0
    for name in [*recipes.names("datasets"), "synthetic"]:
        assert name in result.output


def test_build_says_what_it_made_and_makes_it_once(tmp_path):
    command = (
        "build",
        "turntable",
        "--objects",
        2,
        "--views",
        4,
        "--seed",
        3,
        "--out",
        tmp_path / "out",
    )
    for options, works in ((), True), ((), False), (("--force",), True):
        done = invoke(*command, *options)
        assert done.exit_code == 0, done.output
        assert "2 classes, 6 images in TrainData, 2 in ValidationData" in done.stdout
        assert ("turntable: 8 of 8 images" in done.stderr) == works


def test_the_commands_import_nothing_heavy():
    code = (
        "import sys, hvdtrain.data.commands;"
        "print([m for m in ('torch', 'numpy', 'PIL', 'sklearn', 'rich') if m in sys.modules])"
    )
    with run_python(code) as child:
        assert child.communicate()[0].strip() == "[]"


# check


@pytest.fixture
def folder(tmp_path):
    root = tmp_path / "folder"
    for part, first in (("TrainData", 0), ("ValidationData", 50), ("TestData", 70)):
        for i, name in enumerate(("cat", "dog")):
            files = {f"{k}.png": archives.picture(first + 100 * i + k) for k in range(4)}
            archives.lay_out(root / part / name, files)
    return root


def test_check_counts_and_decodes_every_image(folder):
    result = invoke("check", folder)
    assert result.exit_code == 0, result.output
    assert "every image can be decoded" in result.stdout
    lines = [line.split() for line in result.stdout.splitlines()]
    assert ["class", "train", "validation", "test"] in lines
    assert ["dog", "4", "4", "4"] in lines and ["all", "8", "8", "8"] in lines


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("TrainData/cat/3.jpg", archives.picture(3, (64, 64), "JPEG")[:-99], "3.jpg is damaged"),
        ("TestData/dog/0.png", b"", "0.png is not an image"),
        (
            "ValidationData/dog/9.png",
            archives.picture(2),
            "in two parts: .*TrainData/cat/2.png and .*Data/dog/9.png",
        ),
    ],
)
def test_check_says_what_is_wrong(name, content, words, folder):
    (folder / name).write_bytes(content)
    result = invoke("check", folder)
    assert isinstance(result.exception, Failure) and "1 problem" in str(result.exception)
    assert re.search(f"^WRONG: .*{words}", result.stdout, re.MULTILINE), result.stdout


def test_check_names_what_is_not_used(folder):
    before = invoke("check", folder).stdout
    assert "not used" not in before
    archives.lay_out(
        folder / "TrainData",
        {
            "cat/more/deep/d.JPG": b"x",
            "cat/t.tif": b"x",
            "cat/.DS_Store": b"x",
            "loose.png": archives.picture(901),
        },
    )
    (folder / "TrainData" / "dog" / "gone.png").symlink_to(folder / "nowhere")
    (folder / "TrainData" / "dog" / "loop.png").symlink_to("loop.png")
    os.mkfifo(folder / "TrainData" / "pipe.png")
    result = invoke("check", folder)
    assert result.exit_code == 0, result.output
    note, irregular, hidden = [
        line for line in result.stdout.splitlines() if line not in before.splitlines()
    ]
    unused = ("cat/t.tif", "loose.png", "cat/more")
    named = ", ".join(f"TrainData/{path}" for path in unused)
    assert note.startswith(
        f"note: not used: 2 images and 1 other file(s) or folder(s): {named} (`hvdtrain data build "
        f"folder --source {folder} --out NEW` takes "
    )
    assert irregular == (
        "note: not used: 3 images: TrainData/dog/gone.png, TrainData/dog/loop.png, TrainData/pipe.png "
        "(no regular files, but broken links, pipes or devices: put files in their place)"
    )
    assert hidden == (
        "note: passed over: 1 hidden file(s) and folder(s), or left by systems: .DS_Store"
    )


def test_check_shows_names_as_they_read(folder):
    odd = os.fsdecode(b"caf\xe9,\nau lait")
    for part in ("TrainData", "ValidationData", "TestData"):
        (folder / part / "cat").rename(folder / part / odd)
    result = invoke("check", folder)
    assert result.exit_code == 0 and "\ncafé,\\nau lait  4 " in result.stdout


def test_check_notes_an_image_that_two_classes_have(folder):
    for name in ("TrainData/cat/9.png", "TrainData/dog/8.png"):
        (folder / name).write_bytes(archives.picture(905))
    result = invoke("check", folder)
    assert result.exit_code == 0, result.output
    [note] = [line for line in result.stdout.splitlines() if "two classes" in line]
    assert note.startswith("note: the same image is in two classes, 1 time: ")
    assert note.endswith("TrainData/cat/9.png and " + str(folder / "TrainData/dog/8.png"))


def test_a_folder_that_is_called_as_a_data_set_is_taken_and_that_is_said(
    folder, tmp_path, monkeypatch
):
    folder.rename(tmp_path / "digits")
    monkeypatch.chdir(tmp_path)
    result = invoke("check", "digits")
    assert result.exit_code == 0 and "all    8" in result.stdout
    told = "note: digits is the folder here, and not the built-in data set of that name"
    assert told in result.stdout
    shown = CliRunner().invoke(data, ["show", "digits", "--out", "sheet.png"])
    assert shown.exit_code == 0 and told in shown.stderr


# show


def test_show_draws_a_sheet_and_overwrites_nothing(folder, tmp_path):
    out = tmp_path / "sheet.png"
    assert invoke("show", folder, "--out", out, "-k", 5).exit_code == 0
    with Image.open(out) as sheet:
        assert sheet.width >= 700 and len(sheet.convert("RGB").getcolors(10**7)) > 100
    before = out.read_bytes()
    for place in (out, tmp_path / "no" / "sheet.png"):
        assert "name a new file, in a folder that exists" in str(
            invoke("show", folder, "--out", place).exception
        )
    assert out.read_bytes() == before


# build from files


def test_build_takes_an_archive_and_says_what_it_made(tmp_path):
    archive = tmp_path / "in.zip"
    archive.write_bytes(archives.zipped(archives.imagenet100(archives.wnids(4), 5, 2)))
    command = (
        "build",
        "imagenet-slice",
        "--archive",
        archive,
        "--num-classes",
        3,
        "--test-fraction",
        0.2,
    )
    result = invoke(*command, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "3 classes, 12 images in TrainData, 6 in ValidationData, 3 in TestData" in result.stdout


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--archive", __file__, "--source", "/"), "exclude each other"),
        (("--archive", "nosuch"), "there is no file or folder '"),
        (("--source", __file__), "is neither a folder nor a zip or tar archive"),
        ((), "and --archive FILE or --source FOLDER"),
    ],
)
def test_build_refuses_in_a_line(options, words, tmp_path):
    result = invoke("build", "imagenet-slice", "--out", tmp_path / "out", *options)
    assert isinstance(result.exception, UsageError) and words in str(result.exception)
    assert list(tmp_path.iterdir()) == []
