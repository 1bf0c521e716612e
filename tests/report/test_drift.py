"""Within a sprint that drifts an answer says so; of noise, and of one odd sprint, it says nothing."""

import json

import numpy as np
import pytest
from helpers.report_runs import manifest, steps, summary, write

from hvdtrain.reporting.answer import reach_answer
from hvdtrain.reporting.drift import LEAST, LEAST_STEPS, drift
from hvdtrain.runs.read import Run, find_runs
from hvdtrain.runs.schema import Manifest, Summary, from_json

SPRINT = {"val_accuracy": None, "val_loss": None, "time_to_target_s": None, "evaluations": []}
WARM_UP, STEADY = 20, 90
PARTS = ("forward_s", "backward_s", "comm_s", "optimizer_s")


def rows(of, seconds):
    """Lines of a worker's metrics whose steps take so long; those of the warm-up take ten times as
    long.
    """
    lines = steps(of, WARM_UP + len(seconds), 100.0)
    for line, whole_s in zip(lines, [10 * seconds[0]] * WARM_UP + list(seconds), strict=True):
        line.update({part: whole_s / len(PARTS) for part in PARTS})
    return "".join(json.dumps(line) + "\n" for line in lines)


def sprint(root, seconds, repeat=1, mode="allreduce", workers=2, servers=0, speed=100.0, **changed):
    """The folder of a sprint whose workers' steady steps take so long."""
    change = {"sprint": 4.0} | changed
    folder = write(
        root, mode, workers, servers, repeat, speed, change, steps=len(seconds), **SPRINT
    )
    for rank in range(servers, servers + workers):
        (folder / f"metrics.rank{rank}.jsonl").write_text(
            rows(manifest(mode, workers, servers), seconds)
        )
    return folder


def sprints(root, each, **more):
    for repeat, seconds in enumerate(each, 1):
        sprint(root, seconds, repeat, **more)
    return find_runs([root])


def seconds(chance, slower=0.0, spread=0.05, count=STEADY):
    """Of steps that take evenly more, so that the middle of the last third takes so much longer
    than of the first.
    """
    return 0.02 * np.exp(
        np.linspace(0, 1.5 * np.log1p(slower), count) + chance.normal(0, spread, count)
    )


@pytest.mark.parametrize("slower", [0.08, -0.08])
def test_a_drift_is_found_in_either_direction(slower, tmp_path):
    chance = np.random.default_rng(0)
    assert drift(sprints(tmp_path, [seconds(chance, slower) for _ in range(5)])) == pytest.approx(
        slower, abs=0.025
    )


@pytest.mark.parametrize("spread", [0.01, 0.05, 0.3])
def test_noise_is_no_drift(spread, tmp_path):
    chance = np.random.default_rng(1)
    found = [
        drift(sprints(tmp_path / str(n), [seconds(chance, 0, spread) for _ in range(5)]))
        for n in range(40)
    ]
    assert found.count(None) >= 39


def test_a_drift_that_is_small_or_of_one_sprint_is_none(tmp_path):
    chance = np.random.default_rng(2)
    small = [seconds(chance, LEAST / 3, 0.01) for _ in range(5)]
    assert drift(sprints(tmp_path / "small", small)) is None
    odd = [seconds(chance, 0.5 * (n == 2)) for n in range(5)]
    assert drift(sprints(tmp_path / "odd", odd)) is None
    assert drift(sprints(tmp_path / "one", odd[2:3])) is None


def test_steps_that_stall_now_and_then_hide_no_drift_and_make_none(tmp_path):
    chance = np.random.default_rng(3)
    for slower, name in ((0.0, "none"), (0.08, "drift")):
        each = [seconds(chance, slower, 0.02) for _ in range(5)]
        for one in each:
            one[chance.integers(60, STEADY, 2)] *= 20
        assert (drift(sprints(tmp_path / name, each)) is not None) == (slower > 0)


def test_only_measured_steps_of_sprints_count_and_rounds_of_local_steps_as_a_whole(tmp_path):
    chance = np.random.default_rng(4)
    few = [seconds(chance, 0.5, 0.001, LEAST_STEPS - 1) for _ in range(5)]
    assert drift(sprints(tmp_path / "few", few)) is None
    trainings = [seconds(chance, 0.5) for _ in range(5)]
    assert drift(sprints(tmp_path / "trainings", trainings, sprint=0.0)) is None
    sends = np.tile([1.0, 1.0, 1.0, 9.0], 24)
    rounds = [seconds(chance, 0.0, 0.01, 96) * sends for _ in range(5)]
    for one in rounds:
        # what sends slows, which no median of steps sees
        one[64:] = np.where(sends[64:] > 1, one[64:] * 1.1, one[64:])
    found = drift(sprints(tmp_path / "rounds", rounds, options={"local_steps": 4}))
    assert found == pytest.approx(0.1 * 9 / 12, abs=0.01)


def test_what_is_not_there_has_no_drift(tmp_path):
    of = manifest("allreduce", 2, sprint=4.0)
    run = Run(tmp_path / "nowhere", from_json(of, Manifest), from_json(summary(of), Summary))
    assert drift([]) is None and drift([run] * 5) is None


def test_an_answer_says_which_contender_drifts_by_how_much(tmp_path):
    chance = np.random.default_rng(5)
    kinds = (
        ("single", 1, 0, 50.0, 0.0),
        ("allreduce", 2, 0, 130.0, 0.08),
        ("ps-sync", 2, 1, 100.0, 0.0),
    )
    for mode, workers, servers, speed, slower in kinds:
        each = [seconds(chance, slower, 0.01) for _ in range(5)]
        sprints(tmp_path, each, mode=mode, workers=workers, servers=servers, speed=speed)
    said = reach_answer(find_runs([tmp_path]))
    [line] = [line for line in (*said.but, *said.besides) if "last third" in line]
    assert line.startswith(
        "within sprints of allreduce ×2 steps took 8% longer in the last third than in the first"
    )
    assert "`--sprint 16` shows" in line
