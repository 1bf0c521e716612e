"""The first rank may end at any moment, and with it the store that it serves: whoever reads it then
says so.
"""

import re

import pytest
import torch
from helpers.jobs import SMALL, hvdtrain
from helpers.processes import run_python

from hvdtrain.base.config.run_config import RunConfig
from hvdtrain.base.errors import Failure
from hvdtrain.base.world.network import VARIABLE, free_port
from hvdtrain.base.world.place import World
from hvdtrain.job.coordination import meeting
from hvdtrain.job.coordination.joining import arrive
from hvdtrain.job.coordination.store_group import StoreGroup
from hvdtrain.job.rank.hosts_check import check_hosts
from hvdtrain.job.wire import heartbeat
from hvdtrain.job.wire.heartbeat import StoreLost, wait_for_ranks
from hvdtrain.job.wire.horovod import _become_horovodrun
from hvdtrain.job.wire.rendezvous import leave, reach_store
from hvdtrain.job.wire.requests import Requests
from hvdtrain.job.wire.shared import SharedMemory
from hvdtrain.job.wire.zeromq import connect

SERVES = """
import os, time
from hvdtrain.job.wire.rendezvous import serve_store
store = serve_store("127.0.0.1", int(os.environ["PORT"]), 30)
print("serves", flush=True)
time.sleep(600)
"""
pytestmark = pytest.mark.usefixtures("beside_digits")
SECOND = World("env", 1, 2, 1, 2)
TIMEOUT = 5.0


@pytest.fixture(scope="module")
def lost_store():
    """What a second rank has of a store whose first rank was killed."""
    port = free_port("127.0.0.1")
    with run_python(SERVES, PORT=str(port)) as first:
        assert first.stdout.readline() == "serves\n"
        store = reach_store("127.0.0.1", port, TIMEOUT)
        store.set("x", "")
        assert store.check(["x"])
        first.kill()
    return store


@pytest.mark.parametrize(
    "act",
    [
        lambda store, folder: wait_for_ranks(store, {0: "x"}, TIMEOUT),
        lambda store, folder: leave(1, store, TIMEOUT, [0], ()),
        lambda store, folder: StoreGroup(SECOND, store, TIMEOUT).sum(torch.ones(2)),
        lambda store, folder: StoreGroup(SECOND, store, TIMEOUT).gather_to_first("mine"),
        lambda store, folder: SharedMemory().join(SECOND, store, TIMEOUT),
        lambda store, folder: connect(SECOND, store, TIMEOUT, Requests()),
        lambda store, folder: _become_horovodrun(SECOND, store),
        lambda store, folder: check_hosts(
            RunConfig(mode="ddp", timeout=TIMEOUT), SECOND, folder, store
        ),
    ],
    ids=[
        "waits",
        "leaves",
        "adds",
        "gathers",
        "shares memory",
        "calls",
        "joins Horovod",
        "compares hosts",
    ],
)
def test_who_reads_the_store_of_a_first_rank_that_has_ended_says_so(
    act, lost_store, tmp_path, monkeypatch
):
    monkeypatch.setattr(heartbeat, "ENDS_S", 0.0)
    with pytest.raises(
        StoreLost, match="^rank 0, which serves the store of all ranks, ended before the others$"
    ):
        act(lost_store, tmp_path)


def test_who_meets_a_first_rank_that_ends_at_once_does_not_say_that_it_was_not_found(
    lost_store, monkeypatch
):
    monkeypatch.setattr(heartbeat, "ENDS_S", 0.0)
    monkeypatch.setattr(meeting, "open_store", lambda *_: lost_store)
    with pytest.raises(
        Failure, match="^rank 0, which serves the store of all ranks, ended before training began$"
    ):
        meeting.Meeting(SECOND, TIMEOUT)


def test_a_worker_whose_job_ends_while_it_joins_says_so(lost_store, monkeypatch):
    monkeypatch.setattr(heartbeat, "ENDS_S", 0.0)
    monkeypatch.setattr("hvdtrain.job.coordination.joining.reach_store", lambda *_: lost_store)
    with pytest.raises(Failure, match="^the job ended before this worker had joined it$"):
        arrive(RunConfig(mode="ps-async", servers=1, wire="zmq"), "127.0.0.1", 1, 2, True)


# Each rank is on a host of its own, which a scheduler chose; the first one finds no room while they
# compare them.
FAILS_WHILE_COMPARING = f"""
import os
os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", HVDTRAIN_LAUNCHER="x@y", {VARIABLE}="lo")
from hvdtrain.base.errors import Failure
from hvdtrain.job.rank import hosts_check
def fail(*_):
    raise Failure("there is no room")
if os.environ["RANK"] == "0":
    hosts_check.AT = fail
"""


@pytest.mark.parametrize("at", ["new_file_near", "_problems"])
def test_a_first_rank_that_fails_while_hosts_are_compared_is_a_line_of_each(at, tmp_path):
    first = FAILS_WHILE_COMPARING.replace("hosts_check.AT", f"hosts_check.{at}")
    done = hvdtrain(
        "train",
        "--mode",
        "ddp",
        *SMALL,
        "--out",
        tmp_path / "run",
        ranks=3,
        first=first,
        survive=True,
    )
    # A rank that has not heard yet that all have come says "before training began", and that its
    # environment makes it a rank.
    when = r"(the others|training began(; RANK=\d and .*)?)"
    ended = f"hvdtrain: rank 0, which serves the store of all ranks, ended before {when}"
    *others, last = sorted(done.stdout.splitlines())
    assert last == "hvdtrain: there is no room", done.stdout
    assert len(others) == 2 and all(re.fullmatch(ended, line) for line in others), done.stdout
    assert done.returncode == 1
