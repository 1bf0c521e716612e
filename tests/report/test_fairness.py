"""Which runs are refused beside each other, and which differences are fair."""

import pytest
from helpers.report_runs import run

from hvdtrain.base.errors import UsageError
from hvdtrain.reporting import fairness


def single(**change):
    return run(change=change)


def ring(repeat=1, workers=2, **change):
    return run("allreduce", workers, 0, repeat, change=change)


def served(mode="ps-sync", workers=2, servers=1, **change):
    return run(mode, workers, servers, change=change)


def hardware(**more):
    return {"hardware": {"cpu": "A CPU", "cores": 2, "hosts": ["one"], "gpus": []} | more}


def usable(*cores):
    """Hosts whose processes may use so many cores."""
    hosts = {
        f"host{n}": {"ranks": [n], "cores": 8, "cores_usable": own} for n, own in enumerate(cores)
    }
    return {"hosts": hosts} | hardware(cores=8, hosts=list(hosts))


def variables(**more):
    return {"environment": {"OMP_NUM_THREADS": "1", "HOROVOD_CYCLE_TIME": "1"} | more}


def of_servers(*environments):
    return {
        "server_environment": [{"OMP_NUM_THREADS": "1", "TP_X": "1"} | own for own in environments]
    }


@pytest.mark.parametrize(
    "field, other",
    [
        ("hvdtrain", "0.1.0"),
        ("parameters", 1),
        ("width", 0.5),
        ("image_size", 64),
        ("dropout", 0.5),
        ("dataset_hash", "f00d" * 8),
        ("lr", 0.01),
        ("optimizer", "sgd"),
        ("momentum", 0.0),
        ("weight_decay", 0.1),
        ("device", "cuda"),
        ("deterministic", True),
        ("seed", 7),
        ("initial_weights", "others"),
    ],
)
def test_runs_that_differ_in_what_should_be_equal_are_refused(field, other):
    with pytest.raises(UsageError) as refused:
        fairness.check([single(), ring(), served(**{field: other})])
    said = str(refused.value)
    assert f": {field} differs" in said
    assert "in single-w1-s0-r1, allreduce-w2-s0-r1;" in said and "in ps-sync-w2-s1-r1 (" in said
    assert "\n" not in said


TORCH = {"python": "3.11.2", "torch": "2.14.0", "horovod": "0.28.1"}


@pytest.mark.parametrize(
    "runs, said",
    [
        (
            [ring(), ring(2, threads_per_worker=2)],
            "threads_per_worker differs .*: '1' in allreduce-w2-s0-r1; '2'",
        ),
        ([single(), ring(versions=TORCH)], ": versions.torch differs"),
        (
            [single(), ring(versions={"python": "3.11.2", "torch": "2.15.0"})],
            ": versions.horovod differs",
        ),
        ([single(), ring(**hardware(cpu="B"))], ": hardware.cpu differs"),
        ([single(), ring(**hardware(cores=4))], ": hardware.cores differs"),
        (
            [single(), ring(**variables(MALLOC_ARENA_MAX="1"))],
            "environment.computing.MALLOC_ARENA_MAX differs: 'not set' in single-w1",
        ),
        (
            [ring(), ring(workers=4, **variables(HOROVOD_CYCLE_TIME="7"))],
            "environment.messages.HOROVOD_CYCLE_TIME differs among runs of the same mode, backend",
        ),
        (
            [
                served(**of_servers({})),
                served(workers=4, servers=2, **of_servers({}, {"OMP_NUM_THREADS": "4"})),
            ],
            "environment.servers.OMP_NUM_THREADS differs .*: '1' in ps-sync-w2-s1-r1; '1 or 4' in",
        ),
        (
            [served(record=True), served("ps-async")],
            "record differs: 'yes' in ps-sync-w2-s1-r1; 'no' in ps-async-w2",
        ),
        (
            [single(), ring(trace="all")],
            "trace differs: 'none' in single-w1-s0-r1; 'all' in allreduce-w2",
        ),
        (
            [ring(**usable(2, 2)), ring(2, **usable(2, 1))],
            "hosts.cores_usable differs .*: '2, 2' in allreduce-w2-s0-r1; '1, 2' in",
        ),
        (
            [
                single(device="cuda", **hardware(gpus=["H100"])),
                ring(device="cuda", **hardware(gpus=["K80"])),
            ],
            "hardware.gpus differs",
        ),
        ([single(), ring(device="cuda", **hardware(gpus=["H100"]))], ": device differs"),
        (
            [ring(interface="eth0"), served(interface="ib0")],
            "interface differs: 'eth0' in allreduce-w2-s0-r1; 'ib0'",
        ),
        ([single(), run("allreduce", 2, target_accuracy=0.9)], "target_accuracy differs"),
        (
            [single(), run("allreduce", 2, samples_digest="x")],
            "samples_digest differs among runs of the same repeat",
        ),
        *(
            (
                [ring(), ring(2, **{field: value})],
                f"{field} differs among runs of the same mode, workers",
            )
            for field, value in (("backend", "other"), ("starter", "other"), ("effective_lr", 0.5))
        ),
    ],
)
def test_each_field_is_compared_in_the_runs_that_it_says_something_of(runs, said):
    with pytest.raises(UsageError, match=said):
        fairness.check(runs)


@pytest.mark.parametrize(
    "runs",
    [
        [
            single(threads_per_worker=8),
            ring(),
            served(threads_per_worker=2),
        ],  # each uses all cores of its hosts
        [ring(), run("ddp", 2, change=variables(HOROVOD_CYCLE_TIME="7"))],
        [
            ring(),
            ring(workers=4, starter="horovodrun", **variables(HOROVOD_CYCLE_TIME="7")),
        ],  # which sets others
        [single(), served(record=True)],  # there are no servers that could
        [
            single(**usable(2)),
            ring(**usable(2, 2)),
            ring(2, **usable(None, None)),
        ],  # which nobody knows
        [
            served(**of_servers({})),
            served(workers=4, servers=2, **of_servers({}, {})),
            served(workers=3),
        ],
        [
            single(device="cuda", **hardware(gpus=["H100"])),
            ring(device="cuda", **hardware(gpus=["H100", "H100"])),
        ],
        [single(**hardware(gpus=["H100"])), ring()],  # which the CPU does not use
        [
            single(device="cuda", **hardware(gpus=["H100"])),
            ring(**hardware(gpus=["H100"])),
            served(),
        ],  # one for nobody else
        [single(interface="lo"), ring(interface="eth0"), served(interface="eth0")],
        [
            single(),
            run("allreduce", 2, samples_digest="others", steps=31),
        ],  # more steps are more samples
        [single(), ring(2)],  # another repeat has another order
        [single(), ring(backend="other")],
    ],
)
def test_other_differences_are_fair(runs):
    assert fairness.check(runs)


def test_what_is_compared_may_differ():
    equal = fairness.check(
        [single(), ring(workers=4), served("ps-async", 2, 2, dataset="./digits")]
    )
    fields = {of.field for of in equal}
    assert not fields & {"mode", "workers", "servers", "dataset", "repeat", "command"}
    assert {"model", "lr", "samples_digest"} <= fields
    assert all(of.why for of in equal)


def test_a_field_that_no_run_recorded_is_not_called_equal():
    equal = fairness.check([single(initial_weights=None), ring(initial_weights=None)])
    assert next(of.value for of in equal if of.field == "initial_weights") == "not recorded"
