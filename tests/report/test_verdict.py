"""The verdict: who is named a winner on what evidence, how often by chance, and what is written of it."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers.report_runs import run
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from hvdtrain.report import paired, plots
from hvdtrain.report.headline import reach_verdict
from hvdtrain.report.verdict import DEFAULT, Margins

SPREAD = (1.0, 1.02, 0.98, 1.01, 0.99)  # of five repeats


def repeats(*kind, speed=100.0, factors=SPREAD, processes=(), **more):
    """Runs of which nobody knows the processor time, unless it is given."""
    return [run(*kind, repeat=r, speed=speed * f, processes=list(processes), **more) for r, f in enumerate(factors, 1)]


def verdict(*groups, **margins):
    return reach_verdict([run for group in groups for run in group], Margins(**margins))


def jitter(seed, size=5, spread=0.03):
    return np.exp(np.random.default_rng(seed).normal(0, spread, size)).tolist()


# How often it is right


def found(n, effect, comparisons=10_000, spread=0.03):
    """In which share of made-up comparisons the first of a pair wins, and the second; each run varies by `spread`."""
    noise = np.random.default_rng(n).normal(0, spread, (2, comparisons, n))
    logs = math.log(effect) + noise[0] - noise[1]
    won, lost = (paired.leads(paired.estimate(sign * logs), DEFAULT.speed) for sign in (1, -1))
    return won.mean(), lost.mean()


@pytest.mark.parametrize("n", [5, 10])
@pytest.mark.parametrize("spread", [0.03, 0.3])  # where runs vary widely, the margin is no help
def test_without_a_true_difference_a_winner_is_named_in_at_most_one_in_twenty_comparisons(n, spread):
    assert sum(found(n, 1.0, spread=spread)) < 0.055


def test_a_true_lead_of_a_tenth_is_found_in_five_repeats_and_more_repeats_find_more():
    assert found(5, 1.1)[0] > 0.9
    assert found(10, 1.06)[0] > found(5, 1.06)[0] + 0.1


def test_fewer_than_five_repeats_name_nobody():
    assert [sum(found(n, 2.0)) for n in (2, 3, 4, 5)] == [0, 0, 0, 1]


def test_the_fastest_of_several_servers_has_no_better_chance_to_win_by_luck():
    servers = [("ps-sync", 2, 1), ("ps-ssp", 2, 1), ("ps-async", 2, 1)]
    wins = 0
    for seed in range(300):
        groups = [repeats("allreduce", 2, factors=jitter(seed, spread=0.3))]
        groups += [repeats(*kind, factors=jitter((seed, i), spread=0.3)) for i, kind in enumerate(servers)]
        wins += (verdict(*groups).data["winner"] or "").startswith("ps-")
    assert wins <= 300 * 0.05


@given(st.lists(st.floats(-3, 3), min_size=1, max_size=12), st.floats(0, 0.5))
def test_turning_a_pair_round_turns_its_ratio_round(logs, margin):
    one, other = paired.estimate(logs), paired.estimate([-log for log in logs])
    assert (one.mean, one.low, one.high) == (-other.mean, -other.high, -other.low)
    assert not (paired.leads(one, margin) and paired.leads(other, margin))


def test_the_repeats_that_are_said_to_be_needed_are_enough_and_one_less_is_not():
    logs = math.log(1.05) + np.array([-0.05, 0.0, 0.05])
    needed = paired.repeats_needed(paired.estimate(logs), 0.0)
    deviation = paired.estimate(logs).deviation

    def wins(n):  # with the same mean and deviation
        more = np.resize([-1.0, 1.0], n) if n % 2 == 0 else np.append(np.resize([-1.0, 1.0], n - 1), 0.0)
        return paired.leads(paired.estimate(math.log(1.05) + more * deviation / more.std(ddof=1)), 0.03)

    assert wins(needed) and not wins(needed - 1)
    assert paired.repeats_needed(paired.estimate([0.0, 1e-9]), 0.0) is not None
    assert paired.repeats_needed(paired.estimate([-1.0, 1.01]), 0.0) is None


# Who wins


def test_a_winner_has_five_repeats_an_interval_and_a_margin():
    said = verdict(
        repeats(), repeats("allreduce", 2, speed=190, factors=jitter(1)), repeats("ps-sync", 2, 1, speed=150)
    )
    assert said.data["winner"] == "allreduce ×2" and said.data["loser"] == "ps-sync ×2+1"
    assert said.headline.startswith("Ring all-reduce was faster: allreduce ×2 did 1.2")
    # The same without the report's code: Student's t at 4 degrees of freedom, 2.776.
    logs = [math.log(190 / 150 * a / b) for a, b in zip(jitter(1), SPREAD, strict=True)]
    half = 2.7764 * np.std(logs, ddof=1) / math.sqrt(5)
    low, high = (math.exp(np.mean(logs) + sign * half) for sign in (-1, 1))
    assert (said.data["ci_low"], said.data["ci_high"]) == pytest.approx((low, high), rel=1e-4)
    assert f"(95 % interval {low:.2f} to {high:.2f}, n = 5)" in said.headline
    assert "single 0.5" in said.sentences[0]


def test_below_the_margin_nobody_wins_and_close_speeds_are_called_level():
    close = verdict(repeats("allreduce", 2, speed=102), repeats("ps-sync", 2, 1))
    assert (close.data["winner"], close.data["outcome"]) == (None, "no winner")
    assert close.headline.startswith("Neither is faster by 3 %: allreduce ×2 did 1.02 times")
    assert verdict(repeats("allreduce", 2, speed=102), repeats("ps-sync", 2, 1), speed=0.01).data["winner"]


@pytest.mark.parametrize("n, said", [(1, "; 5 or more repeats in all would"), (3, "; about 5 repeats in all would")])
def test_few_repeats_are_not_yet_known(n, said):
    kinds = {(): 100, ("allreduce", 2): 150, ("ps-sync", 2, 1): 140}
    told = verdict(*(repeats(*kind, speed=speed, factors=SPREAD[:n]) for kind, speed in kinds.items()))
    assert (
        told.headline.startswith("It is not yet known who wins: allreduce ×2 did 1.07 times") and said in told.headline
    )
    assert (told.data["winner"], told.data["n"], told.data["repeats_needed"]) == (None, n, 5)
    assert all(
        (" interval" in sentence) == (n > 1) for sentence in told.sentences
    )  # none is promised that is not there


def test_the_parameter_server_can_win():
    said = verdict(repeats("allreduce", 2), repeats("ps-sync", 2, 1, speed=120))
    assert said.headline.startswith("The parameter server was faster: ps-sync ×2+1 did 1.20 times")


def test_a_mode_that_learns_less_cannot_win():
    ring, fast = repeats("allreduce", 2, accuracy=0.9), repeats("ps-async", 2, 1, speed=150, accuracy=0.1)
    said = verdict(ring, fast)
    assert (said.data["winner"], said.data["outcome"]) == (None, "no winner")
    assert "not within 1 point of the best: 0.100 beside 0.900 of allreduce ×2" in said.headline
    early = verdict(ring[:3], fast[:3])  # it takes five repeats to be sure of that too
    assert early.data["outcome"] == "not yet known"
    assert "not shown to be within 1 point of the best: 0.100 beside 0.900 of allreduce ×2;" in early.headline
    # With a server that learns as much, that one is compared, and the headline does not hide the other.
    said = verdict(ring, fast, repeats("ps-sync", 2, 1, speed=80, accuracy=0.9))
    assert (said.data["winner"], said.data["loser"]) == ("allreduce ×2", "ps-sync ×2+1")
    assert said.headline.endswith(" ps-async ×2+1 (less accurate) did more samples/s than both.")


def test_accuracy_has_to_be_shown_to_be_as_good_not_only_not_to_differ():
    ring = [run("allreduce", 2, repeat=r, speed=150.0 * f) for r, f in enumerate(SPREAD, 1)]
    accuracies = (0.98, 0.96, 1.0, 0.97, 0.99)  # as good on average, but it might be 2 points worse
    servers = [run("ps-sync", 2, 1, repeat=r, speed=200.0 * f, accuracy=a)
               for r, (f, a) in enumerate(zip(SPREAD, accuracies, strict=True), 1)]  # fmt: skip
    said = verdict(ring, servers)
    assert (said.data["winner"], said.data["outcome"]) == (None, "not yet known")
    assert said.data["repeats_needed"] > 5
    [state] = [row["state"] for row in said.data["quality"]["runs"] if row["run"] == said.data["faster"]]
    assert state == "not shown"
    assert verdict(ring, servers, accuracy=0.05).data["winner"] == "ps-sync ×2+1"


def test_runs_without_an_accuracy_do_not_win():
    said = verdict(repeats("allreduce", 2, speed=150, val_accuracy=None), repeats("ps-sync", 2, 1, val_accuracy=None))
    assert said.data["winner"] is None and said.headline.endswith("but its validation accuracy was not measured.")


def test_modes_without_a_common_repeat_are_told_what_they_lack():
    others = [run("ps-sync", 2, 1, repeat=r, speed=100.0) for r in (6, 7)]
    said = verdict(repeats("allreduce", 2), others)
    assert said.data["outcome"] == "nothing to compare" and "have no repeat in common" in said.sentences[0]
    assert verdict(repeats("allreduce", 2)).sentences == [
        "Add runs of another mode on as many workers, started alike on the same hosts."
    ]


# On what terms


def test_four_ring_workers_are_not_compared_with_two_workers_and_a_server():
    said = verdict(repeats("allreduce", 4, speed=200), repeats("ps-sync", 2, 1))
    assert (said.data["winner"], said.data["ratio"], said.data["outcome"]) == (None, None, "nothing to compare")
    assert "on equal terms: 200 samples/s with allreduce ×4, 100 samples/s with ps-sync ×2+1." in said.headline


def test_servers_are_compared_with_as_many_processes_too_and_the_headline_names_the_basis():
    said = verdict(repeats("allreduce", 4), repeats("ps-sync", 4, 4, speed=120), repeats("allreduce", 8, speed=150))
    assert said.headline.startswith("On equally many workers, the parameter server was faster: ps-sync ×4+4 did 1.20")
    assert "On equally many processes, servers included, ring all-reduce was faster: allreduce ×8" in said.headline
    assert (said.data["basis"], said.data["winner"]) == ("workers", "ps-sync ×4+4")
    assert said.data["equal_processes"]["winner"] == "allreduce ×8"
    agreeing = verdict(repeats("allreduce", 4), repeats("ps-sync", 4, 4, speed=120), repeats("allreduce", 8))
    assert agreeing.headline.startswith("The parameter server was faster: ps-sync ×4+4 did 1.20")
    assert agreeing.sentences[0].startswith("On equally many processes, servers included, the parameter server")


def test_equal_processes_alone_are_a_basis_and_named():
    said = verdict(repeats("allreduce", 3, speed=150), repeats("ps-sync", 2, 1))
    assert said.headline.startswith("On equally many processes, servers included, ring all-reduce was faster")
    assert (said.data["basis"], said.data["equal_processes"]) == ("processes", None)


def test_processor_time_of_all_processes_is_a_basis_where_it_was_recorded():
    def processes(*seconds):
        return {"processes": [{"rank": r, "cpu_s": s, "samples": 60 / len(seconds)} for r, s in enumerate(seconds)]}

    servers = repeats("ps-sync", 2, 1, speed=120, **processes(20.0, 10.0, 10.0))
    said = verdict(repeats("allreduce", 2, **processes(10.0, 10.0)), servers)
    assert said.data["winner"] == "ps-sync ×2+1"
    by_time = said.data["equal_processor_seconds"]
    assert (by_time["winner"], by_time["ratio"]) == ("allreduce ×2", pytest.approx(2.0))
    assert "By processor time of all processes, ring all-reduce was faster" in said.headline
    half = verdict(repeats("allreduce", 2, **processes(1.0)), repeats("ps-sync", 2, 1, speed=120))
    assert half.data["equal_processor_seconds"] is None


def test_ddp_is_named_as_itself_and_does_not_win_for_horovods_ring():
    said = verdict(repeats("allreduce", 2), repeats("ddp", 2, speed=150), repeats("ps-sync", 2, 1, speed=120))
    assert said.headline.startswith(
        "The parameter server was faster: ps-sync ×2+1 did 1.20 times the samples/s of allreduce"
    )
    assert said.headline.endswith(" ddp ×2 did more samples/s than both.")
    alone = verdict(repeats("ddp", 2, speed=150), repeats("ps-sync", 2, 1, speed=120))
    assert alone.headline.startswith("There is a winner: ddp ×2 did 1.25") and "Ring" not in alone.headline


@pytest.mark.parametrize(
    "change, are_compared",
    [
        ({"starter": "horovodrun"}, False),
        ({"hardware": {"cpu": "A CPU", "cores": 2, "hosts": ["one", "two"], "gpus": []}}, False),
        ({"hardware": {"cpu": "A CPU", "cores": 2, "hosts": ["two"], "gpus": []}}, False),
        ({}, True),
    ],
)
def test_runs_on_other_hosts_or_started_otherwise_are_not_compared(change, are_compared):
    said = verdict(repeats("allreduce", 2, speed=900), repeats("ps-sync", 2, 1, change=change))
    assert bool(said.data["winner"]) == are_compared == (said.data["ratio"] is not None)


def test_a_server_may_have_a_host_of_its_own():
    def on(*hosts):
        return {"hardware": {"cpu": "A CPU", "cores": 2, "hosts": hosts and list(hosts), "gpus": []}}

    ring = repeats("allreduce", 2, speed=150, change=on("a", "b"))
    assert verdict(ring, repeats("ps-sync", 2, 1, change=on("a", "b", "c"))).data["winner"]
    assert not verdict(ring, repeats("ps-sync", 2, 1, change=on("b", "c"))).data["winner"]


def test_only_repeats_that_both_have_are_compared():
    later = [run("ps-sync", 2, 1, repeat=r, speed=100) for r in (4, 5, 6, 7, 8)]
    assert verdict(repeats("allreduce", 2, speed=150), later).data["n"] == 2
    none = verdict(repeats("allreduce", 2, speed=150, factors=SPREAD[:2]), later)
    assert none.data["outcome"] == "nothing to compare"


# What else is said


def test_time_to_target_is_seconds_a_sample_times_samples():
    slow = [run("ps-sync", 2, 1, repeat=r, speed=100.0 * f, accuracy=0.96) for r, f in enumerate(SPREAD, 1)]
    said = verdict(repeats("allreduce", 2, speed=150, accuracy=0.96), slow)
    ratios = said.data["time_to_target"]["ratios"]
    assert ratios["seconds"]["ratio"] == pytest.approx(
        ratios["seconds_per_sample"]["ratio"] * ratios["samples"]["ratio"]
    )
    assert any("took 0.67 times as long as ps-sync ×2+1" in s and "1.00 times the samples" in s for s in said.sentences)
    slow[0] = replace(slow[0], summary=structs.replace(slow[0].summary, time_to_target_s=None))
    told = verdict(repeats("allreduce", 2, speed=150), slow)
    assert "0.95 validation accuracy was reached by 5 of 5 runs of allreduce ×2 and 4 of 5 runs of ps-sync ×2+1." in \
        told.sentences  # fmt: skip
    assert told.data["time_to_target"]["ratios"] == {}


def test_equal_accuracies_are_not_told_as_a_range():
    said = " ".join(verdict(repeats("allreduce", 2, accuracy=1.0), repeats("ps-sync", 2, 1, accuracy=1.0)).sentences)
    assert "1.000 to 1.000" not in said and "+0.0 to +0.0" not in said and "ps-sync ×2+1 +0.0, as good" in said


def test_every_key_of_verdict_json_is_described():
    described = Path(paired.__file__).with_name("README.md").read_text()
    said = verdict(repeats("allreduce", 2, speed=150), repeats("ps-sync", 2, 1))
    assert all(f"`{key}`" in described for key in said.data)
    assert set(said.data) == set(verdict(repeats()).data)  # where nothing is compared too


def test_no_plot_is_drawn_for_what_no_run_has():
    alone = [run("allreduce", 2, bytes_sent_per_step=None, processes=[], time_to_target_s=None, step_seconds={})]
    drawn, _ = plots.draw(alone)
    shown = {plot.name for plot in drawn}
    assert shown == {"loss", "accuracy"}
    drawn, _ = plots.draw([run("single"), *(run("allreduce", n, speed=90.0 * n) for n in (2, 4))])
    assert "samples/s" in next(plot.svg for plot in drawn if plot.name == "throughput")
