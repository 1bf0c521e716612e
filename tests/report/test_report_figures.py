"""The report's content: that its figures and words follow from the runs."""

import csv
import io
import math
from pathlib import Path
from statistics import geometric_mean

import pytest
from helpers.report_runs import BATCH, EPOCHS, PER_EPOCH, run
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.base.formatting import format_bytes
from hvdtrain.reporting import plots, results
from hvdtrain.reporting.answer import reach_answer
from hvdtrain.reporting.columns import COLUMNS, format_figure
from hvdtrain.reporting.content import collect
from hvdtrain.reporting.plots import step_parts
from hvdtrain.reporting.table import csv_text

RETURN = {"rank": 0, "lost": 7.4, "returned": 7.6}
NAMES = """
    mode workers servers hosts variant model parameters threads_per_worker global_batch lr slow steps_per_epoch steps
    samples epochs wall_s epoch_s samples_per_s network_bound worker_samples_per_s process_samples_per_s
    cpu_s_per_1000_samples
    busiest_share scaling_efficiency val_accuracy val_loss best_val_loss test_loss test_accuracy
    time_to_target_s samples_to_target exposed_comm_fraction step_p50_s step_p95_s step_p99_s bytes_sent_per_step
    peak_bytes_per_step rounds worker_distance staleness_mean staleness_max peak_rss_mb repeat sprint
"""


def test_results_csv_has_exactly_its_columns_and_empty_cells_for_what_is_not_there():
    rows = results.result_rows([run(accuracy=0.5), run("allreduce", 2, speed=150.0)])
    text = csv_text(list(COLUMNS), [list(row.values()) for row in rows])
    header, single, ring = csv.reader(text.splitlines())
    assert header == NAMES.split()
    described = Path(results.__file__).with_name("README.md").read_text()
    assert all(f"\n| `{name}` | " in described for name in header)
    single = dict(zip(header, single, strict=True))
    assert single["mode"] == "single" and single["samples"] == str(BATCH * PER_EPOCH * EPOCHS)
    assert single["time_to_target_s"] == single["staleness_mean"] == single["staleness_max"] == ""
    # Between the evaluations of epochs 5 and 6, at 5/6 of an accuracy of 0.98 and at all of it.
    epochs = 6 * 0.95 / 0.98
    to_target_s = float(dict(zip(header, ring, strict=True))["time_to_target_s"])
    assert to_target_s == pytest.approx(BATCH * PER_EPOCH * epochs / 150.0)


def test_no_text_is_a_formula_of_a_spreadsheet():
    """Numbers stay numbers. Evaluations write theirs by it too."""
    texts = ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "vgg-f", "", "a=1"]
    text = csv_text(["=x"], [[*texts, -1.5, None, float("-inf")]])
    assert [*csv.reader(io.StringIO(text, newline=""))] == [
        ["'=x"],
        ["'=1+1", "'+1", "'-1", "'@SUM(A1)", "'\t=1", *texts[5:], "-1.5", "", "-inf"],
    ]


def test_servers_cost_as_much_as_workers_do():
    """Ten seconds of each of three processes, for 1,920 samples."""
    speed = BATCH * PER_EPOCH * EPOCHS / 10
    [row] = results.result_rows([run("ps-sync", 2, 1, speed=speed)])
    assert row["process_samples_per_s"] == speed / 3
    assert row["cpu_s_per_1000_samples"] == pytest.approx(1000 * 30 / (BATCH * PER_EPOCH * EPOCHS))
    [old] = results.result_rows([run("ps-sync", 2, 1, processes=None)])
    assert old["cpu_s_per_1000_samples"] is None


def baseline(**more):
    return run(change={"threads_per_worker": 1}, **more)


def efficiencies(*runs):
    return [row["scaling_efficiency"] for row in results.result_rows(runs)]


def test_scaling_efficiency_is_over_the_single_run_of_the_repeat():
    found = efficiencies(
        baseline(speed=100.0),
        baseline(repeat=2, speed=110.0),
        run("allreduce", 2, speed=150.0),
        run("allreduce", 2, repeat=2, speed=176.0),
        run("allreduce", 2, repeat=3, speed=168.0),
    )
    # 150/(2·100), 176/(2·110); the third repeat has no single run, so the geometric mean:
    # 168/(2·√11000)
    assert found == pytest.approx([1.0, 1.0, 0.75, 0.8, 84 / math.sqrt(11000)])


def test_without_single_runs_all_modes_have_the_same_other_baseline():
    ps = [
        run("ps-sync", 1, 1, speed=80.0),
        run("ps-sync", 1, 2, speed=100.0),
        run("ps-sync", 2, 1, speed=120.0),
    ]
    assert efficiencies(run("allreduce", 2, speed=120.0), *ps) == pytest.approx(
        [0.75, 1.0, 1.25, 0.75]
    )
    ring = [run("allreduce", 1, speed=100.0), run("allreduce", 2, speed=120.0)]
    assert efficiencies(*ring, *ps) == pytest.approx([1.0, 0.6, 0.8, 1.0, 0.6])
    assert efficiencies(run("allreduce", 2)) == [None]


def test_repeats_are_summarised_by_mean_and_range():
    speeds = {1: 150.0, 2: 166.0, 3: 180.0}
    runs = [run(), *(run("allreduce", 2, repeat=r, speed=s) for r, s in speeds.items())]
    rows = results.result_rows(runs)
    rows[1]["peak_rss_mb"] = None
    table = results.cost_table([(one.kind.label, row) for one, row in zip(runs, rows, strict=True)])
    cells = {label: dict(zip(table.headings, line, strict=True)) for label, line in table.rows}
    ring = cells["allreduce ×2"]
    assert (ring["n"].text, ring["comm. wait"].text, "mean staleness" in ring) == (
        "3",
        "25%",
        False,
    )
    speed = ring["samples/s of a process"]
    assert (speed.value, speed.text, speed.detail) == (
        pytest.approx((75 * 83 * 90) ** (1 / 3)),
        "82.4",
        "75.0–90.0",
    )
    assert (
        ring["memory"].detail == "2 of 3 runs"
        and cells["one process, 2 cores"]["memory"].detail == ""
    )


def test_the_parts_of_a_step_are_its_wall_time_and_the_fastest_has_the_shortest_step():
    seconds = {
        "data": 0.1,
        "forward": 0.1,
        "backward": 0.2,
        "comm": 0.1,
        "optimizer": 0.02,
        "barrier": 0.1,
    }
    runs = [run("allreduce", 2, repeat=r, speed=s) for r, s in ((1, 100.0), (2, 160.0), (3, 200.0))]
    runs.append(run("ps-sync", 2, 1, speed=BATCH / 0.64, step_seconds=seconds | {"metrics": 0.02}))
    ring, served = step_parts(runs[:3]), step_parts(runs[3:])
    assert sum(ring.values()) == pytest.approx(BATCH / geometric_mean([100.0, 160.0, 200.0]))
    assert sum(served.values()) == pytest.approx(0.64) and served["barrier"] == pytest.approx(0.1)
    [drawn] = [
        plot.svg for plot in plots.draw(collect(runs).comparisons)[0] if plot.name == "step-time"
    ]
    assert "waiting between steps" in drawn and "640 ms" in drawn


@given(st.lists(st.floats(-1e12, 1e12), min_size=1), st.integers(0, 3))
def test_a_spread_holds_its_mean(values, missing):
    for name in ("samples_per_s", "val_loss"):
        found = results.mean_and_range([*values, *[None] * missing], name)
        assert found.low <= found.mean <= found.high
    assert found.n == len(values)


def test_figures_have_units_and_three_digits():
    assert format_figure("samples_per_s", 1234.4) == "1,234"
    assert format_figure("time_to_target_s", 4.9) == "4.90 s"
    assert format_figure("exposed_comm_fraction", 0.314) == "31%"
    assert format_figure("val_loss", math.nan) == "diverged"
    assert [format_bytes(b) for b in (0, 999, 1000, 53_248_000)] == [
        "0 B",
        "999 B",
        "1.00 kB",
        "53.2 MB",
    ]


# What could turn an answer


def said_of(runs):
    found = reach_answer(runs)
    return [*found.but, *found.besides]


@pytest.mark.parametrize(
    "said, runs, silent",
    [
        (
            "more busy threads than cores: ps-sync ×2+1: 2 workers × 1 thread and 1 server on 2 cores",
            [run("allreduce", 2), run("ps-sync", 2, 1)],
            [],
        ),
        (
            "more busy threads",
            [run("allreduce", 4), run("ddp", 4)],
            [run("allreduce", 2), run("ddp", 2)],
        ),
        (
            "more busy threads",
            [
                run(*kind, change={"slow": {"asked": "all:3x+1:2x"}})
                for kind in (("ps-sync", 4, 1), ("ps-async", 4, 1))
            ],
            [
                run(*kind, change={"slow": {"asked": "all:4x+1:2x"}})
                for kind in (("ps-sync", 4, 1), ("ps-async", 4, 1))
            ],
        ),
        (
            "made slow, and computed so many times as long: worker 0 1.00, worker 1 4.02",
            [
                run(
                    "allreduce",
                    2,
                    change={"slow": {"asked": "1:4x", "achieved": {"0": 1.0, "1": 4.02}}},
                )
            ],
            [
                run(
                    "allreduce",
                    2,
                    change={"slow": {"asked": "none", "achieved": {"0": 1.0, "1": 1.0}}},
                )
            ],
        ),
        ("all ran on one host", [run("allreduce", 2), run()], [run()]),
        (
            "hosts of one run differ: cores 2 on a and 4 on b",
            [run("allreduce", 2, change={"hosts": {"a": {"cores": 2}, "b": {"cores": 4}}})],
            [run("allreduce", 2)],
        ),
        (
            "ps-sync ×2+1 used 3 hosts, allreduce ×2 2",
            [
                run(
                    *kind,
                    change={"hardware": {"cpu": "A CPU", "cores": 2, "hosts": hosts, "gpus": []}},
                )
                for kind, hosts in (
                    (("allreduce", 2), ["a", "b"]),
                    (("ps-sync", 2, 1), ["a", "b", "c"]),
                )
            ],
            [],
        ),
        ("dropout masks", [run(change={"dropout_layers": True})], [run()]),
        ("batch norm", [run(change={"batch_norm": True})], [run()]),
        ("became NaN: one process", [run(val_loss=math.nan)], [run()]),
        (
            "came and went: allreduce ×2",
            [run("allreduce", 2, returned_servers=[RETURN])],
            [run("allreduce", 2)],
        ),
        ("less than 5 s", [run(wall_s=4.0)], [run(wall_s=4.0, change={"sprint": 4.0})]),
    ],
)
def test_a_doubt_is_said_only_where_the_runs_give_a_reason(said, runs, silent):
    assert any(said in line for line in said_of(runs))
    assert not silent or not any(said in line for line in said_of(silent))


def test_the_time_to_the_target_is_drawn_against_local_steps_where_there_are_several():
    def drawn(*numbers):
        rivals = [
            run("allreduce", 2, speed=n, change={"options": {"local_steps": n}}) for n in numbers
        ]
        runs = [run("allreduce", 2), *rivals, run("ps-sync", 2, 1)]
        return [
            plot.svg
            for plot in plots.draw(collect(runs).comparisons)[0]
            if plot.name == "local-steps"
        ]

    assert drawn() == []
    [picture] = drawn(4, 64)
    assert all(
        f">{label}<" in picture for label in ("1", "4", "64", "allreduce ×2", "ps-sync ×2+1")
    )
