"""Which runs are refused beside each other, and which differences are fair."""

import re

import pytest
from helpers.report_runs import run

from hvdtrain.errors import UsageError
from hvdtrain.report import fairness


@pytest.mark.parametrize(
    "field, other",
    [
        ("hvdtrain", "0.2.0"), ("model", "vgg16"), ("parameters", 1), ("width", 0.5), ("image_size", 64),
        ("dropout", 0.5), ("dataset_hash", "f00d" * 8),
        ("global_batch", 32), ("lr", 0.01), ("optimizer", "sgd"), ("momentum", 0.0),
        ("weight_decay", 0.1), ("device", "cuda"), ("deterministic", True),
        ("seed", 7), ("initial_weights", "others"),
    ],
)  # fmt: skip
def test_runs_that_differ_in_what_should_be_equal_are_refused(field, other):
    with pytest.raises(UsageError) as refused:
        fairness.check([run(), run("allreduce", 2), run("ps-sync", 2, 1, change={field: other})])
    said = str(refused.value)
    assert f": {field} differs" in said
    assert "in single-w1-s0-r1, allreduce-w2-s0-r1;" in said and "in ps-sync-w2-s1-r1 (" in said
    assert "\n" not in said


def test_workers_have_as_many_threads_and_one_process_may_have_a_machine():
    fairness.check([run(change={"threads_per_worker": 8}), run("allreduce", 2)])
    with pytest.raises(UsageError, match="threads_per_worker differs: '1' in allreduce-w2-s0-r1; '2' in ps-sync"):
        fairness.check([run("allreduce", 2), run("ps-sync", 2, 1, change={"threads_per_worker": 2})])


@pytest.mark.parametrize(
    "change, field",
    [
        ({"versions": {"python": "3.11.2", "torch": "2.14.0", "horovod": "0.28.1"}}, "versions.torch"),
        ({"versions": {"python": "3.11.2", "torch": "2.15.0"}}, "versions.horovod"),
        ({"hardware": {"cpu": "B", "cores": 2, "hosts": ["one"], "gpus": []}}, "hardware.cpu"),
        ({"hardware": {"cpu": "A CPU", "cores": 4, "hosts": ["one"], "gpus": []}}, "hardware.cores"),
    ],
)
def test_versions_and_hardware_are_compared_part_by_part(change, field):
    with pytest.raises(UsageError, match=f": {re.escape(field)} differs"):
        fairness.check([run(), run("allreduce", 2, change=change)])


def with_variables(**variables):
    return {"environment": {"OMP_NUM_THREADS": "1", "HOROVOD_CYCLE_TIME": "1"} | variables}


def test_variables_that_change_computing_are_equal_in_all_modes():
    with pytest.raises(UsageError, match="environment.computing.MALLOC_ARENA_MAX differs: 'not set' in single-w1"):
        fairness.check([run(), run("allreduce", 2, change=with_variables(MALLOC_ARENA_MAX="1"))])


def test_variables_of_messages_are_equal_in_runs_whose_messages_travel_alike():
    first, other = run("allreduce", 2), ("allreduce", 4)
    changed = with_variables(HOROVOD_CYCLE_TIME="7")
    fairness.check([run(), first, run("ddp", 2, change=changed)])  # another mode
    fairness.check([first, run(*other, change=changed | {"starter": "horovodrun"})])  # which sets others
    said = "environment.messages.HOROVOD_CYCLE_TIME differs among runs of the same mode, backend"
    with pytest.raises(UsageError, match=said):
        fairness.check([run(), first, run(*other, change=changed)])


def test_what_is_written_down_meanwhile_is_equal_in_all_runs_that_could():
    fairness.check([run(), run("ps-sync", 2, 1, change={"record": True})])  # single has no servers that could
    with pytest.raises(UsageError, match="record differs: 'yes' in ps-sync-w2-s1-r1; 'no' in ps-async-w2-s1-r1"):
        fairness.check([run(), run("ps-sync", 2, 1, change={"record": True}), run("ps-async", 2, 1)])
    for one, other in (("none", "all"), ("all", "100-150")):
        with pytest.raises(UsageError, match=f"trace differs: '{one}' in single-w1-s0-r1; '{other}' in allreduce-w2"):
            fairness.check([run(change={"trace": one}), run("allreduce", 2, change={"trace": other})])


def test_the_cores_that_processes_may_use_are_equal_in_runs_of_one_kind():
    def on(*usable):
        hosts = {f"host{n}": {"ranks": [n], "cores": 8, "cores_usable": own} for n, own in enumerate(usable)}
        hardware = {"cpu": "A CPU", "cores": 8, "cores_usable": usable[0], "hosts": list(hosts), "gpus": []}
        return {"hardware": hardware, "hosts": hosts}

    ring, again = run("allreduce", 2, change=on(2, 2)), ("allreduce", 2, 0, 2)
    fairness.check([run(change=on(2)), ring, run(*again, change=on(2, 2))])
    fairness.check([run(change=on(2)), ring, run(*again, change=on(None, None))])  # which nobody knows
    with pytest.raises(UsageError, match="hosts.cores_usable differs .*: '2, 2' in allreduce-w2-s0-r1; '1, 2' in"):
        fairness.check([run(change=on(2)), ring, run(*again, change=on(2, 1))])


def test_variables_of_servers_are_equal_in_runs_of_a_mode():
    def served(*environments):
        return {"server_environment": list(environments)}

    usual = {"OMP_NUM_THREADS": "1", "TP_X": "1"}
    one, two = run("ps-sync", 2, 1, change=served(usual)), ("ps-sync", 4, 2)
    fairness.check([run(), one, run(*two, change=served(usual, usual)), run("ps-sync", 3, 1)])
    for another, told in (
        (usual | {"OMP_NUM_THREADS": "4"}, "OMP_NUM_THREADS differs .*: '1' in ps-sync-w2-s1-r1; '1 or 4' in"),
        (usual | {"TP_Y": "1"}, "TP_Y differs .*: 'not set' in ps-sync-w2-s1-r1; '1 or not set'"),
    ):
        with pytest.raises(UsageError, match=f"environment.servers.{told}"):
            fairness.check([run(), one, run(*two, change=served(usual, another))])


def test_gpus_are_compared_by_model_and_only_where_they_are_used():
    def on(device, gpus):
        return {"device": device, "hardware": {"cpu": "A CPU", "cores": 2, "hosts": ["one"], "gpus": gpus}}

    fairness.check([run(change=on("cuda", ["H100"])), run("allreduce", 2, change=on("cuda", ["H100", "H100"]))])
    fairness.check([run(change=on("cpu", ["H100"])), run("allreduce", 2, change=on("cpu", []))])
    with pytest.raises(UsageError, match="hardware.gpus differs"):
        fairness.check([run(change=on("cuda", ["H100"])), run("allreduce", 2, change=on("cuda", ["K80"]))])


def test_networks_are_compared_where_runs_use_one():
    def over(interface):
        return {"interface": interface}

    ring = run("allreduce", 2, change=over("eth0"))
    fairness.check([run(change=over("lo")), ring, run("ps-sync", 2, 1, change=over("eth0"))])
    fairness.check([run(change=over("lo")), run("allreduce", 2, change=over("lo"))])
    fairness.check([run(), run("allreduce", 2, change=over("lo"))])  # a single process has none
    with pytest.raises(UsageError, match="interface differs: 'eth0' in allreduce-w2-s0-r1; 'ib0' in ps-sync-w2-s1-r1"):
        fairness.check([run(change=over("lo")), ring, run("ps-sync", 2, 1, change=over("ib0"))])


def test_the_target_and_the_samples_of_a_repeat_have_to_be_equal():
    with pytest.raises(UsageError, match="target_accuracy differs"):
        fairness.check([run(), run("allreduce", 2, target_accuracy=0.9)])
    with pytest.raises(UsageError, match="samples_digest differs among runs of the same repeat"):
        fairness.check([run(), run("allreduce", 2, samples_digest="others")])
    # More steps are more samples; another repeat has another order.
    fairness.check([run(), run("allreduce", 2, samples_digest="others", steps=31)])
    fairness.check([run(), run("allreduce", 2, repeat=2)])


@pytest.mark.parametrize("field, value", [("backend", "other"), ("starter", "other"), ("effective_lr", 0.5)])
def test_repeats_of_one_kind_are_the_same_measurement(field, value):
    other = {field: value}
    fairness.check([run(), run("allreduce", 2, change=other)])
    with pytest.raises(UsageError, match=f"{field} differs among runs of the same mode, workers and servers"):
        fairness.check([run("allreduce", 2), run("allreduce", 2, repeat=2, change=other)])


def test_what_is_compared_may_differ():
    found = fairness.check([run(), run("allreduce", 4), run("ps-async", 2, 2, change={"dataset": "./digits"})])
    fields = {equal.field for equal in found}
    assert not fields & {"mode", "workers", "servers", "dataset", "repeat", "command"}
    assert {"model", "lr", "samples_digest"} <= fields
    assert all(equal.why for equal in found)


def test_a_field_that_no_run_recorded_is_not_called_equal():
    nothing = {"initial_weights": None}
    found = fairness.check([run(change=nothing), run("allreduce", 2, change=nothing)])
    assert next(equal.value for equal in found if equal.field == "initial_weights") == "not recorded"
