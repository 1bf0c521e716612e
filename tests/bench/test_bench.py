"""`hvdtrain bench`: what it takes, what it refuses, and that its rows are of what was asked for."""

import json

import click
import pytest
from click.testing import CliRunner

from hvdtrain.bench.command import Sizes, bench
from hvdtrain.errors import UsageError


@pytest.mark.parametrize(
    ("text", "sizes"), [("4", [4]), ("1M,16m", [2**20, 2**24]), ("64K, 2G", [2**16, 2**31]), ("553648128", [553648128])]
)
def test_sizes_are_bytes_with_units_of_1024(text, sizes):
    assert Sizes().convert(text, None, None) == sizes


@pytest.mark.parametrize("text", ["", "3", "1T", "-1", "1.5M", "1M,", "65G", "9" * 30])
def test_other_sizes_are_refused(text):
    with pytest.raises(click.BadParameter, match="is not a size from 4 bytes to 64G"):
        Sizes().convert(text, None, None)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--op nosuch", "unknown operation 'nosuch': choose from allreduce, pushpull"),
        ("--backend nosuch", "unknown backend 'nosuch': choose from horovod, gloo, rpc, naive-rpc"),
        ("--op pushpull --backend gloo", "none of gloo carries pushpull"),
        ("--json nosuch/rows.json", "there is no folder nosuch to write rows.json in"),
    ],
)
def test_what_cannot_be_timed_is_refused(arguments, words):
    result = CliRunner().invoke(bench, arguments.split())
    assert isinstance(result.exception, UsageError)
    assert words in str(result.exception)


@pytest.mark.timeout(120)
def test_rows_say_what_was_timed(tmp_path):
    arguments = "--op pushpull --backend rpc --bytes 64K,1M -n 2 -s 2 --repeats 3"
    file, plot = tmp_path / "rows.json", tmp_path / "rows.svg"
    result = CliRunner().invoke(bench, [*arguments.split(), "--json", str(file), "--plot", str(plot)])
    assert result.exit_code == 0, result.output
    rows = json.loads(file.read_text())
    assert [(row["op"], row["backend"], row["workers"], row["servers"]) for row in rows] == [
        ("pushpull", "rpc", 2, 2)
    ] * 2
    assert [row["bytes"] for row in rows] == [2**16, 2**20]
    for row in rows:
        assert row["repeats"] == 3
        assert 0 < row["seconds_min"] <= row["seconds_median"] <= row["seconds_max"]
        assert row["gb_per_s"] == pytest.approx(row["bytes"] / row["seconds_median"] / 1e9)
    assert plot.read_text().startswith("<?xml")
