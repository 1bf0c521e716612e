"""A snapshot on all workers of a job: read whole once on each host, and by nobody where a host
reads something else.
"""

import threading

import pytest
import torch
from helpers.workers import on_each

from hvdtrain.base.errors import Failure
from hvdtrain.job.recording import snapshot
from hvdtrain.job.training import resume

HOSTS = ["a", "a", "b", "b"]  # of four workers


@pytest.fixture
def share(tmp_path, monkeypatch):
    """Have every worker, a thread, share what the first one finds: what each has then, or what it
    raises.
    """
    here = threading.local()
    monkeypatch.setattr(resume.socket, "gethostname", lambda: HOSTS[here.worker])

    def one(group, world):
        here.worker = world.worker
        found = snapshot.latest(tmp_path, pytest.fail) if here.worker == 0 else None
        try:
            return resume.share(tmp_path, found, group)
        except Failure as error:
            return error

    def shared():
        return on_each(len(HOSTS), one)

    shared.here = here
    return shared


def write(run):
    (run / "snapshots").mkdir()
    for step in (3, 7):
        snapshot.save(
            run, step, {"w": torch.full((4,), float(step))}, [(0, {"m": torch.ones(4)})], 4, {}, 2
        )


def test_one_worker_of_each_host_reads_it_whole(share, tmp_path, monkeypatch):
    write(tmp_path)
    read, checksum = [], snapshot._checksum

    def counted(path):
        read.append((share.here.worker, path.name))
        return checksum(path)

    monkeypatch.setattr(snapshot, "_checksum", counted)
    for found in share():
        assert (found.step, found.weights["w"].tolist(), found.optimizer["m"].tolist()) == (
            7,
            [7.0] * 4,
            [1.0] * 4,
        )
    assert sorted(read) == [
        (worker, name) for worker in (0, 2) for name in (snapshot.OPTIMIZER, snapshot.WEIGHTS)
    ]


def test_where_there_is_none_nobody_has_one(share):
    assert share() == [None] * 4


def test_a_host_that_reads_something_else_ends_all(share, tmp_path, monkeypatch):
    checksum = snapshot._checksum
    write(tmp_path)
    monkeypatch.setattr(
        snapshot, "_checksum", lambda path: "other" if share.here.worker == 2 else checksum(path)
    )
    lines = {str(error) for error in share()}  # of all workers: any of them may be told
    assert len(lines) == 1 and min(lines).startswith("b: ")
    assert (
        "step-00000007 is not here what the first worker reads: weights.safetensors is not what"
        in lines.pop()
    )
