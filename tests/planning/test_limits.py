"""What holds of every cluster, whatever was measured: limits, and that options are obeyed or
refused.
"""

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from planning.test_calibration import make
from planning.test_simulation import layers, wire_s

from hvdtrain.base.errors import UsageError
from hvdtrain.planning import best, predict
from hvdtrain.planning.bounds import least_step_s
from hvdtrain.planning.calibrate import measured_host
from hvdtrain.planning.calibration import Quantity
from hvdtrain.planning.command import plan as command
from hvdtrain.planning.layout import COARSE, ROUGH
from hvdtrain.planning.scenario import Scenario, Stragglers, Transport

FREE = {
    "message_us": 0,
    "operation_us": 0,
    "send_s_per_gb": 0,
    "receive_s_per_gb": 0,
    "server_send_s_per_gb": 0,
    "server_receive_s_per_gb": 0,
    "efficiency": 1,
}
FREE_MESSAGES = {name: Quantity.exactly(value) for name, value in FREE.items()}
EXAMPLES = settings(max_examples=15, deadline=None)
# Parameters of a model of 20 MB: each bucket of each worker's step costs time to simulate.
SMALL = (1_000_000, 2_000_000, 2_000_000)
MODES = st.sampled_from(["allreduce", "ddp", "sharded", "ps-sync", "ps-async", "ps-ssp"])


def on_perfect_hosts(**changed):
    """A calibration of seconds of computing on a host of sixteen cores, where messages cost nothing."""
    transports = {name: FREE_MESSAGES for name in make().transports}
    changed = {"cores_per_host": 16, "transports": transports, "step_jitter": 0.0} | changed
    return make(optimizer_ms_per_mb=Quantity.exactly(0.0), **changed).slower(20)


def asked(tmp_path, made, *words, servers=True):
    """What `plan predict` prints, in one piece, and what its --json has."""
    made.save(tmp_path / "cal.json")
    modes = "allreduce,ps-sync" if servers else "allreduce"
    words = ["predict", str(tmp_path / "cal.json"), "--modes", modes, *words]
    if "--bandwidth" not in words:
        words += ["--bandwidth", "10tbit"]
    done = CliRunner().invoke(command, [*words, "--json", str(tmp_path / "rows.json")])
    if done.exit_code:
        assert isinstance(done.exception, UsageError | SystemExit), done.exception
        return f"{done.exception} {done.output}", {}
    return " ".join(done.output.split()), json.loads((tmp_path / "rows.json").read_text())


def speeds(found):
    return {(row["mode"], row["workers"]): row["samples_per_s"] for row in found["rows"]}


@pytest.mark.usefixtures("few_draws")
@pytest.mark.parametrize("threads", [1, 4, 16])
def test_where_messages_are_free_n_machines_do_n_times_one(tmp_path, threads):
    """A worker has all cores of its host, however many it was measured with."""
    words = ["--workers", "1,4,16", "--servers", "equal", "--placement", "shared"]
    _, found = asked(tmp_path, on_perfect_hosts(threads_per_worker=threads), *words)
    of = speeds(found)
    for workers in (4, 16):
        for mode in ("allreduce", "ps-sync"):
            assert of[mode, workers] == pytest.approx(workers * of["single", 1], rel=0.05)
    assert all(place["p_one_machine"] < 0.01 for place in found["map"])


@pytest.mark.usefixtures("few_draws")
def test_a_worker_alone_is_one_machine(tmp_path):
    for threads in (1, 16):
        _, found = asked(tmp_path, make(cores_per_host=16, threads_per_worker=threads), "-n", "1")
        of = speeds(found)
        assert of["allreduce", 1] == pytest.approx(of["single", 1], rel=0.02)


@pytest.mark.usefixtures("few_draws")
def test_more_cores_and_threads_compute_faster_and_the_scaling_is_told(tmp_path):
    words = ["--workers", "4", "--bandwidth", "1gbit"]
    said, few = asked(tmp_path, make(), *words)
    assert "Computing was measured with 1 thread; with 2" in said
    said, many = asked(tmp_path, make(), *words, "--cores", "32")
    assert "with 32 a worker is taken to be 27 times as fast (16 to 32)" in said
    assert "Messages were measured on a host of 2 cores; on 32" in said
    _, some = asked(tmp_path, make(), *words, "--cores", "32", "--threads", "4")
    one = [speeds(found)["single", 1] for found in (few, some, many)]
    ring = [speeds(found)["allreduce", 4] for found in (few, some, many)]
    assert one[2] > 10 * one[0] and one[2] == pytest.approx(one[1], rel=0.01)
    assert ring[0] < ring[1] < ring[2]
    said, _ = asked(tmp_path, make(cores_per_host=1), *words)
    assert "measured" not in said


def test_what_was_measured_of_more_cores_is_believed_as_far_as_it_was_measured():
    made = make(cores_per_host=4, machine_speedup=Quantity(2.5, 2.4, 2.6))
    assert made.on_hosts(4).speedup_of_machine(1) == Quantity.exactly(1.0)
    assert made.speedup_of_threads(4) == Quantity(2.5, 2.4, 2.6)
    halves = made.on_hosts(4, 2)
    assert (halves.threads_per_worker, halves.workers_per_host) == (2, 2)
    assert halves.layers[0].forward_ms.value == pytest.approx(6 / 1.5)
    assert halves.speedup_of_machine(2).value == pytest.approx(2.5 / 1.5)
    all_cores = make(cores_per_host=4, threads_per_worker=4, of_more_cores=Quantity(0.5, 0.4, 0.6))
    assert all_cores.speedup_of_threads(1).value == pytest.approx(1 / 2.5)
    far = all_cores.speedup_of_threads(16)
    assert (far.value, far.low, far.high) == pytest.approx((3.55, 2.2, 4.0))


@pytest.mark.usefixtures("few_draws")
def test_workers_of_a_host_share_its_cores(tmp_path):
    made = on_perfect_hosts(threads_per_worker=16)
    _, alone = asked(tmp_path, made, "--workers", "4")
    said, sharing = asked(tmp_path, made, "--workers", "4", "--gpus-per-host", "4")
    rows = {row["mode"]: row for row in sharing["rows"]}
    assert rows["allreduce"]["hosts"] == 1
    assert speeds(sharing)["allreduce", 4] < 0.5 * speeds(alone)["allreduce", 4]
    said, _ = asked(tmp_path, made, "--workers", "32", "--gpus-per-host", "32")
    assert "32 threads of 32 workers share 16 cores of a host" in said


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--threads", "32"], "--threads 32: a host has 16 cores"),
        (["--hosts", "4", "--workers", "4"], "--workers is what --hosts finds out"),
        (["--hosts", "4", "--servers", "4"], "--servers is what --hosts finds out"),
        (["--modes", "allreduce", "--servers", "2"], "--servers changes nothing: no mode of"),
        (["--modes", "ddp", "--wire", "zmq"], "--wire changes nothing"),
        (["--modes", "ddp", "--placement", "shared"], "--placement changes nothing"),
        (["--staleness", "4"], "--staleness changes nothing: ps-ssp is not in --modes"),
    ],
)
def test_options_that_would_change_nothing_are_refused(tmp_path, words, says):
    assert says in asked(tmp_path, on_perfect_hosts(), *words)[0]


def test_a_bandwidth_of_no_runs_is_refused_before_anything_is_measured(tmp_path):
    words = ["calibrate", "--bandwidth", "1gbit", "--out", str(tmp_path / "cal.json")]
    done = CliRunner().invoke(command, words)
    assert "is for the hosts of --from" in str(done.exception)
    words = ["calibrate", "--threads", "5000", "--out", str(tmp_path / "cal.json")]
    assert CliRunner().invoke(command, words).exit_code == 2


def test_threads_of_gpus_are_refused(tmp_path):
    said, _ = asked(tmp_path, make(device="cuda"), "--threads", "2")
    assert "--threads changes nothing: this calibration's workers compute on GPUs" in said


def test_a_file_in_which_one_machine_is_faster_than_all_its_cores_is_refused(tmp_path):
    edited = make(threads_per_worker=32, cores_per_host=32, machine_speedup=Quantity(1.8, 1.8, 1.8))
    said, _ = asked(tmp_path, edited)
    assert "machine_speedup is 1.8, though a worker's 32 threads are all cores of its host" in said


def test_a_worker_is_measured_with_its_share_of_the_cores_that_are_here(monkeypatch):
    monkeypatch.setattr("hvdtrain.planning.calibrate.usable_cores", lambda: 8.0)
    assert measured_host(None, None, 1).threads == 8
    assert measured_host(None, None, 4).threads == 2
    assert measured_host(32, None, 1).threads == 8
    assert measured_host(4, None, 1).threads == 4
    with pytest.raises(UsageError, match="8 cores are here, on which so many cannot be measured"):
        measured_host(32, 32, 1)


def test_gpus_of_a_host_add_up_before_their_ring_crosses_the_network():
    """Over two hosts of eight NCCL sends the weights once, Gloo, along the hosts, 1.9 times."""
    job = Scenario(
        "allreduce", layers(1e-6), 16, workers_per_host=8, cores=100, latency_s=0.0, threads=1
    )
    gloo = predict.simulate(job).step_s
    nccl = predict.simulate(replace(job, on_processor=False)).step_s
    once = job.bytes / job.wire_rate
    assert gloo == pytest.approx(2 * 15 / 16 * once, rel=0.02)
    assert nccl == pytest.approx(once, rel=0.02)


@pytest.mark.usefixtures("few_draws")
def test_one_machine_is_all_gpus_of_a_host(tmp_path):
    made = on_perfect_hosts(device="cuda")
    _, found = asked(tmp_path, made, "--workers", "8", "--gpus-per-host", "4")
    of = speeds(found)
    assert of["allreduce", 8] == pytest.approx(2 * of["single", 1], rel=0.1)


def jobs(most_workers=12):
    """A job of a drawn mode and size, of 25 MB or less."""
    return st.builds(
        lambda mode, workers, servers, shared, computing, megabytes: Scenario(
            mode,
            layers(computing, [megabytes * 50_000 * part for part in (1, 2, 2)]),
            workers,
            servers if mode.startswith("ps") else 0,
            placement="shared" if shared else "dedicated",
            cores=4,
            latency_s=0.0,
        ),
        MODES,
        st.integers(2, most_workers),
        st.integers(1, 4),
        st.booleans(),
        st.sampled_from([1e-6, 0.02, 0.2]),
        st.sampled_from([2, 20]),
    )


COSTS = Transport(50, 300, 0.4, 0.4, 0.4, 0.4, efficiency=0.94)


@EXAMPLES
@given(jobs(), st.floats(0.05, 20), st.floats(1.3, 50), st.booleans())
def test_no_bandwidth_makes_anything_slower(job, gbit, times, is_costly):
    job = replace(job, transport=COSTS if is_costly else Transport(), bandwidth_gbit=gbit)
    slower = predict.simulate(job)
    faster = predict.simulate(replace(job, bandwidth_gbit=gbit * times))
    assert faster.step_s <= 1.02 * slower.step_s


@EXAMPLES
@given(MODES, st.integers(1, 7), st.floats(0, 0.1))
def test_a_host_more_never_makes_computing_slower(mode, hosts, jitter):
    """Where messages are free, one worker more does not take samples away from the others."""
    servers = 1 if mode.startswith("ps") else 0
    model = layers(0.3, SMALL)
    few, more = (
        Scenario(mode, model, n, servers, bandwidth_gbit=1e7, latency_s=0.0, jitter=jitter)
        for n in (hosts, hosts + 1)
    )
    rates = [job.workers / predict.simulate(job, steps=20).step_s for job in (few, more)]
    assert rates[1] >= rates[0]


@EXAMPLES
@given(jobs(), st.floats(0.05, 20))
def test_half_the_weights_are_as_twice_the_rate(job, gbit):
    """But for buckets, of which there are fewer, and Horovod's cycle."""
    job = replace(job, bandwidth_gbit=gbit)
    halves = tuple(replace(layer, parameters=layer.parameters // 2) for layer in job.layers)
    half = predict.simulate(replace(job, layers=halves)).step_s
    twice = predict.simulate(replace(job, bandwidth_gbit=2 * gbit)).step_s
    assert half == pytest.approx(twice, rel=0.25, abs=3e-3)


@EXAMPLES
@given(st.integers(2, 40), st.sampled_from(["allreduce", "ddp"]), st.floats(0.1, 100))
def test_a_ring_reaches_its_floor(workers, mode, gbit):
    job = Scenario(mode, layers(1e-6), workers, bandwidth_gbit=gbit, latency_s=0.0)
    assert predict.simulate(job).step_s == pytest.approx(wire_s(job), rel=0.02, abs=2e-3)


@EXAMPLES
@given(st.integers(1, 12), st.integers(1, 12), st.booleans(), st.floats(0.1, 100))
def test_servers_are_never_below_their_floor_and_asynchronous_ones_near_it(
    workers, servers, is_shared, gbit
):
    if is_shared:
        workers, servers = max(2, workers, servers), min(workers, servers)
    job = Scenario(
        "ps-async",
        layers(1e-6),
        workers,
        servers,
        bandwidth_gbit=gbit,
        latency_s=0.0,
        placement="shared" if is_shared else "dedicated",
    )
    if is_shared and workers != servers:
        # In the asynchronous modes a worker on a server's host takes more steps.
        job = replace(job, mode="ps-sync")
    step_s = predict.simulate(job).step_s
    assert step_s >= 0.98 * wire_s(job)
    if not is_shared:
        assert step_s <= 1.3 * wire_s(job)


@EXAMPLES
@given(
    jobs(),
    st.floats(0.05, 20),
    st.sampled_from([ROUGH, COARSE]),
    st.booleans(),
    st.sampled_from([1, 4]),
    st.sampled_from([1, 2]),
    st.sampled_from([Stragglers(), Stragglers({0: 3.0}), Stragglers({}, 4.0, 0.3)]),
)
def test_no_simulated_step_is_shorter_than_what_is_said_without_simulating_it(
    job, gbit, detail, is_costly, local_steps, workers_per_host, slow
):
    job = replace(
        job,
        bandwidth_gbit=gbit,
        transport=COSTS if is_costly else Transport(),
        local_steps=local_steps,
        workers_per_host=workers_per_host,
        jitter=0.1,
        slow=slow,
    )
    assert predict.simulate(job, detail=detail).step_s >= least_step_s(job)


@pytest.mark.parametrize("gbit", [0.1, 10.0])
def test_a_search_that_leaves_jobs_out_finds_the_same(monkeypatch, gbit):
    template = Scenario("single", bandwidth_gbit=gbit)
    contest = best.Contest(on_perfect_hosts(), template, ["allreduce", "ps-sync", "ps-async"])
    found = contest._fastest_of_each(8, best.SAME_PRICE, COARSE)
    monkeypatch.setattr(best, "least_step_s", lambda job: 0.0)
    assert contest._fastest_of_each(8, best.SAME_PRICE, COARSE) == found
