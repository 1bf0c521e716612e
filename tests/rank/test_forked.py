"""Ranks that tests fork compute what ranks that a starter started compute, and nothing of them is left."""

import pytest
from helpers.forked import Forked
from helpers.jobs import JOB, run, steps

pytestmark = pytest.mark.timeout(120)


def test_forked_ranks_give_the_same_bits_as_started_ones(tmp_path):
    for name, starter in (("started", "mpirun"), ("forked", "forked")):
        options = [*JOB, "--deterministic", "--mode", "ps-sync", "--servers", "1", "--out", str(tmp_path / name)]
        done = run(starter, 2, *options)
        assert done.returncode == 0, done.stdout
    started, forked = ((tmp_path / name / "snapshots/final.safetensors").read_bytes() for name in ("started", "forked"))
    assert started == forked
    losses = [[row["loss"] for row in steps(tmp_path / name, 1)] for name in ("started", "forked")]
    assert losses[0] == losses[1]


def test_the_process_that_is_forked_has_torch_loaded_and_one_thread():
    """Others would be lost in its forks, with whatever locks they held."""
    first = """
import sys
import psutil
print("torch" in sys.modules, len(psutil.Process().parent().threads()))
sys.exit()
"""
    job = Forked(1, [], first=first)
    try:
        printed, _ = job.communicate(30)
    finally:
        job.close()
    assert (job.returncode, printed) == (0, "True 1\n")


@pytest.mark.parametrize("survive", [False, True])
def test_one_that_fails_ends_the_others_or_not(survive):
    first = """
import os, sys, time
rank = int(os.environ["RANK"])
print("here", flush=True)
time.sleep(1 + 2 * rank)
sys.exit(7 - rank)
"""
    job = Forked(3, [], first=first, survive=survive)
    ranks = job.ranks()
    try:
        printed, _ = job.communicate(30)
    finally:
        job.close()
    assert (job.returncode, printed) == (7, "here\n" * 3)
    assert job.codes == ([7, 6, 5] if survive else [7])
    assert sorted(ranks) == [0, 1, 2] and not any(rank.is_running() for rank in ranks.values())
