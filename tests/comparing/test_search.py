"""The search before a comparison: equal numbers of settings, who is left out, and what is written
down.
"""

import json
import random

import pytest
from click.testing import CliRunner
from helpers.foretold import BESIDE_TESTS
from helpers.forked_jobs import forks_first
from helpers.jobs import hvdtrain, short_pilots

from hvdtrain.base.config.run_config import RunConfig
from hvdtrain.base.errors import UsageError
from hvdtrain.comparing.command import compare
from hvdtrain.comparing.comparison_state import ComparisonState, conducted, tried_lines
from hvdtrain.comparing.grid import Axes, plan
from hvdtrain.comparing.search import SPRINT_S, Search
from hvdtrain.comparing.selection import contenders_to_repeat
from hvdtrain.comparing.settings import on_equal_terms, sides, widen, with_fewer_threads
from hvdtrain.launch.hosts import parse_hosts

OPTIONS = {
    "wire": ("rpc", "zmq"),
    "bucket_mb": (4.0,),
    "wait_for": ("auto",),
    "ring_transport": ("auto",),
}
DEFAULT = "single,allreduce,ddp,ps-sync,ps-async"
CONFIG = RunConfig(mode="single", threads=1)
RING = ["allreduce-w2", "ddp-w2", "allreduce-w2-gloo", "sharded-w2"]
SERVERS = ["ps-sync-w2-s1-rpc", "ps-sync-w2-s1-zmq", "ps-async-w2-s1-rpc", "ps-async-w2-s1-zmq"]


def settings(modes=DEFAULT, given=(), most=None, hosts="", config=CONFIG, **options):
    """The contenders of a comparison; most: of a long search."""
    listed, axes = (
        parse_hosts(hosts) if hosts else [],
        Axes(modes.split(","), options=OPTIONS | options),
    )

    def plan_of(axes):
        return plan(config, axes, listed)

    return on_equal_terms(plan_of(axes), widen(axes, plan_of, listed, given), most)


def names(contenders):
    return {side: [run.contender for run in of_side] for side, of_side in sides(contenders).items()}


def search(contenders, folder, speeds, noise=0.0, seed=0, **more):
    """The contenders that stay where they have these samples/s, or 100; and all sprints by their
    place.
    """
    folder.mkdir(exist_ok=True)
    state, draw, made = ComparisonState(folder), random.Random(seed), []

    def sprint(runs, place):
        made.extend((place, run.contender) for run in runs)
        found = {}
        for run in runs:
            found[run.contender] = speeds.get(run.contender, 100.0) * draw.gauss(1, noise)
            state.note_sprint(run, found[run.contender], SPRINT_S)
            state.note_finished(run, found[run.contender], 5.0)
        return found

    drawn = [run.with_options(seed=seed) for run in contenders]
    lines = Search(**more).run(drawn, state, sprint)
    return [run.contender for run in contenders_to_repeat(drawn, state)], made, lines


# As many of each


def test_the_first_command_tries_four_settings_of_each_side():
    assert names(settings()) == {"ring-w2": RING, "servers-w2": SERVERS}


@pytest.mark.parametrize(
    "asked",
    [
        {"modes": "allreduce,ps-sync"},
        {"modes": "allreduce,ddp,sharded,ps-async", "given": ["modes", "wire"], "wire": ("zmq",)},
        {"modes": "allreduce,ps-sync,ps-ssp,ps-async", "given": ["modes"]},
        {"modes": "allreduce,ps-sync", "most": 9},
        {"modes": "allreduce,ddp,ps-sync", "hosts": "a:1,b:1"},
    ],
)
def test_each_side_has_as_many_settings_and_all_that_were_asked_for(asked):
    both = names(settings(**asked))
    numbers = {len(of_side) for of_side in both.values()}
    assert len(both) == 2 and len(numbers) == 1
    found = [name for of_side in both.values() for name in of_side]
    assert len(set(found)) == len(found)
    assert {name.split("-w2")[0] for name in found} >= set(asked["modes"].split(","))


def test_what_is_given_is_not_varied_also_where_it_is_the_default():
    given = "--modes allreduce,ps-sync --wire zmq --servers 1 --wait-for auto --ring-transport auto --bucket-mb 4"
    for more in ([], ["--tune", "10m"]):
        planned = CliRunner().invoke(compare, [*more, *given.split(), "--dry-run"]).output
        assert "tried first" not in planned and "sharded" not in planned
    over_hosts = names(settings("allreduce,ps-sync", ["modes"], 50, "a:1,b:1"))
    assert not [name for name in over_hosts["ring-w2"] if "gloo" in name]  # the launcher decides


def test_one_side_alone_has_the_settings_that_were_asked_for_and_in_a_long_search_more():
    assert names(settings("single,ps-sync")) == {"servers-w2": SERVERS[:2]}
    assert len(names(settings("single,ps-sync", most=50))["servers-w2"]) == 2 * 2 * 3 * 2


@pytest.mark.parametrize(
    ("workers", "sizes"), [(2, {1.0, 4.0, 16.0}), (4, {1.0, 4.0}), (8, {1.0, 4.0}), (16, {4.0})]
)
def test_buckets_that_servers_of_many_workers_do_not_have_are_not_tried(workers, sizes):
    axes = Axes(["ps-sync"], workers=(workers,), options=OPTIONS)

    def plan_of(axes):
        return plan(CONFIG, axes)

    tried = on_equal_terms(plan_of(axes), widen(axes, plan_of, [], ()), 50)
    assert {run.config.bucket_mb for run in tried} == sizes


def test_what_this_job_cannot_have_is_not_varied():
    def plan_of(axes):
        runs = plan(CONFIG, axes)
        if any(run.config.mode == "sharded" or run.config.wait_for == "layer" for run in runs):
            raise UsageError("this model cannot be trained so")
        return runs

    wide = widen(Axes(["allreduce", "ps-sync"], options=OPTIONS), plan_of)
    assert {run.config.ring_transport for run in wide if run.config.mode == "allreduce"} == {
        "auto",
        "gloo",
    }
    assert not [
        run for run in wide if run.config.mode == "sharded" or run.config.wait_for == "layer"
    ]


# Who is left out


def test_both_sides_sprint_as_often_in_shuffled_order_and_who_is_slower_is_left_out(tmp_path):
    speeds = {
        "sharded-w2": 60,
        "ps-sync-w2-s1-rpc": 70,
        "ps-async-w2-s1-zmq": 80,
        "allreduce-w2-gloo": 60,
    }
    staying, made, lines = search(settings(), tmp_path, speeds, 0.01)
    assert staying == [
        "single-w1",
        "allreduce-w2",
        "ddp-w2",
        "ps-sync-w2-s1-zmq",
        "ps-async-w2-s1-rpc",
    ]
    first, second = (
        [name for place, name in made if place == f"pilot/{number}"] for number in (1, 2)
    )
    assert (
        sorted(first) == sorted(second) == sorted([*RING, *SERVERS])
        and first != second
        and len(made) == 16
    )
    assert (
        lines[0]
        == "tried: 4 settings of ring-w2 and 4 settings of servers-w2, in 2 rounds of sprints"
    )
    assert any(
        line.startswith("left out: sharded-w2: 0.6") and "in 2 sprints of each" in line
        for line in lines
    )
    conduct = conducted([tmp_path])
    assert {family: (of.settings, of.seconds) for family, of in conduct.tried.items()} == {
        "ring": (4, 8.0),
        "servers": (4, 8.0),
    }
    assert {of.run for of in conduct.left_out} == set(speeds) and all(
        "0." in of.why for of in conduct.left_out
    )
    [(title, (rings, _))] = tried_lines(tmp_path).items()
    assert title == "What was tried: ring-w2, servers-w2" and "; sharded-w2 " in rings


def test_over_hosts_one_round_is_enough_where_one_machine_is_plainly_ahead(tmp_path):
    contenders = settings(hosts="a:1,b:1")
    speeds = {"single-w1": 1000.0, "ps-sync-w2-s1-rpc": 30.0, "ps-sync-w2-s1-zmq": 40.0}
    staying, made, lines = search(contenders, tmp_path, speeds, 0.01)
    tried = [name for _, name in made]
    assert {place for place, _ in made} == {"pilot/1"} and "single-w1" in tried
    assert len(set(tried)) == len(tried) >= 9 and "in 1 round of sprints" in lines[0]
    # One setting of each mode, but for the mode that is far behind the best of its side.
    assert {name.split("-w2")[0] for name in staying} == {
        "single-w1",
        "allreduce",
        "ddp",
        "ps-async",
    }
    reasons = [left.why for left in conducted([tmp_path]).left_out]
    assert len(reasons) == len(contenders) - len(staying)
    assert all("in one sprint of each" in why for why in reasons)


def test_over_hosts_only_one_machine_sprints_on_where_it_is_plainly_ahead(tmp_path):
    contenders = machine_of(2, DEFAULT, hosts="a:1,b:1")
    contenders += with_fewer_threads(contenders)
    speeds = {"single-w1": 1000.0, "single-w1-t1": 900.0}
    staying, made, _ = search(contenders, tmp_path, speeds, 0.01)
    second_round = {name for place, name in made if place == "pilot/2"}
    assert second_round == {"single-w1", "single-w1-t1"}
    assert "single-w1" in staying and len(made) == len(contenders) + 2


@pytest.mark.parametrize("speed_of_machine", [190.0, 60.0])
def test_over_hosts_there_are_two_rounds_where_one_machine_is_not_plainly_ahead(
    speed_of_machine, tmp_path
):
    speeds = {"single-w1": speed_of_machine}
    _, made, lines = search(settings(hosts="a:1,b:1"), tmp_path, speeds, 0.01)
    assert [name for _, name in made].count("single-w1") == 1
    assert {place for place, _ in made} == {"pilot/1", "pilot/2"}
    assert "in 2 rounds of sprints" in lines[0]


def test_a_setting_that_is_as_fast_is_called_slower_in_at_most_five_of_a_hundred_searches(tmp_path):
    contenders, searches = settings(), 300
    called_slower = dict.fromkeys([*RING, *SERVERS], 0)
    chosen_without = ("cannot be told apart", "nobody asked for it")
    for seed in range(searches):
        _, _, lines = search(contenders, tmp_path / str(seed), {}, 0.05, seed)
        for line in lines[1:]:
            if not any(words in line for words in chosen_without):
                called_slower[line.split(": ")[1]] += 1
    assert max(called_slower.values()) <= searches * 0.05 + 3 * (searches * 0.05 * 0.95) ** 0.5


def test_one_setting_of_each_mode_stays_and_of_what_nobody_asked_for_the_fastest_alone(tmp_path):
    modes, contenders = ["single", "allreduce", "ddp", "ps-sync", "ps-async"], settings()
    for seed in range(20):
        staying, _, _ = search(contenders, tmp_path / str(seed), {}, 0.05, seed)
        asked = [name for name in staying if not name.startswith("sharded")]
        assert sorted(name.split("-w")[0] for name in asked) == sorted(modes)
    staying, _, _ = search(contenders, tmp_path / "fast", {"sharded-w2": 140}, 0.02)
    assert "sharded-w2" in staying


def test_a_mode_that_was_asked_for_stays_unless_it_is_far_behind(tmp_path):
    staying, _, _ = search(
        settings(), tmp_path / "a", {"ps-sync-w2-s1-rpc": 75, "ps-sync-w2-s1-zmq": 80}, 0.005
    )
    assert "ps-sync-w2-s1-zmq" in staying and "ps-sync-w2-s1-rpc" not in staying
    staying, _, _ = search(
        settings(), tmp_path / "b", {"ps-sync-w2-s1-rpc": 45, "ps-sync-w2-s1-zmq": 50}, 0.005
    )
    assert not [name for name in staying if "ps-sync" in name]


def test_several_values_that_were_asked_for_are_contenders(tmp_path):
    speeds = {"ps-sync-w2-s1-rpc": 80}
    staying, _, _ = search(settings(given=["wire"]), tmp_path, speeds, 0.005, compared={"wire"})
    assert {"ps-sync-w2-s1-rpc", "ps-sync-w2-s1-zmq"} <= set(staying)


def test_of_whole_runs_one_setting_of_each_mode_is_trained(tmp_path):
    contenders = settings("allreduce,ps-sync,ps-async", ["modes"])
    staying, _, lines = search(
        contenders, tmp_path, {"ps-async-w2-s1-rpc": 40}, 0.02, before_whole_runs=True
    )
    assert [name.split("-w2")[0] for name in staying] == ["allreduce", "ps-sync", "ps-async"]
    assert any("cannot be told apart" in line for line in lines)


def test_a_contender_that_is_added_later_is_tried_beside_those_that_stayed(tmp_path):
    first = settings("single,allreduce,ps-sync", ["modes"])
    stayed, made, _ = search(first, tmp_path, {"ps-sync-w2-s1-rpc": 60}, 0.01)
    assert "ps-sync-w2-s1-rpc" not in stayed
    again, made, _ = search(first, tmp_path, {}, 0.01)
    assert (again, made) == (stayed, [])
    later = settings("single,allreduce,ps-sync,ps-async", ["modes"])
    _, made, _ = search(later, tmp_path, {}, 0.01)
    state = ComparisonState(tmp_path)
    everybody = [run for of_side in sides(later).values() for run in of_side]
    left_out_before = {run.contender for run in first if state.left_out(run)}
    beside = {run.contender for run in everybody} - left_out_before
    assert {name for place, name in made if place == made[0][0]} == beside
    assert "pilot/1" not in dict(made)
    assert ComparisonState(tmp_path).left_out(
        next(run for run in later if run.contender == "ps-sync-w2-s1-rpc")
    )


def test_a_side_whose_sprints_all_fail_is_tried_again_later(tmp_path):
    contenders = settings("allreduce,ps-sync", ["modes"])
    state = ComparisonState(tmp_path)

    def sprint(runs, place):
        return {run.contender: 0 if run.config.servers else 100.0 for run in runs}

    Search().run(contenders, state, sprint)
    later = Search().settings_to_try(contenders, state)
    assert {run.contender for run in later["servers-w2"]} == set(SERVERS[:2])
    assert all(map(state.was_tried, sides(contenders)["ring-w2"]))


@pytest.mark.parametrize(
    "planted", ["sharded-w2-mb1.0-layer-gloo", "ps-sync-w2-s2-zmq-mb16.0-step"]
)
def test_a_long_search_finds_a_setting_that_is_faster_by_a_quarter(planted, tmp_path):
    found, tries = 0, 20
    contenders = settings("single,allreduce,ps-sync", most=99)
    assert planted in {run.contender for run in contenders}
    for seed in range(tries):
        staying, _, _ = search(
            contenders, tmp_path / str(seed), {planted: 125}, 0.05, seed, seconds=900.0
        )
        found += planted in staying and len(staying) < 6
    assert found >= 0.9 * tries


# Run


@pytest.mark.timeout(240)
def test_what_was_tried_is_told_and_a_long_search_saves_the_best_as_options(tmp_path):
    asked = [
        "--modes",
        "allreduce,ps-sync",
        "--wire",
        "zmq",
        "--wait-for",
        "step",
        "--bucket-mb",
        "4",
        "--servers",
        "1",
    ]
    more = [
        "--width",
        "0.0625",
        "--sprint",
        "0.1",
        "--trainings",
        "0",
        "--tune",
        "1s",
        "--repeats",
        "1",
    ]
    first = f"{forks_first()}{BESIDE_TESTS}{short_pilots(0.1)}"
    done = hvdtrain("compare", *asked, *more, "--out", tmp_path / "c", first=first, timeout=200)
    assert done.returncode == 0, done.stdout
    record = json.loads((tmp_path / "c" / "comparison.json").read_text())["contenders"]
    verdict = json.loads((tmp_path / "c" / "verdict.json").read_text())
    assert set(record) == {"allreduce-w2", "ps-sync-w2-s1"} and verdict["tried"] == {}
    assert (tmp_path / "c" / "tuned-ring-w2.toml").exists()
    preset = str(tmp_path / "c" / "tuned-servers-w2.toml")
    planned = CliRunner().invoke(compare, ["--preset", preset, "--dry-run"]).output
    assert "--mode ps-sync " in planned and "--wire zmq" in planned and "tried first" not in planned


def test_whole_runs_are_not_tuned():
    result = CliRunner().invoke(compare, ["--tune", "1m", "--epochs", "1"])
    assert result.exit_code != 0 and "--tune searches by sprints" in str(result.exception)
    result = CliRunner().invoke(compare, ["--tune", "1m", "--modes", "single", "--dry-run"])
    assert result.exit_code != 0 and "--tune needs rings or servers" in str(result.exception)


# One process with fewer threads


def machine_of(cores, modes="single,allreduce,ddp", hosts=""):
    """One process with that many threads, beside other modes."""
    planned = settings(modes, hosts=hosts)
    return [run.with_options(threads=cores) if run.is_one_process else run for run in planned]


def test_one_process_tries_fewer_threads_as_often_as_a_side_tries_settings():
    planned = machine_of(16)
    rings = len(sides(planned)["ring-w2"])
    extras = with_fewer_threads(planned)
    assert [run.config.threads for run in extras] == [8, 4, 2, 1][: rings - 1]
    assert all(run.is_extra and run.side == planned[0].side for run in extras)
    assert not with_fewer_threads(planned, given={"threads"})
    assert not with_fewer_threads(machine_of(1))
    assert not with_fewer_threads(machine_of(16, modes="single,allreduce"))


@pytest.mark.parametrize("faster", [0.5, 2.0])
def test_fewer_threads_stay_if_they_seem_faster_and_all_cores_in_any_case(tmp_path, faster):
    planned = machine_of(2)
    contenders = [*planned, *with_fewer_threads(planned)]
    staying, _, _ = search(contenders, tmp_path, {"single-w1-t1": 100 * faster})
    one_process = [name for name in staying if name.startswith("single")]
    assert one_process == ["single-w1", "single-w1-t1"][: 2 if faster > 1 else 1]
