"""Runs whose processes share the cores of one host: made-up runs, which a simulation with known costs
took.
"""

from dataclasses import replace

import pytest
from helpers import report_runs
from helpers.report_runs import BATCH
from msgspec import structs

from hvdtrain.planning.calibration import Quantity
from hvdtrain.planning.check import measured_step_s
from hvdtrain.planning.equal_layers import of_equal_layers
from hvdtrain.planning.from_runs import (
    MessageCosts,
    message_seconds,
    scenario_of,
    transport_name,
    with_factors,
)
from hvdtrain.planning.one_host import computing_of_all, computing_s, in_run, with_computing
from hvdtrain.planning.predict import simulate
from hvdtrain.runs.read import load_run

# What a worker computes in a step, and what messages cost over what they are guessed to.
COMPUTING_S = 0.06
CHEAPER = 0.4
JOBS = [("allreduce", 0), ("ddp", 0), ("sharded", 0), ("ps-sync", 1), ("ps-async", 1)]
any_job = pytest.mark.parametrize("mode, servers", JOBS)


def write(
    root, mode, servers, repeat, cores, speed=100.0, device="cpu", local_steps=1, **summarised
):
    """Four workers of one thread on one host."""
    ranks = list(range(4 + servers))
    change = {
        "parameters": 2_500_000,
        "hosts": {"host0": {"ranks": ranks, "cores": cores, "cores_usable": cores}},
        "hardware": {"cpu": "A CPU", "cores": cores, "cores_usable": cores, "hosts": ["host0"]},
        "device": device,
        "options": {"local_steps": local_steps} if local_steps > 1 else {},
    }
    folder = report_runs.write(root, mode, 4, servers, repeat, speed, change, **summarised)
    return load_run(folder)


def truth(run):
    """The calibration with the costs that a run had."""
    computing = with_computing(of_equal_layers(run), Quantity.exactly(COMPUTING_S))
    name = transport_name(run)
    known = computing.transports.get(name, computing.transports["allreduce"])
    computing = replace(computing, transports=computing.transports | {name: known})
    return with_factors(computing, name, [MessageCosts(CHEAPER, CHEAPER, CHEAPER)])


def simulated_run(
    root,
    mode,
    servers,
    cores,
    is_recorded=True,
    longer=1.0,
    repeat=1,
    local_steps=1,
    others_cores=0.0,
):
    """A run that took as long as the simulation says, or so many times as long, while other work
    kept some cores busy.
    """
    draft = write(root / "draft", mode, servers, repeat, cores, local_steps=local_steps)
    job = scenario_of(truth(draft), draft)
    job = replace(job, cores=cores - others_cores)
    simulated = simulate(job)
    each, at_workers, at_servers = message_seconds(job)
    of_workers = (each / 2 if servers else each) + at_workers
    # Per step: the local one, and the part of the exchange's.
    updated = 0.0 if servers else 0.25 if mode == "sharded" else 1.0
    local = 1.0 if local_steps > 1 else 0.0
    optimizer_s = job.optimizer_s * (local + updated / local_steps)
    worker_s = job.computing_s + optimizer_s + of_workers / 4 / local_steps
    server_s = (job.server_optimizer_s + each / 2 + at_servers) / local_steps
    step_s = longer * simulated.step_s
    wall_s = simulated.step_s - simulated.exposed_comm_s - job.fixed_s - optimizer_s
    steps = report_runs.PER_EPOCH * report_runs.EPOCHS
    cpu_s = [server_s] * servers + [worker_s] * 4
    return write(
        root,
        mode,
        servers,
        repeat,
        cores,
        speed=BATCH / step_s,
        local_steps=local_steps,
        step_seconds={
            "data": job.fixed_s,
            "forward": wall_s / 3,
            "backward": wall_s * 2 / 3,
            "comm": simulated.exposed_comm_s + step_s - simulated.step_s,
            "optimizer": optimizer_s,
        },
        computing_cpu_seconds=COMPUTING_S if is_recorded else None,
        processes=[
            {"rank": rank, "role": "worker", "host": "host0", "cpu_s": steps * spent_s}
            for rank, spent_s in enumerate(cpu_s)
        ],
        load={"host0": {"cores": cores, "others_cores": others_cores, "stolen_share": 0.0}},
    )


def computed_s(run):
    """What a worker is taken to compute in a step."""
    return computing_s(in_run(run).calibration)


def with_wall_time(run):
    """The simulated step over the measured one if computing takes its wall time."""
    calibration = of_equal_layers(run)
    return simulate(scenario_of(calibration, run)).step_s / measured_step_s(run)


@any_job
def test_a_run_on_a_crowded_host_is_reproduced(tmp_path, mode, servers):
    """Four workers share two cores, so that computing takes twice as long as it needs them."""
    run = simulated_run(tmp_path, mode, servers, cores=2)
    assert in_run(run).step.computing_s > 1.7 * COMPUTING_S
    assert with_wall_time(run) > 1.7
    assert computed_s(run) == pytest.approx(COMPUTING_S)
    assert in_run(run).missed == pytest.approx(0, abs=0.06)


@any_job
def test_processor_time_of_processes_tells_nearly_as_much(tmp_path, mode, servers):
    """Runs of older versions did not record the processor time of computing."""
    run = simulated_run(tmp_path, mode, servers, cores=2, is_recorded=False)
    assert 0.99 * COMPUTING_S < computed_s(run) < 1.25 * COMPUTING_S
    assert in_run(run).missed == pytest.approx(0, abs=0.1)


@pytest.mark.parametrize("local_steps", [2, 5])
@pytest.mark.parametrize("mode, servers", [job for job in JOBS if job[0] != "sharded"])
def test_of_local_steps_a_rounds_messages_are_beside_a_rounds_computing(
    tmp_path, mode, servers, local_steps
):
    """The gradients of a round cost what those of a step do, and not a part of it."""
    run = simulated_run(tmp_path, mode, servers, cores=2, local_steps=local_steps)
    costs = in_run(run).calibration.transports[transport_name(run)]
    true_costs = truth(run).transports[transport_name(run)]
    for name in ("message_us", "send_s_per_gb", "server_send_s_per_gb"):
        assert costs[name].value == pytest.approx(true_costs[name].value, rel=0.02)
    assert computed_s(run) == pytest.approx(COMPUTING_S)
    assert in_run(run).missed == pytest.approx(0, abs=0.03)


@any_job
def test_cores_that_other_work_had_are_not_shared(tmp_path, mode, servers):
    """A run beside a busy process is as much longer, and computes no longer for it."""
    alone = simulated_run(tmp_path / "alone", mode, servers, cores=2)
    beside = simulated_run(tmp_path / "beside", mode, servers, cores=2, others_cores=0.7)
    assert measured_step_s(beside) > 1.2 * measured_step_s(alone)
    assert computed_s(beside) == pytest.approx(COMPUTING_S)
    assert in_run(beside).missed == pytest.approx(0, abs=0.06)


@any_job
def test_with_cores_enough_wall_time_is_what_computing_takes(tmp_path, mode, servers):
    run = simulated_run(tmp_path, mode, servers, cores=16)
    assert computed_s(run) == pytest.approx(in_run(run).step.computing_s, rel=0.06)
    assert in_run(run).missed == pytest.approx(0, abs=0.06)


def test_of_several_threads_wall_time_counts_unless_the_host_is_crowded(tmp_path):
    """A main thread that waits for its helpers takes no processor time."""
    found = []
    for cores in (2, 16):
        run = simulated_run(tmp_path / str(cores), "ps-sync", 1, cores)
        manifest = structs.replace(run.manifest, threads_per_worker=2)
        run = replace(run, manifest=manifest)
        found.append(computed_s(run) / in_run(run).step.computing_s)
    assert found[0] < 0.6
    assert found[1] == pytest.approx(1)


def test_messages_wait_where_a_step_is_longer_than_its_processor_time(tmp_path):
    """They wait no longer than they work: what is beyond that remains missed."""
    for longer, is_explained in ((1.03, True), (2.0, False)):
        run = simulated_run(tmp_path / str(longer), "ddp", 0, cores=16, longer=longer)
        of_run = in_run(run)
        waits = of_run.calibration.transports["ddp"]["local_waits"].value
        assert 0 < waits <= 1
        assert of_run.waited > 0
        assert (abs(of_run.missed) < 0.06) == is_explained


def test_a_gpu_computes_as_long_as_it_does(tmp_path):
    """It shares no cores."""
    run = write(tmp_path, "allreduce", 0, 1, cores=2, device="cuda:0", computing_cpu_seconds=1e-3)
    assert computed_s(run) == pytest.approx(in_run(run).step.computing_s)
    assert in_run(run).waited == 0


def test_runs_without_processor_time_count_as_they_are(tmp_path):
    run = write(tmp_path, "allreduce", 0, 1, cores=2, processes=[])
    assert computed_s(run) == pytest.approx(in_run(run).step.computing_s)
    assert in_run(run).waited == 0


def test_what_several_runs_tell_of_computing(tmp_path):
    """Recorded figures have a range. Of upper bounds the least counts."""
    recorded = [
        write(tmp_path / "recorded", "ddp", 0, repeat, cores=2, computing_cpu_seconds=seconds)
        for repeat, seconds in enumerate((0.1, 0.12, 0.15), 1)
    ]
    batch = BATCH // 4
    found = computing_of_all([in_run(run) for run in recorded], batch, 1)
    assert [found.low, found.value, found.high] == pytest.approx([0.1, 0.12, 0.15])
    doubled = computing_of_all([in_run(run) for run in recorded], 2 * batch, 1)
    assert doubled.value == pytest.approx(0.24)
    bounds = [*recorded, write(tmp_path / "old", "ddp", 0, 1, cores=2)]
    least = computing_of_all([in_run(run) for run in bounds], batch, 1)
    assert least.value == least.high == pytest.approx(0.1)
