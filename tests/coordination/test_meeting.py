"""Time limits on waits for other ranks do not run while those look at their images, however long that takes."""

import json
import time

import pytest
from helpers.jobs import JOB, hvdtrain, slow_evaluations, started, until

SLOW = """
import os, time
from pathlib import Path
from hvdtrain.rank import work
find = work.find_dataset
def slowly(*arguments):
    if os.environ["RANK"] == os.environ["SLOW"]:
        Path(os.environ["MARK"]).touch()
        time.sleep(float(os.environ["SECONDS"]))
    return find(*arguments)
work.find_dataset = slowly
"""


@pytest.mark.parametrize(("mode", "servers", "slow"), [("ps-sync", 1, 1), ("allreduce", 0, 2)])
def test_workers_may_look_at_images_and_evaluate_for_longer_than_the_timeout(mode, servers, slow, tmp_path):
    """While they do, nobody pushes or pulls."""
    out, began = tmp_path / "run", time.monotonic()
    options = ["--mode", mode, "--servers", servers, *JOB, "--timeout", "4s", "--out", out]
    env = {"SLOW": str(slow), "SECONDS": "6", "MARK": str(tmp_path / "mark")}
    done = hvdtrain("train", *options, ranks=3, first=SLOW + slow_evaluations(6), env=env)
    assert done.returncode == 0, done.stdout
    assert time.monotonic() - began > 12
    assert json.loads((out / "summary.json").read_text())["status"] == "done"


@pytest.mark.parametrize(("victim", "says"), [
    (2, "rank 2 was lost before training began: no sign of life within 4 s (see --timeout)"),
    (0, "rank 0, which serves the store of all ranks, ended before training began"),
])  # fmt: skip
def test_a_rank_that_dies_while_one_looks_at_its_images_is_noticed(victim, says, tmp_path):
    mark = tmp_path / "mark"
    options = ["--mode", "ps-async", "--servers", "1", *JOB, "--timeout", "4s", "--out", str(tmp_path / "run")]
    with started(
        "forked", 3, *options, first=SLOW, env={"SLOW": "2", "SECONDS": "20", "MARK": str(mark)}, survive=True
    ) as job:
        until(mark.is_file)
        time.sleep(1)
        killed = time.monotonic()
        job.ranks()[victim].kill()
        until(lambda: says in job.printed.read_text(), 15)
        assert time.monotonic() - killed < 10
        assert "Traceback" not in job.printed.read_text()


def test_the_time_of_a_job_that_was_suspended_does_not_count(tmp_path):
    """As Slurm suspends jobs: all of their processes."""
    mark, out = tmp_path / "mark", tmp_path / "run"
    options = ["--mode", "ddp", *JOB, "--timeout", "4s", "--out", str(out)]
    with started("forked", 3, *options, first=SLOW, env={"SLOW": "2", "SECONDS": "4", "MARK": str(mark)}) as job:
        until(mark.is_file)
        ranks = list(job.ranks().values())
        for rank in ranks:
            rank.suspend()
        time.sleep(6)
        for rank in ranks:
            rank.resume()
        said, _ = job.communicate(60)
    assert job.returncode == 0, said
