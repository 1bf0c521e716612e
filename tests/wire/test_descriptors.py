"""What a rank may have open at once."""

import dataclasses
import json
import resource

import pytest
from helpers.jobs import JOB, hvdtrain

from hvdtrain.base.config.run_config import RunConfig
from hvdtrain.base.errors import UsageError
from hvdtrain.base.world.place import World
from hvdtrain.job.wire import descriptors
from hvdtrain.job.wire.descriptors import allow_descriptors, needed

pytestmark = pytest.mark.usefixtures("beside_digits")


def limited(soft, hard):
    """What a forked rank runs first, so that it may have so many files and sockets open."""
    return f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))"


@pytest.fixture
def limits(monkeypatch):
    """The soft and the hard limit of this process, as a test has them."""
    held = [1024, 4096]
    monkeypatch.setattr(resource, "getrlimit", lambda which: tuple(held))
    monkeypatch.setattr(
        resource, "setrlimit", lambda which, given: held.__setitem__(slice(2), given)
    )
    return held


def test_a_server_of_many_workers_is_let_have_what_it_needs_or_says_what_to_raise(limits):
    config, server = (
        RunConfig(mode="ps-async", servers=1, wire="zmq"),
        World("srun", 0, 201, 0, 1, servers=1),
    )
    assert needed(config, server) == descriptors.ALONE + 200 * 8
    allow_descriptors(config, server)
    assert limits == [2 * needed(config, server), 4096]
    allow_descriptors(config, dataclasses.replace(server, size=401))
    assert limits == [4096, 4096]
    with pytest.raises(
        UsageError,
        match="rank 0 of 1001 may have 4,096 files and sockets open, and needs up to 8,256: ",
    ):
        allow_descriptors(config, dataclasses.replace(server, size=1001))
    allow_descriptors(config, dataclasses.replace(server, size=1001, rank=7))  # a worker
    limits[:] = resource.RLIM_INFINITY, resource.RLIM_INFINITY
    allow_descriptors(config, dataclasses.replace(server, size=1001))
    assert limits == [resource.RLIM_INFINITY] * 2


@pytest.mark.timeout(180)
@pytest.mark.parametrize(("soft", "hard", "code"), [(40, 60, 2), (40, 2000, 0)])
def test_a_low_limit_is_raised_or_told_before_anything_begins(soft, hard, code, tmp_path):
    out = tmp_path / "run"
    options = ["--mode", "ps-async", "--servers", "1", "--wire", "zmq", *JOB, "--out", out]
    done = hvdtrain("train", *options, ranks=3, first=limited(soft, hard))
    assert done.returncode == code, done.stdout
    if code:
        assert "rank 0 of 3 may have 60 files and sockets open, and needs up to" in done.stdout
        assert "Traceback" not in done.stdout and not out.exists()
    else:
        assert json.loads((out / "summary.json").read_text())["status"] == "done"
