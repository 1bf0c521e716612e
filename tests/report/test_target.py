"""An answer by the time to the target: what is measured, what is said, and which command comes next."""

import json
import math
from dataclasses import replace

import pytest
from click.testing import CliRunner
from helpers.foretold import foretell_little
from helpers.report_runs import BATCH, EPOCHS, PER_EPOCH, run, write
from msgspec import structs

from hvdtrain.base.config.run_config import DEFAULT_EPOCHS
from hvdtrain.base.errors import UsageError
from hvdtrain.comparing.command import compare
from hvdtrain.comparing.comparison_state import DECIDE_BY, ComparisonState, conducted
from hvdtrain.comparing.report_command import report
from hvdtrain.reporting.answer import (
    EITHER,
    ONE_PROCESS,
    RING_WINS,
    SERVERS_WIN,
    UNKNOWN,
    reach_answer,
)
from hvdtrain.reporting.conduct import BY_TIME_TO_TARGET, Conduct
from hvdtrain.reporting.contenders import DEFAULT
from hvdtrain.reporting.explaining.command import explain
from hvdtrain.reporting.figures import table
from hvdtrain.reporting.steps_and_samples import StepsAndSamples
from hvdtrain.reporting.target import Reach, reach_of
from hvdtrain.runs.schema import Evaluation

SPREAD = (1.0, 1.02, 0.98, 1.01, 0.99)
ONE, RING2, SERVED, ASYNC = ("single",), ("allreduce", 2), ("ps-sync", 2, 1), ("ps-async", 2, 1)
TARGET = 0.3
BY_TIME = Conduct(decided_by=BY_TIME_TO_TARGET)


def trainings(kind, speed, epochs, factors=SPREAD):
    """Trainings whose accuracy grows evenly, and reaches TARGET after so many epochs, of which there
    are six.
    """
    made = []
    for repeat, factor in enumerate(factors, 1):
        accuracy = TARGET * EPOCHS / (epochs * factor)
        target = {"accuracy": accuracy, "target_accuracy": TARGET}
        made.append(run(*kind, repeat=repeat, speed=speed, **target))
    return made


def decide(*groups):
    return reach_answer([one for group in groups for one in group], DEFAULT, BY_TIME)


def reached(*accuracies, **more):
    """When a training with evaluations every second, after 10 samples each, reached 0.95."""
    evaluations = [
        Evaluation(samples=10 * n, train_s=n, val_loss=1.0, val_accuracy=accuracy)
        for n, accuracy in enumerate(accuracies, 1)
    ]
    made = run(**more)
    summary = structs.replace(made.summary, evaluations=evaluations, wall_s=4.5, samples=45)
    return reach_of(replace(made, summary=summary))


def test_the_time_lies_between_two_evaluations_and_is_the_whole_time_where_none_reached_it():
    assert reached(0.5, 0.9, 1.0) == pytest.approx((2.5, 25.0, True))
    assert reached(0.5, 0.95) == Reach(2.0, 20.0, True)
    assert reached(0.96, 0.5) == Reach(1.0, 10.0, True)
    assert reached(0.5, 0.94) == Reach(4.5, 45.0, False)
    assert reached(0.9, 0.8, 1.0) == pytest.approx((2.75, 27.5, True))
    assert reached(change={"sprint": 2.0}) is None


def test_a_loss_falls_evenly_to_its_target_and_what_is_no_number_is_passed_over():
    evaluations = [
        Evaluation(samples=10 * n, train_s=n, val_loss=loss)
        for n, loss in enumerate((2.0, math.nan, 1.0, 0.2), 1)
    ]
    made = run(change={"script": "train.py"})
    told = {"evaluations": evaluations, "wall_s": 4.5, "target_accuracy": None}
    summary = structs.replace(made.summary, **told, target_loss=0.6)
    assert reach_of(replace(made, summary=summary)) == pytest.approx((3.5, 35.0, True))
    missed = structs.replace(summary, target_loss=0.1, samples=45)
    assert reach_of(replace(made, summary=missed)) == Reach(4.5, 45, False)


def test_a_loss_is_named_in_the_answer():
    def lost(kind, speed):
        return [
            run(*kind, repeat=n, speed=speed * factor, target_accuracy=None, target_loss=0.1)
            for n, factor in enumerate(SPREAD, 1)
        ]

    said = decide(lost(RING2, 120), lost(SERVED, 100))
    assert said.headline == "RING by time to a loss of 0.1, and by speed"
    assert "s to a loss of 0.1 (5 of 5 trainings reached it)" in said.because
    assert said.data["target_of"] == "loss"


def test_five_whole_trainings_have_a_word_with_seconds_and_how_many_reached_the_target():
    said = decide(
        trainings(RING2, 120, 4), trainings(SERVED, 100, 4, SPREAD[::-1]), trainings(ONE, 50, 4)
    )
    assert said.word == RING_WINS and said.data["decided_by"] == "time-to-target"
    seconds = BATCH * PER_EPOCH * 4 / 120
    assert said.because.startswith(
        f"allreduce ×2 took {seconds:.1f} s to 0.3 (5 of 5 trainings reached it), "
        "ps-sync ×2+1 12.8 s (5 of 5): 1.18 to 1.22 times as fast (mean 1.20, 5 repeats), and 2.40 "
        "times as fast as one process"
    )
    assert said.data["speed"]["ratio"] == pytest.approx(1.2, rel=0.01)
    assert said.headline == "RING by time to 0.3, and by speed"
    assert said.data["by_speed"]["answer"] == RING_WINS
    assert "times the samples/s of ps-sync ×2+1" in said.data["by_speed"]["because"]
    assert not said.data["quality"] and said.next.startswith("hvdtrain launch -n 2 ")
    json.dumps(said.data, allow_nan=False)


def test_where_speed_says_something_else_that_is_the_headline_and_samples_explain_it():
    """Asynchrony takes more steps a second, and needs more of them."""
    said = decide(
        trainings(RING2, 100, 3), trainings(ASYNC, 130, 5, SPREAD[::-1]), trainings(ONE, 50, 3)
    )
    assert (said.word, said.data["by_speed"]["answer"]) == (RING_WINS, SERVERS_WIN)
    assert said.headline == "RING by time to 0.3, SERVERS by speed"
    parts = said.data["steps_and_samples"]
    assert (parts["run"], parts["beside"]) == ("ps-async ×2+1", "allreduce ×2")
    assert parts["s_per_sample"] == pytest.approx(100 / 130)
    assert parts["samples"] == pytest.approx(5 / 3, rel=0.05)
    assert parts["says"].startswith("samples made the difference: ps-async ×2+1 took 0.77 times")


def test_one_machine_and_level_times_are_answers_too():
    slow = trainings(RING2, 40, 4), trainings(SERVED, 40, 4, SPREAD[::-1])
    assert decide(*slow, trainings(ONE, 60, 4)).word == ONE_PROCESS
    tight = (1.0, 1.001, 0.999, 1.0, 1.0)
    level = trainings(RING2, 100, 4, tight), trainings(SERVED, 101, 4, tight[::-1])
    said = decide(*level, trainings(ONE, 50, 4, tight))
    assert said.word == EITHER and "too small to matter" in said.because


def test_who_never_reaches_the_target_loses_to_who_does():
    said = decide(trainings(RING2, 100, 4), trainings(ASYNC, 100, 50), trainings(ONE, 50, 4))
    assert said.word == RING_WINS
    assert "ps-async ×2+1 over 19.2 s (0 of 5): at least 1.4" in said.because
    assert said.data["speed"]["ci_high"] is None
    assert "trainings ended without the target: 5 of 5 of ps-async ×2+1" in said.but[0]
    assert said.data["steps_and_samples"] is None
    [row] = [row for row in said.data["runs"] if row["mode"] == "ps-async"]
    assert (row["to_target"]["reached"], row["to_target"]["seconds"]) == (0, None)
    cells = dict(table(said.data).rows)["ps-async ×2+1"]
    assert [cell.text for cell in cells[:2]] == ["over 19.2 s", "≤ 0.67"]


def test_who_does_not_always_reach_the_target_is_not_ahead_and_next_trains_longer():
    mostly = trainings(ASYNC, 300, 4)
    mostly[2] = trainings(ASYNC, 300, 50)[2]
    said = decide(trainings(RING2, 100, 4), mostly, trainings(ONE, 50, 4))
    assert said.word == UNKNOWN and said.data["speed"]["ci_high"] is None
    assert said.because.startswith("servers ahead, ")
    assert said.because.endswith("trainings ended without the target, and longer ones would tell")
    assert (
        "--decide-by time-to-target " in said.next and f"--epochs {4 * DEFAULT_EPOCHS}" in said.next
    )
    assert "--stop-at-target" not in said.next


def test_where_nobody_reaches_the_target_nothing_is_known_and_next_trains_longer():
    said = decide(trainings(RING2, 130, 50), trainings(SERVED, 100, 50), trainings(ONE, 50, 50))
    assert said.word == UNKNOWN and "there is no pair of trainings" in said.because
    assert (
        f"--epochs {4 * DEFAULT_EPOCHS}" in said.next
        and said.data["by_speed"]["answer"] == RING_WINS
    )


def test_a_few_repeats_say_nothing_and_next_makes_them_by_time():
    said = decide(trainings(RING2, 130, 4, SPREAD[:3]), trainings(SERVED, 100, 4, SPREAD[:3]))
    assert said.word == UNKNOWN and said.data["repeats_needed"] == 5
    words = "--decide-by time-to-target --lr 0.0003 --modes allreduce,ps-sync,single "
    assert words in said.next and said.next.endswith("--repeats 5")


@pytest.mark.parametrize(
    ("s_per_sample", "samples", "cause"),
    [
        (1.3, 1.0, "steps made the difference"),
        (0.8, 2.0, "samples made the difference"),
        (1.2, 1.25, "steps and samples made the difference"),
        (0.8, 1.25, "steps and samples made up for each other"),
        (1.01, 1.0, "neither steps nor samples made a difference"),
    ],
)
def test_what_made_the_difference(s_per_sample, samples, cause):
    assert StepsAndSamples(s_per_sample, samples, 5).cause(0.05) == cause


def comparison(folder):
    """The folder of a comparison by the time to the target, with whole trainings."""
    (folder / "logs").mkdir(parents=True)
    for kind, speed, epochs in ((RING2, 100, 3), (ASYNC, 130, 5), (ONE, 50, 3)):
        for repeat, factor in enumerate(SPREAD, 1):
            accuracy = TARGET * EPOCHS / (epochs * factor)
            target = {"accuracy": accuracy, "target_accuracy": TARGET}
            write(folder / "runs", *kind, repeat=repeat, speed=speed, **target)
    state = ComparisonState(folder)
    state.set_experiment({DECIDE_BY: BY_TIME_TO_TARGET})
    state.save()
    return folder


def test_a_report_decides_as_the_comparison_did_or_as_it_is_told(tmp_path, monkeypatch):
    foretell_little(monkeypatch)
    folder = comparison(tmp_path / "c")
    assert conducted([folder]).decided_by == BY_TIME_TO_TARGET
    printed = CliRunner().invoke(report, [str(folder), "--out", str(tmp_path / "out")]).output
    assert "RING by time to 0.3, SERVERS by speed" in printed
    assert "by speed  SERVERS: ps-async ×2+1 did" in printed
    assert "explain   samples made the difference: " in printed
    page = (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
    assert page.startswith("# RING by time to 0.3, SERVERS by speed\n")
    by_speed = CliRunner().invoke(report, [str(folder), "--decide-by", "speed"]).output
    assert "by time to" not in by_speed


def test_explain_says_of_a_comparison_what_made_the_difference(tmp_path):
    folder = comparison(tmp_path / "c")
    file = tmp_path / "parts.json"
    printed = CliRunner().invoke(explain, [str(folder), "--json", str(file)]).output
    assert "samples made the difference: ps-async ×2+1 took 0.77 times the seconds" in printed
    rows = json.loads(file.read_text(encoding="utf-8"))
    differences = [row for row in rows if "says" in row]
    assert {row["run"] for row in differences} == {"ps-async ×2+1", "one process, 2 cores"}
    assert math.prod(rows[0][key] for key in ("s_per_sample", "samples")) > 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--trainings", "2"], "--trainings is for --decide-by speed"),
        (["--sprint", "4"], "--sprint is for --decide-by speed"),
    ],
)
def test_what_has_no_use_is_refused(words, message):
    result = CliRunner().invoke(compare, ["--decide-by", "target", *words, "--dry-run"])
    assert isinstance(result.exception, UsageError) and message in str(result.exception)


def test_repeats_are_whole_trainings_that_end_at_the_target(tmp_path):
    words = ["--decide-by", "target", "--modes", "allreduce,ps-sync", "--wire", "zmq"]
    printed = CliRunner().invoke(compare, [*words, "--dry-run"]).output
    assert printed.count("--stop-at-target") == 10 and "--sprint" not in printed
    assert "forecast: 10 runs to do, at most about" in printed


def test_times_to_the_target_are_planned_with_slow_workers_too():
    words = "--decide-by target --target-accuracy 0.9 --modes allreduce,ps-async --lr 0.001"
    slow = ["--slow", "none,1:3x", "--dry-run"]
    planned = CliRunner().invoke(compare, [*words.split(), *slow])
    assert planned.exit_code == 0, planned.output
    commands = [line for line in planned.output.splitlines() if "hvdtrain launch" in line]
    slowed = [line for line in commands if "--slow 1:3x" in line]
    assert len(commands) == 2 * len(slowed) and slowed
    assert all("--stop-at-target" in line for line in commands)
