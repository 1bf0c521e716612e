"""Joining Horovod where its own starter did not start the ranks."""

import json
import time

import pytest
from helpers.forked_jobs import forks_first
from helpers.jobs import JOB, hvdtrain
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.base.errors import Failure
from hvdtrain.base.world.place import World
from hvdtrain.job.wire.horovod import join, placement, wait_for_any

pytestmark = pytest.mark.usefixtures("beside_digits")


@given(st.lists(st.sampled_from("abcde"), min_size=1, max_size=20))
def test_whatever_ranks_hosts_have_every_group_has_each_of_its_places_once(hosts):
    """Horovod's ranks meet in a group for each host, and one for each local rank: each needs all
    its places taken.
    """
    places = [placement(hosts, rank) for rank in range(len(hosts))]
    for host in hosts:
        local = [
            (rank, size) for h, (rank, size, _, _) in zip(hosts, places, strict=True) if h == host
        ]
        assert sorted(local) == [(i, len(local)) for i in range(len(local))]
    for local_rank in {place[0] for place in places}:
        across = [place[2:] for place in places if place[0] == local_rank]
        assert sorted(across) == [(i, len(across)) for i in range(len(across))]


# Three ranks that srun dealt out over two hosts, of which each has the name that it is given here.
ON_TWO_HOSTS = """
import os, socket
rank = int(os.environ["RANK"])
for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
    del os.environ[name]
os.environ.update(
    SLURM_JOB_ID="7", SLURM_STEP_ID="0", SLURM_PROCID=str(rank), SLURM_STEP_NUM_TASKS="3",
    SLURM_LOCALID=str(rank // 2), SLURM_NODEID=str(rank % 2), SLURM_STEP_TASKS_PER_NODE="2,1",
)
socket.gethostname = lambda: f"node{rank % 2}"
os.environ["HVDTRAIN_INTERFACE"] = "lo"  # which has an address that this machine's own name would not mean
"""


@pytest.mark.timeout(120)
def test_ranks_that_slurm_dealt_out_over_hosts_train_together(tmp_path):
    out = tmp_path / "run"
    options = ["--mode", "allreduce", "--timeout", "60s", "--out", str(out)]
    done = hvdtrain("train", *JOB, *options, ranks=3, first=ON_TWO_HOSTS)
    assert done.returncode == 0, done.stdout
    manifest = json.loads((out / "manifest.json").read_text())
    assert (manifest["starter"], manifest["workers"], manifest["backend"]) == (
        "srun",
        3,
        "horovod-gloo",
    )
    assert manifest["hardware"]["hosts"] == ["node0", "node1"]
    assert manifest["interface"] == "lo"


def test_a_worker_that_waits_for_the_ring_takes_no_processor_time(monkeypatch):
    import horovod.torch as hvd

    asked, done = [], time.monotonic() + 0.4
    monkeypatch.setattr(hvd, "poll", lambda handle: asked.append(handle) or time.monotonic() > done)
    before = time.thread_time()
    assert wait_for_any([3]) == 0
    assert time.monotonic() > done and set(asked) == {3}
    assert time.thread_time() - before < 0.2


def test_a_worker_whose_wait_is_short_does_not_pause(monkeypatch):
    import horovod.torch as hvd

    looks = iter([False, False, True])
    pauses = []
    monkeypatch.setattr(hvd, "poll", lambda handle: next(looks))
    monkeypatch.setattr(time, "sleep", pauses.append)
    assert wait_for_any([3], without_pause_s=60) == 0
    assert pauses == []


def test_what_is_done_first_is_taken_first(monkeypatch):
    """Other ranks may have begun with another bucket: who waits for the first of its buckets could
    wait for ever.
    """
    import horovod.torch as hvd

    monkeypatch.setattr(hvd, "poll", lambda handle: handle == 7)
    assert wait_for_any([5, 7]) == 1
    assert wait_for_any([5], as_long_as=lambda: False) is None


@pytest.mark.timeout(120)
def test_ranks_of_mpirun_take_gloo_where_they_are_asked_to(tmp_path):
    words = [
        "launch",
        "-n",
        "2",
        "--out",
        str(tmp_path / "run"),
        "--",
        *JOB,
        "--ring-transport",
        "gloo",
    ]
    done = hvdtrain(*words, first=forks_first())
    assert done.returncode == 0, done.stdout
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert (manifest["starter"], manifest["workers"], manifest["backend"]) == (
        "mpirun",
        2,
        "horovod-gloo",
    )


def test_a_transport_that_ranks_cannot_have_is_refused(monkeypatch):
    monkeypatch.setenv("PMIX_SERVER_TMPDIR", "/nowhere")
    with pytest.raises(
        Failure, match="--ring-transport mpi is for ranks that mpirun starts, not torchrun"
    ):
        join(World("torchrun", size=2), transport="mpi")
    with pytest.raises(
        Failure, match="--ring-transport gloo under mpirun is for ranks on one host"
    ):
        join(World("mpirun", size=2), transport="gloo")
