"""Where am I: the environment of every starter, and what follows from it."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.base.errors import UsageError
from hvdtrain.base.world.network import own_address
from hvdtrain.base.world.place import World, check_is_started, naming_left_over, read_world


def torchrun(rank, size, local_rank, local_size):
    return {
        "TORCHELASTIC_RUN_ID": "none",
        "RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_RANK": local_rank,
        "LOCAL_WORLD_SIZE": local_size,
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }


def horovodrun(rank, size, local_rank, local_size):
    return {
        "HOROVOD_RANK": rank,
        "HOROVOD_SIZE": size,
        "HOROVOD_LOCAL_RANK": local_rank,
        "HOROVOD_LOCAL_SIZE": local_size,
        "HOROVOD_CROSS_RANK": "0",
        "HOROVOD_CROSS_SIZE": "1",
    }


def mpirun(rank, size, local_rank, local_size):
    return {
        "OMPI_COMM_WORLD_RANK": rank,
        "OMPI_COMM_WORLD_SIZE": size,
        "OMPI_COMM_WORLD_LOCAL_RANK": local_rank,
        "OMPI_COMM_WORLD_LOCAL_SIZE": local_size,
        "OMPI_COMM_WORLD_NODE_RANK": "0",
        "PMIX_RANK": rank,
    }


def pmi(rank, size, local_rank, local_size):
    return {
        "PMI_RANK": rank,
        "PMI_SIZE": size,
        "MPI_LOCALRANKID": local_rank,
        "MPI_LOCALNRANKS": local_size,
    }


def srun(rank, size, local_rank, local_size):
    return {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": rank,
        "SLURM_STEP_NUM_TASKS": size,
        "SLURM_LOCALID": local_rank,
        "SLURM_STEP_TASKS_PER_NODE": local_size,
        "SLURM_NTASKS": "99",
    }


def env(rank, size, local_rank, local_size):
    return {
        "RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_RANK": local_rank,
        "LOCAL_WORLD_SIZE": local_size,
    }


STARTERS = [torchrun, horovodrun, mpirun, pmi, srun, env]
# What a batch script, or salloc's shell, sees: a place, but no rank's. The step ids are Slurm's
# reserved ones.
BATCH_SCRIPT = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "8"}


@pytest.mark.parametrize("starter", STARTERS, ids=lambda f: f.__name__)
def test_every_starter_is_read(starter):
    world = read_world(env=starter("5", "8", "1", "4"))
    assert world == World(starter.__name__, rank=5, size=8, local_rank=1, local_size=4)
    assert not world.is_local
    assert read_world(env=starter("0", "2", "0", "2")).is_local


def test_nothing_in_the_environment_is_one_rank_alone():
    world = read_world(env={"PATH": "/bin", "SLURM_JOB_ID": "7"})
    assert world == World("alone", 0, 1, 0, 1, 0)
    assert world.is_local and world.is_chief and not world.is_server


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (
            {"RANK": "0", "WORLD_SIZE": "2"},
            "RANK=0 and WORLD_SIZE=2 in the environment .*`unset RANK WORLD_SIZE`; else set MASTER",
        ),
        (
            {"RANK": "0"},
            "WORLD_SIZE is not in the environment: RANK=0 in the environment makes this .*`unset RANK`",
        ),
        (
            {"RANK": "zero", "WORLD_SIZE": "2"},
            "RANK='zero' is not a number: start ranks .*`unset RANK WORLD_SIZE` to work alone",
        ),
    ],
)
def test_variables_of_another_job_are_named_and_how_to_unset_them(found, words):
    with pytest.raises(UsageError, match=words):
        check_is_started(read_world(env=found), found)


def test_errors_name_variables_that_may_be_left_over():
    found = env("0", "2", "0", "2") | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    world = read_world(env=found)
    check_is_started(world, found)
    words = "2 were started; RANK=0 and WORLD_SIZE=2 .*`unset RANK .* MASTER_PORT`"
    with pytest.raises(UsageError, match=words), naming_left_over(world, found):
        raise UsageError("2 were started")
    for known in (mpirun("0", "2", "0", "2"), {}):
        with (
            pytest.raises(UsageError, match="2 were started$"),
            naming_left_over(read_world(env=known)),
        ):
            raise UsageError("2 were started")


def test_a_shell_within_a_step_of_slurm_is_told_too(monkeypatch):
    """`srun -n 2 --pty bash` starts one shell, whose variables are those of a rank of two."""
    found = srun("0", "2", "0", "2")
    world = read_world(env=found)
    words = "SLURM_PROCID=0 and SLURM_STEP_NUM_TASKS=2 .*`unset SLURM_STEP_ID SLURM_PROCID "
    controller, terminal = os.openpty()
    with open(terminal) as typed:
        monkeypatch.setattr("sys.stdin", typed)
        with pytest.raises(UsageError, match=words), naming_left_over(world, found):
            raise UsageError("2 were started")
    os.close(controller)


@pytest.mark.parametrize(
    "step", [{}, {"SLURM_STEP_ID": "4294967291"}, {"SLURM_STEP_ID": "4294967290"}]
)
def test_a_slurm_batch_script_is_not_a_rank(step):
    assert read_world(env=BATCH_SCRIPT | step) == World()


@pytest.mark.parametrize(
    ("outer", "inner"),
    [
        *((srun("0", "1", "0", "1"), starter) for starter in (torchrun, horovodrun, mpirun, pmi)),
        (
            mpirun("0", "1", "0", "1"),
            torchrun,
        ),  # one agent a host under mpirun, with ranks of its own
        (BATCH_SCRIPT, mpirun),
        (BATCH_SCRIPT, env),
        (BATCH_SCRIPT | {"SLURM_STEP_ID": "4294967290"}, pmi),
    ],
)
def test_the_inner_starter_wins(outer, inner):
    world = read_world(env=outer | inner("1", "2", "1", "2"))
    assert (world.starter, world.rank, world.size) == (inner.__name__, 1, 2)


def test_srun_that_speaks_pmi_is_srun():
    """`srun --mpi=pmi2` sets PMI_RANK too, but only Slurm's own variables tell which ranks share a
    host.
    """
    world = read_world(env=srun("3", "4", "1", "2(x2)") | {"PMI_RANK": "3", "PMI_SIZE": "4"})
    assert world == World("srun", 3, 4, local_rank=1, local_size=2)


@pytest.mark.parametrize(
    ("tasks", "node", "here"),
    [
        ("4", "0", 4),
        ("4(x2)", "1", 4),
        ("4,2", "0", 4),
        ("4,2", "1", 2),
        ("4(x3),2", "2", 4),
        ("4(x3),2", "3", 2),
    ],
)
def test_slurm_counts_tasks_for_each_node(tasks, node, here):
    assert read_world(env=srun("0", "16", "0", tasks) | {"SLURM_NODEID": node}).local_size == here


@pytest.mark.parametrize("starter", STARTERS, ids=lambda f: f.__name__)
def test_an_untold_local_place_is_one_rank_a_host(starter):
    told = starter("1", "2", "only if", "told")
    untold = {name: value for name, value in told.items() if value not in ("only if", "told")}
    world = read_world(env=untold)
    assert (world.rank, world.local_rank, world.local_size, world.is_local) == (1, 0, 1, False)


@pytest.mark.parametrize("starter", STARTERS, ids=lambda f: f.__name__)
@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        (("2", "2", "0", "1"), "=2 is not below"),
        (("-1", "2", "0", "1"), "=-1 is not below"),
        (("0", "0", "0", "1"), "=0 is not below"),
        (("one", "2", "0", "1"), "='one' is not a number"),
        (("", "2", "0", "1"), "='' is not a number"),
        (("0", "2", "0", "many"), "='many' is not a number"),
        (("0", "2", "x", "2"), "='x' is not a number"),
        (("one", "two", "0", "1"), "='one' and .*='two' are not numbers"),
        (("0", "2", "0", "0"), "=0 is not within"),
        (("0", "2", "0", "4"), "=4 is not within"),
        (("0", "2", "-1", "2"), "=-1 is negative"),
    ],
)
def test_contradictions_are_refused_and_name_the_starter(starter, numbers, words):
    with pytest.raises(UsageError, match=f"^started by {starter.__name__}.*{words}"):
        read_world(env=starter(*numbers))


@pytest.mark.parametrize("starter", STARTERS, ids=lambda f: f.__name__)
def test_a_missing_size_is_named(starter):
    told = starter("0", "the size", "0", "1")
    [size] = [name for name, value in told.items() if value == "the size"]
    del told[size]
    with pytest.raises(
        UsageError, match=f"started by {starter.__name__}.*{size} is not in the environment"
    ):
        read_world(env=told)


@pytest.mark.parametrize(("servers", "size", "start"), [(1, 1, 2), (2, 2, 3), (5, 2, 6)])
def test_servers_leave_a_worker(servers, size, start):
    with pytest.raises(
        UsageError, match=f"^{servers} servers of {size} ranks .* start at least {start} ranks"
    ):
        read_world(servers, mpirun("0", str(size), "0", str(size)))


def test_negative_servers_are_refused():
    with pytest.raises(UsageError, match="--servers -1"):
        read_world(-1, {})


@given(st.integers(1, 50), st.data())
def test_the_first_ranks_serve_and_the_rest_are_numbered_workers(size, data):
    servers = data.draw(st.integers(0, size - 1))
    worlds = [
        read_world(servers, mpirun(str(rank), str(size), str(rank), str(size)))
        for rank in range(size)
    ]
    assert [w.is_server for w in worlds] == [True] * servers + [False] * (size - servers)
    assert [w.worker for w in worlds if not w.is_server] == list(range(size - servers))
    assert [w.rank for w in worlds if w.is_chief] == [servers]
    assert {w.workers for w in worlds} == {size - servers}
    assert all(w.is_local and own_address(w) == "127.0.0.1" for w in worlds)
