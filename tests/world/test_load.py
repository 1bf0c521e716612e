"""What else a host did beside a run."""

import time

import pytest

from hvdtrain.base.world.load import HostLoad, beside_others, by_host, spent_by_host


def load(busy_s, machine="", stolen_s=0.0, cores=4):
    return {
        "machine": machine,
        "cores": cores,
        "seconds": 10.0,
        "busy_s": busy_s,
        "stolen_s": stolen_s,
    }


def test_this_host_tells_how_busy_it_was():
    watch = HostLoad()
    until = time.monotonic() + 0.3
    while time.monotonic() < until:
        pass
    found = watch.since()
    assert 0.3 <= found["seconds"] < 20 and 0.1 < found["busy_s"] <= found["cores"] * (
        found["seconds"] + 0.1
    )
    assert found["machine"] and found["stolen_s"] >= 0


def test_what_the_jobs_own_processes_took_is_not_others():
    rows = [{"host": "a"}, {"host": "a"}, {"host": "b"}]
    spent = spent_by_host(rows, [6.0, 9.0, 11.0])
    found = by_host({"a": load(25.0), "b": load(11.2, stolen_s=4.0)}, spent)
    assert found["a"] == {"cores": 4, "others_cores": 1.0, "stolen_share": 0.0}
    assert found["b"]["others_cores"] == pytest.approx(0.02) and found["b"]["stolen_share"] == 0.1
    assert beside_others(found) == [
        "a had 1.0 of 4 cores busy otherwise",
        "b had 10% of its time taken by other guests",
    ]


def test_containers_of_one_machine_do_not_take_each_other_for_others():
    found = by_host(
        {"node1": load(20.0, "m"), "node2": load(20.4, "m")}, {"node1": 12.0, "node2": 8.0}
    )
    assert [host["others_cores"] for host in found.values()] == [0.0, 0.04]
    assert beside_others(found) == []


@pytest.mark.parametrize(
    "hosts", [{}, {"a": None}, {"a": {"others_cores": "many"}}, {"a": {"others_cores": 3.0}}]
)
def test_files_of_other_programs_mark_nothing(hosts):
    assert beside_others(hosts) == []
