"""Real parameter-server jobs: how far workers drift apart, what is sent, and runs that are played again."""

import contextlib
import itertools
import json
import re
import signal

import pytest
from helpers.forked import Forked
from helpers.jobs import (
    SMALL,
    adds_up,
    finish,
    hvdtrain,
    ranks_of,
    run,
    slow_steps,
    steps,
    until,
)

from hvdtrain.explain.step_picture import one_step, read_slices
from hvdtrain.plot_style import save, svg

pytestmark = [pytest.mark.timeout(180), pytest.mark.usefixtures("beside_few_digits")]


def train(out, mode, servers, workers, *options):
    done = run("forked", servers + workers, "--mode", mode, "--servers", str(servers), *options, "--out", str(out))
    assert done.returncode == 0, done.stdout
    return json.loads((out / "summary.json").read_text())


def test_ssp_bounds_how_stale_weights_are(tmp_path):
    """While a worker takes one step, another may take s + 1 more than it, and as many that it was behind."""
    out = tmp_path / "run"
    summary = train(out, "ps-ssp", 1, 2, *SMALL[:2], "--epochs", "1", "--batch-size", "32", "--staleness", "1")
    assert summary["staleness_max"] <= 2 * 1 + 1
    assert json.loads((out / "manifest.json").read_text())["staleness_bound"] == 1
    own = [steps(out, rank) for rank in (1, 2)]
    for rows in own:
        assert [row["step"] for row in rows] == list(range(1, 46))
        assert all(row["time"] <= after["time"] for row, after in itertools.pairwise(rows))
        assert all((row["samples"] > 0) == (row["loss"] is not None) == (row["shares"] > 0) for row in rows)
    assert [a["shares"] + b["shares"] for a, b in zip(*own, strict=True)] == [2] * 45  # each share once, by either


def test_a_static_share_of_every_batch_is_each_workers_own(tmp_path):
    out = tmp_path / "run"
    options = ["--epochs", "1", "--batch-size", "32", "--shares", "equal", "--trace", "--trace-steps", "10-20"]
    train(out, "ps-async", 1, 2, *SMALL[:2], *options)
    assert json.loads((out / "manifest.json").read_text())["shares"] == "equal"
    for rank in (1, 2):
        assert [row["step"] for row in steps(out, rank)] == list(range(1, 46))
    slices, _ = read_slices(out)
    assert {s.process for s in slices} == {"rank 0 (server)", "rank 1 (worker)", "rank 2 (worker)"}
    assert sum(s.name == "forward" and s.process == "rank 1 (worker)" for s in slices) == 11
    assert {"backward", "comm", "optimizer"} <= {s.name for s in slices}
    for rank in (1, 2):  # before a layer's forward, and after backward
        waited = sum(s.ended - s.began for s in slices if s.name == "comm" and s.process == f"rank {rank} (worker)")
        assert waited == pytest.approx(sum(row["comm_s"] for row in steps(out, rank)[9:20]), rel=0.1, abs=0.01)
    by_flow = {flow: [s for s in slices if s.flow == flow] for flow in {s.flow for s in slices} - {0}}
    assert len(by_flow) >= 2 * 11
    for pushed, applied, pulled in (sorted(flow, key=lambda s: s.began) for flow in by_flow.values()):
        assert [s.name.split()[0] for s in (pushed, applied, pulled)] == ["push", "apply", "pull"]
    save(one_step({"": out}), tmp_path / "step.png")
    assert (tmp_path / "step.png").stat().st_size > 10_000
    drawn = svg(one_step({"both": out}))
    assert "both: step 15 of rank 1" in drawn and "arrows: a bucket's way to its server and back" in drawn


def test_a_slow_worker_does_less_and_all_have_seen_what_one_process_sees(tmp_path):
    """The digest is of each sample at its step."""
    settings = [*SMALL[:2], "--epochs", "1", "--batch-size", "32", "--threads", "1"]
    options = ["--mode", "ps-async", "--servers", "1", "--slow", "1:8x", *settings]
    options += ["--trace", "--trace-steps", "15-35"]
    said_at_the_end = """
from hvdtrain.rank import process
run_rank = process.run_rank
process.run_rank = lambda *arguments: (run_rank(*arguments), print("Python ends"))
"""
    job = Forked(3, ["train", *options, "--out", str(tmp_path / "run")], first=said_at_the_end)
    try:
        said, _ = job.communicate(timeout=100)
    finally:
        job.close()
    assert job.returncode == 0, said
    logs = [(tmp_path / "run" / "logs" / f"rank.{rank}.out").read_text() for rank in range(3)]
    assert "Python ends" not in "".join(logs)  # while it did, rpc's threads aborted the process now and then
    fast, slowed = (sum(row["shares"] for row in steps(tmp_path / "run", rank)) for rank in (1, 2))
    assert fast + slowed == 2 * 45
    assert slowed < fast / 2
    achieved = json.loads((tmp_path / "run" / "manifest.json").read_text())["slow"]["achieved"]
    assert achieved == {"0": 1, "1": pytest.approx(8, rel=0.03)}
    slices, _ = read_slices(tmp_path / "run")
    for rank in (1, 2):  # what is traced of a worker is of the same steps, though its own have other numbers
        own = [s.name for s in slices if s.process == f"rank {rank} (worker)"]
        pushed = [name for name in own if name.startswith("push")]
        assert len(pushed) == own.count("forward") * len(set(pushed)) > 0
    assert len([s for s in slices if s.name.startswith("apply")]) == len(
        [s for s in slices if s.name.startswith("push")]
    )
    assert run("forked", 1, *settings, "--out", str(tmp_path / "alone")).returncode == 0
    together, alone = (json.loads((tmp_path / name / "summary.json").read_text()) for name in ("run", "alone"))
    assert together["samples_digest"] == alone["samples_digest"]
    assert together["samples"] == alone["samples"]
    assert adds_up(together) and together["step_seconds"]["lease"] > 0  # one worker took far more steps than the other


@pytest.mark.parametrize(
    ("mode", "servers", "workers", "options"),
    [
        ("ps-async", 2, 2, ["--compression", "int8", "--dropout", "0.2", "--bucket-mb", "0.1"]),
        ("ps-ssp", 1, 2, ["--staleness", "1", "--delay-compensation", "0.04", "--optimizer", "sgd", "--nesterov"]),
    ],
)
def test_a_recorded_run_is_replayed_to_the_same_bits(mode, servers, workers, options, tmp_path):
    out = tmp_path / "run"
    settings = [*SMALL[:2], "--epochs", "2", "--batch-size", "16", "--threads", "1", "--dataset", "few"]
    train(out, mode, servers, workers, *settings, "--record", *options)
    replayed = replay(out)
    assert replayed.returncode == 0, replayed.stdout
    assert "bit for bit" in replayed.stdout


def test_a_slow_worker_is_dropped_and_left_behind_with_a_backup_worker_and_the_run_can_be_replayed(tmp_path):
    out = tmp_path / "run"
    options = ["--mode", "ps-sync", "--servers", "1", "--backup", "1", "--record", "--bucket-mb", "0.1"]
    settings = [*SMALL[:2], "--epochs", "1", "--batch-size", "48", "--threads", "1"]
    slow = f"""
import os
if os.environ["RANK"] == "3":
    exec({slow_steps(0.3)!r})
"""
    job = Forked(4, ["train", *options, *settings, "--out", str(out)], first=slow)
    try:
        said, _ = job.communicate(timeout=100)
    finally:
        job.close()
    assert job.returncode == 0, said
    taken = {rank: steps(out, rank) for rank in (1, 2, 3)}
    assert len(taken[3]) < 30 == json.loads((out / "summary.json").read_text())["steps"]
    assert any(row.get("dropped") for row in taken[3])
    lines = (out / "ledger.server0.csv").read_text().splitlines()
    assert any(line.split(",")[1:] == ["2", str(taken[3][0]["step"]), "0", "dropped"] for line in lines)
    assert json.loads((out / "manifest.json").read_text())["backup"] == 1
    replayed = replay(out)
    assert replayed.returncode == 0, replayed.stdout
    assert "bit for bit" in replayed.stdout


def test_what_is_not_the_recorded_run_is_told_from_it_and_what_cannot_be_replayed_is_refused_in_a_line(tmp_path):
    out = tmp_path / "run"
    train(out, "ps-async", 1, 2, *SMALL, "--record", "--lr", "0.01", "--push-scale", "mean")
    ledger, config = out / "ledger.server0.csv", out / "config.toml"
    whole, settings = ledger.read_text(), config.read_text()
    lines = whole.splitlines()
    of_first_bucket = [i for i, line in enumerate(lines) if line.startswith("0,")]
    i, j = next(
        (i, j) for i, j in itertools.pairwise(of_first_bucket) if lines[i].split(",")[1] != lines[j].split(",")[1]
    )
    lines[i], lines[j] = lines[j], lines[i]
    ledger.write_text("\n".join(lines) + "\n")
    replayed = replay(out)
    assert replayed.returncode == 1 and "the ledger of server 0 has push" in replayed.stdout
    for more, words in [("0,0,9,5,1\n", "no push of 2 workers"), (whole.splitlines()[1] + "\n", "was applied before")]:
        ledger.write_text(whole + more)
        assert f"line {len(whole.splitlines()) + 1}: " in (said := refusal(out))
        assert words in said
    ledger.write_text(whole)
    config.write_text(settings.replace("lr = 0.01", "lr = 0.011"))
    replayed = replay(out)
    assert replayed.returncode == 1 and "weights differ from those" in replayed.stdout
    config.write_text(settings.replace("record = true", "record = false"))
    assert "not a recorded run" in refusal(out)
    config.write_text(re.sub("shares = .*", "", settings))
    assert "was recorded by another version: its config.toml has no shares" in refusal(out)
    config.write_text(settings)
    ledger.unlink()
    assert "ledger.server0.csv cannot be read" in refusal(out)
    assert "is not a run folder" in refusal(tmp_path)


def replay(out):
    return hvdtrain("replay", out)


def refusal(out):
    done = replay(out)
    assert done.returncode == 2, done.stdout
    assert done.stdout.startswith("hvdtrain: ") and done.stdout.count("\n") == 1
    return done.stdout


def test_what_is_sent_is_counted_as_it_is_sent(tmp_path):
    """Gradients are compressed, weights are not: a byte an element out, four in."""
    out = tmp_path / "run"
    summary = train(out, "ps-sync", 1, 1, *SMALL, "--compression", "int8")
    weights = 4 * json.loads((out / "manifest.json").read_text())["parameters"]
    assert summary["bytes_sent_per_step"] == pytest.approx(weights * (1 + 1 / 4 + 1 / 6), rel=0.01)  # read once whole


# Eight steps an epoch, of four images for each of three workers.
LONG = ["--dataset", "few", *SMALL[:2], "--threads", "1", "--batch-size", "12", "--servers", "1"]


@contextlib.contextmanager
def four_ranks(out, *options):
    """A job of a server and three workers that are let live when one fails, once each worker has taken some steps."""
    job = Forked(4, ["train", *LONG, *options, "--out", str(out)], first=slow_steps(0.05), survive=True)
    try:
        until(lambda: all((out / f"metrics.rank{r}.jsonl").is_file() and len(steps(out, r)) > 5 for r in (1, 2, 3)))
        yield job
    finally:
        finish(job)


def test_an_asynchronous_job_goes_on_without_its_first_worker_and_can_be_replayed(tmp_path):
    """Evaluations count every image once, or the job would fail; replay sees that each share counted once."""
    out = tmp_path / "run"
    options = ["--mode", "ps-ssp", "--staleness", "1", "--epochs", "3", "--record", "--bucket-mb", "0.5"]
    with four_ranks(out, *options) as job:
        ranks_of(job)[1].kill()
        said, _ = job.communicate(timeout=100)
    assert job.returncode == 0, said
    assert said.count("hvdtrain: rank 1 is lost, and the others go on without it") == 1
    assert said.splitlines()[-1] == "the job ended with 2 of 3 workers: rank 1 was lost"
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["status"], summary["steps"], summary["lost_workers"]) == ("done", 3 * 8, [1])
    assert [row["rank"] for row in summary["processes"]] == [0, 2, 3]
    assert [row["samples"] for row in summary["evaluations"]] == [92, 2 * 92, 3 * 92]  # the lost one's too
    assert sum(life["samples"] for life in summary["membership"]) == 3 * 92
    assert len(steps(out, 1)) < 3 * 8
    assert (out / "snapshots" / "best.safetensors").is_file() and list((out / "snapshots").glob("step-*"))
    replayed = replay(out)
    assert replayed.returncode == 0, replayed.stdout
    ledger = out / "ledger.server0.csv"
    lines = ledger.read_text().splitlines()
    ledger.write_text("\n".join(lines[:1] + lines[2:]) + "\n")
    assert "pushes of share" in replay(out).stdout


def test_a_worker_joins_in_place_of_one_that_was_killed_and_leaves_and_one_more_joins(tmp_path):
    """Two lives of rank 3, and a rank that was not there at the start: replay computes them all again."""
    out = tmp_path / "run"
    options = ["--mode", "ps-async", "--wire", "zmq", "--epochs", "200", "--record", "--time-budget", "10s"]
    joined = []

    def join():
        joined.append(Forked(1, ["train", "--join", "--out", str(out)], first=slow_steps(0.05)))
        until(lambda: len(lives(out)) == 3 + len(joined))
        return joined[-1]

    try:
        with four_ranks(out, *[word for word in options if word not in ("--epochs", "200")]) as job:
            ranks_of(job)[3].kill()
            until(lambda: any(life["why"] for life in lives(out)))
            second = join()
            join()
            before = len(steps(out, 3))
            until(lambda: len(steps(out, 3)) > before + 3)
            second.send_signal(signal.SIGTERM)
            said, _ = second.communicate(timeout=60)
            assert second.returncode == 0 and "rank 3 has left" in said, said
            said, _ = job.communicate(timeout=100)
            assert job.returncode == 0, said
            said, _ = joined[-1].communicate(timeout=60)
            assert joined[-1].returncode == 0, said
    finally:
        for one in joined:
            finish(one)
    summary = json.loads((out / "summary.json").read_text())
    found = [(life["rank"], life["incarnation"], life["why"]) for life in summary["membership"]]
    assert found == [(1, 1, ""), (2, 1, ""), (3, 1, "its connection ended"), (3, 2, "left"), (4, 1, "")]
    assert summary["lost_workers"] == [3]
    assert sum(life["samples"] for life in summary["membership"]) == summary["samples"]
    assert all(life["samples"] for life in summary["membership"])
    replayed = replay(out)
    assert replayed.returncode == 0 and "3 workers and 2 that joined" in replayed.stdout, replayed.stdout
    done = hvdtrain("train", "--join", "--out", out)
    assert done.returncode == 2 and "has no job to join" in done.stdout


def lives(out):
    """The last line of each life."""
    lines = (out / "membership.jsonl").read_text().splitlines()
    return list({row["member"]: row for row in map(json.loads, lines)}.values())


def test_a_worker_that_hangs_is_given_up_after_the_timeout(tmp_path):
    out = tmp_path / "run"
    with four_ranks(out, "--mode", "ps-ssp", "--staleness", "1", "--epochs", "4", "--timeout", "8s") as job:
        hanging = ranks_of(job)[3]
        hanging.suspend()
        until((out / "summary.json").is_file)
        hanging.resume()
        said, _ = job.communicate(timeout=60)
    assert json.loads((out / "summary.json").read_text())["lost_workers"] == [3]
    assert "rank 3 is lost, and the others go on without it: no answer within 8 s (see --timeout)" in said
    assert re.search("^hvdtrain: rank 3 failed: ", said, re.MULTILINE), said


@pytest.mark.parametrize(
    ("mode", "wire", "victim", "says"),
    [
        ("ps-async", "zmq", 0, r"rank \d failed: parameter server rank 0 failed: "),
        (
            "ps-sync",
            "zmq",
            2,
            "rank 0 failed: rank 2 is lost, and every step of ps-sync needs a push from every worker: ",
        ),
    ],
)
def test_a_rank_that_the_others_need_ends_the_job_whatever_its_starter_does(mode, wire, victim, says, tmp_path):
    out = tmp_path / "run"
    with four_ranks(out, "--mode", mode, "--wire", wire, "--epochs", "1000") as job:
        ranks_of(job)[victim].kill()
        said, _ = job.communicate(timeout=30)
    assert job.returncode == 1
    first = next(line for line in said.splitlines() if line.startswith("hvdtrain: "))  # an epoch may be over before
    assert re.match("hvdtrain: " + says, first), said


def test_a_rank_that_dies_before_the_others_have_met_ends_the_job_in_time(tmp_path):
    first = "import os\nif os.environ['RANK'] == '2': os._exit(9)\n"
    job = Forked(3, ["train", *LONG, "--mode", "ps-async", "--timeout", "6s", "--out", str(tmp_path / "run")],
                 first=first, survive=True)  # fmt: skip
    try:
        said, _ = job.communicate(timeout=60)
    finally:
        job.close()
    assert "within 6 s (see --timeout)" in said, said
