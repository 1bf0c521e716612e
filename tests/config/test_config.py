"""What a job is asked to do: out to a command line or a file and back."""

import dataclasses
import tempfile
from pathlib import Path

import click
import pytest
import tomli_w
from helpers.options import TEXT, from_args, in_file
from hypothesis import example, given
from hypothesis import strategies as st

from hvdtrain.base.config.file import read_config
from hvdtrain.base.config.option_types import (
    DURATION,
    LONGEST_S,
    NUMBERS,
    SERVER_NUMBERS,
    Several,
    SnapshotEvery,
    WordOr,
)
from hvdtrain.base.config.run_config import LENGTHS, RunConfig, flag
from hvdtrain.base.errors import UsageError

FIELDS = dataclasses.fields(RunConfig)


def values(field, kind=None):
    """Every value that an option's type allows."""
    kind = kind or field.metadata["type"]
    if isinstance(kind, WordOr):
        words = [kind.meaning] if type(kind.meaning) is type(field.default) else []
        return (
            st.sampled_from(words) | values(field, kind.other)
            if words
            else values(field, kind.other)
        )
    if isinstance(kind, click.IntRange):
        return st.integers(kind.min, kind.max)
    if isinstance(kind, click.FloatRange):
        bounds = {
            "exclude_min": kind.min_open,
            "exclude_max": kind.max_open,
            "allow_infinity": False,
        }
        return st.floats(kind.min, kind.max, **bounds)
    if kind is DURATION:
        return st.floats(0, LONGEST_S, exclude_min=True)
    if isinstance(kind, click.Choice):
        return st.sampled_from(kind.choices)
    if isinstance(kind, SnapshotEvery):
        return st.sampled_from(["epoch", "never", "10m", "90"])
    return st.booleans() if kind is bool else TEXT.filter(lambda words: words != "none")


CONFIGS = st.builds(RunConfig, **{field.name: values(field) for field in FIELDS})


# There and back


@given(CONFIGS)
@example(RunConfig(dataset="--model", lr=5e-324, width=1e-300))
@example(RunConfig(time_budget=1e-05, timeout=LONGEST_S))
def test_to_the_command_line_and_back(config):
    assert from_args(config.to_args()) == config


@given(CONFIGS)
def test_to_a_file_and_back(config):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.toml"
        config.write(path, workers=4, job="17")
        assert RunConfig(**read_config(path)) == config


@pytest.mark.parametrize("f", FIELDS, ids=lambda f: f.name)
def test_one_option_alone_is_all_that_the_command_line_says(f):
    value = {str: "10m", int: 7, float: 0.5, bool: True}[type(f.default)]
    if isinstance(f.metadata["type"], click.Choice):
        value = f.metadata["type"].choices[1]
    config = RunConfig(**{f.name: value})
    assert config.to_args() == ([flag(f.name)] if value is True else [flag(f.name), str(value)])
    assert from_args(config.to_args()) == config


@pytest.mark.parametrize(
    ("name", "word", "meaning", "value"),
    [
        ("threads", "auto", 0, 3),
        ("epochs", "auto", 0, 2),
        ("image_size", "auto", 0, 48),
        ("width", "auto", 0.0, 0.5),
        ("steps", "none", 0, 9),
        ("time_budget", "none", 0.0, 60.0),
        ("log_every", "never", 0, 20),
        ("shuffle_block", "none", 0, 812),
        ("pretrained", "none", "", "file.pth"),
    ],
)
def test_a_word_stands_where_a_number_used_to(name, word, meaning, value, tmp_path):
    assert (
        from_args([flag(name), word])
        == RunConfig()
        == RunConfig(**in_file(tomli_w.dumps({name: meaning})))
    )
    whole = RunConfig().to_args(whole=True)
    assert name in LENGTHS or whole[whole.index(flag(name)) + 1] == word
    assert name not in LENGTHS or flag(name) not in whole
    RunConfig().write(tmp_path / "config.toml")
    assert f'{name} = "{word}"' in (tmp_path / "config.toml").read_text().splitlines()
    assert read_config(tmp_path / "config.toml")[name] == meaning
    assert in_file(tomli_w.dumps({name: value})) == {name: value}
    if name != "pretrained":  # a file of weights may have any name
        with pytest.raises(UsageError, match=f"{name} = 'other' should be of type"):
            in_file(f'{name} = "other"')


def test_only_the_default_model_is_narrow_by_default(tmp_path):
    assert RunConfig().effective_width == 1 / 8 and RunConfig(width=0.5).effective_width == 0.5
    assert {
        RunConfig(model=name).effective_width for name in ("vgg16", "vgg11_bn", "resnet8", "cnn")
    } == {1.0}
    # a run of before
    assert RunConfig(**in_file('model = "vgg16"\nwidth = 0.125')).effective_width == 1 / 8


# Values on the command line


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90),
        ("90s", 90),
        ("1.5m", 90),
        ("30m", 1800),
        ("2h", 7200),
        (" 2 h ", 7200),
        ("1e-05", 1e-5),
    ],
)
def test_durations(text, seconds):
    assert DURATION.convert(text, None, None) == seconds


@pytest.mark.parametrize(
    "text", ["0", "0h", "", "h", "-5", "5d", "1:30", "nan", "inf", "1e400", "9" * 400, "5 5"]
)
def test_what_is_no_duration_is_refused_with_examples(text):
    with pytest.raises(click.BadParameter, match="is not a duration such as 90s, 30m or 2h"):
        DURATION.convert(text, None, None)


@pytest.mark.parametrize(
    "args",
    [
        ["--width", "0"],
        ["--width", "4.1"],
        ["--dropout", "1"],
        ["--momentum", "1"],
        ["--batch-size", "0"],
        ["--epochs", "-1"],
        ["--steps", "-1"],
        ["--lr", "0"],
        ["--lr", "-1"],
        ["--schedule", "linear"],
        ["--push-scale", "sum"],
        ["--seed", "-1"],
        ["--seed", str(2**32)],
        ["--servers", "-1"],
        ["--image-size", "-32"],
        ["--target-accuracy", "1.1"],
        ["--timeout", "0"],
        ["--time-budget", "soon"],
        ["--threads", "0"],
    ],
    ids=" ".join,
)
def test_values_out_of_range_are_refused_and_name_the_option(args):
    with pytest.raises(click.BadParameter) as refused:
        from_args(args)
    assert args[0] in refused.value.format_message()


@pytest.mark.parametrize(
    ("text", "numbers"), [("2", [2]), ("1,2,4", [1, 2, 4]), ("4, 2,4", [4, 2])]
)
def test_lists_of_numbers(text, numbers):
    assert NUMBERS.convert(text, None, None) == numbers


# The last two are of a preset.
@pytest.mark.parametrize(
    "text", ["", "0", "1,0", "-1", "1,,2", "two", "1.5", "1;2", [], [1.5, {}]], ids=str
)
@pytest.mark.parametrize("kind", [NUMBERS, SERVER_NUMBERS], ids=lambda kind: kind.name)
def test_what_is_no_list_of_numbers_is_refused(kind, text):
    with pytest.raises(click.BadParameter):
        kind.convert(text, None, None)


def test_lists_of_names():
    assert Several().convert("single, ddp,single", None, None) == ["single", "ddp"]
    with pytest.raises(click.BadParameter, match="is not a list such as"):
        Several().convert([], None, None)


@pytest.mark.parametrize(
    ("workers", "taken"),
    [(1, (1.0, 0.0)), (3, (1.0, 0.0)), (4, (1.0, 0.2)), (8, (0.7, 0.5)), (16, (0.7, 0.6))],
)
def test_an_outer_optimizer_is_by_default_as_published_for_so_many_workers(workers, taken):
    assert RunConfig(local_steps=8).effective_outer(workers) == taken
    assert RunConfig(local_steps=8, outer_lr=0.3, outer_momentum=0.9).effective_outer(workers) == (
        0.3,
        0.9,
    )
