"""`hvdtrain data`: what it says, what it refuses, and what it imports."""

import re

import pytest
from click.testing import CliRunner
from helpers import archives
from helpers.processes import run_python
from PIL import Image

from hvdtrain.config import recipes
from hvdtrain.data.commands import data
from hvdtrain.errors import Failure, UsageError


def invoke(*arguments):
    return CliRunner().invoke(data, [str(argument) for argument in arguments])


def test_list_shows_every_recipe():
    result = invoke("list")
    assert result.exit_code == 0
    for name in [*recipes.names("datasets"), "synthetic"]:
        assert name in result.output


def test_build_says_what_it_made_and_that_it_was_there(tmp_path):
    command = ("build", "turntable", "--objects", 2, "--views", 4, "--seed", 3, "--out", tmp_path / "out")
    first = invoke(*command)
    assert first.exit_code == 0, first.output
    assert "2 classes, 6 images in TrainData, 2 in ValidationData" in first.stdout
    assert "turntable: 8 of 8 images" in first.stderr
    second = invoke(*command)
    assert second.exit_code == 0
    assert "already holds this data set" in second.stdout
    assert invoke(*command, "--force").exit_code == 0


def test_build_flat(tmp_path):
    result = invoke("build", "turntable", "--objects", 2, "--views", 2, "--flat", "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert len(list((tmp_path / "out").glob("*.png"))) == 4


@pytest.mark.parametrize("option", [("--objects", 3), ("--views", 3), ("--flat",)])
def test_an_option_of_another_data_set_is_refused(tmp_path, option):
    result = invoke("build", "digits", "--out", tmp_path / "out", *option)
    assert isinstance(result.exception, UsageError)
    assert f"no option '{option[0].lstrip('-')}'" in str(result.exception)
    assert list(tmp_path.iterdir()) == []


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


def spoil_pixels(folder):
    whole = archives.picture(3, (64, 64), "JPEG")
    (folder / "TrainData" / "cat" / "3.jpg").write_bytes(whole[: len(whole) // 2])
    return "3.jpg is damaged"


def no_image(folder):
    (folder / "TestData" / "dog" / "0.png").write_bytes(b"")
    return "0.png is not an image"


def same_in_two_parts(folder):
    (folder / "ValidationData" / "dog" / "9.png").write_bytes(archives.picture(2))
    return "the same image is in two parts: .*TrainData/cat/2.png and .*ValidationData/dog/9.png"


@pytest.mark.parametrize("spoil", [spoil_pixels, no_image, same_in_two_parts])
def test_check_finds_what_is_wrong(spoil, folder):
    words = spoil(folder)
    result = invoke("check", folder)
    assert isinstance(result.exception, Failure) and "1 problem" in str(result.exception)
    assert re.search(f"^WRONG: .*{words}", result.stdout, re.MULTILINE), result.stdout


def test_check_notes_copies_and_imbalance(folder):
    for k in range(9):
        (folder / "TrainData" / "dog" / f"copy{k}.png").write_bytes(archives.picture(101))
    result = invoke("check", folder)
    assert result.exit_code == 0
    assert "note: 9 image(s) are copies of another in the same part" in result.stdout
    assert "class 'dog' has 13 training images, 'cat' 4; always answering 'dog' is right for 76.5%" in result.stdout


def test_check_names_what_is_not_used(folder):
    before = invoke("check", folder).stdout
    assert "not used" not in before
    archives.lay_out(folder / "TrainData", {
        "cat/more/deep/d.JPG": archives.picture(900, kind="JPEG"), "cat/t.tif": b"x", "cat/more/x.gif": b"x",
        "cat/.DS_Store": b"x", "loose.png": archives.picture(901), **{f"dog/more/{k}.png": b"" for k in range(6)},
    })  # fmt: skip
    (folder / "TrainData" / "cat" / "more" / "loop").symlink_to(folder / "TrainData")
    result = invoke("check", folder)
    assert result.exit_code == 0, result.output
    notes = [line for line in result.stdout.splitlines() if "not used" in line]
    deeper, loose, others = notes
    assert deeper.startswith("note: not used: 7 image(s) in folders below their class's (`hvdtrain data build folder")
    assert deeper.endswith("TrainData/cat/more/deep/d.JPG, " + ", ".join(
        f"TrainData/dog/more/{k}.png" for k in range(4)
    ) + " and 2 more")  # fmt: skip
    assert loose == "note: not used: 1 image(s) in no class's folder: TrainData/loose.png"
    assert others.startswith("note: not used: 2 file(s) that are not .png, .jpg")
    assert others.endswith(": TrainData/cat/t.tif, TrainData/cat/more/x.gif")
    assert [line for line in result.stdout.splitlines() if line not in notes] == before.splitlines()


def test_check_misses_what_a_build_has_put_there(tmp_path):
    out = tmp_path / "out"
    assert invoke("build", "turntable", "--objects", 2, "--views", 4, "--out", out).exit_code == 0
    next((out / "TrainData" / "obj1").iterdir()).unlink()
    result = invoke("check", out)
    assert "class 'obj1' was built with 3 train + 1 validation images, and has 2 train + 1 validation" in result.stdout


# show


def test_show_draws_a_sheet_and_overwrites_nothing(folder, tmp_path):
    out = tmp_path / "sheet.png"
    assert invoke("show", folder, "--out", out, "-k", 5).exit_code == 0
    with Image.open(out) as sheet:
        assert sheet.width > 800 and len(sheet.convert("RGB").getcolors(10**7)) > 100
    before = out.read_bytes()
    assert "is there already" in str(invoke("show", folder, "--out", out).exception)
    assert out.read_bytes() == before
    assert "there is no folder" in str(invoke("show", folder, "--out", tmp_path / "no" / "sheet.png").exception)


# build from files


def test_build_takes_an_archive_and_says_what_it_made(tmp_path):
    archive = tmp_path / "in.zip"
    archive.write_bytes(archives.zipped(archives.imagenet100(archives.wnids(4), 5, 2)))
    command = ("build", "imagenet-slice", "--archive", archive, "--num-classes", 3, "--test-fraction", 0.2)
    result = invoke(*command, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "3 classes, 12 images in TrainData, 6 in ValidationData, 3 in TestData" in result.stdout
    assert "already holds" in invoke(*command, "--out", tmp_path / "out").stdout


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--archive", "a", "--source", "b"), "exclude each other"),
        (("--archive", "nosuch"), "--archive nosuch is not a file"),
        (("--source", "nosuch"), "--source nosuch is not a folder"),
        ((), "and --archive FILE or --source FOLDER"),
    ],
)
def test_build_refuses_in_a_line(options, words, tmp_path):
    result = invoke("build", "imagenet-slice", "--out", tmp_path / "out", *options)
    assert isinstance(result.exception, UsageError) and words in str(result.exception)
    assert list(tmp_path.iterdir()) == []
