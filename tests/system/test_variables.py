"""Variables of the environment that are no numbers: a line, and no traceback."""

import pytest

from hvdtrain.base.errors import UsageError
from hvdtrain.base.system.variables import seconds, whole_number
from hvdtrain.base.world.place import World, read_world
from hvdtrain.job.wire.rendezvous import open_store, store_address
from hvdtrain.launch.allocation import allocated_cores
from hvdtrain.runs.launched import read_launched


@pytest.mark.parametrize("text", ["abc", "", "-1", "1.5", "70000", "9" * 5000, "٣", "1_0", " 1"])
def test_a_port_that_is_none_is_named(text, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", text)
    world = World("env", size=2, local_size=2)
    for opens in (lambda: open_store(world, 1.0), lambda: store_address(world, None)):
        with pytest.raises(
            UsageError,
            match="MASTER_PORT='.*' in the environment is not a whole number from 0 to 65535",
        ):
            opens()
    monkeypatch.delenv("MASTER_PORT")
    with pytest.raises(UsageError, match="MASTER_PORT='' in the environment"):
        open_store(world, 1.0)


def test_numbers_are_read():
    assert whole_number({"N": "17"}, "N") == 17 and whole_number({}, "N", "1") == 1
    assert seconds({"S": "1e3"}, "S") == 1000 and seconds({}, "S") == 0
    for text in ("x", "nan", "inf", "-1", ""):
        with pytest.raises(
            UsageError, match="S='.*' in the environment is not a number of seconds"
        ):
            seconds({"S": text}, "S")


@pytest.mark.parametrize("slots", ["x", "2,x", "", "2,2,2", "-1,5"])
def test_slots_that_are_no_numbers_are_named(slots):
    place = {
        "HOROVOD_RANK": "0",
        "HOROVOD_SIZE": "4",
        "HOROVOD_LOCAL_RANK": "0",
        "HOROVOD_LOCAL_SIZE": "2",
    }
    with pytest.raises(UsageError, match="HVDTRAIN_SLOTS=.* does not add up to the 4 ranks"):
        read_world(1, place | {"HVDTRAIN_SLOTS": slots})


def test_what_launch_and_slurm_set_is_read_or_named():
    for pairs in ("x", "a,b", "a,b,x", "a,b,nan", "a,b,1,2", "a,b,1e999999"):
        with pytest.raises(
            UsageError,
            match="HVDTRAIN_NETWORK in the environment is not as `hvdtrain launch` sets it",
        ):
            read_launched({"HVDTRAIN_LAUNCHER": "ssh@1", "HVDTRAIN_NETWORK": pairs})
    known = read_launched({"HVDTRAIN_LAUNCHER": "ssh@1", "HVDTRAIN_NETWORK": "a,b,0.5/b,a,2.5e-05"})
    assert known and [pair["gbit_s"] for pair in known.network] == [0.5, 2.5e-05]
    with pytest.raises(
        UsageError, match="SLURM_JOB_CPUS_PER_NODE='x' in the environment is not what Slurm sets"
    ):
        allocated_cores({"SLURM_JOB_CPUS_PER_NODE": "x", "SLURM_JOB_NODELIST": "a"})
