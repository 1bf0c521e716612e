"""What a slow worker costs, from runs of known speeds: the plot, theory, and from when on asynchrony wins."""

import pytest
from helpers.report_runs import run

from hvdtrain.explain.pictures import pictures
from hvdtrain.explain.slow_factors import expected_speeds, expected_staleness, factors_of
from hvdtrain.report.comparisons import split_into_comparisons

SPEED = 100.0
WAITS = {"none": SPEED, "1:2x": 60.0, "1:4x": 30.0}  # samples/s


def slowed(asked, mode="allreduce", speed=SPEED, servers=0, repeat=1, **change):
    return run(mode, 4, servers, repeat, speed, change={"slow": {"asked": asked, "achieved": {}}} | change)


def grid(asynchronous):
    runs = [slowed(asked, speed=speed) for asked, speed in WAITS.items()]
    return runs + [slowed(asked, "ps-async", speed, 1) for asked, speed in asynchronous.items()]


@pytest.mark.parametrize(
    ("asynchronous", "said"),
    [
        ({"none": 70.0, "1:2x": 65.0, "1:4x": 60.0}, "in samples/s, from a factor of about 1.8 on"),
        ({"none": 110.0, "1:2x": 90.0, "1:4x": 80.0}, "in samples/s, at every factor from 1 to 4"),
        ({"none": 20.0, "1:2x": 20.0, "1:4x": 20.0}, "in samples/s, at no factor that was tried"),
    ],
)
def test_it_is_said_from_when_on_asynchrony_wins(asynchronous, said):
    [plot] = pictures(grid(asynchronous))
    assert plot.name == "slow" and f"ps-async ×4+1 is ahead of all that wait for every worker, {said}." in plot.caption
    assert "2×" in plot.svg and "seconds to an accuracy of 0.95" in plot.svg


def test_variants_of_a_mode_are_named_and_drawn_apart():
    runs = [
        slowed(asked, "ps-sync", speed, 1, backup=backup) for asked, speed in WAITS.items() for backup in (0, 1)
    ]  # fmt: skip
    runs += [slowed(asked, "ps-ssp", 50.0, 1, staleness_bound=bound) for asked in WAITS for bound in (1, 2, 8)]
    kinds = {r.kind.label for r in runs}
    assert kinds == {
        "ps-sync ×4+1", "ps-sync ×4+1, backup 1", "ps-ssp ×4+1", "ps-ssp ×4+1, bound 1", "ps-ssp ×4+1, bound 8",
    }  # fmt: skip
    assert {len(comparison.runs) for comparison in split_into_comparisons(runs)} == {5}
    [plot] = pictures(runs)
    assert all(kind in plot.svg for kind in kinds)


def test_theory():
    """Computing is 0.69 of a step of these runs: 0.3 forward, 0.39 backward."""
    slow = 1 / (1 + 3 * 0.69)
    ring, servers = slowed("none"), slowed("none", "ps-async", servers=1)
    assert expected_speeds(ring.kind, {1.0: [ring]}, [4])[4] == pytest.approx(SPEED * slow, rel=0.01)
    assert expected_speeds(servers.kind, {1.0: [servers]}, [4])[4] == pytest.approx(SPEED * (3 + slow) / 4, rel=0.01)
    backed = slowed("none", "ps-sync", servers=1, backup=1)
    assert expected_speeds(backed.kind, {1.0: [backed]}, [4])[4] == pytest.approx(SPEED)
    rates = [0.25, 1, 1, 1]
    means = [expected_staleness(servers.kind, 0.25, not worker) for worker in range(4)]
    assert sum(r * mean for r, mean in zip(rates, means, strict=True)) / sum(rates) == pytest.approx(3)  # n - 1


@pytest.mark.parametrize(
    ("asked", "factors"),
    [
        ("none", (1, 1)), ("0:2.5x", (2.5, 1)), ("all:4x", (1, 4)), ("all:4x+1:2x", (2, 4)), ("1:4x@3s-9s", None),
        ("random:6x:p=0.1", None), ("all:4x+random:6x:p=0.1", None), ("0:2x+1:4x", None), ("fast", None),
    ],
)  # fmt: skip
def test_one_worker_that_is_slow_all_the_time_has_a_factor_beside_that_of_all(asked, factors):
    assert factors_of(slowed(asked)) == factors


def test_what_all_workers_are_slowed_by_is_no_slow_worker():
    of_all = [
        slowed(f"all:4x+{asked}".removesuffix("+none"), mode, speed, servers)
        for mode, servers in (("allreduce", 0), ("ps-async", 1)) for asked, speed in WAITS.items()
    ]  # fmt: skip
    [plot] = pictures([*of_all, slowed("1:2x"), slowed("none")])
    assert "All workers computed 4 times as long as they can" in plot.caption and "at every factor" not in plot.caption
