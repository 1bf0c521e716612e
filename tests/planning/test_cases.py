"""Published tables: the files that ship, what is refused, and that a fit finds what a table was
made of.
"""

from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

import hvdtrain
from hvdtrain.base.errors import UsageError
from hvdtrain.planning import cases, predict
from hvdtrain.planning.command import plan as command

SHIPPED = sorted((Path(hvdtrain.__file__).parent / "planning" / "cases").glob("*.toml"))


def test_published_tables_are_found_where_they_lay_before():
    before = Path(hvdtrain.__file__).parent / "plan" / "cases"
    assert sorted(path.name for path in before.glob("*.toml")) == [path.name for path in SHIPPED]


TEXT = """
title = "made up"
source = "nowhere"
[model]
layers = [
  { name = "conv", megabytes = 10, share_of_compute = 0.9 },
  { name = "fc", megabytes = 90, share_of_compute = 0.1 },
]
batch_per_worker = 32
[cluster]
single_worker_samples_per_s = 100.0
bandwidth_gbit = 10.0
latency_us = 50.0
[[cell]]
mode = "ps-sync"
workers = 8
servers = 2
samples_per_s = 300.0
calibrate = true
[[cell]]
mode = "ps-sync"
workers = 8
servers = 8
placement = "shared"
samples_per_s = 700.0
[[cell]]
mode = "allreduce"
workers = 8
samples_per_s = 750.0
"""


def load(tmp_path, text=TEXT):
    path = tmp_path / "case.toml"
    path.write_text(text)
    return cases.load(path)


def test_two_tables_and_more_ship_with_their_sources():
    assert len(SHIPPED) >= 2
    for path in SHIPPED:
        case = cases.load(path)
        assert len(case.source) > 50
        assert [cell.calibrate for cell in case.cell].count(True) <= 1


def test_a_fit_finds_the_wire_and_predicts_the_other_cells(tmp_path):
    """A table made with half of the wire: from one cell of it, the others."""
    made = load(tmp_path)
    truth = {"efficiency": 0.35, "processor_s_per_gb": 0.2, "jitter": 0.03, "host_gb_per_s": 10.0}
    text = TEXT
    for cell in made.cell:
        text = text.replace(str(cell.samples_per_s), str(cases.figure(made, cell, truth)))
    rows, fitted = cases.predict(load(tmp_path, text))
    assert fitted["efficiency"] == pytest.approx(0.35, rel=0.15)
    assert all(abs(row["error"]) < 0.1 for row in rows)
    assert all(row["low"] <= row["predicted"] <= row["high"] for row in rows)


def test_naive_rules_stand_beside_a_prediction(tmp_path):
    """Linear scaling is from the fitted cell; the wire of two servers takes 4 M / B."""
    rows, _ = cases.predict(load(tmp_path))
    assert [row["linear"] for row in rows] == pytest.approx([300.0] * 3)
    wire_s = 4 * 100e6 / (10e9 / 8)
    assert rows[0]["slower_of_both"] == pytest.approx(8 * 32 / wire_s)
    assert rows[0]["slower_of_both_error"] == pytest.approx(8 * 32 / wire_s / 300 - 1)
    assert rows[2]["slower_of_both"] == pytest.approx(8 * 100.0)


def test_a_table_may_say_how_much_faster_servers_are_than_a_ring(tmp_path):
    """As BytePS's does; what is common to both does not count, nor what another network has."""
    cell = 'servers = 8\nplacement = "shared"\n'
    text = TEXT.replace(cell + "samples_per_s = 700.0", cell + 'times = 1.0\nover = "allreduce"')
    rows, _ = cases.predict(load(tmp_path, text))
    assert rows[1]["published"] == 1.0
    assert 0.7 < rows[1]["predicted"] < 1.3 and rows[1]["linear"] == 1.0
    fast = text.replace('over = "allreduce"', 'over = "allreduce"\nbandwidth_gbit = 10000.0')
    rows, _ = cases.predict(load(tmp_path, fast))
    assert rows[1]["predicted"] == pytest.approx(1.0, abs=0.05)


def test_a_case_takes_the_way_of_the_map(tmp_path):
    """A cell is a prediction of its calibration, in which the workers of a host push once."""
    table = load(tmp_path, TEXT.replace("latency_us", "workers_per_host = 4\nlatency_us"))
    unknowns = dict(cases.NOTHING_COSTS, efficiency=0.5)
    cell = table.cell[0]
    made = table.calibration(cell, unknowns)
    predicted = predict.row(replace(made, model_error=0), cases.job_of(table, cell))
    assert predicted["samples_per_s"] == pytest.approx(cases.figure(table, cell, unknowns), rel=0.1)
    once = made.with_costs(cases.job_of(table, cell))
    assert (once.workers, once.workers_per_host) == (2, 1)


def test_cells_that_are_not_for_fitting_do_not_move_the_fit(tmp_path):
    _, before = cases.predict(load(tmp_path))
    _, after = cases.predict(load(tmp_path, TEXT.replace("750.0", "10.0").replace("700.0", "5.0")))
    assert before == after


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("[cluster]", "[cluster", "cannot be read as a case"),
        ("batch_per_worker = 32", "", r"missing required field `batch_per_worker` - at `\$.model`"),
        ("bandwidth_gbit = 10.0", "bandwidth_gbit = -1", r"at `\$.cluster.bandwidth_gbit`"),
        ('"shared"', '"odd"', r"Invalid enum value 'odd' - at `\$.cell\[1\].placement`"),
        ('mode = "allreduce"', 'mode = "ring"', r"unknown mode 'ring': .*`\$.cell\[2\]`"),
        ("workers = 8\nservers = 2", "workers = 8", "mode ps-sync does not go with 0 servers"),
        ("megabytes = 10,", "megabytes = nan,", r"at `\$.model.layers\[0\].megabytes`"),
        ("[[cell]]", "[[cel]]", "unknown field `cel`"),
        ("samples_per_s = 750.0", "", "a cell has either samples_per_s, or times and over"),
        ("samples_per_s = 750.0", "times = 1.5", "a cell has either samples_per_s, or times and"),
        ("samples_per_s = 750.0", 'times = 1.5\nover = "single"', "over 'single' is no ring"),
    ],
)
def test_a_wrong_case_is_a_line(tmp_path, old, new, words):
    with pytest.raises(UsageError, match=words) as refused:
        load(tmp_path, TEXT.replace(old, new))
    assert "\n" not in str(refused.value)


def test_networks_by_name_have_their_published_sizes():
    for name, megabytes in (("vgg16", 553.4), ("inception_v3", 95.3), ("vit_b_16", 346.3)):
        sizes, shares = zip(*cases.layers_of(name), strict=True)
        assert (sum(sizes), sum(shares)) == (pytest.approx(megabytes, abs=0.1), pytest.approx(1)), (
            name
        )
    assert max(cases.layers_of("vgg16"))[0] == pytest.approx(411, abs=0.1)  # fc6
    with pytest.raises(UsageError, match="unknown model 'vgg17'"):
        cases.layers_of("vgg17")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--bandwidth", "1"], "'1' is not a bandwidth such as 100mbit"),
        (["--bandwidth", "-1gbit"], "is not a bandwidth such as"),
        (["--latency", "50"], "is not a latency such as 50us"),
        (["--workers", "0"], "is not a number from 1 to 4096"),
        (["--workers", "8-2"], "is not a number from 1 to 4096"),
        (["--servers", "same"], "or equal"),
        (["--slow", "1:4x@20s-40s"], "a plan knows 1:4x"),
    ],
)
def test_wrong_options_of_predict_are_refused(tmp_path, words, says):
    done = CliRunner().invoke(command, ["predict", str(tmp_path / "cal.json"), *words])
    assert done.exit_code == 2
    assert says in " ".join(done.output.split()).replace("│", "")
