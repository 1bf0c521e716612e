"""A script in comparisons: what the answer says of speed and of what the script reports."""

import dataclasses
import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from helpers.foretold import BESIDE_TESTS
from helpers.forked_jobs import forks_first
from helpers.jobs import hvdtrain
from helpers.report_runs import run

from hvdtrain.base.errors import UsageError
from hvdtrain.job.rank.command import train
from hvdtrain.reporting.answer import SERVERS_WIN, UNKNOWN, reach_answer
from hvdtrain.reporting.fairness import check
from hvdtrain.runs.command_lines import compare_command, with_placeholders

SPREAD = (1.0, 1.02, 0.98, 1.01, 0.99)
RING_WINS, ASYNC = ("allreduce", 2), ("ps-async", 2, 1)
SCRIPT = {"script": "train.py", "script_args": "", "train_samples": None}
NOTHING = {"val_accuracy": None, "val_loss": None, "time_to_target_s": None, "evaluations": []}


def repeats(kind, speed, change=SCRIPT, **summarised):
    """Returns five runs of a kind."""
    return [
        run(*kind, repeat=number, speed=speed * factor, change=change, **summarised)
        for number, factor in enumerate(SPREAD, 1)
    ]


def sprints(kind, speed):
    return repeats(kind, speed, SCRIPT | {"sprint": 4.0}, **NOTHING)


def test_without_a_report_the_answer_is_of_speed_alone_and_says_so():
    said = reach_answer([*sprints(RING_WINS, 100), *sprints(ASYNC, 130)])
    assert said.word == SERVERS_WIN
    assert "by speed alone: what was learned is not told" in said.because


@pytest.mark.parametrize(
    ("loss", "word", "because"),
    [
        (0.5, SERVERS_WIN, "with as low a loss"),
        (0.6, UNKNOWN, "the loss of ps-async ×2+1 is not within 1 % of its opponent's"),
    ],
)
def test_a_lower_loss_is_better(loss, word, because):
    lost = NOTHING | {"target_accuracy": None}
    ring = repeats(RING_WINS, 100, **lost | {"val_loss": 0.5})
    served = repeats(ASYNC, 130, **lost | {"val_loss": loss})
    said = reach_answer([*ring, *served])
    assert said.word == word and because in said.because


def test_runs_of_a_script_with_other_options_are_not_compared():
    other = SCRIPT | {"script_args": "--layers 3"}
    with pytest.raises(UsageError, match="script_args differs"):
        check([run(*RING_WINS, change=SCRIPT), run("ddp", 2, change=other)])


def test_a_stranger_s_script_is_no_command_to_paste():
    command = "hvdtrain compare --modes ddp --script /tmp/evil.py --repeats 5"
    assert "--script FILE.py" in with_placeholders(command)


def test_the_command_that_compares_a_script_leaves_its_length_to_it(tmp_path):
    (tmp_path / "config.toml").write_text('script = "a.py"\n', encoding="utf-8")
    launched = dataclasses.replace(run(*RING_WINS, change=SCRIPT), folder=tmp_path)
    command = compare_command([launched], repeats=5)
    assert "--script a.py" in command and "--epochs" not in command


@pytest.mark.timeout(200)
def test_a_script_is_verified():
    script = str(Path(__file__).with_name("regression.py"))
    words = ["verify", "--script", script, "--modes", "sharded,ps-sync", "-n", "2"]
    done = hvdtrain(*words, "--", "--one-model", first=forks_first(), timeout=180)
    assert done.returncode == 0, done.stdout
    assert "all 2 agree with one process" in done.stdout and " sgd " in done.stdout


@pytest.mark.timeout(300)
def test_a_script_is_compared(tmp_path):
    script = Path(__file__).with_name("regression.py")
    options = ["--modes", "single,allreduce", "--sprint", "0.3s", "--repeats", "1"]
    out = tmp_path / "out"
    words = ["compare", "--script", str(script), *options, "--out", str(out)]
    done = hvdtrain(
        *[*words, "--", "--steps", "1000000", "--one-model"],
        first=forks_first() + BESIDE_TESTS,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout
    verdict = json.loads((out / "verdict.json").read_text())
    assert {row["mode"] for row in verdict["runs"]} == {"single", "allreduce"}
    manifest = json.loads((out / "runs" / "allreduce-w2-r1" / "manifest.json").read_text())
    assert manifest["script"] == "regression.py" and manifest["model_hash"].startswith("sha256:")
    assert manifest["script_args"] == "--steps 1000000 --one-model"


@pytest.mark.timeout(300)
def test_a_script_is_compared_by_the_time_to_a_loss_that_it_reports(tmp_path):
    script = Path(__file__).with_name("regression.py")
    out = tmp_path / "out"
    target = ["--decide-by", "target", "--target-loss", "1.02", "--repeats", "1"]
    words = ["compare", "--script", str(script), "--modes", "allreduce,ps-async", "--wire", "zmq"]
    done = hvdtrain(
        *[*words, *target, "--ring-transport", "mpi", "--out", str(out)],
        *["--", "--steps", "4000", "--one-model", "--optimizer", "adam", "--report"],
        first=forks_first() + BESIDE_TESTS,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout
    verdict = json.loads((out / "verdict.json").read_text())
    assert verdict["decided_by"] == "time-to-target"
    assert (verdict["target"], verdict["target_of"]) == (1.02, "loss")
    assert {row["mode"]: row["to_target"]["reached"] for row in verdict["runs"]} == {
        "allreduce": 1,
        "ps-async": 1,
    }
    summary = json.loads((out / "runs" / "allreduce-w2-r1" / "summary.json").read_text())
    *_, before, last = summary["evaluations"]
    assert before["val_loss"] > 1.02 >= last["val_loss"]  # it ended there
    assert last["samples"] == summary["steps"] * 24 == last["step"] * 24


@pytest.mark.timeout(120)
def test_a_script_that_never_reports_its_target_ends_in_a_line(tmp_path):
    script = Path(__file__).with_name("regression.py")
    options = ["--mode", "single", "--target-accuracy", "0.9", "--stop-at-target"]
    words = ["train", *options, "--script", str(script), "--out", str(tmp_path / "out")]
    done = hvdtrain(*words, timeout=100)
    assert done.returncode == 1
    assert "never called job.report(accuracy=…)" in done.stdout and "--target-loss" in done.stdout


def test_a_loss_to_reach_is_for_scripts():
    for words, line in (
        (["--target-loss", "0.5"], "--target-loss is for --script"),
        (["--script", __file__, "--target-loss", "1", "--target-accuracy", "0.5"], "exclude each"),
    ):
        told = CliRunner().invoke(train, ["--mode", "single", *words])
        assert isinstance(told.exception, UsageError) and line in str(told.exception)
