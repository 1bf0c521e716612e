"""`hvdtrain data`: what it says, what it refuses, and what it imports."""

import pytest
from click.testing import CliRunner
from conftest import run_python

from hvdtrain import recipes
from hvdtrain.data.commands import data
from hvdtrain.errors import UsageError


def invoke(*arguments):
    return CliRunner().invoke(data, [str(argument) for argument in arguments])


def test_list_shows_every_recipe():
    result = invoke("list")
    assert result.exit_code == 0
    for name in recipes.names("datasets"):
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
