"""Runs over several hosts: who is compared with whom depends on the network and on where the ranks
were.
"""

import pytest
from helpers.report_runs import run, write

from hvdtrain.runs.fields import placement, ran_alike
from hvdtrain.runs.read import load_run


def over(ranks, gbit_s=1.0):
    """What the manifest says of ranks on hosts, such as {"a": [0, 2], "b": [1]}."""
    pairs = [{"from": "a", "to": "b", "gbit_s": gbit_s}]
    return {
        "hosts": {name: {"ranks": own} for name, own in ranks.items()},
        "hardware": {"cpu": "A CPU", "cores": 2, "hosts": list(ranks), "gpus": []},
        "network": {"pairs": pairs} if gbit_s else None,
    }


RING = over({"a": [0], "b": [1]})


@pytest.mark.parametrize(
    ("servers", "alike"),
    [
        (over({"a": [0, 2], "b": [1]}), True),  # a server beside one of the workers
        (over({"a": [1], "b": [2], "c": [0]}), True),  # or on a host of its own
        (over({"a": [1, 2], "b": [0]}), False),  # both workers on one host
        (over({"a": [0, 2], "b": [1]}, 1.3), True),
        (over({"a": [0, 2], "b": [1]}, 0.2), False),  # another network, whatever it is called
        (over({"a": [0, 2], "b": [1]}, 0), True),  # nobody measured it
    ],
)
def test_ring_and_servers_have_their_workers_spread_alike_over_the_same_network(servers, alike):
    ring, ps = run("allreduce", 2, change=RING), run("ps-sync", 2, 1, change=servers)
    assert ran_alike([ring], [ps]) == ran_alike([ps], [ring]) == alike


def test_as_many_processes_on_as_many_hosts_are_alike():
    three = over({"a": [0], "b": [1], "c": [2]})
    assert ran_alike([run("allreduce", 3, change=three)], [run("ps-sync", 2, 1, change=three)])


def test_placement_says_which_ranks_share_a_host():
    assert (
        placement(run("ps-sync", 2, 1, change=over({"a": [1], "b": [0, 2]})))
        == "1 server + 1 worker | 1 worker"
    )
    assert placement(run("ps-sync", 2, 1)) == "1 server + 2 workers"
    assert placement(run("single", change={"hosts": {}})) is None


def test_a_run_whose_parts_were_computed_elsewhere_is_left_out(tmp_path):
    part = {
        "mode": "allreduce",
        "workers": 2,
        "servers": 0,
        "backend": "horovod-gloo",
        "interface": "eth0",
    }
    part |= {"hosts": {"a": [0], "b": [1]}}
    same, moved = (
        part | {"after_step": 15},
        part | {"backend": "horovod-mpi", "interface": "lo", "hosts": {"a": [0, 1]}},
    )
    assert load_run(
        write(tmp_path / "1", "allreduce", 2, change={"parts": [part, same]})
    ).is_finished
    problem = load_run(
        write(tmp_path / "2", "allreduce", 2, change={"parts": [part, moved]})
    ).problem
    assert problem == (
        "it was resumed in another way: backend horovod-gloo, then horovod-mpi; interface eth0, then lo; "
        "hosts a (0), b (1), then a (0 1)"
    )
