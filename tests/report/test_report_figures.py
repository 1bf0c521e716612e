"""The report's content: which runs are refused, and that its figures and words follow from the runs."""

import csv
import io
import math
import re
from statistics import geometric_mean

import pytest
from helpers.report_runs import BATCH, EPOCHS, PER_EPOCH, run
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from hvdtrain.errors import UsageError
from hvdtrain.formatting import format_bytes
from hvdtrain.plot_style import STEP_PARTS
from hvdtrain.report import fairness, results
from hvdtrain.report.caveats import caveats
from hvdtrain.report.columns import COLUMNS, SUMMARY, TERMINAL, TERMINAL_RANGE, format_figure
from hvdtrain.report.step_parts import parts_table
from hvdtrain.report.table import fitting
from hvdtrain.runs.loss_curve import MAX_POINTS, loss_curve
from hvdtrain.runs.network_bound import network_bound
from hvdtrain.runs.read import finished_by_kind
from hvdtrain.runs.schema import Step

NAMES = """
    mode workers servers variant model parameters global_batch lr steps_per_epoch steps samples epochs wall_s epoch_s
    samples_per_s worker_samples_per_s process_samples_per_s cpu_s_per_1000_samples scaling_efficiency val_accuracy
    val_loss best_val_loss test_loss test_accuracy
    time_to_target_s samples_to_target exposed_comm_fraction step_p50_s step_p95_s step_p99_s bytes_sent_per_step
    bytes_sent_per_1000_samples staleness_mean staleness_max peak_rss_mb repeat
"""


# What is refused


@pytest.mark.parametrize(
    "field, other",
    [
        ("hvdtrain", "0.2.0"), ("model", "vgg16"), ("parameters", 1), ("width", 0.5), ("image_size", 64),
        ("dropout", 0.5), ("dataset_hash", "f00d" * 8), ("train_samples", 1), ("validation_samples", 1),
        ("classes", 2), ("global_batch", 32), ("lr", 0.01), ("optimizer", "sgd"), ("momentum", 0.0),
        ("weight_decay", 0.1), ("threads_per_worker", 2), ("device", "cuda"), ("deterministic", True),
        ("seed", 7), ("initial_weights", "others"),
    ],
)  # fmt: skip
def test_runs_that_differ_in_what_should_be_equal_are_refused(field, other):
    with pytest.raises(UsageError) as refused:
        fairness.check([run(), run("allreduce", 2), run("ps-sync", 2, 1, change={field: other})])
    said = str(refused.value)
    assert f": {field} differs" in said
    assert "in single-w1-s0-r1, allreduce-w2-s0-r1;" in said and "in ps-sync-w2-s1-r1 (" in said
    assert "\n" not in said


@pytest.mark.parametrize(
    "change, field",
    [
        ({"versions": {"python": "3.11.2", "torch": "2.14.0", "horovod": "0.28.1"}}, "versions.torch"),
        ({"versions": {"python": "3.11.2", "torch": "2.15.0"}}, "versions.horovod"),
        ({"hardware": {"cpu": "B", "cores": 2, "hosts": ["one"], "gpus": []}}, "hardware.cpu"),
        ({"hardware": {"cpu": "A CPU", "cores": 4, "hosts": ["one"], "gpus": []}}, "hardware.cores"),
    ],
)
def test_versions_and_hardware_are_compared_part_by_part(change, field):
    with pytest.raises(UsageError, match=f": {re.escape(field)} differs"):
        fairness.check([run(), run("allreduce", 2, change=change)])


def with_variables(**variables):
    return {"environment": {"OMP_NUM_THREADS": "1", "HOROVOD_CYCLE_TIME": "1"} | variables}


def test_variables_that_change_computing_are_equal_in_all_modes():
    with pytest.raises(UsageError, match="environment.computing.MALLOC_ARENA_MAX differs: 'not set' in single-w1"):
        fairness.check([run(), run("allreduce", 2, change=with_variables(MALLOC_ARENA_MAX="1"))])


@pytest.mark.parametrize(
    "mode, servers, reads, does_not",
    [("allreduce", 0, "HOROVOD_CYCLE_TIME", "TP_X"), ("ps-sync", 1, "TP_X", "HOROVOD_CYCLE_TIME"),
     ("allreduce", 0, "OMPI_MCA_coll", "GLOO_X"), ("ddp", 0, "GLOO_X", "UCX_TLS")],
)  # fmt: skip
def test_variables_of_messages_are_equal_in_runs_whose_messages_read_them(mode, servers, reads, does_not):
    first, other = run(mode, 2, servers), (mode, 4, servers)
    fairness.check([run(), first, run(*other, change=with_variables(**{does_not: "7"}))])
    with pytest.raises(UsageError, match=f"environment.messages.{reads} differs among runs of the same mode, backend"):
        fairness.check([run(), first, run(*other, change=with_variables(**{reads: "7"}))])
    # Other starters, or more hosts, set others.
    fairness.check([first, run(*other, change=with_variables(**{reads: "7"}) | {"starter": "horovodrun"})])


def test_runs_of_versions_that_recorded_no_variables_are_compared_as_before():
    old = {"environment": None, "hosts": None}
    fairness.check([run(change=old), run("allreduce", 2, change=old), run("allreduce", 4, change=old)])


def test_an_all_reduces_algorithm_is_equal_in_runs_of_one_kind():
    def by(name):
        return {"allreduce": {"name": name, "evidence": "it was asked for"}}

    first, again = run("allreduce", 2, change=by("ring")), ("allreduce", 2, 0, 2)
    fairness.check([run(), first, run(*again, change=by("ring")), run("allreduce", 4, change=by("unknown"))])
    fairness.check([first, run(*again)])  # of a version that did not record it
    with pytest.raises(UsageError, match="allreduce.name differs among runs of the same mode, workers and servers"):
        fairness.check([run(), first, run(*again, change=by("rabenseifner"))])


def test_what_is_written_down_meanwhile_is_equal_in_all_runs_that_could():
    fairness.check([run(), run("ps-sync", 2, 1, change={"record": True})])  # single has no servers that could
    with pytest.raises(UsageError, match="record differs: 'yes' in ps-sync-w2-s1-r1; 'no' in ps-async-w2-s1-r1"):
        fairness.check([run(), run("ps-sync", 2, 1, change={"record": True}), run("ps-async", 2, 1)])
    for one, other in (("none", "all"), ("all", "100-150")):
        with pytest.raises(UsageError, match=f"trace differs: '{one}' in single-w1-s0-r1; '{other}' in allreduce-w2"):
            fairness.check([run(change={"trace": one}), run("allreduce", 2, change={"trace": other})])


def test_the_cores_that_processes_may_use_are_equal_in_runs_of_one_kind_and_told_of_others():
    def on(*usable):
        hosts = {f"host{n}": {"ranks": [n], "cores": 8, "cores_usable": own} for n, own in enumerate(usable)}
        hardware = {"cpu": "A CPU", "cores": 8, "cores_usable": usable[0], "hosts": list(hosts), "gpus": []}
        return {"hardware": hardware, "hosts": hosts}

    ring, again = run("allreduce", 2, change=on(2, 2)), ("allreduce", 2, 0, 2)
    fairness.check([run(change=on(2)), ring, run(*again, change=on(2, 2))])
    fairness.check([run(change=on(2)), ring, run(*again, change=on(None, None))])  # of a version that recorded none
    told = "Processes could use different numbers of their host's cores"
    assert not any(told in line for line in caveats([run(change=on(2)), ring]))
    [line] = [line for line in caveats([run(change=on(2.5)), ring]) if told in line]
    assert line.endswith(": single 2.5, allreduce ×2 2.")
    with pytest.raises(UsageError, match="hosts.cores_usable differs .*: '2, 2' in allreduce-w2-s0-r1; '1, 2' in"):
        fairness.check([run(change=on(2)), ring, run(*again, change=on(2, 1))])


def test_variables_of_servers_are_equal_in_all_runs_with_servers():
    def served(*environments):
        return {"server_environment": list(environments)}

    usual = {"OMP_NUM_THREADS": "1", "TP_X": "1"}
    one, two = run("ps-sync", 2, 1, change=served(usual)), ("ps-async", 4, 2)
    fairness.check([run(), one, run(*two, change=served(usual, usual)), run("ps-ssp", 2, 1)])
    for another, told in (
        (usual | {"OMP_NUM_THREADS": "4"}, "OMP_NUM_THREADS differs: '1' in ps-sync-w2-s1-r1; '1 or 4' in ps-async"),
        (usual | {"MALLOC_ARENA_MAX": "1"}, "MALLOC_ARENA_MAX differs: 'not set' in ps-sync-w2-s1-r1; '1 or not set'"),
    ):
        with pytest.raises(UsageError, match=f"environment.servers_computing.{told}"):
            fairness.check([run(), one, run(*two, change=served(usual, another))])
    with pytest.raises(UsageError, match="environment.servers_messages.TP_X differs among runs of the same mode"):
        fairness.check([one, run("ps-sync", 2, 1, 2, change=served(usual | {"TP_X": "2"}))])


def test_gpus_are_compared_by_model_and_only_where_they_are_used():
    def on(device, gpus):
        return {"device": device, "hardware": {"cpu": "A CPU", "cores": 2, "hosts": ["one"], "gpus": gpus}}

    fairness.check([run(change=on("cuda", ["H100"])), run("allreduce", 2, change=on("cuda", ["H100", "H100"]))])
    fairness.check([run(change=on("cpu", ["H100"])), run("allreduce", 2, change=on("cpu", []))])
    with pytest.raises(UsageError, match="hardware.gpus differs"):
        fairness.check([run(change=on("cuda", ["H100"])), run("allreduce", 2, change=on("cuda", ["K80"]))])


def test_networks_are_compared_where_runs_use_one():
    def over(interface):
        return {"interface": interface}

    ring = run("allreduce", 2, change=over("eth0"))
    fairness.check([run(change=over("lo")), ring, run("ps-sync", 2, 1, change=over("eth0"))])
    fairness.check([run(change=over("lo")), run("allreduce", 2, change=over("lo"))])
    fairness.check([run(), run("allreduce", 2, change=over("lo"))])  # of a version that did not record it
    with pytest.raises(UsageError, match="interface differs: 'eth0' in allreduce-w2-s0-r1; 'ib0' in ps-sync-w2-s1-r1"):
        fairness.check([run(change=over("lo")), ring, run("ps-sync", 2, 1, change=over("ib0"))])


def test_the_target_and_the_samples_of_a_repeat_have_to_be_equal():
    with pytest.raises(UsageError, match="target_accuracy differs"):
        fairness.check([run(), run("allreduce", 2, target_accuracy=0.9)])
    with pytest.raises(UsageError, match="samples_digest differs among runs of the same repeat"):
        fairness.check([run(), run("allreduce", 2, samples_digest="others")])
    # More steps are more samples; another repeat has another order.
    fairness.check([run(), run("allreduce", 2, samples_digest="others", steps=31)])
    fairness.check([run(), run("allreduce", 2, repeat=2)])


@pytest.mark.parametrize(
    "field, value", [("backend", "other"), ("starter", "other"), ("push_scale", "other"), ("effective_lr", 0.5)]
)
def test_repeats_of_one_kind_are_the_same_measurement(field, value):
    other = {field: value}
    fairness.check([run(), run("allreduce", 2, change=other)])
    with pytest.raises(UsageError, match=f"{field} differs among runs of the same mode, workers and servers"):
        fairness.check([run("allreduce", 2), run("allreduce", 2, repeat=2, change=other)])


def test_what_is_compared_may_differ():
    found = fairness.check([run(), run("allreduce", 4), run("ps-async", 2, 2, change={"dataset": "./digits"})])
    fields = {equal.field for equal in found}
    assert not fields & {"mode", "workers", "servers", "dataset", "repeat", "command"}
    assert {"model", "lr", "samples_digest"} <= fields
    assert all(equal.why for equal in found)


def test_a_field_that_no_run_recorded_is_not_called_equal():
    nothing = {"initial_weights": None}
    found = fairness.check([run(change=nothing), run("allreduce", 2, change=nothing)])
    assert next(equal.value for equal in found if equal.field == "initial_weights") == "not recorded"


# The figures


def test_results_csv_has_exactly_its_columns_and_empty_cells_for_what_is_not_there():
    text = results.csv_text(results.result_rows([run(accuracy=0.5), run("allreduce", 2, speed=150.0)]))
    header, single, ring = csv.reader(text.splitlines())
    assert header == NAMES.split() == list(COLUMNS)
    single = dict(zip(header, single, strict=True))
    assert single["mode"] == "single" and single["samples"] == str(BATCH * PER_EPOCH * EPOCHS)
    assert single["time_to_target_s"] == single["staleness_mean"] == single["staleness_max"] == ""
    assert dict(zip(header, ring, strict=True))["time_to_target_s"] == repr(BATCH * PER_EPOCH * 6 / 150.0)


def test_servers_cost_as_much_as_workers_do():
    """Ten seconds of each of three processes, for 1,920 samples."""
    speed = BATCH * PER_EPOCH * EPOCHS / 10
    [row] = results.result_rows([run("ps-sync", 2, 1, speed=speed)])
    assert row["process_samples_per_s"] == speed / 3
    assert row["cpu_s_per_1000_samples"] == pytest.approx(1000 * 30 / (BATCH * PER_EPOCH * EPOCHS))
    [old] = results.result_rows([run("ps-sync", 2, 1, processes=None)])
    assert old["cpu_s_per_1000_samples"] is None


def test_a_figure_stands_in_every_table_that_its_column_names():
    groups = results.summarise(results.result_rows([run("ps-async", 2, 1, histogram={"0": 1})]))
    for on_terminal, places in ((False, {SUMMARY}), (True, {TERMINAL, TERMINAL_RANGE})):
        shown = [c for c in COLUMNS.values() if places & set(c.shown) and groups[0][c.name]]
        headings = [(c.short if on_terminal else "") or c.heading for c in shown]
        assert [heading for _, heading in results.summary_table(groups, on_terminal).columns[1:]] == headings
    assert all(column.meaning for column in COLUMNS.values())


def over(hosts, gbit_s, **more):
    pairs = [{"from": a, "to": b, "gbit_s": gbit_s} for a in hosts for b in hosts if a != b]
    placed = {host: {"ranks": ranks} for host, ranks in hosts.items()}
    return {"hosts": placed, "network": {"pairs": pairs}, "parameters": 2_500_000} | more  # 10 MB


@pytest.mark.parametrize(
    "kind, hosts, crossing",
    [
        (("allreduce", 2), {"a": [0], "b": [1]}, 10),  # 2(n - 1)/n of the weights
        (("allreduce", 4), {"a": [0, 1], "b": [2, 3]}, 15),
        (("ddp", 4), {"a": [0], "b": [1], "c": [2], "d": [3]}, 15),
        (("ps-sync", 4, 1), {"s": [0], "a": [1, 2], "b": [3, 4]}, 40),  # n of them to the server
        (("ps-sync", 2, 2), {"a": [0, 2], "b": [1, 3]}, 10),  # beside the workers: (n + k - 2)/k
        (("ps-sync", 3, 3), {"a": [0, 3], "b": [1, 4], "c": [2, 5]}, 40 / 3),
    ],
)
def test_a_network_bounds_samples_per_second_by_what_crosses_a_hosts_link(kind, hosts, crossing):
    bound = network_bound(run(*kind, change=over(hosts, 0.8)))  # 100 MB/s
    assert bound == pytest.approx(BATCH / (crossing / 100))


def test_without_a_measured_link_or_a_crossing_there_is_no_bound():
    two = {"a": [0], "b": [1]}
    assert network_bound(run("allreduce", 2)) is None
    assert network_bound(run("allreduce", 2, change=over({"a": [0, 1], "b": []}, 0.8))) is None
    assert network_bound(run("allreduce", 2, change=over(two, 0.0))) is None
    assert network_bound(run("allreduce", 2, change=over(two, 0.8, compression="topk"))) is None
    half = network_bound(run("allreduce", 2, change=over(two, 0.8, compression="fp16")))
    assert half == 2 * network_bound(run("allreduce", 2, change=over(two, 0.8)))


def efficiencies(*runs):
    return [row["scaling_efficiency"] for row in results.result_rows(runs)]


def test_scaling_efficiency_is_over_the_single_run_of_the_repeat():
    found = efficiencies(
        run(speed=100.0), run(repeat=2, speed=110.0), run("allreduce", 2, speed=150.0),
        run("allreduce", 2, repeat=2, speed=176.0), run("allreduce", 2, repeat=3, speed=168.0),
    )  # fmt: skip
    # 150/(2·100), 176/(2·110); the third repeat has no single run, so the geometric mean: 168/(2·√11000)
    assert found == pytest.approx([1.0, 1.0, 0.75, 0.8, 84 / math.sqrt(11000)])


def test_without_single_runs_all_modes_have_the_same_other_baseline():
    ps = [run("ps-sync", 1, 1, speed=80.0), run("ps-sync", 1, 2, speed=100.0), run("ps-sync", 2, 1, speed=120.0)]
    assert efficiencies(run("allreduce", 2, speed=120.0), *ps) == pytest.approx([0.75, 1.0, 1.25, 0.75])
    ring = [run("allreduce", 1, speed=100.0), run("allreduce", 2, speed=120.0)]
    assert efficiencies(*ring, *ps) == pytest.approx([1.0, 0.6, 0.8, 1.0, 0.6])
    assert efficiencies(run("allreduce", 2)) == [None]


@given(st.lists(st.tuples(*[st.floats(1.0, 1e4)] * 3), min_size=1, max_size=6))
def test_efficiency_in_the_table_is_what_its_own_speeds_give(speeds):
    kinds = [(), ("allreduce", 2), ("ps-sync", 2, 1)]
    runs = [
        run(*kind, repeat=r, speed=s) for r, each in enumerate(speeds, 1) for kind, s in zip(kinds, each, strict=True)
    ]
    single, *others = results.summarise(results.result_rows(runs))
    ideals = set()
    for group in others:
        speed, efficiency = group["samples_per_s"].mean, group["scaling_efficiency"].mean
        assert efficiency == pytest.approx(speed / (2 * single["samples_per_s"].mean))
        ideals.add(round(speed / efficiency / single["samples_per_s"].mean, 6))
    assert ideals == {2.0}  # one ideal for all modes


def test_repeats_are_summarised_by_mean_and_range():
    speeds = {1: 150.0, 2: 166.0, 3: 180.0}
    rows = results.result_rows([run("allreduce", 2, repeat=r, speed=s) for r, s in speeds.items()] + [run()])
    rows[1]["time_to_target_s"] = None
    single, ring = results.summarise(rows)
    assert (single.kind.mode, single.n, ring.n) == ("single", 1, 3)
    mean = (150.0 * 166.0 * 180.0) ** (1 / 3)
    assert ring["samples_per_s"] == results.Spread(pytest.approx(mean), 150.0, 180.0, 3)
    assert ring["exposed_comm_fraction"].mean == 0.25
    assert ring["staleness_mean"] is None
    cells = [results.format_cell(*of) for of in ((ring, "samples_per_s"), (ring, "time_to_target_s"))]
    assert [(c.text, c.detail) for c in cells] == [("165", "150–180"), ("11.1 s", "10.7–11.6, 2 of 3 runs")]
    assert results.format_cell(single, "samples_per_s").detail == ""


def parts_of(runs):
    table = parts_table(finished_by_kind(runs), results.summarise(results.result_rows(runs)))
    return {label: dict(zip((h for _, h in table.columns), cells, strict=True)) for label, cells in table.rows}


def test_the_parts_of_a_step_are_its_wall_time_and_the_fastest_has_the_shortest_step():
    seconds = {"data": 0.1, "forward": 0.1, "backward": 0.2, "comm": 0.1, "optimizer": 0.02, "barrier": 0.1}
    runs = [run("allreduce", 2, repeat=r, speed=s) for r, s in ((1, 100.0), (2, 160.0), (3, 200.0))]
    runs.append(run("ps-sync", 2, 1, speed=BATCH / 0.64, step_seconds=seconds | {"metrics": 0.02}))
    found = parts_of(runs)
    ring, served = found["allreduce ×2"], found["ps-sync ×2+1"]
    assert ring["together"].value == pytest.approx(1000 * BATCH / geometric_mean([100.0, 160.0, 200.0]))
    assert served["together"].value == pytest.approx(640)
    assert (served["waiting between steps"].text, served["waiting between steps"].detail) == ("100 ms", "15.6%")
    assert "not recorded" not in served
    headings = {heading for heading, _, _ in STEP_PARTS.values()}
    assert sum(cell.value for name, cell in served.items() if name in headings and cell.text) == pytest.approx(640)


def test_what_an_older_version_did_not_record_is_shown_as_that():
    half = {"data": 0.05, "forward": 0.1, "backward": 0.1, "comm": 0.05, "optimizer": 0.02}
    served = parts_of([run("ps-sync", 2, 1, speed=100.0, step_seconds=half)])["ps-sync ×2+1"]
    assert (served["not recorded"].text, served["together"].text) == ("320 ms", "640 ms")
    assert served["95 %"].text == ""


@given(st.lists(st.floats(-1e12, 1e12), min_size=1), st.integers(0, 3))
def test_a_spread_holds_its_mean(values, missing):
    for name in ("samples_per_s", "val_loss"):
        found = results.spread([*values, *[None] * missing], name)
        assert found.low <= found.mean <= found.high
    assert found.n == len(values)


def test_figures_have_units_and_three_digits():
    assert format_figure("samples_per_s", 1234.4) == "1,234"
    assert format_figure("time_to_target_s", 4.9) == "4.90 s"
    assert format_figure("exposed_comm_fraction", 0.314) == "31%"
    assert format_figure("val_loss", math.nan) == "diverged"
    assert [format_bytes(b) for b in (0, 999, 1000, 53_248_000)] == ["0 B", "999 B", "1.00 kB", "53.2 MB"]


@given(
    st.lists(st.tuples(st.floats(0, 1e3), st.integers(0, 64), st.floats(0, 5)), max_size=300),
    st.integers(1, 4),
)
def test_a_loss_curve_keeps_the_mean_over_samples(rows, workers):
    ranks = {f"rank{r}": [] for r in range(workers)}
    for n, (time, samples, loss) in enumerate(rows):
        ranks[f"rank{n % workers}"].append(Step(time=time, samples=samples, loss=loss))
    curve = loss_curve(ranks)
    assert len(curve.loss) <= MAX_POINTS
    assert curve.seconds == sorted(curve.seconds) and curve.samples == sorted(curve.samples)
    seen, total = 0.0, 0.0
    for middle, loss in zip(curve.samples, curve.loss, strict=True):
        weight = 2 * (middle - seen)  # a point stands in the middle of its samples
        seen, total = seen + weight, total + weight * loss
    assert seen == pytest.approx(sum(samples for _, samples, _ in rows))
    assert total == pytest.approx(sum(samples * loss for _, samples, loss in rows), abs=1e-6)


def test_the_terminal_table_fits_and_no_figure_is_broken():
    runs = [
        run(mode, workers, servers, repeat, 120.0 * workers + 99 * repeat, histogram={"0": 1, "63": 1})
        for mode, workers, servers in (("single", 1, 0), ("ps-async", 16, 4), ("allreduce", 16, 0))
        for repeat in (1, 2, 3)
    ]
    table = results.summary_table(results.summarise(results.result_rows(runs)), on_terminal=True)

    def printed(width):
        console = Console(width=width, file=io.StringIO())
        with console.capture() as captured:
            console.print(*fitting(table, width, is_narrow=True))
        return captured.get().splitlines()

    # A heading of two lines, a rule, each kind's means and ranges: nothing was folded or cut.
    lines = printed(100)
    assert len(lines) == 3 + 2 * 3 and "2,019–2,217" in lines[8] and "ps-async ×16+4 3" in lines[7]
    for width in (80, 40):
        narrow = "\n".join(printed(width))
        figures = [text for _, cells in table.rows for cell in cells for text in (cell.text, cell.detail)]
        assert all(figure in narrow for figure in figures) and narrow.count("ps-async ×16+4 ") > 1
    parts = list(fitting(table, 40, is_narrow=True, first=1))  # as the batch of a grid's rows is in each
    assert len(parts) > 2 and {str(part.columns[1].header).strip() for part in parts} == {"n"}


# What to keep in mind


def three(*args, speeds, **more):
    return [run(*args, repeat=r, speed=s, **more) for r, s in enumerate(speeds, 1)]


@pytest.mark.parametrize(
    "said, runs, silent",
    [
        ("slows these runs: ps-sync ×2+1: 2 workers × 1 thread and 1 server on 2 cores.",
         [run("ps-sync", 2, 1)], []),
        ("More busy threads", [run("allreduce", 4)], [run("allreduce", 2), run("ps-sync", 1, 1)]),
        ("More busy threads", [run("ps-sync", 4, 1, change={"slow": {"asked": "all:3x+1:2x", "achieved": {}}})],
         [run("ps-sync", 4, 1, change={"slow": {"asked": "all:4x+1:2x", "achieved": {}}})]),
        ("as long, over the whole run: allreduce ×2: worker 0 1.00, worker 1 4.02.",
         [run("allreduce", 2, change={"slow": {"asked": "1:4x", "achieved": {"0": 1.0, "1": 4.02}}})],
         [run("allreduce", 2, change={"slow": {"asked": "none", "achieved": {"0": 1.0, "1": 1.0}}})]),
        ("ran on one host", [run("allreduce", 2)], [run()]),
        ("Hosts of one run differ: cores 2 on a and 4 on b.",
         [run("allreduce", 2, change={"hosts": {"a": {"cores": 2}, "b": {"cores": 4}}})], [run("allreduce", 2)]),
        ("newer than those", [run("ps-async", 2, 1, histogram={"0": 1, "1": 1})],
         [run("ps-sync", 2, 1, histogram={"0": 2})]),
        ("One run only", [run()], three(speeds=(1, 2))),
        ("Different software", [run("allreduce", 2), run("ps-sync", 2, 1)], [run(), run("allreduce", 2)]),
        ("equally many samples", [run(), run("allreduce", 2, samples=5)], [run(), run("allreduce", 2)]),
        ("counts whole", [run("ps-async", 2, 1, change={"push_scale": "none"})],
         [run("ps-sync", 2, 1, change={"push_scale": "none"})]),
        ("learning rate", [run(), run("ps-async", 2, 1, change={"effective_lr": 0.0005})],
         [run(), run("allreduce", 2)]),
        ("share a seed", [run(), run(repeat=2, change={"seed": 1})], three(speeds=(1, 2))),
        ("Dropout is on", [run(change={"dropout": 0.5})], [run()]),
        ("Batch norm", [run(change={"model": "vgg11_bn"})], [run()]),
        ("became NaN: single", [run(val_loss=math.nan)], [run()]),
        ("does not charge", [run(), run("ps-sync", 2, 1)], [run(), run("allreduce", 2)]),
        ("48 hours apart", [run(), run(repeat=2, change={"started": "2026-11-23T10:01:00+00:00"})],
         three(speeds=(1, 2))),
    ],
)  # fmt: skip
def test_a_caveat_is_said_only_where_it_is_true(said, runs, silent):
    assert any(said in line for line in caveats(runs))
    assert not any(said in line for line in caveats(silent))
