"""Time limits on waits for other ranks do not run while those look at their images, however long
that takes.
"""

import json
import re
import time

import pytest
from helpers.jobs import JOB, hvdtrain, slow_steps, started, steps, until

pytestmark = pytest.mark.usefixtures("beside_digits")
SLOW = """
import os, time
from pathlib import Path
from hvdtrain.job.rank import prepare
find = prepare.find_dataset_of
def slowly(*arguments):
    if os.environ["RANK"] == os.environ["SLOW"]:
        Path(os.environ["MARK"]).touch()
        time.sleep(float(os.environ["SECONDS"]))
    return find(*arguments)
prepare.find_dataset_of = slowly
"""


LATE = """
import os, time
from hvdtrain.job.training import loop, step
backward, evaluate = step.backward, loop.evaluate
taken = []
def late(*arguments):
    if os.environ["RANK"] == os.environ["LATE"]:
        time.sleep(6)
def step_backward(*arguments):
    taken.append(None)
    if len(taken) == 2:
        late()
    return backward(*arguments)
def late_evaluation(*arguments):
    late()
    return evaluate(*arguments)
step.backward, loop.evaluate = step_backward, late_evaluation
"""


@pytest.mark.parametrize(
    ("mode", "wire", "seconds"),
    [("ps-sync", "rpc", 4), ("ps-async", "zmq", 0), ("allreduce", "", 4), ("ddp", "", 0)],
)
def test_a_rank_that_is_alive_is_waited_for_beyond_the_timeout(mode, wire, seconds, tmp_path):
    """One looks at its images, computes and evaluates for so long, and another, which is the one
    that leads in a ring, does neither.
    """
    out, began, servers = tmp_path / "run", time.monotonic(), bool(wire)
    options = ["--mode", mode, "--servers", int(servers), *(["--wire", wire] if wire else [])]
    if mode == "ps-async":  # the other would have taken all shares before this one's second
        options += ["--shares", "equal"]
    env = {"SLOW": "1", "SECONDS": str(seconds), "MARK": str(tmp_path / "mark"), "LATE": "2"}
    done = hvdtrain(
        "train",
        *options,
        *JOB,
        "--timeout",
        "2s",
        "--out",
        out,
        ranks=3,
        first=SLOW + LATE,
        env=env,
    )
    assert done.returncode == 0, done.stdout
    assert time.monotonic() - began > 12 + seconds
    assert json.loads((out / "summary.json").read_text())["status"] == "done"
    assert "lost" not in done.stdout and re.search(r"waiting for rank.* 2.*, alive", done.stdout), (
        done.stdout
    )


@pytest.mark.parametrize(
    ("victim", "says"),
    [
        (2, "rank 2 is lost: no sign of life within 4 s (see --timeout)"),
        (0, "rank 0, which serves the store of all ranks, ended before training began"),
    ],
)
def test_a_rank_that_dies_while_one_looks_at_its_images_is_noticed(victim, says, tmp_path):
    mark = tmp_path / "mark"
    options = [
        "--mode",
        "ps-async",
        "--servers",
        "1",
        *JOB,
        "--timeout",
        "4s",
        "--out",
        str(tmp_path / "run"),
    ]
    with started(
        "forked",
        3,
        *options,
        first=SLOW,
        env={"SLOW": "2", "SECONDS": "100", "MARK": str(mark)},
        survive=True,
    ) as job:
        until(mark.is_file)
        time.sleep(1)
        job.ranks()[victim].kill()
        until(lambda: says in job.printed.read_text())  # while that one still looks at its images
        assert "Traceback" not in job.printed.read_text()


def test_the_time_of_a_job_that_was_suspended_does_not_count(tmp_path):
    """As Slurm suspends jobs: all of their processes."""
    mark, out = tmp_path / "mark", tmp_path / "run"
    options = ["--mode", "ddp", *JOB, "--timeout", "4s", "--out", str(out)]
    with started(
        "forked", 3, *options, first=SLOW, env={"SLOW": "2", "SECONDS": "4", "MARK": str(mark)}
    ) as job:
        until(mark.is_file)
        ranks = list(job.ranks().values())
        for rank in ranks:
            rank.suspend()
        time.sleep(6)
        for rank in ranks:
            rank.resume()
        said, _ = job.communicate(60)
    assert job.returncode == 0, said


@pytest.mark.parametrize(
    ("mode", "victim", "says"),
    [
        ("allreduce", 2, "rank 0 failed: rank 2 is lost"),
        ("ddp", 0, "rank [12] failed: rank 0 is lost"),
    ],
)
def test_a_rank_of_a_ring_that_is_silent_ends_the_job_whatever_the_others_wait_for(
    mode, victim, says, tmp_path
):
    """The first rank serves the store of all: whoever asks that one gets no answer."""
    out = tmp_path / "run"
    options = ["--mode", mode, *JOB, "--steps", "100000", "--timeout", "3s", "--out", str(out)]
    with started("forked", 3, *options, first=slow_steps(0.05), survive=True) as job:
        until(lambda: (out / "metrics.rank1.jsonl").is_file() and steps(out, 1))
        stopped = job.ranks()[victim]
        stopped.suspend()
        began = time.monotonic()
        line = f"hvdtrain: {says}: no sign of life within 3 s"
        until(lambda: re.search(line, job.printed.read_text()))
        assert time.monotonic() - began > 2
