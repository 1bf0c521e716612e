"""The answer: which word on what evidence, why, what could turn it, and which command comes next."""

import itertools
import json
import math
import shlex
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers.report_runs import IMAGES, run, write
from msgspec import structs

from hvdtrain import report
from hvdtrain.report.answer import EITHER, ONE_MACHINE, RING, SERVERS, UNKNOWN, reach_answer
from hvdtrain.report.contenders import Margins
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
        (130, 100, 50, RING, "allreduce ×2 did 1.30 times the samples/s of ps-sync ×2+1 (1."),
        (100, 130, 50, SERVERS, "ps-sync ×2+1 did 1.30 times the samples/s of allreduce ×2 (1."),
        (
            130,
            100,
            200,
            ONE_MACHINE,
            "one machine, 2 cores, did 1.54 times the samples/s of allreduce ×2, the best that",
        ),
        (130, 100, 129.5, ONE_MACHINE, "did 1.00 times"),
        (110, 100, 108, UNKNOWN, "allreduce ×2, the best that is distributed, did 1.02 times"),
    ],
)
def test_five_repeats_have_a_word_and_its_figures(ring, servers, one, word, because):
    factors = (1.0, 1.004, 0.996, 1.002, 0.998) if word != UNKNOWN else (1.0, 1.06, 0.94, 1.03, 0.97)
    kinds = ((RING2, ring, factors), (SERVED, servers, factors[::-1]), (ONE, one, factors[::-1]))
    said = answer(*(repeats(kind, speed, own) for kind, speed, own in kinds))
    assert said.word == said.data["answer"] == word and because in said.because
    assert ("the same mathematics" in said.because) == (word in (RING, SERVERS))
    assert len(said.but) <= 2 and said.next.startswith("hvdtrain ")
    wanted = {RING: ["launch", "-n", "2"], SERVERS: ["launch", "-n", "2", "-s", "1"], ONE_MACHINE: ["train"]}
    words = shlex.split(said.next)[1:]
    assert words[: len(wanted.get(word, ["compare"]))] == wanted.get(word, ["compare"])


def test_local_steps_that_gain_in_one_process_too_are_said_to():
    rounds = {"change": {"options": {"local_steps": 8}}}
    rivals = repeats(RING2, 130, **rounds), repeats(SERVED, 100, OTHER, **rounds), SLOW_ONE
    for speed, gains in ((50, False), (100, True)):
        said = answer(*rivals, repeats(ONE, speed, **rounds))
        words = "gains without messages too: one machine, 2 cores, local steps 8 took 0.50 times as long"
        assert any(words in line for line in (*said.but, *said.besides)) == gains


def test_a_lead_too_small_to_matter_is_said_to_be_one():
    tight = (1.0, 1.001, 0.999, 1.0, 1.0)
    said = answer(repeats(RING2, 101, tight), repeats(SERVED, 100, tight[::-1]), SLOW_ONE)
    assert said.word == EITHER and "1.01 times" in said.because and "too small to matter" in said.because
    assert answer(repeats(RING2, 101, tight), repeats(SERVED, 100, tight[::-1]), SLOW_ONE, speed=0.005).word == RING


@pytest.mark.parametrize("n", [1, 2, 4])
def test_fewer_than_five_repeats_are_no_answer_and_next_makes_them(n):
    said = answer(repeats(RING2, 300, SPREAD[:n]), repeats(SERVED, 100, OTHER[:n]))
    assert said.word == UNKNOWN and said.data["repeats_needed"] == 5
    assert "--modes allreduce,ps-sync,single" in said.next and said.next.endswith("--repeats 5")
    assert said.but[0] == "one machine was not tried" and said.data["next_s"] > 0


def test_where_one_machine_was_left_out_the_answer_says_so_and_next_adds_it():
    said = answer(repeats(RING2, 130), repeats(SERVED))
    assert said.word == RING and said.but[0] == "one machine was not tried"
    assert said.next.startswith("hvdtrain compare --modes allreduce,ps-sync,single ")


def test_one_machine_and_a_ring_are_a_comparison():
    said = answer(repeats(ONE, 100), repeats(RING2, 180, OTHER))
    assert said.word == RING and "did 1.80 times the samples/s of one machine" in said.because
    assert said.but[0] == "no servers were tried" and "--modes single,allreduce,ps-sync" in said.next
    assert answer(repeats(ONE, 100), repeats(RING2, 80)).word == ONE_MACHINE


def test_two_modes_of_a_family_are_told_apart_and_the_word_is_their_family():
    said = answer(repeats(RING2), repeats(("ddp", 2), 120, OTHER))
    assert said.word == RING and "ddp ×2 did 1.20 times the samples/s of allreduce ×2" in said.because
    served = answer(repeats(SERVED), repeats(ASYNC, 130, OTHER), SLOW_ONE)
    assert served.word == SERVERS and "ps-async ×2+1 did 1.30 times the samples/s of ps-sync ×2+1" in served.because


def test_a_mode_alone_is_nothing_to_compare_and_next_adds_what_is_missing():
    said = answer(repeats(RING2))
    assert said.word == UNKNOWN and "nothing to compare" in said.because
    assert "--modes allreduce,single,ps-sync" in said.next


def test_a_pause_between_runs_is_no_part_of_what_a_run_takes():
    one, other = "2026-01-01T10:00:00+00:00", "2026-01-03T10:00:00+00:00"
    said = answer(in_time([run(*RING2)], one), in_time([run(*SERVED)], other))
    assert 0 < said.data["next_s"] < 3600


def test_one_process_with_a_part_of_its_machine_is_no_contender():
    part = repeats(ONE, 500, change={"threads_per_worker": 1})
    said = answer(part, repeats(RING2, 130), repeats(SERVED))
    assert said.word == RING and "one machine was not tried" in said.but
    assert [of["run"] for of in said.data["runs"]] == ["allreduce ×2", "ps-sync ×2+1"]
    assert part[0].kind.label == "one process, 1 of 2 cores"


# Several on a side


def with_options(kind, options, speed, factors=SPREAD):
    return repeats(kind, speed, factors, change={"options": options})


def test_best_is_compared_with_best_and_options_tell_contenders_apart():
    said = answer(
        repeats(RING2), repeats(("ddp", 2), 105, OTHER), SLOW_ONE,
        repeats(SERVED, 80), with_options(SERVED, {"wire": "zmq"}, 88), with_options(SERVED, {"bucket_mb": 1.0}, 70),
    )  # fmt: skip
    assert said.word == RING
    assert "ddp ×2, the best of 2 rings, did 1.19 times the samples/s of ps-sync ×2+1, zmq, the best of 3 servers" in \
        said.because  # fmt: skip
    assert {of["run"] for of in said.data["runs"]} >= {"ps-sync ×2+1, zmq", "ps-sync ×2+1, bucket mb 1.0"}
    assert said.data["speed"]["confidence"] == pytest.approx(1 - 0.025)


def test_a_mode_that_finished_once_leaves_the_others_their_repeats():
    said = answer(repeats(RING2, 130), repeats(SERVED), repeats(ASYNC, 500, (1.0,)), SLOW_ONE)
    assert (said.word, said.data["speed"]["n"]) == (RING, 5)
    assert "left out" in said.but[0] and said.next.endswith("--repeats 10") and "ps-async" in said.next


def test_a_mode_added_a_week_later_waits_until_the_others_ran_again():
    later = in_time(repeats(ASYNC, 500), "2026-11-28T10:00:00+00:00")
    said = answer(repeats(RING2, 130), repeats(SERVED), SLOW_ONE, later)
    assert said.word == RING and said.data["left_out"] == ["ps-async ×2+1"] and said.next.endswith("--repeats 10")


def test_rings_and_servers_on_other_numbers_of_workers_are_not_compared():
    said = answer(repeats(("allreduce", 4), 500), repeats(SERVED), SLOW_ONE)
    assert said.data["speed"] is None
    processes = answer(repeats(("allreduce", 3), 150), repeats(SERVED), SLOW_ONE)
    assert processes.word == RING  # as many processes, servers included
    turned = answer(repeats(RING2), repeats(("allreduce", 3), 150), repeats(SERVED, 120), SLOW_ONE)
    assert turned.word == SERVERS and "allreduce ×3, a ring of as many processes, did 1.25 times" in turned.but[0]


# Quality


def test_what_learns_nothing_never_wins():
    ring, fast = repeats(RING2, accuracy=0.97), repeats(ASYNC, 150, OTHER, accuracy=0.1)
    said = answer(ring, fast, SLOW_ONE)
    assert said.word == RING and "but the accuracy of ps-async ×2+1, 0.100 beside 0.970, is not within" in said.because
    other = answer(ring, fast, repeats(SERVED, 80, accuracy=0.97), SLOW_ONE)
    assert other.word == RING and other.but[0] == "ps-async ×2+1 did more samples/s, and learned less: 0.100"
    chance = np.random.default_rng(0)
    for _ in range(50):
        factors = np.exp(chance.normal(0, 0.05, (2, 7))).tolist()
        pair = repeats(RING2, 100, factors[0], accuracy=0.97), repeats(ASYNC, 150, factors[1], accuracy=0.1)
        assert answer(*pair).word != SERVERS


def test_where_all_are_far_below_the_target_next_trains_longer():
    said = answer(repeats(RING2, accuracy=0.5), repeats(ASYNC, 150, OTHER, accuracy=0.4), SLOW_ONE)
    assert said.word == UNKNOWN and "trained too briefly for 0.95" in said.because
    assert "--epochs 60 " in said.next and said.next.endswith("--repeats 5")


def test_accuracy_is_paired_by_image_and_by_seed(tmp_path):
    chance = np.random.default_rng(1)
    right = chance.random((5, IMAGES)) < 0.97
    for kind, speed, factors, flips in ((RING2, 100, SPREAD, 0), (ASYNC, 150, OTHER, 2), (ONE, 50, SPREAD, 0)):
        for repeat in range(1, 6):
            own = right[repeat - 1].copy()
            own[repeat * 7 : repeat * 7 + flips] ^= True
            folder = write(tmp_path, *kind, repeat=repeat, speed=speed * factors[repeat - 1], accuracy=own.mean())
            (folder / "answers.bin").write_bytes(np.packbits(own).tobytes())
    said = reach_answer(find_runs([tmp_path]))
    [tested] = said.data["quality"]
    assert (said.word, tested["state"], tested["paired_by"], tested["n"]) == (SERVERS, "as good", "images and seeds", 5)
    assert -0.01 < tested["ci_low"] < 0 and "as accurate, 0.9" in said.because
    for folder in tmp_path.glob("ps-async*"):
        (folder / "answers.bin").write_bytes(b"\0")  # of another length
    assert reach_answer(find_runs([tmp_path])).data["quality"][0]["paired_by"] == "seeds"


def test_sprints_tell_speed_and_trainings_what_is_learned():
    sprint = {"val_accuracy": None, "val_loss": None, "time_to_target_s": None, "evaluations": [], "steps": 7}
    fast = [
        one for kind, speed, own in ((RING2, 100, SPREAD), (SERVED, 130, OTHER), (ONE, 50, SPREAD))
        for one in repeats(kind, speed, own, change={"sprint": 4.0}, **sprint)
    ]  # fmt: skip
    trained = run(*RING2, speed=900)
    said = reach_answer([*fast, trained])
    assert said.word == SERVERS and "1.30 times" in said.because
    ring = said.data["runs"][0]
    assert (ring["n"], ring["trainings"], ring["accuracy"]) == (5, 1, 0.98) and ring["samples_per_s"] < 110
    alone = reach_answer(
        [r for r in fast if r.kind.mode != "ps-sync"] + repeats(ASYNC, 130, change={"sprint": 4.0}, **sprint)
    )
    assert alone.word == UNKNOWN and "was not measured" in alone.because and "--sprint 4 --trainings 5" in alone.next


def test_the_time_to_the_target_counts_what_did_not_get_there():
    ring = repeats(RING2, 130)
    ring[0] = replace(ring[0], summary=structs.replace(ring[0].summary, time_to_target_s=None))
    said = answer(ring, repeats(SERVED), SLOW_ONE)
    [of] = [of for of in said.data["runs"] if of["run"] == "allreduce ×2"]
    spent = [r.summary.time_to_target_s or r.summary.wall_s for r in ring]
    assert of["to_target"] == {"seconds": pytest.approx(sum(spent) / 4), "reached": 4, "n": 5}
    found = said.data["time_to_target"]
    assert found["ci_low"] < found["ratio"] < found["ci_high"] and found["n"] == 5


# What could turn it


def test_one_worker_that_did_nine_tenths_is_said():
    processes = [{"rank": 0, "cpu_s": 1.0}] + [{"rank": r, "cpu_s": 1.0, "samples": s} for r, s in ((1, 95), (2, 5))]
    said = answer(repeats(RING2), repeats(ASYNC, 200, OTHER, accuracy=0.98, processes=processes), SLOW_ONE)
    assert said.word == SERVERS
    assert "one of 2 workers of ps-async ×2+1 did 95% of the samples" in said.but


def test_processor_time_that_turns_the_answer_is_said():
    def spent(ranks, seconds):
        return {"processes": [{"rank": r, "cpu_s": seconds, "samples": 960} for r in range(ranks)]}

    said = answer(repeats(RING2, 130, **spent(2, 9.0)), repeats(SERVED, **spent(3, 2.0)), SLOW_ONE)
    assert "allreduce ×2 took 9.38 s of processor time for 1,000 samples, ps-sync ×2+1 2.08" in said.but


def test_next_is_built_of_what_the_runs_were_asked(tmp_path):
    from hvdtrain.config.run_config import RunConfig

    for kind, speed in ((RING2, 130), (SERVED, 100), (ONE, 50)):
        for repeat in range(1, 6):
            launch = {"launcher": "ssh", "hosts": [f"node{n}:1" for n in (1, 2)]} if kind != ONE else None
            folder = write(tmp_path / "c" / "runs", *kind, repeat=repeat, speed=speed, change={"launch": launch})
            config = RunConfig(
                mode=kind[0], servers=len(kind) // 3, steps=60, seed=6 + repeat, repeat=repeat, threads=1
            )
            config.write(folder / "config.toml")
    assert "--out" not in reach_answer([r for r in find_runs([tmp_path / "c"]) if r.manifest.repeat < 3]).next
    (tmp_path / "c" / "logs").mkdir()  # as a comparison's folder has
    runs = find_runs([tmp_path / "c"])
    said = reach_answer(runs)
    assert (
        said.next.startswith("hvdtrain launch -n 2 ") and "node1:1,node2:1" in said.next and "--steps 60" in said.next
    )
    assert "--seed" not in said.next and "--threads" not in said.next
    more = shlex.split(reach_answer([r for r in runs if r.manifest.repeat < 3]).next)
    options = {
        "--workers": "2", "--servers": "1", "-H": "node1:1,node2:1", "--steps": "60", "--seed": "7", "--wire": "rpc",
        "--out": str(tmp_path / "c"), "--repeats": "5",
    }  # fmt: skip
    assert options.items() <= dict(itertools.pairwise(more)).items()


def test_next_asks_for_what_modes_can_have_alone(tmp_path):
    from hvdtrain.config.run_config import RunConfig

    both = {"wait_for": "layer", "shares": "measured"}
    asked = {RING2: both, SERVED: both, ASYNC: {"wait_for": "step"}, ONE: {}}
    for kind, options in asked.items():
        folder = write(tmp_path, *kind, change={"options": options})
        RunConfig(mode=kind[0], servers=len(kind) // 3, steps=60, **options).write(folder / "config.toml")
    words = shlex.split(reach_answer(find_runs([tmp_path])).next)
    assert {"--wait-for": "layer,step", "--shares": "measured"}.items() <= dict(itertools.pairwise(words)).items()


def test_verdict_json_can_be_written_and_every_key_is_described(tmp_path):
    described = (Path(report.__file__).parent / "README.md").read_text()
    full = answer(repeats(RING2, 130), repeats(ASYNC, accuracy=0.97), SLOW_ONE)
    for said in (full, answer(repeats(RING2))):
        assert set(said.data) == set(full.data) and json.dumps(said.data, allow_nan=False)
        keys = {*said.data, *said.data["runs"][0], *(said.data["speed"] or {})}
        assert not [key for key in keys if f"`{key}`" not in described]
    diverged = answer(repeats(RING2, val_loss=math.nan), repeats(SERVED), SLOW_ONE)
    assert any("became NaN" in line for line in diverged.but)
    hostile = load_run(write(tmp_path, "allreduce", 2, change={"options": {"wire": "\x1b[2J"}}))
    assert reach_answer([hostile]).word == UNKNOWN
