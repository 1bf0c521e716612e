"""Real jobs that are stopped and go on: as if they had never stopped, on other workers, in another
mode.
"""

import json
import shutil
import signal
import subprocess
import time

import pytest
from helpers.fork_proxy import FIRST
from helpers.forked_jobs import forked_hvdtrain
from helpers.jobs import (
    HVDTRAIN,
    SETTINGS,
    adds_up,
    finish,
    holds_tests_until,
    hvdtrain,
    make_images,
    ranks_of,
    run,
    slow_evaluations,
    slow_steps,
    started,
    steps,
    until,
)
from helpers.weights import SMOOTH, assert_same_weights

from hvdtrain.reporting.explaining.step_picture import read_slices

pytestmark = [pytest.mark.timeout(240), pytest.mark.usefixtures("beside_digits")]

# 12 steps an epoch, 30 in all, of eight images each, which three workers do not share evenly;
# dropout and momentum are what a careless restart would lose.
SMALL = ["--dataset", "few", "--width", "0.0625", "--batch-size", "8", "--threads", "1"]
JOB = [*SMALL, "--steps", "30", "--seed", "5", "--deterministic"]
ENDLESS = ["--steps", "4000"]
RANDOM = ["--dropout", "0.3", "--augment", "shift-flip"]
# so that it still trains when something has been done, however fast the machine
PACE = slow_steps(0.05)
AFTER_FIVE_STEPS = slow_steps(0.4, after=5)


def losses(out, rank=0):
    return {row["step"]: row["loss"] for row in steps(out, rank)}


def summary(out):
    return json.loads((out / "summary.json").read_text())


def interrupted(starter, ranks, out, first_worker, *options, pace=AFTER_FIVE_STEPS, first=""):
    """Train until five steps are written, then ask the job to leave; what it printed."""
    with started(starter, ranks, *JOB, *options, "--out", str(out), first=pace + first) as job:
        metrics = out / f"metrics.rank{first_worker}.jsonl"
        until(lambda: metrics.is_file() and metrics.read_text().count("\n") >= 5)
        job.send_signal(signal.SIGTERM if ranks == 1 else signal.SIGUSR1)
        printed, _ = job.communicate(timeout=100)
    assert job.returncode == 143, printed
    assert not (out / "summary.json").exists()
    return printed


@pytest.mark.parametrize(("mode", "wire"), [("ps-sync", "zmq"), ("ps-async", "rpc")])
def test_sigterm_to_a_server_alone_lets_the_job_save_and_leave(mode, wire, tmp_path):
    """As where a scheduler evicts the pod of a server."""
    out = tmp_path / "run"
    served = [
        "--mode",
        mode,
        "--servers",
        "2",
        "--wire",
        wire,
        "--steps",
        "3000",
        "--snapshot-every",
        "never",
    ]
    with started("forked", 4, *SMALL, *served, "--out", str(out), first=slow_steps(0.05)) as job:
        until(lambda: (out / "metrics.rank2.jsonl").is_file() and len(steps(out, 2)) > 3)
        ranks_of(job)[1].send_signal(signal.SIGTERM)
        printed, _ = job.communicate(timeout=100)
    assert job.returncode == 143, printed
    assert "ended by SIGTERM at step" in printed and list((out / "snapshots").glob("step-*"))


def test_a_rank_that_cannot_write_its_trace_keeps_nobody_from_leaving(tmp_path):
    first = """
import errno
import os
from hvdtrain.job.rank import results
write = results.write_rank_trace
def on_a_full_disk(run, recorded):
    if recorded.rank == 1:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    write(run, recorded)
results.write_rank_trace = on_a_full_disk
"""
    cut = tmp_path / "cut"
    printed = interrupted("forked", 2, cut, 0, "--mode", "ddp", "--trace", first=first)
    assert "go on with --resume" in printed and (cut / "trace.pftrace").is_file()


def test_a_stopped_run_goes_on_to_the_same_bits(tmp_path):
    """Of two numbers there is one sum, in whatever order a ring adds them."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    options = [*RANDOM, "--mode", "allreduce"]
    done = run("forked", 2, *JOB, *options, "--out", str(whole))
    assert done.returncode == 0, done.stdout
    slow = "0:10x@step1-4"  # all of it before the run is stopped
    pace = slow_steps(0.4, after=5, before=0.1)
    printed = interrupted("forked", 2, cut, 0, *options, "--slow", slow, pace=pace)
    assert (
        f"go on with --resume --out {cut}" in printed and "the last snapshot is of step" in printed
    )
    assert len(steps(cut, 0)) < 30
    done = run("forked", 2, "--resume", "--out", str(cut))  # its own options hold
    assert done.returncode == 0, done.stdout
    for rank in (0, 1):
        assert losses(cut, rank) == losses(whole, rank)
        assert [row["step"] for row in steps(cut, rank)] == list(range(1, 31))
    assert json.loads((cut / "manifest.json").read_text())["slow"]["achieved"]["0"] > 1.5
    ours, theirs = summary(cut), summary(whole)
    for same in (
        "samples_digest",
        "samples",
        "steps",
        "val_loss",
        "val_accuracy",
        "best_val_loss",
        "best_step",
    ):
        assert ours[same] == theirs[same], same
    for row, other in zip(ours["evaluations"], theirs["evaluations"], strict=True):
        for same in ("step", "train_loss", "train_accuracy", "val_loss"):
            assert row[same] == other[same], same


beside_whole = pytest.mark.xdist_group("whole")  # a run that one process makes


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """JOB as one process runs it, never stopped. Not to be changed."""
    out = tmp_path_factory.mktemp("whole") / "run"
    done = run("forked", 1, *JOB, *SMOOTH, "--mode", "single", "--out", str(out))
    assert done.returncode == 0, done.stdout
    return out


@beside_whole
@pytest.mark.parametrize(
    ("first", "then"),
    [  # mode, ranks, servers
        (("ps-sync", 3, 1), ("sharded", 3, 0)),
        (("sharded", 3, 0), ("ps-sync", 4, 2)),
        (("ps-async", 3, 1), ("single", 1, 0)),
    ],
)
def test_a_run_goes_on_with_other_workers_in_another_mode(first, then, whole, tmp_path):
    """No sample is lost or seen twice; synchronous modes end with the weights of a run that never
    stopped. What the first start traced is there when it leaves, and stays where the next one
    traces nothing.
    """
    cut = tmp_path / "cut"
    mode, ranks, servers = first
    options = [*SMOOTH, "--trace", "--trace-steps", "1-4"]
    interrupted("forked", ranks, cut, servers, "--mode", mode, "--servers", str(servers), *options)
    traced = read_slices(cut)
    there = {int(s.process.split()[1]) for s in traced[0]}
    assert (
        there
        == set(map(int, json.loads((cut / "manifest.json").read_text())["clocks"]))
        == set(range(ranks))
    )
    assert not (cut / "trace").exists()
    other, ranks, servers = then
    options = [*SMOOTH[:2], "--resume", "--mode", other, "--servers", str(servers)]
    done = run("forked", ranks, *options, "--out", str(cut))
    assert done.returncode == 0, done.stdout
    assert "no step was traced" in done.stdout and read_slices(cut) == traced
    assert summary(cut)["samples_digest"] == summary(whole)["samples_digest"]
    assert summary(cut)["samples"] == summary(whole)["samples"]
    assert adds_up(summary(cut))  # whatever the number of workers was before
    if mode != "ps-async":
        assert_same_weights(cut, whole)
    parts = json.loads((cut / "manifest.json").read_text())["parts"]
    assert [part["mode"] for part in parts] == [mode, other]


def test_resume_of_what_has_finished_or_not_begun(tmp_path):
    out = tmp_path / "run"
    short = ["--width", "0.0625", "--steps", "4", "--threads", "1"]
    # as a job that is put back in a queue is started
    first = run("forked", 1, *short, "--resume", "--out", str(out))
    assert first.returncode == 0 and summary(out)["steps"] == 4
    again = run("forked", 1, *short, "--resume", "--out", str(out))
    assert again.returncode == 0 and "there is nothing left to do" in again.stdout
    longer = run(
        "forked", 1, "--resume", "--steps", "6", "--schedule", "constant", "--out", str(out)
    )
    assert longer.returncode == 2 and "schedule was 'auto', not 'constant'" in longer.stdout
    longer = run("forked", 1, "--resume", "--steps", "6", "--out", str(out))
    assert longer.returncode == 0 and summary(out)["steps"] == 6
    # What is most likely mistyped: with nothing else given, or beside a run of nearly that name.
    for words in (["--out", tmp_path / "ruin"], [*short, "--out", tmp_path / "rum"]):
        mistyped = run("forked", 1, "--resume", *map(str, words))
        assert mistyped.returncode == 2 and not words[-1].exists(), mistyped.stdout
        assert f"there is no run in {words[-1]} to go on with: there is {out};" in mistyped.stdout
    nowhere = run("forked", 1, "--resume")
    assert nowhere.returncode == 2 and "--resume needs --out" in nowhere.stdout
    launched = hvdtrain("launch", "--resume", "--out", out, "--", "--shuffle-block", "8")
    assert launched.returncode == 2 and launched.stdout.count("\n") == 1
    assert launched.stdout.startswith(
        f"hvdtrain: {out} is of another job: --shuffle-block was 0, not 8; that may not"
    )


def test_a_result_is_not_begun_again(tmp_path):
    out, other = tmp_path / "run", tmp_path / "other"
    short = ["--width", "0.0625", "--steps", "4", "--threads", "1"]
    assert run("forked", 1, *short, "--snapshot-every", "never", "--out", str(out)).returncode == 0
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    longer = run("forked", 1, "--resume", "--steps", "6", "--out", str(out))
    assert (
        longer.returncode == 2
        and "has no snapshot to go on from, and summary.json would be lost" in longer.stdout
    )
    changed = run("forked", 1, "--resume", "--lr", "0.5", "--width", "0.125", "--out", str(out))
    assert changed.returncode == 2
    assert (
        "is of another job: --width was 0.0625, not 0.125; --lr was 0.0003, not 0.5;"
        in changed.stdout
    )
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
    other.mkdir()
    (other / "mine").write_text("precious")
    nothing = run("forked", 1, "--resume", "--out", str(other))
    assert (
        nothing.returncode == 2
        and f"there is no run in {other} to go on with" in nothing.stdout
        and "it has no config.toml" in nothing.stdout
    )


def test_two_jobs_do_not_go_on_with_one_run(tmp_path):
    out = tmp_path / "run"
    with started("forked", 1, *SMALL, "--steps", "3000", "--out", str(out), first=PACE) as job:
        until(lambda: (out / "metrics.rank0.jsonl").is_file() and steps(out, 0))
        other = run("forked", 1, "--resume", "--steps", "3000", "--out", str(out))
        assert other.returncode == 2 and "another job has claimed it" in other.stdout
        assert job.poll() is None


def test_a_time_budget_ends_with_a_global_batch_and_snapshots_come_by_the_clock(tmp_path):
    out = tmp_path / "run"
    options = [
        *SMALL,
        "--mode",
        "ps-async",
        "--servers",
        "1",
        "--time-budget",
        "5s",
        "--snapshot-every",
        "2s",
    ]
    done = hvdtrain("train", *options, "--keep-snapshots", "9", "--out", out, ranks=3, first=PACE)
    assert done.returncode == 0, done.stdout
    assert sum(len(steps(out, rank)) for rank in (1, 2)) == 2 * summary(out)["steps"]
    saved = sorted(int(p.name[5:]) for p in (out / "snapshots").glob("step-*"))
    assert saved and summary(out)["snapshots"] == len(saved)
    assert 4 < summary(out)["wall_s"] < 60  # steps without end would take as long as the test may


def test_stop_at_target_stops_there(tmp_path):
    out = tmp_path / "run"
    done = run(
        "forked",
        1,
        "--width",
        "0.0625",
        "--threads",
        "1",
        "--epochs",
        "9",
        "--target-accuracy",
        "0.3",
        "--stop-at-target",
        "--snapshot-every",
        "never",
        "--out",
        str(out),
    )
    assert done.returncode == 0, done.stdout
    rows = summary(out)["evaluations"]
    assert (
        len(rows) < 9
        and rows[-1]["val_accuracy"] >= 0.3
        and all(r["val_accuracy"] < 0.3 for r in rows[:-1])
    )
    assert not list((out / "snapshots").glob("step-*"))
    assert f"accuracy {rows[-1]['val_accuracy']:.4f}" in hvdtrain("evaluate", out).stdout


def launched(out, *options, ranks=("-n", "1"), train=("--mode", "allreduce"), first=PACE):
    words = [*forked_hvdtrain(), "launch", *ranks, "--out", str(out), *options, "--", *JOB, *train]
    settings = SETTINGS | {"env": SETTINGS["env"] | {FIRST: first}}
    return subprocess.Popen(words, **settings, start_new_session=True)


def refusal(job):
    """What a job says that does not begin."""
    printed, _ = job.communicate(timeout=100)
    assert job.returncode == 2, printed
    return printed


def test_a_launched_job_is_left_alone_while_it_runs_and_goes_on_later(tmp_path):
    """With its own options but for those given."""
    out = tmp_path / "run"
    job = launched(
        out,
        ranks=("-n", "1", "-s", "1"),
        train=("--mode", "ps-sync", "--compression", "fp16", *ENDLESS),
    )
    try:
        until(lambda: (out / "metrics.rank1.jsonl").is_file() and len(steps(out, 1)) >= 5)
        assert "its job is still running" in refusal(launched(out, "--resume"))
        stopped = subprocess.run([HVDTRAIN, "stop", str(out)], **SETTINGS, timeout=90)  # by SIGTERM
        assert stopped.returncode == 0, stopped.stdout
        printed, _ = job.communicate(timeout=100)
    finally:
        finish(job)
    assert job.returncode == 143 and list((out / "snapshots").glob("step-*")), printed
    assert (
        "go on with --resume" in printed
        and "Traceback" not in printed
        and "non-zero" not in printed
    )
    assert "the job was asked to leave: `hvdtrain launch --resume --out" in printed.splitlines()[-1]
    assert not (tmp_path / "run.launch/running.json").exists()
    assert "holds a run" in refusal(launched(out))
    words, last = [*forked_hvdtrain(), "launch", "--resume", "--out", str(out)], len(steps(out, 1))
    same = subprocess.run([*words, "--", "--steps", str(last + 4)], **SETTINGS, timeout=90)
    assert same.returncode == 0, same.stdout
    assert "until then ps-sync with 1 worker and 1 server" in same.stdout
    manifest = json.loads((out / "manifest.json").read_text())
    assert (manifest["mode"], manifest["compression"], summary(out)["steps"]) == (
        "ps-sync",
        "fp16",
        last + 4,
    )
    assert [row["step"] for row in steps(out, 1)] == list(range(1, last + 5))


def test_launch_starts_a_crashed_job_again_after_its_last_snapshot(tmp_path):
    out = tmp_path / "run"
    options = ("--mode", "ps-sync", "--dataset", "digits", "--batch-size", "128")
    ranks = ("-n", "1", "-s", "1")
    # there is time to stop it amid an epoch, and the server writes down what it did
    pace = slow_steps(0.15)
    job = launched(out, "--retries", "1", ranks=ranks, train=options, first=pace)
    try:
        until((out / "snapshots" / "step-00000012").is_dir)
        until(lambda: len(steps(out, 1)) >= 14)
        ranks_of(job)[1].kill()
        printed, _ = job.communicate(timeout=120)
        assert job.returncode == 0, printed
        assert "starting again, 1 of 1 times" in printed and "going on after step 12" in printed
        assert [row["step"] for row in steps(out, 1)] == list(range(1, 31))
        served = [
            json.loads(line) for line in (out / "metrics.server0.jsonl").read_text().splitlines()
        ]
        pushes = [line["pushes"] for line in served]
        # the lines of both, and the second counted anew
        assert pushes != sorted(pushes) and pushes[-1] == 18
        again = sum(row["samples"] or 0 for row in summary(out)["processes"])
        assert again == summary(out)["samples"] - 1438  # the first epoch was another start's
        assert (tmp_path / "run.launch" / "log.1").is_file()
    finally:
        finish(job)


def test_a_snapshot_that_could_not_be_saved_is_not_said_to_be(tmp_path):
    out = tmp_path / "run"
    options = [*SMALL, "--snapshot-every", "never", "--steps", "3000", "--out", str(out)]
    with started("forked", 1, *options, first=PACE) as job:
        until(lambda: (out / "metrics.rank0.jsonl").is_file() and len(steps(out, 0)) > 3)
        shutil.rmtree(out / "snapshots")
        (out / "snapshots").write_text("in the way")
        job.send_signal(signal.SIGTERM)
        printed, _ = job.communicate(timeout=100)
    assert job.returncode == 143
    assert "could not be saved" in printed and "no snapshot could be saved" in printed


def test_a_run_that_is_interrupted_says_how_to_go_on(tmp_path):
    """With what its last snapshot has, or, where there is none yet, from the beginning."""
    out = tmp_path / "run"
    options = [*SMALL, "--steps", "3000", "--resume", "--out", str(out)]
    for every, ready, printed in (
        (
            "10m",
            "metrics.rank0.jsonl",
            "nothing had been saved: `hvdtrain train --resume --out {}` begins it again",
        ),
        (
            "epoch",
            "snapshots/step-????????",
            "`hvdtrain train --resume --out {}` goes on after step",
        ),
    ):
        with started("forked", 1, *options, "--snapshot-every", every, first=PACE) as job:
            until(lambda ready=ready: any(out.glob(ready)) and len(steps(out, 0)) > 2)
            job.send_signal(signal.SIGINT)
            said, _ = job.communicate(timeout=100)
        assert job.returncode == 130 and f"hvdtrain: interrupted: {printed.format(out)}" in said, (
            said
        )


def test_a_usage_error_is_not_tried_again(tmp_path):
    job = launched(
        tmp_path / "run", "--retries", "3", train=("--mode", "allreduce", "--dataset", "nowhere")
    )
    printed, _ = job.communicate(timeout=100)
    assert job.returncode == 2 and "starting again" not in printed


def test_a_second_sigterm_ends_at_once(tmp_path):
    """The first one waits, here for the end of an evaluation that takes a minute."""
    out = tmp_path / "run"
    with started(
        "forked", 1, *SMALL, "--epochs", "9", "--out", str(out), first=slow_evaluations(60)
    ) as job:
        until(lambda: (out / "metrics.rank0.jsonl").is_file() and len(steps(out, 0)) == 12)
        job.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        assert job.poll() is None
        job.send_signal(signal.SIGTERM)
        assert job.wait(40) == 143
        assert not list((out / "snapshots").glob("step-*"))


def test_sigterm_after_the_last_step_lets_the_results_be_written(tmp_path):
    """While the test images are evaluated, which takes a while."""
    data, out = tmp_path / "data", tmp_path / "run"
    make_images(data, train=8, validation=8, side=64)
    shutil.copytree(data / "ValidationData", data / "TestData")
    (data / "TrainData" / "a" / "x.tif").write_bytes(b"")
    options = [
        "--dataset",
        str(data),
        "--width",
        "0.0625",
        "--batch-size",
        "8",
        "--steps",
        "2",
        "--threads",
        "1",
    ]
    told = tmp_path / "told"
    first = holds_tests_until(told)
    with started("forked", 1, *options, "--out", str(out), first=first) as job:
        until((out / "snapshots" / "final.safetensors").is_file)
        assert not (out / "summary.json").exists()
        job.send_signal(signal.SIGTERM)
        told.touch()
        printed, _ = job.communicate(timeout=100)
    assert job.returncode == 0, printed
    assert "test_accuracy" in summary(out)
    told = "note: not used: 1 image: TrainData/a/x.tif"
    assert told in printed


def test_a_batch_for_each_worker_is_the_same_after_a_restart(tmp_path):
    out = tmp_path / "run"
    weak = ["--per-worker", "--lr-scaling", "sqrt", "--mode", "allreduce", "--batch-size", "4"]
    for steps_in_all in ("3", "6"):
        words = [*SMALL, *weak, "--steps", steps_in_all, "--resume", "--out", str(out)]
        done = run("forked", 2, *words)
        assert done.returncode == 0, done.stdout
    assert "going on after step 3" in done.stdout
    manifest = json.loads((out / "manifest.json").read_text())
    assert (manifest["global_batch"], manifest["lr"]) == (8, pytest.approx(0.0003 * 2**0.5))
    assert steps(out, 0)[0]["samples"] == 4


@beside_whole
def test_a_run_that_was_killed_between_its_last_step_and_its_summary_takes_no_step_more(
    whole, tmp_path
):
    out = tmp_path / "run"
    shutil.copytree(whole, out)
    before = summary(out)
    (out / "summary.json").write_text("{}")
    done = run("forked", 1, *SMOOTH[:2], "--resume", "--out", str(out))
    assert done.returncode == 0, done.stdout
    after = summary(out)
    for same in ("steps", "samples", "samples_digest", "val_loss", "evaluations"):
        assert after[same] == before[same], same
