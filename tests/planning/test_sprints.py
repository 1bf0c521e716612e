"""Short runs that a calibration makes: which of them count."""

import dataclasses

import pytest

from hvdtrain.base.config.run_config import RunConfig
from hvdtrain.planning import sprints
from hvdtrain.planning.check import measured_step_s

SMALL = RunConfig(model="cnn", dataset="digits", image_size=28)


@pytest.fixture(autouse=True)
def for_a_moment(monkeypatch):
    monkeypatch.setattr(sprints, "SPRINT_S", 0.3)


def runs_of(config, threads=(1,)):
    lines = []
    with sprints.sprints(config, 4, threads, lines.append) as runs:
        steps = [measured_step_s(run) for run in runs]
        folders = [run.folder for run in runs]
    assert not any(folder.exists() for folder in folders)
    return runs, steps, lines


@pytest.mark.timeout(120)
def test_one_process_trains_with_each_number_of_threads(monkeypatch):
    monkeypatch.setattr(sprints.Watch, "others", lambda watch: 0.0)
    runs, steps, lines = runs_of(SMALL, threads=(1, 2))
    assert [run.manifest.threads_per_worker for run in runs] == [1, 2]
    assert all(run.kind.mode == "single" and run.manifest.global_batch == 4 for run in runs)
    assert all(0 < seconds < 10 for seconds in steps) and len(lines) == 1


@pytest.mark.timeout(120)
def test_a_run_that_other_work_disturbs_is_made_again_and_left_out_if_that_is_disturbed_too(
    monkeypatch,
):
    shares = iter([0.5, 0.0, 0.5, 0.5])
    monkeypatch.setattr(sprints.Watch, "others", lambda watch: next(shares))
    made = []
    sprint = sprints._sprint

    def counted(*words):
        made.append(words)
        return sprint(*words)

    monkeypatch.setattr(sprints, "_sprint", counted)
    runs, _, _ = runs_of(SMALL, threads=(1, 2))
    assert len(runs) == 1 and len(made) == 4


def test_a_run_that_fails_leaves_the_calibration_without_it():
    runs, _, lines = runs_of(dataclasses.replace(SMALL, model="nothing.py:missing"))
    assert not runs and "a training is left out: hvdtrain: " in lines[-1]
    assert "nothing.py" in lines[-1]
