"""Which runs of a comparison are done, which have failed, and which are left."""

import shutil

import pytest
from helpers import report_runs

from hvdtrain.base.config.run_config import RunConfig
from hvdtrain.comparing.comparison_state import ComparisonState
from hvdtrain.comparing.grid import Axes, plan
from hvdtrain.comparing.progress import Progress
from hvdtrain.comparing.running import Comparison
from hvdtrain.reporting.contenders import DEFAULT
from hvdtrain.runs.read import find_runs, load_run


@pytest.fixture
def runs():
    return plan(RunConfig(threads=1), Axes(["single", "allreduce", "ddp"]))


def names(runs):
    return [run.name for run in runs]


def test_a_run_is_left_until_an_earlier_call_or_this_one_has_started_it(runs):
    single, allreduce, ddp = runs
    progress = Progress(kept={single.name})
    assert names(progress.left(runs)) == [allreduce.name, ddp.name]
    progress.start(allreduce)
    assert names(progress.left(runs)) == [ddp.name]
    assert progress.done == {single.name, allreduce.name}


def test_a_sprint_of_the_search_is_counted_and_does_not_stand_for_the_run_of_its_name(runs):
    progress = Progress()
    two_rounds = [run.sprint(1.0) for run in runs] * 2
    progress.start_sprint(two_rounds[0])
    assert names(progress.sprints_left(two_rounds)) == names([*runs[1:], *runs])
    progress.start_sprint(two_rounds[0])
    assert names(progress.sprints_left(two_rounds)) == names([*runs[1:], *runs[1:]])
    assert progress.started == 2 and names(progress.left(runs)) == names(runs)


def test_a_contender_that_failed_once_has_no_runs_left(runs):
    single, allreduce, ddp = runs
    progress = Progress()
    progress.start(ddp)
    progress.fail(ddp, "no memory", has_worked=True)
    again = [run.as_repeat(2) for run in runs]
    assert names(progress.left(again)) == [again[0].name, again[1].name]
    assert [progress.is_to_start(run) for run in again] == [True, True, False]
    progress.fail(single, "no memory", has_worked=True)
    assert not progress.shared_reason and progress.is_to_start(allreduce)


def test_nothing_is_started_after_two_failed_alike_on_other_ranks_and_nothing_worked(runs):
    single, allreduce, ddp = runs
    progress = Progress()
    progress.fail(single, "rank 0 failed: a.png is damaged (see rank.0.err)", has_worked=False)
    assert progress.is_to_start(ddp)
    progress.fail(allreduce, "rank 1 failed: a.png is damaged (see rank.1.err)", has_worked=False)
    assert progress.shared_reason.startswith("rank 1 failed") and not progress.is_to_start(ddp)


def test_a_sprint_that_was_set_aside_is_left_again_and_stays_counted(tmp_path, runs):
    single, _, _ = runs
    progress = Progress()
    progress.start(single)
    progress.finished[single.name] = load_run(report_runs.write(tmp_path, "single", 1))
    progress.set_aside(single)
    assert not progress.finished and progress.started == 1
    assert single.name in names(progress.left(runs))


def test_a_look_takes_the_runs_that_are_known_and_reads_no_folder_again(tmp_path, runs):
    for repeat in range(1, 6):
        report_runs.write(tmp_path / "runs", "single", 1, repeat=repeat)
    earlier = {run.name: run for run in find_runs([tmp_path])}
    shutil.rmtree(tmp_path / "runs")
    job = Comparison(tmp_path, runs[:1], earlier, ComparisonState(tmp_path), 0.0, 5, 0)
    assert job._why_enough(DEFAULT) == "there is nothing to compare"
