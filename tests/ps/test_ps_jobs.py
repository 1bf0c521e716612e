"""Real parameter-server jobs: how far workers drift apart, what is sent, and runs that are played
again.
"""

import contextlib
import itertools
import json
import re
import signal

import pytest
from helpers.jobs import (
    ENDS_WHEN_TOLD,
    SMALL,
    adds_up,
    hvdtrain,
    ranks_of,
    read_rows,
    run,
    slow_steps,
    started,
    steps,
    until,
    until_told,
)

from hvdtrain.reporting.explaining.step_picture import read_slices

pytestmark = [pytest.mark.timeout(180), pytest.mark.usefixtures("beside_digits")]


def train(out, mode, servers, workers, *options):
    done = run(
        "forked",
        servers + workers,
        "--mode",
        mode,
        "--servers",
        str(servers),
        *options,
        "--out",
        str(out),
    )
    assert done.returncode == 0, done.stdout
    return json.loads((out / "summary.json").read_text())


def test_ssp_bounds_how_stale_weights_are_and_can_be_replayed(tmp_path):
    """While a worker takes one step, another may take s + 1 more than it, and as many that it was
    behind.
    """
    out = tmp_path / "run"
    options = "--dataset few --epochs 1 --batch-size 4 --threads 1 --staleness 1 --record".split()
    options += ["--delay-compensation", "0.04", "--optimizer", "sgd", "--nesterov"]
    summary = train(out, "ps-ssp", 1, 2, *SMALL[:2], *options)
    assert summary["staleness_max"] <= 2 * 1 + 1
    assert json.loads((out / "manifest.json").read_text())["staleness_bound"] == 1
    own = [steps(out, rank) for rank in (1, 2)]
    for rows in own:
        assert [row["step"] for row in rows] == list(range(1, 24))
        assert all(row["time"] <= after["time"] for row, after in itertools.pairwise(rows))
        assert all(
            (row["samples"] > 0) == (row["loss"] is not None) == (row["shares"] > 0) for row in rows
        )
    # each share once, by either
    assert [a["shares"] + b["shares"] for a, b in zip(*own, strict=True)] == [2] * 23
    assert_replayed(out)


def test_a_slow_worker_does_less_and_all_have_seen_what_one_process_sees(tmp_path):
    """The digest is of each sample at its step."""
    settings = [*SMALL[:2], "--epochs", "1", "--batch-size", "32", "--threads", "1"]
    options = ["--mode", "ps-async", "--servers", "1", "--slow", "1:8x", *settings]
    options += ["--trace", "--trace-steps", "3-44"]
    said_at_the_end = """
from hvdtrain.job.rank import process
run_rank = process.run_rank
process.run_rank = lambda *arguments: (run_rank(*arguments), print("Python ends"))
"""
    # or the other has all shares before this one's first
    first = slow_steps(0.01) + said_at_the_end
    done = hvdtrain("train", *options, "--out", tmp_path / "run", ranks=3, first=first)
    assert done.returncode == 0, done.stdout
    logs = [(tmp_path / "run" / "logs" / f"rank.{rank}.out").read_text() for rank in range(3)]
    # while it did, rpc's threads aborted the process now and then
    assert "Python ends" not in "".join(logs)
    fast, slowed = (sum(row["shares"] for row in steps(tmp_path / "run", rank)) for rank in (1, 2))
    assert fast + slowed == 2 * 45
    assert slowed < fast / 2
    achieved = json.loads((tmp_path / "run" / "manifest.json").read_text())["slow"]["achieved"]
    # of a few steps, which a busy machine wakes late: exactly, in numerics/test_slowdown.py
    assert achieved == {"0": 1, "1": pytest.approx(8, rel=0.3)}
    slices, _ = read_slices(tmp_path / "run")
    # what is traced of a worker is of the same steps, though its own have other numbers
    for rank in (
        1,
        2,
    ):
        own = [s.name for s in slices if s.process == f"rank {rank} (worker)"]
        pushed = [name for name in own if name.startswith("push")]
        assert len(pushed) == own.count("forward") * len(set(pushed)) > 0
    assert len([s for s in slices if s.name.startswith("apply")]) == len(
        [s for s in slices if s.name.startswith("push")]
    )
    assert run("forked", 1, *settings, "--out", str(tmp_path / "alone")).returncode == 0
    together, alone = (
        json.loads((tmp_path / name / "summary.json").read_text()) for name in ("run", "alone")
    )
    assert together["samples_digest"] == alone["samples_digest"]
    assert together["samples"] == alone["samples"]
    # one worker took far more steps than the other
    assert adds_up(together) and together["step_seconds"]["lease"] > 0


def test_a_slow_worker_is_dropped_and_left_behind_with_a_backup_worker_and_the_run_can_be_replayed(
    tmp_path,
):
    out = tmp_path / "run"
    options = [
        "--mode",
        "ps-sync",
        "--servers",
        "1",
        "--backup",
        "1",
        "--record",
        "--bucket-mb",
        "0.1",
    ]
    settings = [*SMALL[:2], *"--dataset few --epochs 2 --batch-size 12 --threads 1".split()]
    slow = f"""
import os
if os.environ["RANK"] == "3":
    exec({slow_steps(1)!r})
"""
    done = hvdtrain("train", *options, *settings, "--out", out, ranks=4, first=slow)
    assert done.returncode == 0, done.stdout
    taken = {rank: steps(out, rank) for rank in (1, 2, 3)}
    assert len(taken[3]) < 16 == json.loads((out / "summary.json").read_text())["steps"]
    assert any(row.get("dropped") for row in taken[3])
    lines = (out / "ledger.server0.csv").read_text().splitlines()
    assert any(
        line.split(",")[1:] == ["2", str(taken[3][0]["step"]), "0", "dropped"] for line in lines
    )
    assert json.loads((out / "manifest.json").read_text())["backup"] == 1
    assert_replayed(out)


def test_what_is_not_the_recorded_run_is_told_from_it_and_what_cannot_be_replayed_is_refused_in_a_line(
    tmp_path,
):
    out = tmp_path / "run"
    options = [
        "--record",
        "--lr",
        "0.01",
        "--push-scale",
        "mean",
        "--dropout",
        "0.2",
        "--bucket-mb",
        "0.1",
    ]
    options += ["--shares", "equal"]  # so that both workers push
    summary = train(out, "ps-async", 2, 2, *SMALL, *options, "--compression", "int8")
    weights = 4 * json.loads((out / "manifest.json").read_text())["parameters"]
    # Gradients are compressed, weights are not: a byte an element out, four in, and each worker
    # reads twice whole.
    assert summary["bytes_sent_per_step"] == pytest.approx(
        2 * weights * (1 + 1 / 4 + 2 / 6), rel=0.02
    )
    assert_replayed(out)
    ledger, config = out / "ledger.server0.csv", out / "config.toml"
    whole, settings = ledger.read_text(), config.read_text()
    lines = whole.splitlines()
    of_first_bucket = [i for i, line in enumerate(lines) if line.startswith("0,")]
    i, j = next(
        (i, j)
        for i, j in itertools.pairwise(of_first_bucket)
        if lines[i].split(",")[1] != lines[j].split(",")[1]
    )
    lines[i], lines[j] = lines[j], lines[i]
    ledger.write_text("\n".join(lines) + "\n")
    replayed = replay(out)
    assert replayed.returncode == 1 and "the ledger of server 0 has push" in replayed.stdout
    for more, words in [
        ("0,0,9,5,1\n", "no push of 2 workers"),
        (whole.splitlines()[1] + "\n", "was applied before"),
    ]:
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


def assert_replayed(out):
    replayed = replay(out)
    assert replayed.returncode == 0 and "bit for bit" in replayed.stdout, replayed.stdout


def refusal(out):
    done = replay(out)
    assert done.returncode == 2, done.stdout
    assert done.stdout.startswith("hvdtrain: ") and done.stdout.count("\n") == 1
    return done.stdout


# Eight steps an epoch, of four images for each of three workers.
LONG = ["--dataset", "few", *SMALL[:2], "--threads", "1", "--batch-size", "12", "--servers", "1"]


@contextlib.contextmanager
def four_ranks(out, *options, first=""):
    """A job of a server and three workers that are let live when one fails, once each worker has
    taken some steps.
    """
    more = {"first": slow_steps(0.2, after=5) + first, "survive": True}
    with started("forked", 4, *LONG, *options, "--out", str(out), **more) as job:
        until(
            lambda: all(
                (out / f"metrics.rank{r}.jsonl").is_file() and len(steps(out, r)) > 5
                for r in (1, 2, 3)
            )
        )
        yield job


@pytest.mark.parametrize(
    "of_mode", [["ps-ssp", "--staleness", "1"], ["ps-async", "--local-steps", "3"]]
)
def test_an_asynchronous_job_goes_on_without_its_first_worker_and_can_be_replayed(
    of_mode, tmp_path
):
    """Evaluations count every image once, or the job would fail; replay sees that each share
    counted once. Of eight steps an epoch, rounds of local steps have three, three and two.
    """
    out = tmp_path / "run"
    options = ["--mode", *of_mode, "--epochs", "3", "--record", "--bucket-mb", "0.5"]
    with four_ranks(out, *options) as job:
        ranks_of(job)[1].kill()
        said, _ = job.communicate(timeout=100)
    assert job.returncode == 0, said
    assert said.count("hvdtrain: rank 1 is lost, and the others go on without it") == 1
    assert said.splitlines()[-1] == "the job ended with 2 of 3 workers: rank 1 was lost"
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["status"], summary["steps"], summary["lost_workers"]) == ("done", 3 * 8, [1])
    assert [row["rank"] for row in summary["processes"]] == [0, 2, 3]
    # the lost one's too
    assert [row["samples"] for row in summary["evaluations"]] == [
        92,
        2 * 92,
        3 * 92,
    ]
    assert sum(life["samples"] for life in summary["membership"]) == 3 * 92
    assert len(steps(out, 1)) < 3 * 8
    assert (out / "snapshots" / "best.safetensors").is_file() and list(
        (out / "snapshots").glob("step-*")
    )
    assert_replayed(out)
    ledger = out / "ledger.server0.csv"
    lines = ledger.read_text().splitlines()
    ledger.write_text("\n".join(lines[:1] + lines[2:]) + "\n")
    assert "pushes of share" in replay(out).stdout


@pytest.mark.hosts
def test_a_worker_joins_in_place_of_one_that_was_killed_and_leaves_and_one_more_joins(tmp_path):
    """Two lives of rank 3, and a rank that was not there at the start: replay computes them all
    again.
    """
    out = tmp_path / "run"
    options = ["--mode", "ps-async", "--wire", "zmq", "--record", *ENDS_WHEN_TOLD]
    over = tmp_path / "over"
    with contextlib.ExitStack() as jobs, four_ranks(out, *options, first=until_told(over)) as job:

        def join():
            before = len(lives(out))
            joining = started("forked", 1, "--join", "--out", str(out), first=slow_steps(0.05))
            joined = jobs.enter_context(joining)
            until(lambda: len(lives(out)) > before)
            return joined

        ranks_of(job)[3].kill()
        until(lambda: any(life["why"] for life in lives(out)))

        def has_trained(rank, more):
            file = out / f"metrics.rank{rank}.jsonl"
            return file.is_file() and sum(row["samples"] > 0 for row in read_rows(file)) >= more

        second, third = join(), join()
        before = sum(row["samples"] > 0 for row in steps(out, 3))
        until(lambda: has_trained(3, before + 3) and has_trained(4, 1))
        second.send_signal(signal.SIGTERM)
        said, _ = second.communicate(timeout=100)
        assert second.returncode == 0 and "rank 3 has left" in said, said
        over.touch()
        for going_on in (job, third):
            said, _ = going_on.communicate(timeout=100)
            assert going_on.returncode == 0, said
    summary = json.loads((out / "summary.json").read_text())
    found = [(life["rank"], life["incarnation"], life["why"]) for life in summary["membership"]]
    assert found == [
        (1, 1, ""),
        (2, 1, ""),
        (3, 1, "its connection ended"),
        (3, 2, "left"),
        (4, 1, ""),
    ]
    assert summary["lost_workers"] == [3]
    assert sum(life["samples"] for life in summary["membership"]) == summary["samples"]
    assert all(life["samples"] for life in summary["membership"])
    replayed = replay(out)
    assert replayed.returncode == 0 and "3 workers and 2 that joined" in replayed.stdout, (
        replayed.stdout
    )
    done = hvdtrain("train", "--join", "--out", out)
    assert done.returncode == 2 and "has no job to join" in done.stdout


def lives(out):
    """The last line of each life."""
    return list({row["member"]: row for row in read_rows(out / "membership.jsonl")}.values())


def test_a_worker_that_hangs_is_given_up_after_the_timeout(tmp_path):
    out = tmp_path / "run"
    with four_ranks(
        out, "--mode", "ps-ssp", "--staleness", "1", "--epochs", "4", "--timeout", "8s"
    ) as job:
        hanging = ranks_of(job)[3]
        hanging.suspend()
        until((out / "summary.json").is_file)
        hanging.resume()
        said, _ = job.communicate(timeout=100)
    assert json.loads((out / "summary.json").read_text())["lost_workers"] == [3]
    assert (
        "rank 3 is lost, and the others go on without it: no answer within 8 s (see --timeout)"
        in said
    )
    assert re.search("^hvdtrain: rank 3 failed: ", said, re.MULTILINE), said


@pytest.mark.parametrize(
    ("mode", "victim", "says"),
    [
        ("ps-async", 0, r"rank \d failed: parameter server rank 0 failed: "),
        (
            "ps-sync",
            2,
            "rank 0 failed: rank 2 is lost, and every step of ps-sync needs a push from every worker: ",
        ),
    ],
)
def test_a_rank_that_the_others_need_ends_the_job_whatever_its_starter_does(
    mode, victim, says, tmp_path
):
    with four_ranks(tmp_path / "run", "--mode", mode, "--wire", "zmq", "--epochs", "1000") as job:
        ranks_of(job)[victim].kill()
        said, _ = job.communicate(timeout=100)
    assert job.returncode == 1
    # an epoch may be over before
    first = next(line for line in said.splitlines() if line.startswith("hvdtrain: "))
    assert re.match("hvdtrain: " + says, first), said


def test_a_rank_that_dies_before_the_others_have_met_ends_the_job_in_time(tmp_path):
    first = "import os\nif os.environ['RANK'] == '2': os._exit(9)\n"
    options = [*LONG, "--mode", "ps-async", "--timeout", "6s", "--out", tmp_path / "run"]
    done = hvdtrain("train", *options, ranks=3, first=first, survive=True)
    assert "within 6 s (see --timeout)" in done.stdout
