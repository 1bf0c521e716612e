"""The file of a calibration, predictions from it, runs beside them: pure arithmetic, no process."""

import json
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from helpers import report_runs
from msgspec import structs

from hvdtrain.base.errors import UsageError
from hvdtrain.planning import best, calibration, check, from_runs, predict
from hvdtrain.planning.calibrate import transports
from hvdtrain.planning.calibration import Calibration, LayerCost, Quantity
from hvdtrain.planning.command import plan as command
from hvdtrain.planning.layout import COARSE
from hvdtrain.planning.probe import BLOCKS, LARGE, SMALL, StepSeconds
from hvdtrain.planning.scenario import Scenario
from hvdtrain.runs.read import load_run

BATCH = 32
ANY = Scenario("single")


def make(**changed):
    """A calibration of a model of 25 MB that computes 0.1 s a step of 32."""
    layers = tuple(
        LayerCost(f"layer{i}", 5.0, Quantity(6, 5.5, 6.5), Quantity(12, 11, 13)) for i in range(5)
    )
    costs = {
        "message_us": Quantity(200, 100, 400),
        "operation_us": Quantity(1000, 500, 2000),
        "send_s_per_gb": Quantity(0.5, 0.4, 0.6),
        "receive_s_per_gb": Quantity(0.5, 0.4, 0.6),
        "server_send_s_per_gb": Quantity(0.4, 0.3, 0.5),
        "server_receive_s_per_gb": Quantity(0.4, 0.3, 0.5),
        "efficiency": Quantity(0.94, 0.9, 0.96),
    }
    codec = {
        "encode_ms_per_mb": Quantity(0.6, 0.5, 0.7),
        "decode_ms_per_mb": Quantity(0.1, 0.1, 0.1),
    }
    return replace(
        Calibration(
            {"name": "vggf", "parameters": 6_250_000},
            BATCH,
            layers,
            Quantity(10, 9, 11),
            Quantity(0.2, 0.19, 0.22),
            {name: dict(costs) for name in calibration.TRANSPORTS},
            {"int8": codec | {"wire_share": Quantity(0.25, 0.25, 0.25)}},
            cores_per_host=2,
            step_jitter=0.02,
        ),
        **changed,
    )


def rows(made, modes=("allreduce", "ps-sync"), workers=(4,), servers=(2,), bandwidths=(1.0,)):
    return [
        predict.row(made, job)
        for job in predict.scenarios(ANY, modes, workers, servers, bandwidths)
    ]


def test_what_is_written_is_read(tmp_path):
    path = tmp_path / "cal.json"
    made = make(bandwidth_gbit=0.3)
    made.save(path)
    assert calibration.load(path) == made


def test_a_plain_number_will_do_where_somebody_edits_it_by_hand(tmp_path):
    path = tmp_path / "cal.json"
    make().save(path)
    content = json.loads(path.read_text())
    content["transports"]["ps"]["message_us"] = 50
    path.write_text(json.dumps(content))
    assert calibration.load(path).transports["ps"]["message_us"] == Quantity(50, 50, 50)


def spoilt(change):
    def spoil(content):
        change(content)
        return json.dumps(content)

    return spoil


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda content: "{", "cannot be read as a calibration"),
        (lambda content: "[]", "is no hvdtrain-calibration of version 1"),
        (spoilt(lambda c: c.update(version=2)), "calibrate again"),
        (spoilt(lambda c: c.update(layers=[])), r"at `\$.layers`"),
        (
            spoilt(lambda c: c["layers"][1].update(forward_ms=-1)),
            r">= 0.0 - at `\$.layers\[1\].forward_ms",
        ),
        (
            spoilt(lambda c: c["layers"][0].update(gradient_megabytes="5")),
            "got `str` - at .*gradient_megabytes",
        ),
        (spoilt(lambda c: c["transports"].pop("ps")), "transports.ps has no message_us"),
        (
            spoilt(lambda c: c["transports"]["ps"].pop("efficiency")),
            "transports.ps has no efficiency",
        ),
        (
            spoilt(lambda c: c["transports"].update({"ps-zmq": {}})),
            "transports.ps-zmq has no message_us",
        ),
        (
            spoilt(lambda c: c["transports"]["ps"].update(efficiency=0)),
            "efficiency .* at least 0.001",
        ),
        (spoilt(lambda c: c.update(machine_speedup=1e-300)), "machine_speedup .* at least 0.001"),
        (
            spoilt(
                lambda c: c.update(
                    fixed_ms=0, layers=[c["layers"][0] | {"forward_ms": 0, "backward_ms": 0}]
                )
            ),
            "no time",
        ),
        (spoilt(lambda c: c["fixed_ms"].update(low=99)), "low <= value <= high"),
        (spoilt(lambda c: c.update(cores_per_host=0)), "cores_per_host"),
        (spoilt(lambda c: c.update(batch_per_worker=True)), "got `bool` - at .*batch_per_worker"),
        (spoilt(lambda c: c.update(step_jitter=float("nan"))), "step_jitter"),
    ],
)
def test_a_damaged_file_is_a_line(tmp_path, spoil, words):
    path = tmp_path / "cal.json"
    make().save(path)
    path.write_text(spoil(json.loads(path.read_text())))
    with pytest.raises(UsageError, match=words) as refused:
        calibration.load(path)
    assert "\n" not in str(refused.value)


def test_a_file_without_an_end_is_not_read():
    with pytest.raises(UsageError, match="it is no regular file"):
        calibration.load(Path("/dev/zero"))


def test_predictions_lie_in_their_intervals_and_repeat():
    found = rows(
        make(), ("allreduce", "ddp", "ps-sync", "ps-async"), (1, 4), (1, "equal"), (0.1, 10.0)
    )
    assert len(found) == 2 * 2 * 2 + (1 + 2) * 2 * 2
    assert all(row["step_s_low"] < row["step_s"] < row["step_s_high"] for row in found)
    again = rows(make(), ("allreduce", "ps-async"), (4,), ("equal",), (0.1,))
    assert len(again) == 2 and all(row in found for row in again)


def test_intervals_have_nine_in_ten_of_what_may_be():
    """Steps that the model misses by its error, of what a calibration may be, lie in the interval
    as often as said.
    """
    made, draw = make(most_workers=4, most_servers=2), random.Random(0)
    [row] = rows(made, ["ps-sync"], bandwidths=(0.5,))
    inside = 0
    for number in range(200):
        real = made.with_costs(
            Scenario("ps-sync", workers=4, servers=2, bandwidth_gbit=0.5), random.Random(number)
        )
        step_s = predict.simulate(real, detail=COARSE).step_s * math.exp(
            draw.gauss(0, made.model_error)
        )
        inside += row["step_s_low"] < step_s < row["step_s_high"]
    assert 0.85 <= inside / 200 <= 0.97


def test_a_wider_calibration_gives_wider_intervals():
    def width(low, high):
        ps = make().transports["ps"] | {"efficiency": Quantity(0.6, low, high)}
        (row,) = rows(
            make(transports=make().transports | {"ps": ps}), ["ps-sync"], bandwidths=(0.1,)
        )
        return row["step_s_high"] / row["step_s_low"]

    assert width(0.4, 0.9) > 1.3 * width(0.59, 0.61)


def test_beyond_the_calibration_it_says_so_and_widens():
    made = make()
    sizes = [Scenario("ps-sync", workers=n, servers=k) for n, k in ((2, 1), (4, 1), (1024, 8))]
    assert [predict.doublings_beyond(made, size) for size in sizes] == [
        (0, 0),
        (1, 0),
        (1 + 2, 8 + 1),
    ]
    known, beyond = (
        rows(make(most_servers=k, most_workers=64), workers=(64,), servers=(8,)) for k in (8, 1)
    )
    for a, b in zip(known[1:], beyond[1:], strict=True):
        assert b["step_s_high"] / b["step_s"] > a["step_s_high"] / a["step_s"]


def test_twice_the_batch_computes_about_twice_as_long():
    (single,) = rows(make(), ["allreduce"], [1])
    (double,) = rows(make().with_batch(2 * BATCH), ["allreduce"], [1])
    assert double["step_s"] == pytest.approx(single["step_s"] + 0.1, rel=0.15)


def test_one_machine_has_the_batch_of_all_workers_and_all_cores():
    """Four workers' batch on two cores, which are as fast as 1.85: an update for all of it."""
    one = predict.row(make(), best.one_machine(ANY, 4))
    assert (one["mode"], one["workers"], one["hosts"], one["batch_per_worker"]) == (
        "single",
        1,
        1,
        4 * BATCH,
    )
    assert one["step_s"] == pytest.approx(4 * 0.1 / 1.85 + 25 * 0.2e-3, rel=0.01)
    measured = predict.row(make(machine_speedup=Quantity(1.5, 1.4, 1.6)), best.one_machine(ANY, 4))
    assert measured["step_s"] == pytest.approx(4 * 0.1 / 1.5 + 25 * 0.2e-3, rel=0.01)


def asked(tmp_path, *words, modes="allreduce,ps-sync"):
    """What `hvdtrain plan predict` prints, in one piece, and its rows."""
    make(
        codecs=make().codecs
        | {"fp16": make().codecs["int8"] | {"wire_share": Quantity(0.5, 0.5, 0.5)}}
    ).save(tmp_path / "cal.json")
    words = [
        "predict",
        str(tmp_path / "cal.json"),
        "--modes",
        modes,
        "--bandwidth",
        "100mbit",
        *words,
    ]
    if "--hosts" not in words:
        words += ["--servers", "1"]
    done = CliRunner().invoke(command, [*words, "--json", str(tmp_path / "rows.json")])
    if done.exit_code:
        assert isinstance(done.exception, UsageError | SystemExit), done.exception
        return f"{done.exception} {done.output}", {}
    return " ".join(done.output.split()), json.loads((tmp_path / "rows.json").read_text())


@pytest.mark.usefixtures("few_draws")
def test_prices_without_a_number_of_hosts_are_refused(tmp_path):
    assert (
        "--price-host and --price-server need --hosts"
        in asked(tmp_path, "--price-server", "0.5")[0]
    )


@pytest.mark.usefixtures("few_draws")
def test_only_workers_that_there_are_can_be_slow(tmp_path):
    """As `train` has it; of several numbers of workers, those that have that worker are slow."""
    for words in (["--workers", "2"], ["--workers", "1,4"], ["--hosts", "4"]):
        said, _ = asked(tmp_path, *words, "--slow", "4:4x")
        assert "there is no worker 4; workers are 0 to " in said
    said, found = asked(tmp_path, "--workers", "2,4", "--slow", "3:4x")
    assert "nobody is slow where there is no worker 3, with 2 workers" in said
    plain = asked(tmp_path, "--workers", "2,4")[1]["rows"]
    same = [a["step_s"] == b["step_s"] for a, b in zip(plain, found["rows"], strict=True)]
    assert same == [row["workers"] <= 2 for row in plain]


@pytest.mark.usefixtures("few_draws")
def test_a_row_says_what_it_really_sends(tmp_path):
    modes = "allreduce,ddp,ps-sync"
    plain = asked(tmp_path, "--workers", "2", modes=modes)[1]["rows"]
    for codec, senders in (("int8", {"ps-sync"}), ("fp16", {"ps-sync", "allreduce"})):
        _, found = asked(tmp_path, "--workers", "2", "--compression", codec, modes=modes)
        for without, row in zip(plain, found["rows"], strict=True):
            assert row["compression"] == (codec if row["mode"] in senders else "none")
            share = {"int8": 0.25, "fp16": 0.5, "none": 1}[row["compression"]]
            assert row["bytes_sent_per_worker"] == share * without["bytes_sent_per_worker"]
    uses = asked(tmp_path, "--hosts", "2", modes=modes)[1]["rows"]
    sent = {
        mode: {row["compression"] for row in uses if row["mode"] == mode}
        for mode in modes.split(",")
    }
    both = {"none", "fp16"}  # no ring sends int8, which is no contest then
    assert sent == {"allreduce": both, "ddp": {"none"}, "ps-sync": both}
    assert "unknown compression" in asked(tmp_path, "--compression", "int4", modes="ddp,ps-sync")[0]


@pytest.mark.usefixtures("few_draws")
def test_the_map_has_what_both_sides_can_send_at_its_best_on_equal_machines(tmp_path):
    modes = "allreduce,ddp,ps-sync"
    said, found = asked(tmp_path, "--workers", "4", modes=modes)
    [place] = found["map"]
    assert (place["workers"], place["hosts"], place["basis"]) == (4, 4, "hosts")
    assert place["ring"] == "allreduce ×4 fp16" and place["servers"].endswith("fp16")
    chances = [place[name] for name in ("p_ring", "p_servers", "p_one_machine")]
    assert sum(chances) == pytest.approx(1)
    assert place["ratio"] > 1.3  # 100 Mbit/s, on which no server beats a ring
    assert "plain gradients" not in said
    said, found = asked(tmp_path, "--workers", "4", "--compression", "int8", modes=modes)
    assert found["map"][0]["servers"].endswith("int8") and "int8" not in found["map"][0]["ring"]
    assert "Rings send uncompressed gradients here; only servers use int8" in said


@pytest.mark.usefixtures("few_draws")
def test_servers_are_asked_about_over_one_wire_and_at_their_best_over_either():
    ps = make().transports["ps"]
    cheaper = {
        name: figure.times(1 if name == "efficiency" else 0.2) for name, figure in ps.items()
    }
    for wires, of_row, of_map in (
        (("rpc", "zmq"), "rpc", "zmq"),
        (("rpc",), "rpc", "rpc"),
        (("zmq",), "zmq", "zmq"),
    ):
        made = make(transports=make().transports | {"ps-zmq": cheaper}, wires=wires)
        job = Scenario("ps-sync", workers=4, servers=4, bandwidth_gbit=10.0, wire=wires[0])
        assert predict.row(made, job)["wire"] == of_row
        [place] = best.Contest(made, job, ["ps-sync"]).map([4], [10.0], [1])
        assert ("zmq" in place["servers"]) == (of_map == "zmq")
    with pytest.raises(UsageError, match="no transport ps-zmq: calibrate again"):
        predict.row(make(), job)


def test_a_sure_map_is_where_one_thing_decides(tmp_path):
    """At 1 Mbit/s one machine wins, at 10 Tbit/s on 16 hosts what is distributed; from 5 Mbit/s on
    with local steps.
    """

    def chance(workers, gbit, steps=1):
        [place] = best.Contest(make(), ANY, ["allreduce", "ps-sync"]).map(
            [workers], [gbit], [steps]
        )
        return place["p_one_machine"]

    assert chance(4, 1e-3) == 1
    assert chance(16, 1e4) == 0
    assert chance(4, 0.1) > 0.9 > 0.1 > chance(4, 0.1, 64)


def test_a_row_of_which_one_worker_does_nearly_all_says_so_and_is_no_cluster(tmp_path):
    said, found = asked(
        tmp_path, "--workers", "2", "--placement", "shared", modes="allreduce,ps-async"
    )
    lone = next(row for row in found["rows"] if row["mode"] == "ps-async")
    assert lone["busiest_share"] > 0.9
    assert f"one worker does {lone['busiest_share']:.0%}" in said
    assert found["map"][0]["servers"] != "ps-async ×2+1 beside"


def test_what_was_measured_apart_is_drawn_apart():
    """What messages cost is known of each transport by itself, what computing takes is the same for
    all.
    """
    made = make()
    drawn = {
        mode: made.with_costs(Scenario(mode, workers=2, servers=k), random.Random(1))
        for mode, k in (("allreduce", 0), ("ddp", 0), ("ps-sync", 1), ("ps-async", 1))
    }
    assert len({job.layers for job in drawn.values()}) == 1
    assert len({job.transport for job in drawn.values()}) == 3
    assert drawn["ps-sync"].transport == drawn["ps-async"].transport


@pytest.mark.usefixtures("few_draws")
def test_cheap_servers_are_bought_and_dear_ones_are_not():
    """Servers at a tenth of the price: a ring cannot have them, and for the same money there are
    more workers.
    """
    contest = best.Contest(make(codecs={}), ANY, ["allreduce", "ps-sync"])
    cheap = contest.splits(4, best.Prices(1.0, 0.1))
    assert all(row["price"] <= 4.0 + 1e-9 for row in cheap)
    assert cheap[0]["price_per_million"] == pytest.approx(
        cheap[0]["price"] * 1e6 / cheap[0]["samples_per_s"] / 3600
    )
    assert [row["samples_per_s"] for row in cheap] == sorted(
        (r["samples_per_s"] for r in cheap), reverse=True
    )
    dedicated = [
        row["servers"]
        for row in cheap
        if row["placement"] == "dedicated" and row["worker_hosts"] == 3
    ]
    assert dedicated == [10]
    assert contest.place(4, best.Prices(1.0, 0.1))["basis"] == "price"
    free = contest.splits(4, best.Prices(1.0, 0.0))
    assert {row["workers"] for row in free if row["servers"]} == {4} and {
        row["price"] for row in free
    } == {4.0, 1.0}
    assert contest.place(4, best.Prices(1.0, 0.0))["basis"] == "workers"


def test_costs_of_messages_from_measured_steps():
    """Two workers: each sends and receives the blocks; a server both workers'."""
    gigabytes = BLOCKS * LARGE / 1e9
    message, per_gb, of_server = 1e-3, 0.5, 0.4

    def measured(messages, size):
        worker = messages * message + 2 * size * per_gb
        server = 2 * (messages * message + 2 * size * of_server)
        return StepSeconds([worker] * 3, [server] * 3, [1.0] * 3)

    found = transports({("ps", SMALL): measured(2, 0), ("ps", LARGE): measured(16, gigabytes)})
    assert found["ps"]["message_us"].value == pytest.approx(1000, rel=0.01)
    assert found["ps"]["send_s_per_gb"].value == pytest.approx(per_gb, rel=0.01)
    assert found["ps"]["server_receive_s_per_gb"].value == pytest.approx(of_server, rel=0.01)
    guessed = found["allreduce"]["send_s_per_gb"]
    assert guessed.high > 3 * guessed.low  # it was not measured


def written(
    root, made, mode, workers, servers, bandwidth, cpu_factor=1.0, local_steps=1, threads=1
):
    """A run on hosts of its own, as long as predicted."""
    asked = Scenario(
        mode,
        workers=workers,
        servers=servers,
        bandwidth_gbit=bandwidth,
        placement="shared",
        local_steps=local_steps,
    )
    job = made.with_threads(threads).with_costs(asked)
    step = predict.simulate(job).step_s
    hosts = {
        f"host{n}": {"ranks": [n, servers + n] if n < servers else [servers + n]}
        for n in range(workers)
    }
    change = {
        "parameters": 6_250_000,
        "global_batch": workers * BATCH,
        "hosts": hosts,
        "threads_per_worker": threads,
        "options": {"local_steps": local_steps} if local_steps > 1 else {},
    }
    folder = report_runs.write(
        root, mode, workers, servers, speed=report_runs.BATCH / step, change=change
    )
    summary = json.loads((folder / "summary.json").read_text())
    each, at_workers, at_servers = from_runs.message_seconds(job)
    of_workers = cpu_factor * (at_workers + (each / 2 if servers else each))
    of_servers = cpu_factor * (at_servers + each / 2) + job.optimizer_s
    computing_s = threads * (job.computing_s - job.fixed_s) + job.fixed_s
    of_local_steps = computing_s + (job.optimizer_s if local_steps > 1 else 0.0)
    updating_s = 0.0 if servers else job.optimizer_s
    of_worker = (of_workers / workers + updating_s) / local_steps + of_local_steps
    for process in summary["processes"]:
        used = of_worker
        if process["role"] == "server":
            used = of_servers / servers / local_steps
        process["cpu_s"] = used * summary["steps"]
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def test_runs_as_long_as_predicted_have_no_error(tmp_path):
    made = make()
    runs = [
        load_run(written(tmp_path, made, mode, 3, k, 0.5))
        for mode, k in (("allreduce", 0), ("ps-sync", 2))
    ]
    found = [check.compare(made, run, 0.5) for run in runs]
    assert [(row["mode"], row["workers"], row["servers"], row["hosts"]) for row in found] == [
        ("allreduce", 3, 0, 3),
        ("ps-sync", 3, 2, 3),
    ]
    assert all(abs(row["error"]) < 0.02 for row in found)
    # said to be on a faster network than it was
    assert all(check.compare(made, run, 1.0)["error"] < -0.2 for run in runs)


def test_where_shares_are_leased_a_step_is_the_jobs_wall_time(tmp_path):
    """One of two workers has had 3 of 60 shares, at a second each: a step of the job is not half a
    second.
    """
    folder = report_runs.write(tmp_path, "ps-async", 2, 1, speed=640.0, change={"shares": "leased"})
    step = {"samples": 0, "loss": None}
    for rank, had in (
        (1, {n: 1 for n in (1, 11, 21)}),
        (2, {n: 1 if n in (1, 11, 21) else 2 for n in range(1, 31)}),
    ):
        lines = [
            step | {"time": (n - 1) // 10 + 1.0 if rank == 1 else 0.1 * n, "shares": had.get(n, 0)}
            for n in range(1, 31)
        ]
        (folder / f"metrics.rank{rank}.jsonl").write_text(
            "".join(json.dumps(line) + "\n" for line in lines)
        )
    run = load_run(folder)
    assert check.measured_step_s(run) == pytest.approx(report_runs.BATCH / 640)
    _, asked = check.job_of_run(make(model={}), run, 1.0)
    assert (asked.round_steps, asked.is_leased, asked.softsync) == (
        report_runs.PER_EPOCH,
        True,
        False,
    )


def test_a_run_is_simulated_with_its_servers_where_they_were(tmp_path):
    """Rank 0 is the server, and rank 2 the slow worker. Hosts that do not have all ranks say nothing."""
    jobs = []
    for number, ranks in enumerate([([0, 1], [2]), ([1], [0, 2]), ([0, 1], [7])]):
        hosts = {f"host{host}": {"ranks": on_host} for host, on_host in enumerate(ranks)}
        change = {"hosts": hosts, "slow": {"asked": "1:3x", "achieved": {}}}
        folder = report_runs.write(tmp_path / str(number), "ps-async", 2, 1, change=change)
        _, job = check.job_of_run(make(model={}), load_run(folder), 0.1)
        jobs.append(replace(job, round_steps=0))
    assert [job.ranks_by_host for job in jobs] == [((0, 1), (2,)), ((1,), (0, 2)), ()]
    apart, beside, _ = (predict.simulate(make().with_costs(job)).step_s for job in jobs)
    assert beside > 1.5 * apart


@pytest.mark.parametrize(
    ("local_steps", "evaluated_at", "mean"), [(4, 8, 4), (8, 5, 5), (8, 10, 5), (8, 17, 6)]
)
def test_before_an_evaluation_fewer_local_steps_are_exchanged(
    tmp_path, local_steps, evaluated_at, mean
):
    """Where shares are leased. Workers in lockstep go on with their local steps over an evaluation."""
    found = {}
    for mode in ("ps-async", "ps-sync"):
        change = {"options": {"local_steps": local_steps}}
        run = report_runs.run(mode, 2, 1, change=change)
        [first, *_] = run.summary.evaluations
        summary = structs.replace(
            run.summary, evaluations=[structs.replace(first, step=evaluated_at)]
        )
        _, found[mode] = check.job_of_run(make(model={}), replace(run, summary=summary), 1.0)
    leased, in_lockstep = found["ps-async"], found["ps-sync"]
    assert (leased.local_steps, leased.round_steps) == (mean, evaluated_at)
    assert (in_lockstep.local_steps, in_lockstep.round_steps) == (local_steps, 0)


def test_of_local_steps_rounds_are_measured_each_with_its_exchange(tmp_path):
    folder = report_runs.write(tmp_path, "allreduce", 2, change={"options": {"local_steps": 4}})
    # a round's exchange is over before the next step is
    ends = [0.1 * n + 0.6 * ((n - 1) // 4) for n in range(1, 18)]
    for rank in range(2):
        rows = [
            {"step": n, "time": end, "samples": 4, "loss": None} for n, end in enumerate(ends, 1)
        ]
        (folder / f"metrics.rank{rank}.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rows)
        )
    assert check.measured_step_s(load_run(folder)) == pytest.approx(0.25)


def test_a_report_has_predictions_beside_its_runs_and_says_which_it_cannot_make(tmp_path):
    made = make()  # one of the runs has measured the links, for both
    folders = [
        written(tmp_path, made, mode, 3, k, 0.5) for mode, k in (("allreduce", 0), ("ps-sync", 2))
    ]
    manifest = json.loads((folders[0] / "manifest.json").read_text())
    manifest |= {"network": {"pairs": [{"from": "host0", "to": "host1", "gbit_s": 0.5}]}}
    (folders[0] / "manifest.json").write_text(
        json.dumps(manifest | {"slow": {"asked": "1:4x@2s-3s", "achieved": {}}})
    )
    table = check.table(made, [load_run(folder) for folder in folders])
    [(label, [_, _, error])] = table.rows
    assert label == "ps-sync ×3+2, slow: none" and abs(error.value) < 0.02
    assert any("was run with --slow '1:4x@2s-3s': a plan knows" in note for note in table.notes)
    assert any("joined by 500 Mbit/s" in note for note in table.notes)
    assert any(note.startswith("Median error ") for note in table.notes)


def test_a_run_of_another_model_or_unknown_links_is_refused(tmp_path):
    folder = written(tmp_path, make(), "allreduce", 2, 0, 1.0)
    with pytest.raises(UsageError, match="how fast their links are is not known"):
        check.compare(make(), load_run(folder), None)
    with pytest.raises(UsageError, match="6,250,000 parameters, the calibration one of 1,000"):
        check.compare(make(model={"parameters": 1000}), load_run(folder), 1.0)
    (folder / "summary.json").unlink()
    with pytest.raises(UsageError, match="has not finished"):
        check.finished(folder)


def test_runs_correct_a_calibration(tmp_path):
    """Of a wire that reaches 0.7 and messages that cost twice as much, runs tell both."""
    poor = make().transports["ps"] | {"efficiency": Quantity(0.7, 0.7, 0.7)}
    real = make(transports=make().transports | {"ps": poor})
    folder = written(tmp_path, real, "ps-sync", 3, 1, 0.2, cpu_factor=2.0)
    found = from_runs.from_runs(make(), [load_run(folder)], 0.2)
    assert found.transports["ps"]["send_s_per_gb"].value == pytest.approx(1.0, rel=0.1)
    assert found.transports["ps"]["efficiency"].value == pytest.approx(0.7, abs=0.03)
    assert found.transports["allreduce"] == make().transports["allreduce"]
    assert (found.most_workers, found.bandwidth_gbit) == (3, 0.2)


def test_runs_on_gpus_tell_what_messages_cost(tmp_path):
    """A worker's threads do not compute there, and one process is no faster with more threads."""
    made = make(device="cuda")
    folders = [written(tmp_path, made, "ps-sync", 3, 3, 0.2, 2.0)]
    folders.append(written(tmp_path, made, "single", 1, 0, 0.2))
    for folder in folders:
        manifest = json.loads((folder / "manifest.json").read_text())
        manifest |= {"device": "cuda:0", "threads_per_worker": 16}
        (folder / "manifest.json").write_text(json.dumps(manifest))
    found = from_runs.from_runs(make(), [load_run(folder) for folder in folders], 0.2)
    assert found.device == "cuda"
    assert found.transports["ps"]["message_us"].value == pytest.approx(400, rel=0.02)
    assert found.layers[0].forward_ms.value == pytest.approx(6)


@pytest.mark.parametrize(("local_steps", "threads"), [(1, 2), (3, 1), (6, 2)])
@pytest.mark.parametrize(("mode", "servers"), [("ddp", 0), ("ps-sync", 3)])
def test_runs_of_local_steps_and_of_several_threads_tell_what_messages_cost(
    tmp_path, mode, servers, local_steps, threads
):
    """Messages of a round are beside a round's computing, in which all threads are busy."""
    folder = written(tmp_path, make(), mode, 3, servers, 0.2, 2.0, local_steps, threads)
    run = load_run(folder)
    found = from_runs.from_runs(make(), [run], 0.2).transports[from_runs.transport_name(run)]
    assert found["message_us"].value == pytest.approx(400, rel=0.02)


def test_a_run_that_leaves_nothing_for_messages_does_not_show_what_they_cost(tmp_path):
    """Its threads did not compute all the time. Its steps still show the efficiency."""
    folder = written(tmp_path, make(), "ps-sync", 3, 3, 0.2, threads=2)
    summary = json.loads((folder / "summary.json").read_text())
    for process in summary["processes"]:
        if process["role"] == "worker":
            process["cpu_s"] /= 2
    (folder / "summary.json").write_text(json.dumps(summary))
    guessing = make(made={"guessed": ["ps"]})
    found = from_runs.from_runs(guessing, [load_run(folder)], 0.2)
    known = make().transports["ps"]
    efficiency = found.transports["ps"]["efficiency"]
    assert found.transports["ps"] | {"efficiency": known["efficiency"]} == known
    assert efficiency.value == pytest.approx(0.94, abs=0.03)
    assert found.made["left_nothing"] == ["ps-sync-w3-s3-r1"]
    assert found.made["guessed"] == ["ps"]


def test_runs_at_two_rates_tell_what_messages_cost_from_what_the_wire_carries(tmp_path):
    """Processes that spin do not show it: at one rate a dear message is as a poor wire."""
    ring = make().transports["allreduce"] | {"efficiency": Quantity.exactly(0.7)}
    real = make(transports=make().transports | {"allreduce": ring}).with_messages(["allreduce"], 2)
    runs = []
    for gbit in (0.2, 2.0):
        folder = written(tmp_path / str(gbit), real, "allreduce", 3, 0, gbit)
        manifest = json.loads((folder / "manifest.json").read_text())
        pairs = [{"from": "host0", "to": "host1", "gbit_s": gbit}]
        manifest |= {"backend": "horovod-mpi", "network": {"pairs": pairs}}
        (folder / "manifest.json").write_text(json.dumps(manifest))
        runs.append(load_run(folder))
    found = from_runs.from_runs(make(), runs, None).transports["allreduce"]
    assert found["efficiency"].value == pytest.approx(0.7, abs=0.05)
    assert found["send_s_per_gb"].value == pytest.approx(1.0, rel=0.25)
    alone = from_runs.from_runs(make(), runs[:1], None).transports["allreduce"]
    assert alone["send_s_per_gb"].value == pytest.approx(0.5)


def test_runs_tell_what_stays_on_a_host_and_what_processes_take_while_idle(tmp_path):
    """A server beside the first of two workers: a byte between them costs half; each process takes
    0.03 of a core.
    """
    made = make()
    known = {"local_share": Quantity(0.5, 0.5, 0.5), "idle_cores": Quantity(0.03, 0.03, 0.03)}
    folder = written(
        tmp_path,
        make(transports=made.transports | {"ps": made.transports["ps"] | known}),
        "ps-sync",
        2,
        1,
        0.5,
    )
    summary = json.loads((folder / "summary.json").read_text())
    steps, gigabytes, buckets = summary["steps"], 0.025, 25e6 / 4 / 2**20
    idle = 0.03 * summary["wall_s"] / steps
    first, second = (
        0.1 + 2 * buckets * 200e-6 + 2 * gigabytes * 0.5 * share for share in (0.5, 1.0)
    )
    server = 4 * buckets * 200e-6 + 2 * gigabytes * 0.4 * 1.5 + 0.005
    for process, used in zip(
        sorted(summary["processes"], key=lambda p: p["rank"]), (server, first, second), strict=True
    ):
        process["cpu_s"] = steps * (used + idle)
    (folder / "summary.json").write_text(json.dumps(summary))
    # before its first message it starts, which costs more; so does its end
    sent = [
        0,
        0,
        5,
        5,
        9,
        9,
        9,
    ]
    used = [0.0, 2.0, 2.5, 2.53, 4.0, 4.03, 9.0]
    lines = [
        {"time": 100 + n, "cpu_s": s, "bytes_sent": b, "pushes": b, "queued_s": 0}
        for n, (b, s) in enumerate(zip(sent, used, strict=True))
    ]
    (folder / "metrics.server0.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines) + "{half"
    )
    costs = from_runs.from_runs(made, [load_run(folder)], 0.5).transports["ps"]
    assert costs["idle_cores"].value == pytest.approx(0.03, rel=0.01)
    assert costs["local_share"].value == pytest.approx(0.5, rel=0.05)
    assert costs["send_s_per_gb"].value == pytest.approx(0.5, rel=0.05)
    assert costs["server_send_s_per_gb"].value == pytest.approx(0.4, rel=0.05)
