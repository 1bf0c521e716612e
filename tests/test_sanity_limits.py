"""What has to hold whatever hvdtrain measures or foretells: limits that physics and arithmetic set.

What is planned is simulated, and what is compared is made up; what jobs count of their bytes is in
helpers/jobs.py.
"""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from helpers.report_runs import run
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hvdtrain.base import modes
from hvdtrain.planning.predict import simulate
from hvdtrain.planning.ring import FILLS
from hvdtrain.planning.scenario import Layer, Scenario, Stragglers
from hvdtrain.reporting import rule
from hvdtrain.reporting.answer import EITHER, RING_WINS, SERVERS_WIN, reach_answer
from hvdtrain.runs.network_bound import network_bound

MODES = [modes.declared(name) for name in modes.names()]
RINGS = [mode.name for mode in MODES if mode.family == modes.RING]
SERVED = [mode.name for mode in MODES if mode.family == modes.SERVERS]
LOCKSTEP = [mode.name for mode in MODES if mode.lockstep and mode.family != modes.ONE_MACHINE]
COMPUTING_S, LAYERS, PARAMETERS, BATCH = 0.3, 10, 2_500_000, 64
GBIT, PERFECT = 0.8, 1e7
COMPARED = {"allreduce": 0, "ps-sync": 1, "single": 0}
SPREAD = (1.0, 1.02, 0.98, 1.01, 0.99)


def scenario(mode, workers, servers=0, computing_s=COMPUTING_S, gbit=GBIT, **more):
    """A model of 10 MB in equal layers, whose messages cost the processors nothing."""
    layer = Layer(PARAMETERS // LAYERS, computing_s / LAYERS / 3, 2 * computing_s / LAYERS / 3)
    return Scenario(
        mode, (layer,) * LAYERS, workers, servers, bandwidth_gbit=gbit, latency_s=0.0, **more
    )


def equal(mode, workers, **more):
    """As many dedicated servers as workers, where the mode has servers."""
    return scenario(mode, workers, workers if mode in SERVED else 0, **more)


def bound_s(mode, workers, servers=0):
    """Seconds that a step takes at least by what is said of a run whose links were measured, each
    rank on its host.
    """
    hosts = {f"host{rank}": {"ranks": [rank]} for rank in range(workers + servers)}
    pairs = [{"from": a, "to": b, "gbit_s": GBIT} for a, b in itertools.permutations(hosts, 2)]
    measured = {"hosts": hosts, "network": {"pairs": pairs}, "parameters": PARAMETERS}
    return BATCH / network_bound(run(mode, workers, servers, change=measured))


# One thing decides


@pytest.mark.parametrize("workers", [2, 4, 16])
@pytest.mark.parametrize("mode", RINGS + SERVED)
def test_on_a_perfect_network_n_hosts_do_n_times_one(mode, workers):
    one = simulate(scenario("single", 1, gbit=PERFECT)).step_s
    assert one == pytest.approx(COMPUTING_S)
    assert workers * one / simulate(equal(mode, workers, gbit=PERFECT)).step_s == pytest.approx(
        workers, rel=0.02
    )


@pytest.mark.parametrize("mode", RINGS + SERVED)
def test_the_faster_the_network_the_nearer_is_a_step_to_its_computing(mode):
    beyond = [
        simulate(equal(mode, 4, gbit=gbit)).step_s - COMPUTING_S
        for gbit in (0.1, 1, 10, 100, PERFECT)
    ]
    assert all(after <= before + 1e-3 for before, after in itertools.pairwise(beyond))
    assert abs(beyond[-1]) < 0.01 * COMPUTING_S < beyond[0]


@pytest.mark.parametrize("workers", [2, 4, 16])
@pytest.mark.parametrize("mode", RINGS)
def test_a_ring_without_computing_takes_what_its_links_need(mode, workers):
    """What is planned and what a report says of a run's links are counted in two ways, and agree."""
    reached = FILLS[1] if mode == "sharded" else 1.0
    step_s = simulate(scenario(mode, workers, computing_s=1e-6)).step_s
    assert step_s * reached == pytest.approx(bound_s(mode, workers), rel=0.02)


@pytest.mark.parametrize(("workers", "servers"), [(2, 1), (2, 2), (4, 2), (8, 8)])
@pytest.mark.parametrize("mode", SERVED)
def test_servers_without_computing_take_what_their_links_need_and_less_than_three_times_that(
    mode, workers, servers
):
    """Of so few buckets all are pushed before the first answer, and connections share links
    unevenly.
    """
    step_s = simulate(scenario(mode, workers, servers, computing_s=1e-6)).step_s
    assert 0.97 <= step_s / bound_s(mode, workers, servers) < 3


@given(st.sampled_from(RINGS + SERVED), st.integers(2, 6), st.integers(1, 6), st.floats(0.01, 3.0))
def test_no_step_is_foretold_to_be_faster_than_its_links_and_its_computing(
    mode, workers, servers, computing_s
):
    servers = servers if mode in SERVED else 0
    step_s = simulate(scenario(mode, workers, servers, computing_s)).step_s
    assert step_s >= 0.97 * max(bound_s(mode, workers, servers), computing_s)
    everything_in_turn = computing_s + 2 * bound_s(mode, workers, servers) / FILLS[1]
    assert step_s <= everything_in_turn


# Bytes


@pytest.mark.parametrize("workers", [2, 3, 8])
@pytest.mark.parametrize("mode", RINGS)
def test_a_ring_sends_its_floor(mode, workers):
    """2(n-1)/n of the weights, a worker and step (Patarasuk and Yuan, 2009)."""
    floor = 2 * (workers - 1) / workers * 4 * PARAMETERS
    assert simulate(scenario(mode, workers)).bytes_sent == pytest.approx(floor)


@pytest.mark.parametrize(("workers", "servers"), [(1, 1), (3, 1), (4, 2)])
@pytest.mark.parametrize("mode", SERVED)
def test_a_worker_sends_its_gradients_once_and_servers_the_weights_to_each(mode, workers, servers):
    outcome = simulate(scenario(mode, workers, servers))
    assert outcome.bytes_sent == pytest.approx(4 * PARAMETERS)
    assert outcome.server_bytes_sent == pytest.approx(4 * PARAMETERS * workers / servers)


@pytest.mark.parametrize("hosts", [3, 4, 8, 16])
def test_on_as_many_hosts_no_synchronous_server_beats_a_ring_by_its_links_alone(hosts):
    """Servers go as min(n, k) of n + k = H hosts, at most H/2, and the ring as H²/(2(H−1)), which
    is more.
    """
    ring = hosts / bound_s("allreduce", hosts)
    for servers in range(1, hosts):
        assert (hosts - servers) / bound_s("ps-sync", hosts - servers, servers) <= ring


# More and less


@given(
    st.sampled_from(RINGS + SERVED),
    st.integers(2, 6),
    st.integers(1, 6),
    st.floats(0.02, 50.0),
    st.integers(0, 9),
)
def test_twice_the_bandwidth_never_slows_and_gains_at_most_twice(
    mode, workers, servers, gbit, seed
):
    job = scenario(
        mode, workers, servers if mode in SERVED else 0, gbit=gbit, jitter=0.05, seed=seed
    )
    once, twice = (simulate(replace(job, bandwidth_gbit=rate)).step_s for rate in (gbit, 2 * gbit))
    assert 0.98 <= once / twice <= 2.04  # links are shared as is drawn


@given(
    st.sampled_from(LOCKSTEP),
    st.lists(st.floats(1.0, 8.0), min_size=2, max_size=5),
    st.floats(0.1, 100.0),
)
def test_one_more_straggler_never_helps_lockstep_and_all_wait_for_the_slowest(mode, factors, gbit):
    steps = []
    for number in range(len(factors) + 1):
        slow = Stragglers(dict(enumerate(factors[:number])))
        steps.append(simulate(equal(mode, len(factors), gbit=gbit, slow=slow)).step_s)
    assert all(after >= 0.98 * before for before, after in itertools.pairwise(steps))
    assert steps[-1] >= 0.99 * max(factors) * COMPUTING_S


def test_asynchrony_does_no_more_than_its_workers_add_up_to():
    for factor in (1.0, 2.0, 8.0):
        step_s = simulate(
            equal("ps-async", 4, gbit=PERFECT, slow=Stragglers({1: factor})), steps=16
        ).step_s
        assert 4 / step_s <= 1.03 * (3 + 1 / factor) / COMPUTING_S


# Comparisons


def runs(speeds, factors=SPREAD, **more):
    """Five sprints of each of these modes, on two workers, at these samples/s."""
    made = []
    for number, (mode, speed) in enumerate(speeds.items()):
        workers, servers = (1 if mode == "single" else 2), COMPARED.get(mode, 0)
        own = [*factors[number % 5 :], *factors[: number % 5]]
        made += [
            run(mode, workers, servers, repeat, speed * factor, **more)
            for repeat, factor in enumerate(own, 1)
        ]
    return made


def ratios(answer):
    return {
        of["run"]: (of["samples_per_s"], of["least"], of["most"], of["n"])
        for of in answer.data["runs"]
    }


@given(
    st.permutations(runs({"allreduce": 130, "ps-sync": 100, "single": 50})), st.floats(1e-3, 1e3)
)
@settings(max_examples=20)
def test_neither_the_order_of_runs_nor_the_unit_of_speed_matters(shuffled, unit):
    usual = reach_answer(runs({"allreduce": 130, "ps-sync": 100, "single": 50}))
    assert reach_answer(shuffled).data == usual.data
    other = reach_answer(
        runs({"allreduce": 130 * unit, "ps-sync": 100 * unit, "single": 50 * unit})
    )
    assert (other.word, other.data["speed"]["n"]) == (usual.word, usual.data["speed"]["n"])
    for key in ("ratio", "ci_low", "ci_high"):
        assert other.data["speed"][key] == pytest.approx(usual.data["speed"][key])


@pytest.mark.parametrize("lead", [1.3, 1.04, 1.0])
def test_a_comparison_read_backwards_says_the_reverse(lead):
    """The same speeds under each other's labels."""
    forth = reach_answer(runs({"allreduce": 100 * lead, "ps-sync": 100, "single": 50}))
    made = runs({"ps-sync": 100 * lead, "allreduce": 100, "single": 50})
    back = reach_answer(made)
    reverse = {RING_WINS: SERVERS_WIN, SERVERS_WIN: RING_WINS}
    assert back.word == reverse.get(forth.word, forth.word)
    there, here = forth.data["speed"], back.data["speed"]
    assert there["ratio"] * here["ratio"] == pytest.approx(1)
    assert there["ci_low"] * here["ci_high"] == pytest.approx(1)


logs = st.lists(st.floats(-1, 1), min_size=5, max_size=12)


@given(st.lists(logs, min_size=4, max_size=4))
def test_the_best_of_two_against_the_best_of_two_is_the_reverse_from_the_other_side(each):
    n = min(map(len, each))
    a, b, c, d = (values[:n] for values in each)
    pairs = [[rule.Differences(np.subtract(one, other)) for other in (c, d)] for one in (a, b)]
    turned = [[rule.Differences(-pairs[i][j].values) for i in range(2)] for j in range(2)]
    forth, back = rule.best_over_best(pairs), rule.best_over_best(turned)
    assert (forth.mean, forth.low, forth.high) == pytest.approx((-back.mean, -back.high, -back.low))
    margin = math.log1p(0.05)
    limits = [
        forth.low,
        forth.high,
        abs(forth.mean) - margin,
        forth.low + margin,
        forth.high - margin,
    ]
    assume(all(abs(limit) > 1e-9 for limit in limits))
    reverse = {rule.AHEAD: rule.BEHIND, rule.BEHIND: rule.AHEAD}
    judged = int(rule.judge(forth, 0.05))
    assert int(rule.judge(back, 0.05)) == reverse.get(judged, judged)


def test_what_is_compared_with_itself_is_level():
    same = (1.0, 1.3, 0.7, 1.1, 0.9)
    made = [
        run(*kind, repeat, 100.0 * factor)
        for kind in (("allreduce", 2, 0), ("ps-sync", 2, 1))
        for repeat, factor in enumerate(same, 1)
    ]
    said = reach_answer(made)
    assert (said.word, said.data["speed"]["ratio"]) == (EITHER, 1.0)


@pytest.mark.parametrize("extra", ["ddp", "sharded"])
def test_a_contender_that_is_added_and_slower_changes_no_others_figures(extra):
    speeds = {"allreduce": 130, "ps-sync": 100, "single": 50}
    without, beside = reach_answer(runs(speeds)), reach_answer(runs(speeds | {extra: 60}))
    assert ratios(without).items() <= ratios(beside).items()
    assert len(ratios(beside)) == len(speeds) + 1
    assert (
        beside.word == without.word
        and beside.data["speed"]["ratio"] == without.data["speed"]["ratio"]
    )
    # Who has one more chance to be the best has to show a little more.
    assert math.isclose(beside.data["speed"]["ci_high"], without.data["speed"]["ci_high"])
    assert beside.data["speed"]["ci_low"] <= without.data["speed"]["ci_low"]
