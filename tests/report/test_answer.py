"""The answer: which word on what evidence, why, what could turn it, and which command comes next."""

import itertools
import json
import math
import shlex
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
from helpers.report_runs import IMAGES, run, write
from msgspec import structs

from hvdtrain import reporting
from hvdtrain.base.config.run_config import DEFAULT_EPOCHS
from hvdtrain.base.errors import UsageError
from hvdtrain.reporting import quality
from hvdtrain.reporting.answer import (
    EITHER,
    ONE_MACHINE_WINS,
    ONE_PROCESS,
    RING_WINS,
    SERVERS_WIN,
    UNKNOWN,
    reach_answer,
)
from hvdtrain.reporting.comparisons import split_into_comparisons
from hvdtrain.reporting.conduct import Conduct
from hvdtrain.reporting.contenders import Margins
from hvdtrain.reporting.fairness import check
from hvdtrain.reporting.results import result_rows
from hvdtrain.reporting.target import reach_of
from hvdtrain.runs.read import find_runs, load_run

SPREAD = (1.0, 1.02, 0.98, 1.01, 0.99)  # of five repeats
OTHER = SPREAD[::-1]
ONE, RING2, SERVED, ASYNC = ("single",), ("allreduce", 2), ("ps-sync", 2, 1), ("ps-async", 2, 1)


def repeats(kind, speed=100.0, factors=SPREAD, **more):
    return [run(*kind, repeat=r, speed=speed * f, **more) for r, f in enumerate(factors, 1)]


def answer(*groups, **margins):
    return reach_answer([one for group in groups for one in group], Margins(**margins))


def in_time(runs, started):
    """The same, all begun on another day."""
    return [replace(r, manifest=structs.replace(r.manifest, started=started)) for r in runs]


SLOW_ONE = repeats(ONE, 50)


@pytest.mark.parametrize(
    ("ring", "servers", "one", "word", "because"),
    [
        (
            130,
            100,
            50,
            RING_WINS,
            "allreduce ×2 did 1.30 to 1.30 times the samples/s of ps-sync ×2+1 (mean 1.30",
        ),
        (
            100,
            130,
            50,
            SERVERS_WIN,
            "ps-sync ×2+1 did 1.30 to 1.30 times the samples/s of allreduce ×2 (mean 1.30",
        ),
        (
            130,
            100,
            200,
            ONE_PROCESS,
            "one process, 2 cores, did 1.53 to 1.54 times the samples/s of allreduce ×2, the fastest distr",
        ),
        (130, 100, 129.5, ONE_PROCESS, "did 1.00 to 1.01 times"),
        (
            110,
            100,
            108,
            UNKNOWN,
            "allreduce ×2, the fastest distributed contender, did 0.96 to 1.07 times",
        ),
    ],
)
def test_five_repeats_have_a_word_and_its_figures(ring, servers, one, word, because):
    factors = (
        (1.0, 1.004, 0.996, 1.002, 0.998) if word != UNKNOWN else (1.0, 1.06, 0.94, 1.03, 0.97)
    )
    kinds = ((RING2, ring, factors), (SERVED, servers, factors[::-1]), (ONE, one, factors[::-1]))
    said = answer(*(repeats(kind, speed, own) for kind, speed, own in kinds))
    assert said.word == said.data["answer"] == word and because in said.because
    assert ("the same mathematics" in said.because) == (word in (RING_WINS, SERVERS_WIN))
    assert len(said.but) <= 2 and said.next.startswith("hvdtrain ")
    wanted = {
        RING_WINS: ["launch", "-n", "2"],
        SERVERS_WIN: ["launch", "-n", "2", "-s", "1"],
        ONE_PROCESS: ["train"],
    }
    words = shlex.split(said.next)[1:]
    assert words[: len(wanted.get(word, ["compare"]))] == wanted.get(word, ["compare"])


def test_local_steps_that_gain_in_one_process_too_are_said_to():
    rounds = {"change": {"options": {"local_steps": 8}}}
    rivals = repeats(RING2, 130, **rounds), repeats(SERVED, 100, OTHER, **rounds), SLOW_ONE
    for speed, gains in ((50, False), (100, True)):
        said = answer(*rivals, repeats(ONE, speed, **rounds))
        words = "gains without messages too: one process, 2 cores, local steps 8 took 0.50 times as long"
        assert any(words in line for line in (*said.but, *said.besides)) == gains


def test_a_lead_too_small_to_matter_is_said_to_be_one():
    tight = (1.0, 1.001, 0.999, 1.0, 1.0)
    said = answer(repeats(RING2, 101, tight), repeats(SERVED, 100, tight[::-1]), SLOW_ONE)
    assert (
        said.word == EITHER
        and "1.01 times" in said.because
        and "too small to matter" in said.because
    )
    assert (
        answer(
            repeats(RING2, 101, tight), repeats(SERVED, 100, tight[::-1]), SLOW_ONE, speed=0.005
        ).word
        == RING_WINS
    )


def test_where_no_number_of_repeats_would_tell_none_is_said_to_be_needed():
    noisy = (
        repeats(RING2, 101, [0.2, 5.0, 0.3, 4.0, 1.0]),
        repeats(SERVED, 100, [3.0, 0.4, 5.0, 0.2, 1.0]),
    )
    said = answer(*noisy, repeats(ONE, 50))
    assert (
        said.word == UNKNOWN
        and "even 56 repeats would not be enough; try longer runs" in said.because
    )
    assert said.data["repeats_needed"] is None


def test_what_is_not_known_yet_leans_and_says_whether_to_repeat_or_to_wait():
    noisy = (1.0, 1.3, 0.7, 1.2, 0.8)
    kinds = repeats(RING2, 120, noisy), repeats(SERVED, 100, noisy[::-1]), SLOW_ONE
    said = answer(*kinds)
    assert said.word == UNKNOWN and said.because.startswith(
        "ring ahead, 1.20 times; not sure: allreduce ×2 did "
    )
    assert said.data["leans"] == {"to": "ring", "ratio": pytest.approx(1.2)}
    assert " repeats would tell" in said.because and "quiet" not in said.because
    for one in kinds[0][:2]:
        one.summary.load["a"] = {"cores": 2, "others_cores": 1.0, "stolen_share": 0.0}
    assert answer(*kinds).because.endswith(
        " repeats would tell, when the machine is quiet: other work ran beside 2 of 15 runs"
    )
    assert answer(repeats(RING2, 130), repeats(SERVED), SLOW_ONE).data["leans"] is None


@pytest.mark.parametrize("n", [1, 2, 4])
def test_fewer_than_five_repeats_are_no_answer_and_next_makes_them(n):
    said = answer(repeats(RING2, 300, SPREAD[:n]), repeats(SERVED, 100, OTHER[:n]))
    assert said.word == UNKNOWN and said.data["repeats_needed"] == 5
    assert "--modes allreduce,ps-sync,single" in said.next and said.next.endswith("--repeats 5")
    assert said.but[0] == "one machine was not tried" and said.data["next_s"] > 0


def test_where_one_machine_was_left_out_the_answer_says_so_and_next_adds_it():
    said = answer(repeats(RING2, 130), repeats(SERVED))
    assert said.word == RING_WINS and said.but[0] == "one machine was not tried"
    assert said.next.startswith("hvdtrain compare --modes allreduce,ps-sync,single ")


def test_one_machine_and_a_ring_are_a_comparison():
    said = answer(repeats(ONE, 100), repeats(RING2, 180, OTHER))
    assert (
        said.word == RING_WINS
        and "did 1.77 to 1.83 times the samples/s of one process" in said.because
    )
    assert (
        said.but[0] == "no servers were tried" and "--modes single,allreduce,ps-sync" in said.next
    )
    assert answer(repeats(ONE, 100), repeats(RING2, 80)).word == ONE_PROCESS
    two = {"change": {"hardware": {"cpu": "A CPU", "cores": 2, "hosts": ["a", "b"], "gpus": []}}}
    one = {"change": {"hardware": {"cpu": "A CPU", "cores": 2, "hosts": ["a"], "gpus": []}}}
    namespaces = {
        name: {"ranks": [rank], "machine": "m", "cores": 2, "cores_usable": 2}
        for rank, name in enumerate("ab")
    }
    sharing = {"change": two["change"] | {"hosts": namespaces}}
    unsure = answer(repeats(ONE, 130, **one), repeats(RING2, 80, **sharing))
    assert (
        unsure.word == UNKNOWN
        and "no more than is explained by hosts that share the cores" in unsure.because
    )
    assert (
        "the 2 hosts of allreduce ×2 are one machine, of which they claim 2 times the cores"
        in unsure.but[0]
    )
    assert unsure.next == "hvdtrain hosts up --count 2 --cpus 1"
    assert answer(repeats(ONE, 200, **one), repeats(RING2, 80, **sharing)).word == ONE_MACHINE_WINS
    over_hosts = answer(repeats(ONE, 100, **one), repeats(RING2, 80, **two))
    assert over_hosts.word == over_hosts.data["answer"] == ONE_MACHINE_WINS


def test_two_modes_of_a_family_are_told_apart_and_the_word_is_their_family():
    said = answer(repeats(RING2), repeats(("ddp", 2), 120, OTHER))
    assert (
        said.word == RING_WINS
        and "ddp ×2 did 1.18 to 1.22 times the samples/s of allreduce ×2" in said.because
    )
    served = answer(repeats(SERVED), repeats(ASYNC, 130, OTHER), SLOW_ONE)
    assert (
        served.word == SERVERS_WIN
        and "ps-async ×2+1 did 1.28 to 1.32 times the samples/s of ps-sync ×2+1" in served.because
    )


def test_a_mode_alone_is_nothing_to_compare_and_next_adds_what_is_missing():
    said = answer(repeats(RING2))
    assert said.word == UNKNOWN and "nothing to compare" in said.because and not said.compares
    assert "--modes allreduce,single,ps-sync" in said.next


def test_a_pause_between_runs_is_no_part_of_what_a_run_takes():
    one, other = "2026-01-01T10:00:00+00:00", "2026-01-03T10:00:00+00:00"
    said = answer(in_time([run(*RING2)], one), in_time([run(*SERVED)], other))
    assert 0 < said.data["next_s"] < 3600


def test_one_process_with_a_part_of_its_machine_is_no_contender():
    part = repeats(ONE, 500, change={"threads_per_worker": 1})
    said = answer(part, repeats(RING2, 130), repeats(SERVED))
    assert said.word == RING_WINS and "one machine was not tried" in said.but
    doubt = "not in the table, since no process had all cores: one process, 1 of 2 cores"
    assert doubt in said.but
    assert [of["run"] for of in said.data["runs"]] == ["allreduce ×2", "ps-sync ×2+1"]
    assert part[0].kind.label == "one process, 1 of 2 cores"


def test_one_process_with_fewer_threads_stands_for_the_machine_beside_one_with_all():
    part = repeats(ONE, 170, change={"threads_per_worker": 1})
    [comparison] = split_into_comparisons([*part, *repeats(ONE, 140), *repeats(RING2, 130)])
    assert [kind.label for kind in comparison.by_kind][:2] == [
        "one process, 1 of 2 cores",
        "one process, 2 cores",
    ]
    said = reach_answer(comparison.runs)
    assert said.word == ONE_PROCESS
    assert said.because.startswith("one process, 1 of 2 cores, did 1.31 to 1.31 times")


# One machine, of several hosts or beside batches of several workers


def on(names, **more):
    return {
        "change": {"hardware": {"cpu": "A CPU", "cores": 2, "hosts": list(names), "gpus": []}}
        | more
    }


def split_and_answered(*groups):
    [comparison] = split_into_comparisons([one for group in groups for one in group])
    return comparison, reach_answer(comparison.runs)


def test_over_several_hosts_a_ring_on_one_stands_for_one_machine():
    over_both = repeats(RING2, 120, **on("ab"))
    served = repeats(SERVED, 100, OTHER, **on("ab"))
    one = repeats(ONE, 130, OTHER, **on("a"))
    comparison, said = split_and_answered(over_both, served, one, repeats(RING2, 150, **on("a")))
    labels = ["one process, 2 cores", "allreduce ×2 on one host", "allreduce ×2", "ps-sync ×2+1"]
    assert [kind.label for kind in comparison.by_kind] == labels
    assert said.word == ONE_MACHINE_WINS
    best = "allreduce ×2 on one host, the best of 2 ways to use one machine, did 1.25 to 1.25 times the samples/s of"
    assert said.because.startswith(best)
    assert said.data["one_machine"]["beside"] == "allreduce ×2 on one host"
    assert said.data["speed"]["run"] == "allreduce ×2", (
        "the ring that the servers are compared with is over both"
    )
    rows = {row["run"]: row["family"] for row in said.data["runs"]}
    assert list(rows) == [
        "allreduce ×2",
        "ps-sync ×2+1",
        "one process, 2 cores",
        "allreduce ×2 on one host",
    ]
    assert rows["allreduce ×2 on one host"] == "one machine"
    assert said.next.startswith("hvdtrain launch -n 2 ")


def test_on_a_single_host_a_ring_is_a_ring():
    comparison, said = split_and_answered(
        repeats(ONE, 100, **on("a")), repeats(RING2, 150, OTHER, **on("a"))
    )
    assert [kind.family for kind in comparison.by_kind] == [
        "one machine",
        "ring",
    ] and said.word == RING_WINS


def test_a_ring_on_one_host_changes_neither_the_others_figures_nor_the_commands_to_repeat_them():
    launch = {"launcher": "ssh", "hosts": ["a:1", "b:1"]}
    others = [
        *repeats(RING2, 180, **on("ab", launch=launch)),
        *repeats(SERVED, 150, OTHER, **on("ab", launch=launch)),
        *repeats(ONE, 100, **on("a", launch=launch | {"hosts": ["a:1"]})),
    ]
    alone = repeats(("ddp", 4), 90, OTHER, **on("a", launch=launch | {"hosts": ["a:4"]}))
    _, without = split_and_answered(others)
    _, beside = split_and_answered(others, alone)
    assert beside.word == without.word == RING_WINS and beside.next == without.next
    assert beside.data["speed"] == without.data["speed"]
    assert [row for row in beside.data["runs"] if "on one host" not in row["run"]] == without.data[
        "runs"
    ]
    unsure = split_and_answered(others[:3], alone[:3])[1].next
    assert (
        "--modes allreduce,single --workers 2 " in unsure
        and "-H a:1,b:1" in unsure
        and "ddp" not in unsure
    )


def test_scaling_is_over_one_process_whatever_stands_for_one_machine():
    runs = [
        run(*ONE, speed=100, **on("a", threads_per_worker=1)),
        run(*RING2, speed=150, **on("a")),
    ]
    runs += [run(*RING2, speed=180, **on("ab"))]
    [comparison] = split_into_comparisons(runs)
    found = {
        (row["mode"], row["hosts"]): row["scaling_efficiency"]
        for row in result_rows(comparison.runs)
    }
    assert found == {("single", 1): 1.0, ("allreduce", 1): 0.75, ("allreduce", 2): 0.9}


def test_hosts_and_what_is_on_them_may_differ_between_one_machine_and_others_alone():
    """Two rings of as many workers, on one host and on two, could not share a table."""
    pair = [run(*RING2, **on("a")), run(*RING2, **on("ab"))]
    with pytest.raises(
        UsageError, match="hardware.hosts differs among runs of the same mode, workers and servers"
    ):
        check(pair)
    [comparison] = split_into_comparisons(pair)
    assert check(comparison.runs)


def test_one_process_with_the_batch_of_a_worker_is_one_machine_beside_several():
    """With --per-worker."""
    two, four = ({"change": {"global_batch": 64 * n, "lr": 0.001 * n}} for n in (2, 4))
    of_two = [*repeats(RING2, 150, OTHER, **two), *repeats(SERVED, 100, **two)]
    of_four = repeats(("allreduce", 4), 90, OTHER, **four)
    parts = split_into_comparisons([*repeats(ONE, 100), *of_two, *of_four])
    assert [part.title.split(",")[0] for part in parts] == ["global batch 128", "global batch 256"]
    said = [reach_answer(part.runs) for part in parts]
    assert [one.word for one in said] == [RING_WINS, ONE_PROCESS]
    assert said[0].data["one_machine"]["beside"] == "one process, 2 cores"
    told = "batches differ, and samples/s are compared: one process, 2 cores of 64, allreduce ×4 of 256"
    assert told in said[1].but


def test_accuracies_of_other_batches_do_not_stand_for_each_other():
    one = repeats(ONE, 100, accuracy=0.9)
    ring = repeats(RING2, 150, OTHER, change={"global_batch": 128, "lr": 0.002, "sprint": 3.0})
    [comparison] = split_into_comparisons([*one, *ring])
    rows = {row["run"]: row["accuracy"] for row in reach_answer(comparison.runs).data["runs"]}
    assert rows == {"allreduce ×2": None, "one process, 2 cores": pytest.approx(0.9)}


def test_one_process_is_one_machine_beside_a_slow_worker_that_it_does_not_have():
    """With --slow."""
    slow = {"change": {"slow": {"asked": "1:4x", "achieved": {}}}}
    comparison, said = split_and_answered(repeats(ONE, 100), repeats(RING2, 60, OTHER, **slow))
    assert comparison.title == "" and said.word == ONE_PROCESS
    slower = "only worker 0 exists on one machine, so --slow differs: one process, 2 cores: none, allreduce ×2: 1:4x"
    assert slower in said.but
    first = {"change": {"slow": {"asked": "0:4x", "achieved": {}}}}
    assert len(split_into_comparisons([*repeats(ONE, 100), *repeats(RING2, 60, **first)])) == 2


# Several on a side


def with_options(kind, options, speed, factors=SPREAD):
    return repeats(kind, speed, factors, change={"options": options})


def test_best_is_compared_with_best_and_options_tell_contenders_apart():
    said = answer(
        repeats(RING2),
        repeats(("ddp", 2), 105, OTHER),
        SLOW_ONE,
        repeats(SERVED, 80),
        with_options(SERVED, {"wire": "zmq"}, 88),
        with_options(SERVED, {"bucket_mb": 1.0}, 70),
    )
    assert said.word == RING_WINS
    best = "the samples/s of ps-sync ×2+1, zmq, the best of 3 contenders with servers"
    assert f"ddp ×2, the best of 2 rings, did 1.17 to 1.22 times {best}" in said.because
    assert {of["run"] for of in said.data["runs"]} >= {
        "ps-sync ×2+1, zmq",
        "ps-sync ×2+1, bucket mb 1.0",
    }
    assert said.data["speed"]["confidence"] == pytest.approx(1 - 0.025)


def test_a_mode_that_finished_once_leaves_the_others_their_repeats():
    said = answer(repeats(RING2, 130), repeats(SERVED), repeats(ASYNC, 500, (1.0,)), SLOW_ONE)
    assert (said.word, said.data["speed"]["n"]) == (RING_WINS, 5)
    assert (
        "not compared" in said.but[0]
        and said.next.endswith("--repeats 10")
        and "ps-async" in said.next
    )


def test_a_mode_added_a_week_later_waits_until_the_others_ran_again():
    later = in_time(repeats(ASYNC, 500), "2026-11-28T10:00:00+00:00")
    said = answer(repeats(RING2, 130), repeats(SERVED), SLOW_ONE, later)
    assert said.word == RING_WINS and said.next.endswith("--repeats 10")
    assert said.data["left_out"] == [
        {"run": "ps-async ×2+1", "why": "fewer than 5 repeats beside the others"}
    ]


def test_one_machine_that_ran_at_another_time_is_said_to_be_left_out_and_not_to_be_missing():
    later = in_time(repeats(ONE, 500), "2026-11-28T10:00:00+00:00")
    said = answer(repeats(RING2, 130), repeats(SERVED), later)
    assert said.word == RING_WINS and said.next.endswith("--repeats 10")
    assert said.but[0] == (
        "not compared, with fewer repeats than others at the same time: one process, 2 cores"
    )
    assert "one machine was not tried" not in said.but


def test_rings_and_servers_on_other_numbers_of_workers_are_not_compared():
    said = answer(repeats(("allreduce", 4), 500), repeats(SERVED), SLOW_ONE)
    assert said.data["speed"] is None
    processes = answer(repeats(("allreduce", 3), 150), repeats(SERVED), SLOW_ONE)
    assert processes.word == RING_WINS  # as many processes, servers included
    turned = answer(repeats(RING2), repeats(("allreduce", 3), 150), repeats(SERVED, 120), SLOW_ONE)
    assert (
        turned.word == SERVERS_WIN
        and "allreduce ×3, a ring of as many processes, did 1.25 times" in turned.but[0]
    )


# Quality


def test_what_learns_nothing_never_wins():
    ring, fast = repeats(RING2, accuracy=0.97), repeats(ASYNC, 150, OTHER, accuracy=0.1)
    said = answer(ring, fast, SLOW_ONE)
    assert (
        said.word == RING_WINS
        and "but the accuracy of ps-async ×2+1, 0.100 beside 0.970, is not within" in said.because
    )
    other = answer(ring, fast, repeats(SERVED, 80, accuracy=0.97), SLOW_ONE)
    assert (
        other.word == RING_WINS
        and other.but[0] == "ps-async ×2+1 did more samples/s, and learned less: 0.100"
    )
    chance = np.random.default_rng(0)
    for _ in range(50):
        factors = np.exp(chance.normal(0, 0.05, (2, 7))).tolist()
        pair = (
            repeats(RING2, 100, factors[0], accuracy=0.97),
            repeats(ASYNC, 150, factors[1], accuracy=0.1),
        )
        assert answer(*pair).word != SERVERS_WIN


def test_where_all_are_far_below_the_target_next_trains_longer():
    said = answer(repeats(RING2, accuracy=0.5), repeats(ASYNC, 150, OTHER, accuracy=0.4), SLOW_ONE)
    assert said.word == UNKNOWN and "trained too briefly for 0.95" in said.because
    assert f"--epochs {4 * DEFAULT_EPOCHS} " in said.next and said.next.endswith("--repeats 5")


def differences(chance, trainings, images, mean, of_images, of_seeds):
    """Made-up differences in whether an image is told rightly, [trainings, images]."""
    noise = chance.normal(0, 0.1, (trainings, images))
    seeds = chance.normal(0, of_seeds, (trainings, 1))
    return mean + chance.normal(0, of_images, images) + seeds + noise


def test_the_trainings_that_are_said_to_be_needed_tell_in_four_of_five():
    chance, margin = np.random.default_rng(0), 0.01
    parts = [
        quality._parts_of_variance(differences(chance, 400, 4000, 0, 0.15, 0.01)) for _ in range(3)
    ]
    for fixed, shrinking in parts:
        assert fixed == pytest.approx(0.15**2 / 4000, rel=0.15) and shrinking == pytest.approx(
            0.01**2, rel=0.3
        )
    before = quality._by_images(differences(chance, 2, 4000, 0.0, 0.1, 0.006))._replace(mean=0.0)
    needed = quality._trainings_needed(before, margin, 0.1**2 / 4000, 0.006**2)
    lows = [
        quality._by_images(differences(chance, needed, 4000, 0.0, 0.1, 0.006)).low
        for _ in range(200)
    ]
    assert needed < 56 and np.mean(np.array(lows) > -margin) >= 0.75
    # so few images never tell
    assert quality._trainings_needed(before, margin, 0.3**2 / 360, 0.006**2) is None


def shown_as_good(chance, images, trainings, behind=0.0, accuracy=0.967, noise=0.012):
    """Of 300 made-up pairs of contenders that learn alike, in how many one is shown to be as good
    as the other.

    Args:
        behind: by how much one is truly less accurate.
        noise: the mean variance of whether a training tells an image rightly: two of the digits,
            with the same initial weights and other rounding or order, disagree in 1.4 to 5 % of the
            images, which is twice as much.
    """
    ratio = noise / (accuracy * (1 - accuracy))
    shapes = ratio / (1 - ratio) * np.array([accuracy, 1 - accuracy])
    lows = []
    for _ in range(300):
        chances = chance.beta(*shapes, images)
        one, other = (chance.random((trainings, images)) < chances - less for less in (behind, 0.0))
        lows.append(quality._by_images(one.astype(float) - other).low)
    return np.mean(np.array(lows) > -Margins().accuracy)


@pytest.mark.parametrize(
    ("images", "trainings", "least", "most"),
    [(359, 2, 0.0, 0.17), (898, 2, 0.25, 0.5), (359, 5, 0.2, 0.45), (898, 5, 0.65, 1.0)],
)
def test_more_validation_images_and_trainings_show_more_often_that_one_is_as_good(
    images, trainings, least, most
):
    """Of the digits as they are built, and with --validation 0.5."""
    chance = np.random.default_rng(4)
    assert least <= shown_as_good(chance, images, trainings) <= most
    assert shown_as_good(chance, images, trainings, behind=Margins().accuracy) <= 0.03


def test_accuracy_is_paired_by_image_and_by_seed(tmp_path):
    chance = np.random.default_rng(1)
    right = chance.random((5, IMAGES)) < 0.97
    for kind, speed, factors, flips in (
        (RING2, 100, SPREAD, 0),
        (ASYNC, 150, OTHER, 2),
        (ONE, 50, SPREAD, 0),
    ):
        for repeat in range(1, 6):
            own = right[repeat - 1].copy()
            own[repeat * 7 : repeat * 7 + flips] ^= True
            folder = write(
                tmp_path,
                *kind,
                repeat=repeat,
                speed=speed * factors[repeat - 1],
                accuracy=own.mean(),
            )
            (folder / "answers.bin").write_bytes(np.packbits(own).tobytes())
    said = reach_answer(find_runs([tmp_path]))
    [tested] = said.data["quality"]
    assert (said.word, tested["state"], tested["paired_by"], tested["n"]) == (
        SERVERS_WIN,
        "as good",
        "images and seeds",
        5,
    )
    assert -0.01 < tested["ci_low"] < 0 and "as accurate, 0.9" in said.because
    for folder in tmp_path.glob("ps-async*"):
        (folder / "answers.bin").write_bytes(b"\0")  # of another length
    assert reach_answer(find_runs([tmp_path])).data["quality"][0]["paired_by"] == "seeds"


def test_sprints_tell_speed_and_trainings_what_is_learned():
    sprint = {
        "val_accuracy": None,
        "val_loss": None,
        "time_to_target_s": None,
        "evaluations": [],
        "steps": 7,
    }
    fast = [
        one
        for kind, speed, own in ((RING2, 100, SPREAD), (SERVED, 130, OTHER), (ONE, 50, SPREAD))
        for one in repeats(kind, speed, own, change={"sprint": 4.0}, **sprint)
    ]
    trained = run(*RING2, speed=900)
    said = reach_answer([*fast, trained])
    assert said.word == SERVERS_WIN and "1.28 to 1.32 times" in said.because
    ring = said.data["runs"][0]
    assert (ring["n"], ring["trainings"], ring["accuracy"]) == (5, 1, 0.98) and ring[
        "samples_per_s"
    ] < 110
    alone = reach_answer(
        [r for r in fast if r.kind.mode != "ps-sync"]
        + repeats(ASYNC, 130, change={"sprint": 4.0}, **sprint)
    )
    assert (
        alone.word == UNKNOWN
        and "was not measured" in alone.because
        and "--sprint 4 --trainings 2" in alone.next
    )


def test_the_time_to_the_target_counts_what_did_not_get_there():
    ring = repeats(RING2, 130)
    ring[0] = replace(ring[0], summary=structs.replace(ring[0].summary, evaluations=[]))
    said = answer(ring, repeats(SERVED), SLOW_ONE)
    [of] = [of for of in said.data["runs"] if of["run"] == "allreduce ×2"]
    spent = [reach_of(r).seconds for r in ring]
    assert spent[0] == ring[0].summary.wall_s > spent[1]
    wanted = {"seconds": pytest.approx(sum(spent) / 4), "reached": 4, "n": 5}
    assert wanted.items() <= of["to_target"].items()
    found = said.data["time_to_target"]
    assert found["ci_low"] < found["ratio"] < found["ci_high"] and found["n"] == 5


# What could turn it


def test_one_worker_that_did_nine_tenths_is_said():
    processes = [{"rank": 0, "cpu_s": 1.0}] + [
        {"rank": r, "cpu_s": 1.0, "samples": s} for r, s in ((1, 95), (2, 5))
    ]
    said = answer(
        repeats(RING2), repeats(ASYNC, 200, OTHER, accuracy=0.98, processes=processes), SLOW_ONE
    )
    assert said.word == SERVERS_WIN
    assert "one of 2 workers of ps-async ×2+1 did 95% of the samples" in said.but


def test_processor_time_that_turns_the_answer_is_said():
    def spent(ranks, seconds):
        return {"processes": [{"rank": r, "cpu_s": seconds, "samples": 960} for r in range(ranks)]}

    said = answer(repeats(RING2, 130, **spent(2, 9.0)), repeats(SERVED, **spent(3, 2.0)), SLOW_ONE)
    assert (
        "allreduce ×2 took 9.38 s of processor time for 1,000 samples, ps-sync ×2+1 2.08"
        in said.but
    )


def test_next_is_built_of_what_the_runs_were_asked(tmp_path):
    from hvdtrain.base.config.run_config import RunConfig

    for kind, speed in ((RING2, 130), (SERVED, 100), (ONE, 50)):
        for repeat in range(1, 6):
            launch = (
                {"launcher": "ssh", "hosts": [f"node{n}:1" for n in (1, 2)]}
                if kind != ONE
                else None
            )
            folder = write(
                tmp_path / "c" / "runs",
                *kind,
                repeat=repeat,
                speed=speed,
                change={"launch": launch},
            )
            config = RunConfig(
                mode=kind[0],
                servers=len(kind) // 3,
                steps=60,
                seed=6 + repeat,
                repeat=repeat,
                threads=1,
            )
            config.write(folder / "config.toml")
    assert (
        "--out"
        not in reach_answer([r for r in find_runs([tmp_path / "c"]) if r.manifest.repeat < 3]).next
    )
    (tmp_path / "c" / "logs").mkdir()  # as a comparison's folder has
    runs = find_runs([tmp_path / "c"])
    said = reach_answer(runs)
    assert (
        said.next.startswith("hvdtrain launch -n 2 ")
        and "node1:1,node2:1" in said.next
        and "--steps 60" in said.next
    )
    assert "--seed" not in said.next and "--threads" not in said.next
    more = shlex.split(reach_answer([r for r in runs if r.manifest.repeat < 3]).next)
    options = {
        "--workers": "2",
        "--servers": "1",
        "-H": "node1:1,node2:1",
        "--steps": "60",
        "--seed": "7",
        "--wire": "rpc",
        "--out": str(tmp_path / "c"),
        "--repeats": "5",
    }
    assert options.items() <= dict(itertools.pairwise(more)).items()
    few = [r for r in runs if r.manifest.repeat < 3]
    older = [replace(r, manifest=structs.replace(r.manifest, hvdtrain="0.1.0")) for r in few]
    # compare does not add runs to runs of another version.
    assert f"--out {tmp_path / 'c'}-{version('hvdtrain')} " in reach_answer(older).next
    for given, words in (
        ({"modes": "", "wire": "", "workers": ""}, "hvdtrain compare --launcher ssh "),
        (
            {"modes": "ddp,ps-sync", "wire": "zmq"},
            "hvdtrain compare --modes ddp,ps-sync --wire zmq --launcher ",
        ),
    ):
        asked = reach_answer(few, conduct=Conduct(given=given)).next
        assert words in asked and "--servers" not in asked and "--wire rpc" not in asked
    assert " --threads -1 " in reach_answer(few, conduct=Conduct(threads=-1)).next


def test_next_asks_for_what_modes_can_have_alone(tmp_path):
    from hvdtrain.base.config.run_config import RunConfig

    both = {"wait_for": "layer", "shares": "measured"}
    asked = {RING2: both, SERVED: both, ASYNC: {"wait_for": "step"}, ONE: {}}
    for kind, options in asked.items():
        folder = write(tmp_path, *kind, change={"options": options})
        RunConfig(mode=kind[0], servers=len(kind) // 3, steps=60, **options).write(
            folder / "config.toml"
        )
    words = shlex.split(reach_answer(find_runs([tmp_path])).next)
    assert {"--wait-for": "layer,step", "--shares": "measured"}.items() <= dict(
        itertools.pairwise(words)
    ).items()


def test_verdict_json_can_be_written_and_every_key_is_described(tmp_path):
    described = (Path(reporting.__file__).parent / "README.md").read_text()
    full = answer(repeats(RING2, 130), repeats(ASYNC, accuracy=0.97), SLOW_ONE)
    for said in (full, answer(repeats(RING2))):
        assert set(said.data) == set(full.data) and json.dumps(said.data, allow_nan=False)
        keys = {*said.data, *said.data["runs"][0], *(said.data["speed"] or {})}
        assert not [key for key in keys if f"`{key}`" not in described]
    diverged = answer(repeats(RING2, val_loss=math.nan), repeats(SERVED), SLOW_ONE)
    assert any("became NaN" in line for line in diverged.but)
    hostile = load_run(write(tmp_path, "allreduce", 2, change={"options": {"wire": "\x1b[2J"}}))
    assert reach_answer([hostile]).word == UNKNOWN
