"""Configuration files that are not what write() wrote."""

import dataclasses

import pytest
import tomli_w
from helpers.options import TEXT, from_args, in_file
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.base.config.file import read_config
from hvdtrain.base.config.run_config import RunConfig
from hvdtrain.base.errors import UsageError

FIELDS = dataclasses.fields(RunConfig)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"\xff\xfe\x00\x01" * 50, "cannot read the configuration .*config.toml"),
        ("mode = ", "cannot read the configuration .*Invalid value"),
        ("x = " + "[" * 50_000, "nested too deeply"),
        ("x = " + "[" * 100_000, "larger than 65,536 bytes"),
        ("seed = " + "9" * 5000, "cannot read the configuration"),
        ('colour = "red"', "config.toml: 'colour': choose from mode, servers, dataset"),
        ("mode = 3", "mode = 3 should be of type str"),
        ("batch_size = 32.0", "batch_size = 32.0 should be of type int"),
        ("seed = true", "seed = True should be of type int"),
        ("deterministic = 1", "deterministic = 1 should be of type bool"),
        ("batch_size = 0", "config.toml: batch_size: 0 is not in the range"),
        ("lr = " + "9" * 400, "config.toml: lr: int too large"),
        ("time_budget = -5.0", "config.toml: time_budget: '-5.0' is not a duration"),
        ("timeout = nan", "config.toml: timeout: 'nan' is not a duration"),
        (
            'schedule = "linear"',
            "config.toml: schedule: 'linear' is not one of 'auto', 'cosine', 'constant'",
        ),
        (
            r'dataset = "/x\n#$ -S /their/program\n"',
            r"config.toml: dataset = '/x\\n#\$ .*' has a control character",
        ),
        (r'model = "a\u2028b"', r"config.toml: model = 'a\\u2028b' has a control character"),
    ],
    ids=lambda value: str(value[:20]),
)
def test_broken_and_hostile_files_are_refused(text, words):
    with pytest.raises(UsageError, match=words) as refused:
        in_file(text)
    assert "\n" not in str(refused.value)


def test_a_missing_file_and_a_folder_are_refused(tmp_path):
    for path in (tmp_path / "nosuch.toml", tmp_path):
        with pytest.raises(UsageError, match="cannot read the configuration"):
            read_config(path)


def test_whole_numbers_stand_for_floats_and_what_is_remembered_is_passed_over():
    read = in_file('lr = 1\nworkers = 4\njob = "17"')
    assert read == {"lr": 1.0}
    assert type(read["lr"]) is float


@given(
    st.dictionaries(
        st.sampled_from([f.name for f in FIELDS]),
        st.integers()
        | st.floats(allow_nan=False)
        | st.booleans()
        | TEXT
        | st.sampled_from(["constant", "none"]),
    )
)
def test_what_a_file_may_say_the_command_line_may_say_too(values):
    try:
        config = RunConfig(**in_file(tomli_w.dumps(values)))
    except UsageError:
        return
    assert from_args(config.to_args()) == config
