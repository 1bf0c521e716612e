"""What the built-in data sets hold, and that a built folder is complete or missing."""

import resource
import shutil
import signal
import time
import tomllib
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from helpers.processes import SMALL_TURNTABLE as SMALL
from helpers.processes import run_python as run
from PIL import Image

from hvdtrain.base.config import recipes
from hvdtrain.base.errors import Failure, UsageError
from hvdtrain.data import storage
from hvdtrain.data.build import build
from hvdtrain.data.commands import data
from hvdtrain.data.find import locate_folder
from hvdtrain.data.folder import content_hash, scan
from hvdtrain.data.recipe import Recipe


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    return build("digits", tmp_path_factory.mktemp("built") / "digits")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HVDTRAIN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "datasets"


def files(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*.*")}


# ---- digits


def test_digits_are_1797_real_images_in_ten_classes(digits):
    from sklearn.datasets import load_digits

    images = scan(digits)
    assert images.classes == tuple("0123456789")
    assert len(images.train) + len(images.validation) == 1797
    originals = load_digits()
    for path, label in images.validation[::40]:
        index = int(path.stem)
        assert originals.target[index] == label
        with Image.open(path) as image:
            assert (image.mode, image.size, image.format) == ("L", (32, 32), "PNG")
            small = np.asarray(image.resize((8, 8), Image.Resampling.BOX), dtype=float)
        assert np.corrcoef(small.ravel(), originals.images[index].ravel())[0, 1] > 0.95


def test_building_digits_gives_later_processes_no_variables_of_openmp(tmp_path):
    program = f"""
import os, sys
from pathlib import Path
from hvdtrain.data.build import build
before = dict(os.environ)
build("digits", Path({str(tmp_path / "built")!r}))
print("sklearn" in sys.modules, before == dict(os.environ))
"""
    printed, _ = run(program).communicate(timeout=60)
    assert printed == "True True\n"


def test_dataset_toml_says_what_the_folder_holds(digits):
    manifest = tomllib.loads((digits / "dataset.toml").read_text())
    said = {"name": "digits", "source": "digits", "licence": "CC BY 4.0", "seed": 0, "images": 1797}
    assert said.items() <= manifest.items()
    assert "80 % training, 20 % validation, drawn random within each class" in manifest["split"]
    for name, counts in manifest["classes"].items():
        assert counts["train"] == len(list((digits / "TrainData" / name).iterdir()))
        assert counts["validation"] == len(list((digits / "ValidationData" / name).iterdir()))


def test_half_of_the_digits_may_be_to_validate_on_and_the_split_of_others_stays(digits, tmp_path):
    half, usual = scan(build("digits", tmp_path / "half", validation=0.5)), scan(digits)
    assert (len(usual.train), len(usual.validation)) == (1438, 359)
    assert (len(half.train), len(half.validation)) == (899, 898)
    assert {path.name for path, _ in usual.validation[:]} < {
        path.name for path, _ in half.validation[:]
    }


def test_the_same_recipe_gives_the_same_bytes(digits, small, tmp_path):
    assert files(build("digits", tmp_path / "second")) == files(digits)
    assert files(build("turntable", tmp_path / "small", **SMALL)) == files(small)


# ---- complete or not at all


def test_a_build_that_fails_half_way_leaves_nothing(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    written = []
    # The system refuses to write any file above this size, as it does on a full disk.
    resource.setrlimit(resource.RLIMIT_FSIZE, (800, limits[1]))
    try:
        with pytest.raises(
            Failure, match=r"cannot build '.*out': File too large; nothing of it is left"
        ):
            build("digits", tmp_path / "out", progress=lambda done, _: written.append(done))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert len(written) > 10  # or it did not fail half way
    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    written_out = storage._write_out
    seen = []

    def look(folder):
        seen.append(((folder / "dataset.toml").is_file(), (tmp_path / "out").exists()))
        written_out(folder)

    monkeypatch.setattr(storage, "_write_out", look)
    build("turntable", tmp_path / "out", **SMALL)
    assert seen == [(True, False)]


def test_what_a_killed_build_left_is_cleaned_up_by_the_next(tmp_path):
    out = tmp_path / "out"
    child = run(
        f"from hvdtrain.data.build import Path, build; build('turntable', Path({str(out)!r}), objects=100)"
    )
    with child:
        deadline = time.monotonic() + 30
        while not list(tmp_path.glob(".out.*/*/*/obj*")) and time.monotonic() < deadline:
            time.sleep(0.01)
        child.send_signal(signal.SIGKILL)
    assert list(tmp_path.glob(".out.*/*/*/obj*"))
    assert not out.exists()
    build("turntable", out, objects=2, views=2)
    assert len(list(out.rglob("obj*.png"))) == 4
    assert list(tmp_path.iterdir()) == [out]


def test_processes_that_ask_at_once_get_one_folder(cache):
    code = "from hvdtrain.data.find import locate_folder; p = locate_folder('digits'); print(p, p.stat().st_ino)"
    children = [run(code) for _ in range(2)]
    answers = {child.communicate(timeout=60)[0] for child in children}
    assert [child.returncode for child in children] == [0, 0]
    assert len(answers) == 1
    path, inode = answers.pop().split()  # all were given the folder that one of them built
    assert [str(path) for path in cache.iterdir()] == [path]
    assert cache.joinpath(path).stat().st_ino == int(inode)


def test_a_folder_of_somebody_else_is_never_replaced(tmp_path):
    (tmp_path / "thesis.tex").write_text("mine")
    (tmp_path / "dataset.toml").write_text('name = "turntable"')  # not one of ours
    for force in (False, True):
        with pytest.raises(UsageError, match="was not made by `hvdtrain data build`"):
            build("turntable", tmp_path, force=force, **SMALL)
    assert (tmp_path / "thesis.tex").read_text() == "mine"


def test_what_appears_during_or_after_a_build_is_not_replaced(small, tmp_path):
    out = tmp_path / "out"

    def meddle(done, total):
        out.mkdir(exist_ok=True)
        (out / "mine").touch()

    with pytest.raises(UsageError, match="was not made by"):
        build("turntable", out, force=True, progress=meddle, **SMALL)
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "mine"]
    shutil.copytree(small, out, dirs_exist_ok=True)
    with pytest.raises(
        UsageError, match=r"holds what `hvdtrain data build` has not put there \(mine\)"
    ):
        build("turntable", out, force=True, **SMALL)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ("", "which is not whole"),
        ("classes = 3", "was not made by"),
        ("options = 3", "was not made by"),
        ("[classes.a]\ntrain = 'x'", "was not made by"),
    ],
)
def test_a_dataset_toml_that_lacks_something_is_a_line(more, says, tmp_path):
    out = build("turntable", tmp_path / "out", objects=2, views=2)
    (out / "dataset.toml").write_text(f'made_by = "hvdtrain data build"\n{more}\n')
    with pytest.raises(UsageError, match=says):
        build("turntable", out, objects=2, views=3)
    assert CliRunner().invoke(data, ["check", str(out)]).exit_code == 0


def test_another_data_set_is_replaced_by_force_alone(tmp_path):
    out = build("turntable", tmp_path / "out", objects=2, views=2)
    with pytest.raises(UsageError, match=r"holds data set 'turntable'.*--force"):
        build("turntable", out, objects=2, views=3)
    assert len(scan(out).train) == 2
    build("turntable", out, force=True, objects=2, views=3)
    assert len(scan(out).train) == 4
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("file", "is a file"),
        ("file/out", "cannot write in"),
        ("/", "cannot be replaced"),
        (".", "cannot be replaced"),
    ],
)
def test_a_place_where_no_folder_can_be_is_refused(tmp_path, monkeypatch, place, words):
    (tmp_path / "file").touch()
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    with pytest.raises(UsageError, match=words):
        build("turntable", Path(".") if place == "." else tmp_path / place, **SMALL)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["cwd", "file"]


# ---- names and options


def test_what_is_damaged_in_the_cache_is_built_anew(cache):
    folder = locate_folder("digits")
    whole = content_hash(scan(folder))
    next((folder / "TrainData" / "3").iterdir()).unlink()
    assert locate_folder("digits") == folder
    assert content_hash(scan(folder)) == whole


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("digit", {}, "unknown data set 'digit': choose from .*digits.*turntable"),
        ("digits", {"objects": 3}, "'digits' has no option 'objects': it takes seed"),
        ("turntable", {"objects": 1}, "1 class would be left"),
        ("folder", {"validation": float("nan")}, "validation nan is not a finite number"),
    ],
)
def test_a_wrong_name_or_option_is_refused_before_anything_is_written(
    tmp_path, name, options, words
):
    with pytest.raises(UsageError, match=words):
        build(name, tmp_path / "new" / "out", **options)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("licence", "license", "digits.toml: Object contains unknown field `license`"),
        (
            'source = "digits"',
            "source = 7",
            r"digits.toml: Expected `str`, got `int` - at `\$.source`",
        ),
        (
            '"digits"',
            '"telepathy"',
            "digits.toml 'telepathy': choose from digits, files, folder, imagenet, ",
        ),
        (
            'title = "Real handwritten digits"',
            "title = ",
            r"digits.toml: Invalid value \(at line 1",
        ),
        ("Real handwritten", "Real \udce9", "digits.toml: 'utf-8' codec can't decode"),
    ],
)
def test_a_broken_recipe_is_named(tmp_path, monkeypatch, old, new, words):
    text = (recipes.RECIPES / "datasets" / "digits.toml").read_text().replace(old, new)
    (tmp_path / "datasets").mkdir()
    (tmp_path / "datasets" / "digits.toml").write_text(text, errors="surrogateescape")
    monkeypatch.setattr(recipes, "RECIPES", tmp_path)
    recipes.load.cache_clear()
    with pytest.raises(UsageError, match=words):
        Recipe.load("digits")
    recipes.load.cache_clear()
