"""How sure predictions are: what they hang on, where nothing validates them, how intervals widen."""

import re
from importlib.metadata import version

import pytest
from planning.test_calibration import make
from planning.test_limits import asked, on_perfect_hosts

from hvdtrain.planning import best, predict
from hvdtrain.planning.scenario import Scenario


def place(made, hosts=4, modes=("allreduce", "ps-async"), **changed):
    on_hosts = made.on_hosts(made.cores_per_host)
    return best.Contest(on_hosts, Scenario("single", **changed), modes).place(hosts)


def test_an_answer_says_that_it_hangs_on_jitter_where_that_alone_makes_it():
    """Only workers that do not wait for each other are spared the slowest step of all."""
    busy = place(on_perfect_hosts(step_jitter=0.3), bandwidth_gbit=100.0)
    assert busy["p_servers"] > 0.8 and "jitter" in busy["hangs_on"]
    quiet = place(on_perfect_hosts(step_jitter=0.02), bandwidth_gbit=100.0)
    assert max(quiet["p_ring"], quiet["p_servers"]) < 0.8 and quiet["hangs_on"] == []


def test_an_answer_says_that_it_hangs_on_the_network_where_half_of_it_turns_it():
    """Ring and one machine are level at some bandwidth, above which the ring is faster."""
    found = [
        place(make(), 2, ["allreduce"], bandwidth_gbit=gbit) for gbit in (0.01, 2, 3, 4, 6, 10)
    ]
    assert found[0]["p_one_machine"] == 1 and found[0]["hangs_on"] == []
    first_sure = next(place for place in found if place["p_ring"] >= 0.8)
    assert "bandwidth" in first_sure["hangs_on"]


@pytest.mark.usefixtures("few_draws")
def test_a_map_has_no_probability_where_nothing_was_validated(tmp_path):
    words = ["--workers", "2,5", "--servers", "1", "--bandwidth", "10mbit,100mbit,10gbit"]
    said, found = asked(tmp_path, make(), *words)
    marks = {
        (place["workers"], place["bandwidth_gbit"]): place["not_validated"]
        for place in found["map"]
    }
    assert marks[2, 0.01] == ["less than 0.05 Gbit/s"]
    assert marks[2, 0.1] == []
    assert marks[5, 0.1] == ["more than 4 hosts"]
    assert marks[2, 10.0] == ["more than 1 Gbit/s"]
    assert marks[5, 10.0] == ["more than 4 hosts", "more than 1 Gbit/s"]
    # Of the places only the one that was validated has a percentage.
    assert re.findall(r"(RING|SERVERS|ONE MACHINE) \d+%", said) == ["ONE MACHINE"]
    assert "were hardly ever compared with measurements" in said
    often = "random:4x:p=0.1"
    for slow, mode, marked in (
        (often, "ps-async", True),
        (often, "ps-sync", False),
        ("1:4x", "ps-async", False),
    ):
        words = ["--workers", "2", "--servers", "1", "--bandwidth", "1gbit", "--modes", mode]
        _, found = asked(tmp_path, make(), *words, "--slow", slow)
        reasons = ["random stragglers in asynchronous modes"] if marked else []
        assert found["map"][0]["not_validated"] == reasons
    assert place(make(device="cuda"))["not_validated"] == ["GPUs"]


def width(made, **changed):
    row = predict.row(made, Scenario("ps-sync", workers=2, servers=1, **changed))
    return row["step_s_high"] / row["step_s_low"]


def test_intervals_widen_with_each_doubling_away_from_what_was_measured():
    at_0_3 = make(bandwidth_gbit=0.3)
    widths = [width(at_0_3, bandwidth_gbit=gbit) for gbit in (0.3, 1.0, 10.0, 100.0)]
    assert widths == sorted(widths) and widths[-1] > 1.2 * widths[0]
    jobs = [Scenario("allreduce", workers=2, bandwidth_gbit=gbit) for gbit in (0.15, 0.6, 2.4)]
    found = [predict.doublings_of_bandwidth(at_0_3, job) for job in jobs]
    assert found[:2] == [(1, 0), (1, 0)]
    # Up to 1 Gbit/s predictions were compared with measurements.
    assert found[2] == pytest.approx((1.737, 1.263), abs=1e-3)
    without_runs = [predict.doublings_of_bandwidth(make(), job) for job in jobs]
    assert without_runs == [(0, 0), (0, 0), (0, pytest.approx(1.263, abs=1e-3))]
    crowded = Scenario("allreduce", workers=8, workers_per_host=4)
    assert predict.doublings_beyond(make(), crowded) == (1, 1 + 2)
    assert predict.doublings_beyond(make(workers_per_host=4), crowded) == (1, 1)


def test_an_interval_widens_twice_as_much_where_nothing_was_ever_compared():
    """From two workers to four, and from four to eight."""
    rows = [
        predict.row(make(), Scenario("allreduce", workers=n, latency_s=0.0), is_drawn=False)
        for n in (2, 4, 8)
    ]
    near, further, furthest = (row["beyond"] for row in rows)
    assert near == 0 and furthest - further == pytest.approx(2 * further)


def test_a_known_bias_of_a_mode_is_corrected_and_told(tmp_path):
    job = Scenario("allreduce", workers=2)
    plain = predict.row(make(), job)["step_s"]
    biased = make(bias={"allreduce": 1.1})
    assert predict.row(biased, job)["step_s"] == pytest.approx(plain / 1.1)
    speeds = [place(made, 2, ["allreduce"])["ring_samples_per_s"] for made in (make(), biased)]
    assert speeds[1] == pytest.approx(1.1 * speeds[0])
    said, _ = asked(tmp_path, biased, "--workers", "2", servers=False)
    assert "allreduce: the steps of its runs were predicted 1.10 times too long" in said


@pytest.mark.usefixtures("few_draws")
def test_what_a_calibration_was_made_beside_is_told(tmp_path):
    """With each probability, and below the table and the map."""
    about = {"others_share": 0.4, "jitter": "guessed", "hvdtrain": "9.9"}
    made = make(made=about, step_jitter=0.03)
    words = ["--workers", "2", "--bandwidth", "50mbit"]
    said, found = asked(tmp_path, made, *words)
    assert "The machine did other work: 40% of it, while it was calibrated" in said
    assert f"made with hvdtrain 9.9, not {version('hvdtrain')}" in said
    assert "Fewer than eight steps were undisturbed: jitter is taken to be 0.03" in said
    assert "ONE MACHINE 100% (other work)" in said and found["map"][0]["others_share"] == 0.4
    today = make(made={"hvdtrain": version("hvdtrain")})
    quiet = asked(tmp_path, today, *words)[0]
    assert "other work" not in quiet and "calibrate again" not in quiet
    assert "made with hvdtrain 0.1.0, not" in asked(tmp_path, make(), *words)[0]
