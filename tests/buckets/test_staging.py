"""What goes between a GPU and servers by way of CPU memory, on a machine without a GPU: the CPU
stands in for it.

torch.cpu has the streams and events of torch.cuda, in which nothing is ever late. Here what is
copied out is.
"""

import json
import threading

import pytest
import torch
from helpers import jobs
from helpers.jobs import hvdtrain
from helpers.staged import LATE_EVENTS, STAGED_RING
from helpers.weights import SMOOTH_BATCH_NORM, assert_same_weights
from safetensors.torch import load_file

from hvdtrain.base.errors import Failure
from hvdtrain.job.buckets.exchange import Exchange, Lane
from hvdtrain.job.buckets.partition import cut
from hvdtrain.job.buckets.staging import Staging
from hvdtrain.job.wire.requests import as_future

LATE = f"""{LATE_EVENTS}
from hvdtrain.job.ps import push_exchange, worker
worker.PushExchange = lambda *arguments, **options: push_exchange.PushExchange(*arguments, **dict(options, staged=True))
"""
WITHOUT_RPC = """
import sys
sys.modules["torch.distributed.rpc"] = None
"""
JOB = [*jobs.JOB, "--bucket-mb", "0.0625"]
pytestmark = pytest.mark.usefixtures("beside_digits")


@pytest.mark.timeout(180)
def test_gradients_that_arrive_late_or_over_another_wire_give_the_same_weights(tmp_path):
    options = ["train", *JOB, "--mode", "ps-sync", "--servers", "1"]
    for name, first in (("direct", WITHOUT_RPC), ("staged", LATE)):
        wire = "zmq" if name == "direct" else "rpc"
        done = hvdtrain(*options, "--wire", wire, "--out", tmp_path / name, ranks=3, first=first)
        assert done.returncode == 0, done.stdout
    direct, staged = (
        load_file(tmp_path / name / "snapshots" / "final.safetensors")
        for name in ("direct", "staged")
    )
    assert all(tensor.equal(direct[name]) for name, tensor in staged.items())
    summary = json.loads((tmp_path / "staged" / "summary.json").read_text())
    assert summary["exposed_comm_fraction"] > 0.1  # half a second of 26 buckets, each 10 ms late


class AverageLane(Lane):
    """Its gradient comes back at once."""

    def send(self, gradient):
        return as_future(gradient)

    def take(self, weights):
        self.staging.copy_in(self.number, weights)


@pytest.mark.parametrize("event", ["late", "broken"])
def test_a_copy_that_is_late_is_told_of_and_one_that_goes_wrong_ends_the_wait(event, monkeypatch):
    held, told, weights, pieces = threading.Event(), [], torch.zeros(12), cut([6, 6], 1, 6)

    def tell(line):
        told.append(line)
        held.set()

    staging = Staging(weights, pieces)
    lanes = [AverageLane(number, piece, weights, staging) for number, piece in enumerate(pieces)]
    exchange = Exchange(lanes, [6, 6], weights, staging, room=48, patience=0.2, tell=tell)

    def synchronize(self):
        if event == "broken":
            raise RuntimeError("the device is lost")
        held.wait(60)

    def step():
        for parameter in (1, 0):
            exchange.bucketer.put(parameter, torch.ones(6))
        exchange.wait_for_all()

    step()
    assert weights.tolist() == [1] * 12
    monkeypatch.setattr(torch.cpu.Event, "synchronize", synchronize, raising=False)
    if event == "broken":
        with pytest.raises(Failure, match="the device is lost"):
            step()
        return
    step()
    assert told[0] == (
        "waiting for ranks that have not sent 2 of 2 buckets of gradients, 0 among them, alive, for 1 min"
    )


def test_an_answers_memory_is_not_written_while_the_copy_before_may_read_it(monkeypatch):
    """Also where the stream that computes has been told to wait for that copy, as when weights are
    pulled twice.
    """
    staging, awaited = Staging(torch.zeros(6), cut([6], 1, 6)), []
    monkeypatch.setattr(torch.cpu.Event, "synchronize", lambda self: awaited.append(self))
    staging.copy_in(0, torch.ones(6))
    copied = staging.arrivals[0]
    staging.wait_for([0])
    assert awaited == []
    staging.copy_in(0, torch.ones(6))
    assert awaited == [copied]


def test_a_ring_by_way_of_cpu_memory_gives_the_same_weights(tmp_path):
    options = [*JOB[:-2], "--mode", "allreduce", "--accumulate", "2", *SMOOTH_BATCH_NORM]
    for name, first in (("direct", ""), ("staged", STAGED_RING)):
        done = hvdtrain("train", *options, "--out", tmp_path / name, ranks=2, first=first)
        assert done.returncode == 0, done.stdout
    assert_same_weights(tmp_path / "staged", tmp_path / "direct")
