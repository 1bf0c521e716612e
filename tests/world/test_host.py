"""What is recorded of hosts, and in what those of one job differ."""

import pytest

from hvdtrain.base.config.run_config import RunConfig
from hvdtrain.base.world import host
from hvdtrain.base.world.place import World, workers_on_this_host
from hvdtrain.job.rank import process
from hvdtrain.job.recording.manifest import by_host


def test_variables_that_change_speed_are_recorded_and_neither_secrets_nor_the_jobs_own_are():
    env = {
        "HOROVOD_CYCLE_TIME": "5",
        "OMPI_MCA_btl": "self,sm",
        "UCX_TLS": "tcp",
        "MALLOC_ARENA_MAX": "1",
        "TP_SOCKET_IFNAME": "lo",
        "LD_PRELOAD": "/lib/x.so",
        "HOROVOD_SECRET_KEY": "s",
        "NCCL_TOKEN": "s",
        "HOROVOD_RANK": "0",
        "HOROVOD_GLOO_RENDEZVOUS_PORT": "4711",
        "OMPI_MCA_initial_wdir": "/x",
        "OMPI_COMM_WORLD_RANK": "0",
        "PATH": "/bin",
    }
    assert host.speed_variables(env) == dict(sorted(list(env.items())[:6]))


def test_each_difference_between_hosts_is_a_phrase():
    a = {
        "cpu": "A",
        "cores": 2,
        "memory_gb": 8.0,
        "versions": {"torch": "1"},
        "environment": {"OMP_X": "1"},
    }
    b = {"cpu": "A", "cores": 2.5, "memory_gb": 8.2, "versions": {"torch": "2"}, "environment": {}}
    assert host.differences({"a": a, "b": b, "c": a}) == [
        "cores 2 on a, c and 2.5 on b",
        "torch 1 on a, c and 2 on b",
        "OMP_X 1 on a, c and (none) on b",
    ]
    assert host.differences({"a": a, "c": dict(a)}) == host.differences({}) == []
    assert host.differences({"a": a, "b": a | {"memory_gb": 16.0}}) == [
        "memory_gb 8.0 on a and 16.0 on b"
    ]
    assert host.differences({"a": a, "b": {"cpu": "A"}}) == []  # of which nothing else is known


def test_what_ranks_say_of_their_hosts_comes_together():
    server, worker = {"host": "a", "cores": 2}, {"host": "a", "cores": 2, "threads_per_worker": 1}
    hosts = by_host({2: worker | {"host": "b"}, 0: server, 1: worker})
    assert hosts == {
        "a": {"ranks": [0, 1], "cores": 2, "threads_per_worker": 1},
        "b": {"ranks": [2], "cores": 2, "threads_per_worker": 1},
    }


@pytest.mark.parametrize(("rank", "workers"), [(0, 2), (1, 1), (2, 2), (3, 1), (4, 2)])
def test_a_server_is_no_worker_of_its_host_where_it_is_known_where_it_is(rank, workers):
    """Ranks 0, 2 and 4 are on the first host, 1 and 3 on the second; ranks 0 and 1 serve."""
    world = World("mpirun", rank, 5, servers=2, local_size=3 if rank % 2 == 0 else 2)
    assert workers_on_this_host(world, {"HVDTRAIN_SLOTS": "3,2"}) == workers


@pytest.mark.parametrize(
    ("cores", "world", "threads"),
    [
        (8, World("mpirun", 0, 2, 0, 2), 4),
        (
            8,
            World("mpirun", 1, 3, 1, 3, servers=1),
            4,
        ),  # all on one host: the server is known to be none of them
        (8, World("mpirun", 1, 6, 1, 3, servers=1), 2),  # nobody knows where the server is
        (8, World("horovodrun", 0, 3, 0, 1), 8),
        (2.5, World("mpirun", 0, 2, 0, 2), 1),  # of a control group
        (0.5, World(), 1),
    ],
)
def test_the_workers_of_a_host_share_the_cores_that_they_may_use(
    cores, world, threads, monkeypatch
):
    monkeypatch.setattr(process, "usable_cores", lambda: cores)
    assert process._threads_of_worker(RunConfig(), world) == threads
