"""Elastic rings: a worker that is killed amid training is gone and nothing else is; one joins when
an epoch is over.
"""

import json
import re
import signal

import pytest
from helpers.foretold import FORETELLS_LITTLE
from helpers.jobs import (
    hvdtrain,
    read_rows,
    slow_steps,
    slow_steps_until,
    started,
    steps,
    until,
)
from helpers.launched import Launched
from helpers.weights import SMOOTH, assert_same_weights

pytestmark = [pytest.mark.timeout(180), pytest.mark.usefixtures("beside_digits")]
# Of 92 images, so that three workers do not share the last batch of an epoch evenly.
EPOCH, TAKEN, BATCH = 8, 80, 12
SMALL = ["--dataset", "few", "--width", 0.0625, "--threads", 1, "--batch-size", BATCH]
# At ten times this learning rate what rounding leaves is a thousand times as much after so many
# steps.
JOB = [*SMALL, *SMOOTH, "--steps", TAKEN, "--optimizer", "sgd", "--lr", 0.002]
PACE = slow_steps(0.1)  # so that it still trains when a worker is killed, or has joined


def lives(run, rank):
    """Of a worker, those that have begun or ended, in order, and why."""
    return [
        (life["incarnation"], life["why"])
        for life in read_rows(run / "membership.jsonl")
        if life["rank"] == rank
    ]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """What one worker comes to with the same global batches."""
    out = tmp_path_factory.mktemp("elastic") / "single"
    done = hvdtrain("train", "--mode", "single", *JOB, "--out", out)
    assert done.returncode == 0, done.stdout
    return out


@pytest.mark.parametrize(
    ("mode", "killed"),
    [("ddp", 2), ("sharded", 1), pytest.param("allreduce", 1, marks=pytest.mark.hosts)],
)
def test_the_others_go_on_in_the_same_processes_and_a_new_one_joins_and_no_sample_is_lost_or_counts_twice(
    mode, killed, undisturbed, tmp_path
):
    """In ddp it leaves at SIGTERM, alone."""
    out, options = tmp_path / "run", ["--mode", mode, *JOB]
    if mode == "sharded":
        options += ["--bucket-mb", 1]
    over = tmp_path / "over"
    pace = slow_steps_until(over, 0.3)  # so that it still trains when one has joined
    with Launched(
        out, "local", 3, 0, *options, place=["--elastic"], forked=True, first=pace
    ) as job:
        job.wait_for_steps()
        begun = job.ranks()
        begun.pop(killed).kill()
        until(lambda: lives(out, killed)[1:])
        lost_after = len(steps(out, killed))
        with started("forked", 1, "--join", "--trust-model", "--out", str(out)) as joined:
            until(lambda: len(steps(out, killed)) > lost_after + 5)
            if mode == "ddp":
                joined.send_signal(signal.SIGTERM)
                told, _ = joined.communicate(timeout=100)
            over.touch()
            assert all(process.is_running() for process in begun.values())
            said, _ = job.process.communicate(timeout=100)
            if mode != "ddp":
                told, _ = joined.communicate(timeout=100)
    assert job.process.returncode == 0, said
    assert f"rank {killed} is lost, and the others go on without it" in said
    assert f"rank {killed} has joined, whose life number 2 this is" in told
    if mode == "ddp":
        assert (
            f"rank {killed} has left at step" in told
            and f"rank {killed} has left, and the others go on" in said
        )
    for rank in begun:
        assert [row["step"] for row in steps(out, rank)] == list(range(1, TAKEN + 1))
    with_it = [row["step"] for row in steps(out, killed)][lost_after:]
    assert with_it[0] % EPOCH == 1 and with_it == list(range(with_it[0], with_it[-1] + 1))
    summary, before = (json.loads((run / "summary.json").read_text()) for run in (out, undisturbed))
    assert [summary[name] for name in ("samples_digest", "samples")] == [
        before[name] for name in ("samples_digest", "samples")
    ]
    # a step taken twice is 1e-2 of the way, and new moments are more
    assert_same_weights(out, undisturbed)
    found = {(life["rank"], life["incarnation"]): life["why"] for life in summary["membership"]}
    assert found == dict.fromkeys([(rank, 1) for rank in begun], "") | {
        (killed, 1): "its connection ended",
        (killed, 2): "left" if mode == "ddp" else "",
    }
    words = ["report", out, "--out", tmp_path / "report"]
    told = hvdtrain(*words, first=FORETELLS_LITTLE).stdout
    assert (f"finished without ranks [{killed}], which left" in told.replace("\n", " ")) == (
        mode == "ddp"
    )
    assert not (out / "join.json").exists()


def test_a_worker_that_is_lost_is_started_again_and_leaves_with_the_others(tmp_path):
    """It is lost amid an epoch. Horovod looks so seldom for work that it is stopped
    before it knows that the average under way comes to nothing.
    """
    out, options = (
        tmp_path / "run",
        ["--mode", "allreduce", *SMALL, "--epochs", 1000],
    )
    place, env = ["--elastic", "--respawn"], {"HOROVOD_CYCLE_TIME": "300"}  # milliseconds
    with Launched(out, "local", 2, 0, *options, place=place, env=env, forked=True) as job:
        job.wait_for_steps()
        job.ranks()[1].kill()
        until(lambda: lives(out, 1)[-1] == (2, ""))
        before = len(steps(out, 1))
        until(lambda: len(steps(out, 1)) > before + 2)
        job.process.terminate()
        said, _ = job.process.communicate(timeout=100)
        assert job.process.returncode == 143, said
        assert not job.alive()
    assert list((out / "snapshots").glob("step-*"))


@pytest.mark.hosts
def test_two_neighbours_in_a_sharded_ring_that_are_lost_at_once_end_the_job_in_one_line(tmp_path):
    """Unless Horovod had begun to start again without the one alone."""
    options = ["--mode", "sharded", *JOB]
    with Launched(
        tmp_path / "run", "local", 4, 0, *options, place=["--elastic"], forked=True, first=PACE
    ) as job:
        job.wait_for_steps()
        ranks = job.ranks()
        ranks[1].kill()
        ranks[2].kill()
        said, _ = job.process.communicate(timeout=100)
    assert job.process.returncode == 1
    assert re.search(
        r"workers \[1, 2\], neighbours in the ring, are gone",
        said.splitlines()[-1],
    )


def test_the_first_worker_is_needed_and_its_loss_is_one_line(tmp_path):
    options = ["--mode", "ddp", *JOB]
    with Launched(
        tmp_path / "run", "local", 2, 0, *options, place=["--elastic"], forked=True, first=PACE
    ) as job:
        job.wait_for_steps()
        job.ranks()[0].kill()
        said, _ = job.process.communicate(timeout=100)
    assert job.process.returncode == 1
    assert (
        "rank 0 is lost: --elastic survives the loss of any rank but this one"
        in said.splitlines()[-1]
    )


# What a forked rank runs first, so that it is killed when Horovod begins to start.
DIES_AT_START = """
import os, signal
from hvdtrain.job.wire import horovod
def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)
horovod.join_anew = die
"""


def test_a_worker_that_dies_while_it_joins_is_one_that_is_lost(tmp_path):
    """Before it has told the others where it is. Horovod, as hvdtrain builds it, does not end the
    others' processes then.
    """
    out = tmp_path / "run"
    options = ["--mode", "allreduce", *SMALL, "--epochs", 1000, "--dataset", "few"]
    with Launched(out, "local", 2, 0, *options, place=["--elastic"], forked=True) as job:
        job.wait_for_steps()
        with started(
            "forked", 1, "--join", "--trust-model", "--out", str(out), first=DIES_AT_START
        ):
            until(lambda: lives(out, 2)[-1:] == [(1, "its connection ended")])
            before = len(steps(out, 0))
            until(lambda: len(steps(out, 0)) > before + 3)
        job.process.terminate()
        said, _ = job.process.communicate(timeout=60)
        assert job.process.returncode == 143, said
        assert not job.alive()
