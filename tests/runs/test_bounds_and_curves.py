"""What a run's files say of its network and its loss."""

import pytest
from helpers.report_runs import BATCH, run
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.reporting.columns import COLUMNS
from hvdtrain.reporting.plots import MAX_POINTS, loss_curve
from hvdtrain.runs.network_bound import network_bound
from hvdtrain.runs.schema import Step


def over(hosts, gbit_s, **more):
    pairs = [{"from": a, "to": b, "gbit_s": gbit_s} for a in hosts for b in hosts if a != b]
    placed = {host: {"ranks": ranks} for host, ranks in hosts.items()}
    return {"hosts": placed, "network": {"pairs": pairs}, "parameters": 2_500_000} | more  # 10 MB


@pytest.mark.parametrize(
    "kind, hosts, crossing",
    [
        (("allreduce", 2), {"a": [0], "b": [1]}, 10),  # 2(n - 1)/n of the weights
        (("allreduce", 4), {"a": [0, 1], "b": [2, 3]}, 15),
        (("ddp", 4), {"a": [0], "b": [1], "c": [2], "d": [3]}, 15),
        (("ps-sync", 4, 1), {"s": [0], "a": [1, 2], "b": [3, 4]}, 40),  # n of them to the server
        (("ps-sync", 2, 2), {"a": [0, 2], "b": [1, 3]}, 10),  # beside the workers: (n + k - 2)/k
        (("ps-sync", 3, 3), {"a": [0, 3], "b": [1, 4], "c": [2, 5]}, 40 / 3),
        (("ps-async", 4, 1), {"s": [0], "a": [1, 2], "b": [3, 4]}, 40),
        (("ps-async", 3, 1), {"s": [0], "a": [1, 2], "b": [3]}, 30),
        (("ps-sync", 3, 2), {"s": [0], "t": [1], "a": [2, 3], "b": [4]}, 20),
        (
            ("ps-async", 3, 2),
            {"s": [0], "t": [1], "a": [2, 3], "b": [4]},
            15,
        ),  # half of the shares for the one on b
    ],
)
def test_a_network_bounds_samples_per_second_by_what_crosses_a_hosts_link(kind, hosts, crossing):
    bound = network_bound(run(*kind, change=over(hosts, 0.8)))  # 100 MB/s
    assert bound == pytest.approx(BATCH / (crossing / 100))


def test_without_a_measured_link_or_a_crossing_there_is_no_bound():
    two = {"a": [0], "b": [1]}
    assert (
        network_bound(run("allreduce", 2)) is None
        and COLUMNS["network_bound"].of(run("single")) is None
    )
    assert network_bound(run("allreduce", 2, change=over({"a": [0, 1], "b": []}, 0.8))) is None
    assert network_bound(run("allreduce", 2, change=over(two, 0.0))) is None
    assert network_bound(run("allreduce", 2, change=over(two, 0.8, compression="topk"))) is None
    beside = run("ps-async", 2, 1, change=over({"a": [0, 1], "b": [2]}, 0.8))
    assert network_bound(beside) is None  # the worker beside the server may have every share
    half = network_bound(run("allreduce", 2, change=over(two, 0.8, compression="fp16")))
    assert half == 2 * network_bound(run("allreduce", 2, change=over(two, 0.8)))


@given(
    st.lists(st.tuples(st.floats(0, 1e3), st.integers(0, 64), st.floats(0, 5)), max_size=300),
    st.integers(1, 4),
)
def test_a_loss_curve_keeps_the_mean_over_samples(rows, workers):
    ranks = {f"rank{r}": [] for r in range(workers)}
    for n, (time, samples, loss) in enumerate(rows):
        ranks[f"rank{n % workers}"].append(Step(time=time, samples=samples, loss=loss))
    seconds, losses = loss_curve(ranks)
    assert len(losses) <= MAX_POINTS and seconds == sorted(seconds)
    counted = [(samples, loss) for _, samples, loss in rows if samples]
    assert bool(losses) == bool(counted)
    if len(rows) <= workers and counted:  # one window
        mean = sum(samples * loss for samples, loss in counted) / sum(
            samples for samples, _ in counted
        )
        assert losses == [pytest.approx(mean)]
