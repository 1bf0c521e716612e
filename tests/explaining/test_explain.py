"""Who was waited for, where a step went, and what would have been: from run folders made up to have
known answers.
"""

import json
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner
from msgspec import structs

from hvdtrain.base.errors import UsageError
from hvdtrain.reporting.explaining.account import PARTS, account
from hvdtrain.reporting.explaining.command import explain
from hvdtrain.reporting.explaining.pictures import pictures
from hvdtrain.reporting.explaining.straggler import find_straggler
from hvdtrain.reporting.explaining.timeline import read_timeline
from hvdtrain.reporting.explaining.what_if import what_if
from hvdtrain.runs.membership_log import LEFT
from hvdtrain.runs.read import load_run
from hvdtrain.runs.schema import Slow

COMPUTE_S, LATENCY_S = 0.040, 0.004
BOUND = 1  # of ps-ssp


def make_run(
    folder,
    factors,
    mode="allreduce",
    steps=200,
    slow=slice(None),
    noise=0.05,
    servers=0,
    seed=0,
    cores=None,
):
    """A run whose worker w computes factors[w] times as long as the others in the steps `slow`,
    where it sleeps.
    """
    folder.mkdir(parents=True)
    random, workers = np.random.default_rng(seed), len(factors)
    own = COMPUTE_S * random.lognormal(0, noise, (workers, steps))
    own[:, slow] *= np.array(factors)[:, None]
    bound = {"ps-ssp": BOUND, "ps-async": steps}.get(mode, 0)
    ends, waits, begins = np.zeros_like(own), np.full_like(own, LATENCY_S), np.zeros(workers)
    for step in range(steps):
        ends[:, step] = done = begins + own[:, step] + LATENCY_S
        begins = np.maximum(done, ends[:, step - bound].max() if step >= bound else 0)
        waits[:, step] += begins - done
        ends[:, step] = begins
    end = ends.max() if bound < steps else ends[:, -1].min()
    processes = []
    for worker in range(workers):
        taken = int((ends[worker] <= end).sum())
        lines = [
            json.dumps(
                {
                    "step": step + 1,
                    "epoch": 1,
                    "samples": 16,
                    "loss": 1.0,
                    "accuracy": 0.5,
                    "time": ends[worker, step],
                    "data_s": 0.0,
                    "forward_s": own[worker, step] / 3,
                    "backward_s": 2 * own[worker, step] / 3,
                    "comm_s": waits[worker, step],
                    "optimizer_s": 0.0,
                }
            )
            for step in range(taken)
        ]
        (folder / f"metrics.rank{servers + worker}.jsonl").write_text("\n".join(lines) + "\n")
        place = {"rank": servers + worker, "role": "worker", "host": "one"}
        processes.append(place | {"cpu_s": taken * COMPUTE_S, "samples": 16 * taken})
    samples = sum(process["samples"] for process in processes)
    (folder / "manifest.json").write_text(
        json.dumps(
            {
                "mode": mode,
                "workers": workers,
                "servers": servers,
                "repeat": 1,
                "global_batch": 16 * workers,
                "threads_per_worker": 1,
                "staleness_bound": BOUND if mode == "ps-ssp" else None,
                "hosts": {"one": {"ranks": list(range(servers + workers)), "cores_usable": cores}},
            }
        )
    )
    (folder / "summary.json").write_text(
        json.dumps(
            {
                "status": "done",
                "steps": steps,
                "samples": samples,
                "wall_s": end,
                "samples_per_s": samples / end,
                "processes": processes,
            }
        )
    )
    return folder


def explained_run(run, *words):
    """What the command writes and says of a run."""
    file = run / "explained.json"
    result = CliRunner().invoke(
        explain, [str(run), "--json", str(file), *map(str, words)], catch_exceptions=False
    )
    assert result.exit_code == 0, result.output
    return json.loads(file.read_text()), " ".join(result.output.split())


def explained(tmp_path, *factors, **more):
    return explained_run(make_run(tmp_path / "run", factors, **more))


def change(file, **more):
    file.write_text(json.dumps(json.loads(file.read_text()) | more))


def change_steps(run, rank, changed):
    """Replace the lines of a worker by what becomes of their list."""
    file = run / f"metrics.rank{rank}.jsonl"
    steps = changed([json.loads(line) for line in file.read_text().splitlines()])
    file.write_text("\n".join(map(json.dumps, steps)) + "\n")
    return steps


def accounted(run):
    run = load_run(run)
    steps = read_timeline(run)
    return run, steps, account(run, steps)


@pytest.mark.parametrize(("mode", "servers"), [("allreduce", 0), ("ps-sync", 1), ("ps-async", 1)])
@pytest.mark.parametrize("seed", range(4))
def test_the_slow_rank_is_named_and_equal_ones_and_one_interrupted_now_and_then_are_not(
    tmp_path, mode, servers, seed
):
    told, printed = explained(tmp_path / "slow", 1, 1, 4, 1, mode=mode, servers=servers, seed=seed)
    assert told["straggler"] == servers + 2
    assert told["factor"] == pytest.approx(4, rel=0.05)
    assert f"Rank {servers + 2} was slow" in printed
    clean, printed = explained(
        tmp_path / "clean", 1, 1, 1, 1, mode=mode, servers=servers, seed=seed, noise=0.3
    )
    assert clean["straggler"] is None
    assert "No slow worker was found" in printed
    interrupted = np.random.default_rng(seed).random(200) < 0.6
    assert explained(tmp_path / "interrupted", 1, 8, slow=interrupted)[0]["straggler"] is None


def test_it_is_said_since_when_and_until_when_it_was_slow(tmp_path):
    told, _ = explained(tmp_path, 1, 4, slow=slice(50, 120), steps=200)
    fast, slow = COMPUTE_S + LATENCY_S, 4 * COMPUTE_S + LATENCY_S
    assert told["slow_from_s"] == pytest.approx(50 * fast, abs=10 * slow)  # to a block of steps
    assert told["slow_until_s"] == pytest.approx(50 * fast + 70 * slow, abs=10 * slow)


@pytest.mark.parametrize("busy", [slice(60, 140), slice(0, 60)])
def test_one_that_was_slow_throughout_is_said_to_have_been(tmp_path, busy):
    """While it also has to share its core, a part of the run, it is slower still, on average by the
    steps' times.
    """
    run = make_run(tmp_path / "run", (1, 4), noise=0.05)

    def slower(steps):
        for step in steps[busy]:
            step |= {"forward_s": 3 * step["forward_s"], "backward_s": 3 * step["backward_s"]}
        return steps

    steps = change_steps(run, 1, slower)
    change(run / "manifest.json", slow={"asked": "1:4x", "achieved": {"0": 1.0, "1": 4.0}})
    told, printed = explained_run(run)
    often = busy.stop - max(5, busy.start)  # but for warm-up
    assert told["factor"] == pytest.approx((12 * often + 4 * (195 - often)) / 195, rel=0.05)
    assert (told["slow_from_s"], told["slow_until_s"]) == (0, steps[-1]["time"])
    assert "--slow 1:4x made workers slow (rank 1 4.0 times as long as it can)" in printed


def test_a_worker_that_leased_few_shares_is_explained_too(tmp_path):
    """Of the 50 steps that the run took, also where one had a single share."""
    for few in (7, 1):
        run = make_run(tmp_path / str(few), (1, 1), mode="ps-async", servers=1, steps=50)
        every = 50 // few
        change_steps(run, 2, lambda steps, every=every: steps[-1::-every][::-1])
        change_steps(
            run, 2, lambda steps: [step | {"backward_s": 7 * step["backward_s"]} for step in steps]
        )
        _, printed = explained_run(run)
        assert "Rank 2 was slow" in printed


def test_the_parts_of_a_step_are_all_of_it(tmp_path):
    told, _ = explained(tmp_path, 1, 4)
    assert list(told["parts"]) == list(PARTS)
    assert told["step_s"] == pytest.approx(4 * COMPUTE_S + LATENCY_S, rel=0.05)
    assert told["parts"]["other_waiting"] == pytest.approx(LATENCY_S, rel=0.05)


def test_the_mean_step_is_that_of_the_samples_per_second_where_workers_take_unequally_many(
    tmp_path,
):
    told, printed = explained(tmp_path, 1, 8, mode="ps-async", servers=1, noise=0.01)
    assert told["step_s"] == pytest.approx(2 * 16 / told["samples_per_s"], rel=0.02)
    assert "the mean of all steps" in printed


def test_whom_workers_waited_for_at_the_end_of_epochs_is_left_open_where_none_was_slow(tmp_path):
    """A share of the waiting is no one's, so no rank has 0 s in its row."""
    run = make_run(tmp_path / "run", (1, 1), mode="ps-async", servers=1, noise=0.001)
    for rank, late_s in ((1, 2.0), (2, 1.9)):  # each comes later to the second half
        change_steps(
            run,
            rank,
            lambda steps, late_s=late_s: [
                step | {"time": step["time"] + late_s * (step["step"] > 100)} for step in steps
            ],
        )
    told, printed = explained_run(run)
    assert told["parts"]["waiting_for_slowest"] == pytest.approx(3.9 / 390, rel=0.05)
    assert told["waited_s"] == {"1": None, "2": None} and " 0.0 s" not in printed


@pytest.mark.parametrize("noise", [0.05, 0.4])
@pytest.mark.parametrize(("mode", "servers"), [("allreduce", 0), ("ps-ssp", 1), ("ps-async", 1)])
def test_without_the_straggler_it_is_as_fast_as_a_run_that_had_none(tmp_path, mode, servers, noise):
    """Where the steps of equals vary, they wait for each other too."""
    told, _ = explained(tmp_path / "slow", 1, 1, 1, 4, mode=mode, servers=servers, noise=noise)
    clean, _ = explained(tmp_path / "clean", 1, 1, 1, 1, mode=mode, servers=servers, noise=noise)
    assert told["what_if"]["without_straggler"]["samples_per_s"] == pytest.approx(
        clean["samples_per_s"], rel=0.05
    )
    waited_s = 0 if mode == "ps-async" else 195 * 3 * COMPUTE_S
    assert told["waited_s"][str(servers + 3)] == pytest.approx(waited_s, rel=0.15, abs=0.1)


def test_workers_that_are_not_in_step_are_no_faster_than_their_cores_allow(tmp_path):
    """While one of them sleeps, others have its core."""
    told, _ = explained(tmp_path, 1, 1, 1, 4, mode="ps-async", servers=1, cores=3)
    without = told["what_if"]["without_straggler"]["samples_per_s"]
    assert without == pytest.approx(3 / COMPUTE_S * 16, rel=0.03)


def test_what_a_run_does_not_tell_is_null(tmp_path):
    told, _ = explained(tmp_path, 1, 1)
    assert told["what_if"]["double_bandwidth"]["samples_per_s"] is None
    assert told["what_if"]["one_more_server"]["samples_per_s"] is None
    told, _ = explained(tmp_path / "without-metrics-of-servers", 1, 1, mode="ps-sync", servers=1)
    assert told["unknown"]["server"] == "there are no metrics of servers"
    assert told["what_if"]["one_more_server"]["samples_per_s"] is None


def test_a_run_with_backup_workers_is_explained_though_a_slow_one_takes_fewer_steps(tmp_path):
    """Nobody waits for it, so nobody would be faster without it."""
    run = make_run(tmp_path / "run", (1, 1, 1, 4), mode="ps-async", servers=1)
    change(run / "manifest.json", mode="ps-sync", backup=1)
    told, printed = explained_run(run)
    assert (told["straggler"], told["waited_s"]["4"]) == (4, pytest.approx(0, abs=0.05))
    assert "Rank 4 was slow" in printed
    assert told["what_if"]["without_straggler"]["samples_per_s"] is None


def linked(run, wire_s):
    """The run as one over two hosts, whose links the bytes of a step keep busy for so long."""
    ranks = [[0], list(range(1, 2 + len(list(run.glob("metrics.server*")))))]
    pairs = [{"from": a, "to": b, "gbit_s": 1.0} for a, b in (("one", "two"), ("two", "one"))]
    change(
        run / "manifest.json",
        trained_parameters=round(wire_s * 1e9 / 8 / 4),
        network={"pairs": pairs},
        hosts={name: {"ranks": here} for name, here in zip(("one", "two"), ranks, strict=True)},
    )
    return run


@pytest.mark.parametrize(
    ("wire_s", "hidden_s"), [(0.010, 0.010), (0.028, 2 / 3 * COMPUTE_S), (0.060, 2 / 3 * COMPUTE_S)]
)
def test_what_backward_could_have_hidden_of_the_links_is_lost_overlap(tmp_path, wire_s, hidden_s):
    """A step waits for 4 ms. Twice the bandwidth spares half the links' time, where a step waited
    so long for it.
    """
    run, steps, told = accounted(linked(make_run(tmp_path / "run", (1, 1), noise=0.001), wire_s))
    not_hidden = min(LATENCY_S, wire_s - hidden_s)
    assert told.parts["links"] == pytest.approx(not_hidden, abs=2e-4)
    assert told.parts["lost_overlap"] == pytest.approx(LATENCY_S - not_hidden, abs=2e-4)
    assert told.step_s == pytest.approx(COMPUTE_S + LATENCY_S, rel=0.02)
    rate = what_if(run, steps, None, told)["double_bandwidth"]
    spared = min(LATENCY_S, wire_s / 2)
    assert rate == pytest.approx(
        run.summary.samples_per_s * told.step_s / (told.step_s - spared), rel=0.01
    )


def test_with_servers_the_next_forward_hides_the_wire_too_and_queueing_is_what_servers_counted(
    tmp_path,
):
    run = make_run(tmp_path / "run", (1, 1), mode="ps-sync", servers=1, noise=0.001)
    counted = {"time": 1.0, "pushes": 400, "applying_s": 0.0, "queued_s": 0.0}
    change(run / "summary.json", processes=[])
    (run / "metrics.server0.jsonl").write_text(json.dumps(counted) + "\n")
    _, _, told = accounted(linked(run, 0.028 / 2))  # the two workers' bytes share a link
    assert (told.parts["links"], told.parts["queueing"]) == (0, 0)
    assert told.parts["lost_overlap"] == pytest.approx(LATENCY_S, abs=2e-4)
    (run / "metrics.server0.jsonl").write_text(json.dumps(counted | {"queued_s": 0.4}) + "\n")
    _, _, told = accounted(run)
    assert told.parts["queueing"] == pytest.approx(0.001)
    assert told.parts["lost_overlap"] == pytest.approx(LATENCY_S - 0.001, abs=2e-4)


def test_answers_that_leave_behind_all_pushes_are_the_wires_as_far_as_buckets_explain_it(tmp_path):
    """A server alone on its host and two workers, in lockstep. Of one bucket, whose pushes take 90
    ms, a step waits for 150 ms; so it does of twenty, of which the last one's answers take 4.5 ms.
    """
    run = make_run(tmp_path / "run", (1, 1), mode="ps-sync", servers=1, noise=0.001)
    for rank in (1, 2):
        change_steps(run, rank, lambda steps: [row | {"comm_s": 0.15} for row in steps])
    (run / "metrics.server0.jsonl").write_text('{"time": 1.0, "pushes": 400, "queued_s": 0.0}\n')
    linked(run, 0.045)
    change(
        run / "manifest.json",
        hosts={name: {"ranks": [n]} for n, name in enumerate(("one", "two", "three"))},
    )
    change(run / "summary.json", samples_per_s=32 / (COMPUTE_S + 0.15))
    megabytes = 4 * json.loads((run / "manifest.json").read_text())["trained_parameters"] / 2**20

    def told_with(bucket_mb, **manifest):
        change(run / "manifest.json", bucket_mb=bucket_mb, **manifest)
        read, steps, told = accounted(run)
        rates = what_if(read, steps, None, told)
        return told, {
            name: (rate or 0) / read.summary.samples_per_s for name, rate in rates.items()
        }

    told, faster = told_with(megabytes)
    assert (
        told.needed_s["links"] == pytest.approx(0.15, rel=0.01)
        and told.parts["other_waiting"] < 1e-3
    )
    halved = told.step_s / (told.step_s - 0.075)
    assert (faster["double_bandwidth"], faster["one_more_server"]) == pytest.approx(
        (halved, halved), rel=0.01
    )
    assert told_with(megabytes / 20)[0].needed_s["links"] == pytest.approx(0.09 + 0.0045, rel=0.01)
    assert told_with(megabytes, mode="ps-async")[0].needed_s["links"] == pytest.approx(
        0.09, rel=0.01
    )


def test_what_would_have_been_is_held_to_what_the_links_allow(tmp_path):
    """A server on the host of each of two workers sends as much over either link as one on the
    first's does.
    """
    run = make_run(tmp_path / "run", (1, 4), mode="ps-sync", servers=1, noise=0.001)
    (run / "metrics.server0.jsonl").write_text(
        '{"time": 1.0, "pushes": 400, "applying_s": 20.0, "queued_s": 0}\n'
    )
    wire_s = 0.15
    change(
        linked(run, wire_s) / "manifest.json",
        hosts={"one": {"ranks": [0, 1]}, "two": {"ranks": [2]}},
    )
    run, steps, told = accounted(run)
    rates = what_if(run, steps, find_straggler(steps), told)
    most = 2 * 16 / wire_s
    assert rates["one_more_server"] <= most and rates["without_straggler"] == pytest.approx(most)
    assert told.needed_s["links"] == pytest.approx(wire_s)


def test_a_worker_on_the_servers_host_does_not_wait_for_the_link_of_another(tmp_path):
    """Where shares are leased, those of the worker behind the link take it 40 ms each, one step in
    two.
    """
    run = make_run(tmp_path / "run", (1, 1), mode="ps-async", servers=1, noise=0.001)
    change(
        linked(run, 0.04) / "manifest.json", hosts={"one": {"ranks": [0, 1]}, "two": {"ranks": [2]}}
    )
    assert accounted(run)[2].needed_s["links"] == pytest.approx(0.02, rel=0.01)


@pytest.mark.parametrize(("mode", "servers"), [("allreduce", 0), ("ps-async", 1)])
def test_messages_are_told_from_computing_where_it_is_known_how_long_a_slow_worker_slept(
    tmp_path, mode, servers
):
    """Each step spends 2 ms of processor time on messages."""
    run = make_run(tmp_path / "run", (1, 4), mode, servers=servers, noise=0.001)
    processes = json.loads((run / "summary.json").read_text())["processes"]
    for process in processes:
        process["cpu_s"] *= 1 + 0.002 / COMPUTE_S
    taken = sum(process["samples"] for process in processes) / 16
    change(run / "summary.json", processes=processes, steps=round(taken / 2))  # of the job

    def messages(asked, achieved):
        change(run / "manifest.json", slow={"asked": asked, "achieved": achieved})
        told = accounted(run)[2]
        return told.unknown.get("messages") or told.needed_s["messages"]

    assert messages("1:4x", {"0": 1.0, "1": 4.0}) == pytest.approx(0.002, rel=0.15)
    for asked, achieved in (
        ("1:4x", {"0": 1.0}),
        ("all:2x", {"0": 1.0}),
        ("1:4x", {}),
        ("unheard of", {"1": 4.0}),
    ):
        assert "does not tell how long" in messages(asked, achieved)


def test_processor_time_of_a_run_over_mpi_is_not_that_of_messages(tmp_path):
    """Its processes spin while they wait for each other."""
    run = make_run(tmp_path / "run", (1, 1))
    processes = json.loads((run / "summary.json").read_text())["processes"]
    change(
        run / "summary.json",
        processes=[process | {"cpu_s": 2 * process["cpu_s"]} for process in processes],
    )
    change(run / "manifest.json", backend="horovod-gloo")
    assert accounted(run)[2].needed_s["messages"] == pytest.approx(COMPUTE_S, rel=0.1)
    change(run / "manifest.json", backend="horovod-mpi")
    told = accounted(run)[2]
    assert "spin" in told.unknown["messages"] and told.needed_s["messages"] == 0


def test_what_a_rings_optimizer_does_beside_backward_is_no_message(tmp_path):
    """Of each step's processor time it is 2 ms, which are in none of its parts."""
    run = make_run(tmp_path / "run", (1, 1), noise=0.001)
    for rank in (0, 1):
        change_steps(
            run, rank, lambda steps: [row | {"hidden_optimizer_seconds": 0.002} for row in steps]
        )
    processes = json.loads((run / "summary.json").read_text())["processes"]
    more = 1 + 0.002 / COMPUTE_S
    change(
        run / "summary.json",
        processes=[process | {"cpu_s": more * process["cpu_s"]} for process in processes],
    )
    _, _, told = accounted(run)
    assert told.needed_s["messages"] < 1e-4
    assert told.step_s == pytest.approx(COMPUTE_S + LATENCY_S, rel=0.01)


@pytest.mark.parametrize(("mode", "servers"), [("allreduce", 0), ("ps-sync", 1)])
def test_the_next_forward_hides_what_layers_wait_for_and_nothing_where_a_step_waits(
    tmp_path, mode, servers
):
    """The wire takes 50 ms, of which backward hides its own, and a step waits for the rest."""
    run = make_run(tmp_path / "run", (1, 1), mode=mode, servers=servers, noise=0.001)
    for rank in (servers, servers + 1):
        change_steps(run, rank, lambda steps: [row | {"comm_s": 0.03} for row in steps])
    if servers:
        (run / "metrics.server0.jsonl").write_text(
            '{"time": 1.0, "pushes": 400, "queued_s": 0.0}\n'
        )
    linked(run, 0.05 / (2 if servers else 1))  # which workers share on their way to a server

    def not_hidden(**manifest):
        change(run / "manifest.json", **manifest)
        return accounted(run)[2].parts["links"]

    assert not_hidden(wait_for="step") == pytest.approx(0.05 - 2 / 3 * COMPUTE_S, rel=0.02)
    assert not_hidden(wait_for="layer") == pytest.approx(0.05 - COMPUTE_S, rel=0.02)
    # there are no layers then
    assert not_hidden(compile=True) == pytest.approx(0.05 - 2 / 3 * COMPUTE_S, rel=0.02)


def test_a_round_of_local_steps_waits_for_the_slowest_at_its_end_alone(tmp_path):
    """Two workers that are slower in turn, a step each, are equally fast over a round of two."""
    run = make_run(tmp_path / "run", (1, 1), noise=0.001)
    change(run / "manifest.json", options={"local_steps": 2})
    part = ("forward_s", "comm_s")
    for rank in (0, 1):
        change_steps(
            run,
            rank,
            lambda steps, rank=rank: [
                row | {part[(row["step"] + rank) % 2]: 0.06} for row in steps
            ],
        )
    _, _, told = accounted(run)
    assert told.parts["waiting_for_slowest"] < 0.002
    of_round = told.parts_of_round(2, has_servers=False)
    assert sum(of_round.values()) == pytest.approx(2 * told.step_s)
    assert list(of_round) == ["local_steps", "waiting_for_slowest", "exchange"]


def test_a_worker_alone_waits_for_no_communication(tmp_path):
    told, _ = explained(tmp_path, 1, mode="single")
    waits = set(PARTS) - {"computing", "other_waiting"}
    assert {name: told["parts"][name] for name in waits} == dict.fromkeys(waits, 0.0)
    assert told["unknown"] == {}
    told, _ = explained(tmp_path / "with-a-server", 1, mode="ps-async", servers=1)
    assert told["parts"]["waiting_for_slowest"] == 0


@pytest.mark.parametrize(
    ("why", "comes_back", "said"),
    [
        ("connection lost", False, "were lost"),
        ("connection lost", True, "were lost"),
        (LEFT, False, "left"),
    ],
)
def test_a_worker_that_was_lost_or_left_is_said_not_to_have_been_there_and_nobody_waited_for_it(
    tmp_path, why, comes_back, said
):
    """Of a run of 8.8 s, from 4.4 s on to the end, or for 2.2 s."""
    run = make_run(tmp_path / "run", (1, 1), mode="ps-async", servers=1, noise=0.001)
    change_steps(run, 2, lambda steps: [*steps[:100], *(steps[150:] if comes_back else [])])
    life = {"rank": 2, "incarnation": 1, "joined": 100.0}
    lives = [life | {"rank": 1}, life | {"left": 101.0, "why": why}]
    lives += [life | {"incarnation": 2}] if comes_back else []
    change(run / "summary.json", lost_workers=[] if why == LEFT else [2], membership=lives)
    told, printed = explained_run(run)
    [[begin, end]] = told["absent_s"]["2"]
    assert (begin, end) == pytest.approx((4.4, 6.6 if comes_back else 8.8), rel=0.01)
    assert f"Workers {said} (rank 2): while one was not there" in printed
    assert f"Rank 2 was not there from 4.4 s to {'6.6 s' if comes_back else 'the end'}." in printed
    assert told["parts"]["waiting_for_slowest"] < LATENCY_S


@pytest.mark.parametrize(("mode", "servers"), [("allreduce", 0), ("ps-async", 1)])
def test_a_lost_worker_that_took_too_few_steps_is_left_out_and_the_others_are_explained(
    tmp_path, mode, servers
):
    run = linked(make_run(tmp_path / "run", (1, 4, 1), mode=mode, servers=servers), 0.01)
    change(
        run / "manifest.json",
        hosts={"one": {"ranks": [0, servers]}, "two": {"ranks": [1, 2, servers + 2]}},
    )
    lost = servers + 2
    change_steps(run, lost, lambda steps: steps[: 0 if servers else 30])
    with pytest.raises(UsageError, match="too few to explain"):
        explained_run(run)
    change(run / "summary.json", lost_workers=[lost])
    told, printed = explained_run(run)
    assert (told["left_out"], told["straggler"]) == ([lost], servers + 1)
    assert f"Left out is rank {lost}, which took too few steps" in printed
    for rank in (servers, servers + 1):
        change_steps(run, rank, lambda steps: [])
    change(run / "summary.json", lost_workers=[servers, servers + 1, lost])
    with pytest.raises(UsageError, match="too few to explain"):
        explained_run(run)


def test_steps_of_workers_in_lockstep_are_set_beside_each_other_by_their_numbers(tmp_path):
    """A worker that was lost came back amid the run, in which steps of all take longer and longer."""
    run = make_run(tmp_path / "run", (1, 1), noise=0.001)
    for rank in (0, 1):
        grown = [{"forward_s": 0.0, "backward_s": number / 1000} for number in range(200)]
        change_steps(
            run,
            rank,
            lambda steps, grown=grown: [row | more for row, more in zip(steps, grown, strict=True)],
        )
    change_steps(run, 1, lambda steps: steps[100:])
    change(run / "summary.json", lost_workers=[1])
    timeline = read_timeline(load_run(run))
    assert timeline.computed_s.shape == (2, 95)
    assert (timeline.computed_s[0] == timeline.computed_s[1]).all()


def test_the_heatmap_of_several_runs_is_a_picture(tmp_path):
    runs = [
        make_run(tmp_path / "a", (1, 4)),
        make_run(tmp_path / "b", (1, 4), mode="ps-async", servers=1),
    ]
    change_steps(runs[1], 2, lambda steps: steps[:20])
    change(runs[1] / "summary.json", lost_workers=[2])
    picture = tmp_path / "steps.svg"
    words = [*map(str, runs), "--plot", str(picture)]
    assert CliRunner().invoke(explain, words, catch_exceptions=False).exit_code == 0
    drawn = picture.read_text()
    # which hatches
    assert "a: allreduce ×2" in drawn and "b: ps-async ×2+1" in drawn and "<pattern" in drawn


def test_a_report_shows_who_was_slow_where_somebody_was(tmp_path):
    folders = [
        make_run(tmp_path / "a", (1, 1)),
        make_run(tmp_path / "b", (1, 4), mode="ps-sync", servers=1),
    ]
    runs = [load_run(folder) for folder in folders]
    assert pictures(runs[:1]) == []
    [plot] = pictures(runs)
    assert plot.name == "ranks" and "ps-sync ×2+1" in plot.svg and "allreduce ×2" not in plot.svg
    manifest = structs.replace(runs[1].manifest, slow=Slow(asked="1:4x"))
    [plot] = pictures([*runs, replace(runs[1], manifest=manifest)])
    assert "ps-sync ×2+1, slow: none" in plot.svg and "ps-sync ×2+1, slow: 1:4x" in plot.svg


def test_what_cannot_be_explained_is_refused_in_a_line_and_figures_go_to_standard_output_alone(
    tmp_path,
):
    def refused(*words):
        return str(CliRunner().invoke(explain, [str(word) for word in words]).exception)

    short = make_run(tmp_path / "short", (1, 1), steps=3)
    assert (
        "short/metrics.rank0.jsonl has 3 recorded steps, too few to explain: train for 45"
        in refused(short)
    )
    shared = make_run(tmp_path / "shared", (1, 1), mode="ps-async", servers=1, steps=3)
    assert (
        "shared/metrics.rank1.jsonl has 2 recorded steps, too few to explain: train for 45"
        in refused(shared)
    )
    damaged = make_run(tmp_path / "damaged", (1, 1))
    (damaged / "metrics.rank1.jsonl").write_text("no step\n" * 60)
    assert (
        "metrics.rank1.jsonl has 0 recorded steps and 60 lines that are none, too few"
        in refused(damaged)
    )
    (damaged / "metrics.rank1.jsonl").unlink()
    assert f"there is no {damaged}/metrics.rank1.jsonl, which has what that worker did" in refused(
        damaged
    )
    assert "there is no folder" in refused(tmp_path / "none")
    assert "end its name in .png" in refused(short, "--plot", "a.gif")
    good = make_run(tmp_path / "good", (1, 1))
    told = CliRunner().invoke(explain, [str(good), "--json", "-"], catch_exceptions=False)
    assert json.loads(told.stdout)["run"] == str(good) and "allreduce" in told.stderr
    assert "there is no folder" in refused(good, "--json", tmp_path / "none" / "a.png")
    assert f"{good} has no trace.pftrace: train with --trace" in refused(
        good, "--timeline", tmp_path / "a.png"
    )
    # before anything is said
    assert CliRunner().invoke(explain, [str(good), str(short)]).output == ""
    sizes = {"workers": 1, "servers": 0, "after_step": 0}
    change(
        good / "manifest.json", parts=[{"mode": "single"} | sizes, {"mode": "allreduce"} | sizes]
    )
    assert "it was resumed in another way: mode single" in refused(good)
    (short / "summary.json").unlink()
    with pytest.raises(UsageError, match="cannot be explained: the run has not finished"):
        explain.main([str(short)], standalone_mode=False)


def test_a_run_of_few_steps_says_what_they_took_and_the_command_that_trains_for_more(tmp_path):
    """Eight steps, as a sprint of a slow model has."""
    run = make_run(tmp_path / "few", (1, 1.5), steps=8)
    told, printed = explained_run(run)
    assert told["counted_steps"] == 7
    waiting = told["waiting_s"]
    # In each step one of the two waits for the other's half more.
    assert waiting["low"] < waiting["mean"] < waiting["high"]
    assert waiting["mean"] == pytest.approx(COMPUTE_S / 4 + LATENCY_S, rel=0.3)
    assert told["computing_s"]["mean"] == pytest.approx(1.25 * COMPUTE_S, rel=0.1)
    step_s = told["step_s"]
    assert step_s["mean"] == pytest.approx(told["computing_s"]["mean"] + waiting["mean"])
    assert "the mean of 7 steps after the first" in printed
    assert told["command"] in printed and "--steps 45" in told["command"]


def test_of_a_comparison_its_fastest_ring_and_servers_are_explained(tmp_path):
    runs = tmp_path / "compared" / "runs"
    for name, mode, servers, factor in (
        ("fast", "allreduce", 0, 1),
        ("slow", "ddp", 0, 2),
        ("servers", "ps-sync", 1, 1),
    ):
        make_run(runs / name, (factor, factor), mode=mode, servers=servers)
    file = tmp_path / "explained.json"
    words = [str(tmp_path / "compared"), "--json", str(file)]
    CliRunner().invoke(explain, words, catch_exceptions=False)
    assert [told["mode"] for told in json.loads(file.read_text())] == ["allreduce", "ps-sync"]
