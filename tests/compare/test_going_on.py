"""A comparison goes on in the folder of an earlier one: what stays, what is made again, and what is refused."""

import dataclasses
import fcntl
import json
import os
import signal
import subprocess
from types import SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner
from helpers import report_runs
from helpers.forked_jobs import forked_hvdtrain
from helpers.jobs import SETTINGS, until

from hvdtrain.compare import earlier, running, settled
from hvdtrain.compare.command import compare
from hvdtrain.compare.earlier import check_images, claimed, find_finished, keep_threads, match, set_aside
from hvdtrain.compare.grid import Axes, plan
from hvdtrain.config.run_config import RunConfig
from hvdtrain.errors import UsageError
from hvdtrain.launch.hosts import Host
from hvdtrain.report.contenders import DEFAULT
from hvdtrain.runs.request import with_absolute_paths
from hvdtrain.world.host import versions

ASKED = RunConfig(steps=20, threads=1)


def planned(modes="allreduce,ps-sync", repeats=2, config=ASKED, **axes):
    return plan(config, Axes(modes.split(","), repeats=repeats, **axes))


def finish(folder, runs, speeds=None, **changed):
    """The folders of finished runs, as jobs leave them."""
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    for number, run in enumerate(runs):
        made = folder / "runs" / run.name
        made.mkdir(parents=True)
        taken = dataclasses.replace(run.config, width=run.config.taken_width)  # as ranks write it down
        with_absolute_paths(taken).write(made / "config.toml", workers=run.workers, job="1")
        config = run.config
        of = report_runs.manifest(
            config.mode, run.workers, config.servers, config.repeat, versions=versions(), **changed
        )
        (made / "manifest.json").write_text(json.dumps(of))
        speed = speeds[number] if speeds is not None else 100.0
        (made / "summary.json").write_text(json.dumps(report_runs.summary(of, speed)))


def kept(folder, runs):
    return sorted(match(find_finished(folder), runs, folder))


def test_finished_runs_stay_and_more_repeats_and_modes_join_them(tmp_path):
    finish(tmp_path, planned(repeats=3)[:3])
    names = ["allreduce-w2-r1", "ps-sync-w2-s1-r1", "ps-sync-w2-s1-r2"]  # the second repeat begins with the other mode
    assert kept(tmp_path, planned(repeats=5)) == names
    assert kept(tmp_path, planned("single,allreduce,ps-sync")) == names
    assert kept(tmp_path, planned("ddp")) == []
    many = planned(batches=[32, 64], repeats=1)  # their names have the batch in them
    assert kept(tmp_path, many) == ["b32-allreduce-w2-r1", "b32-ps-sync-w2-s1-r1"]


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"steps": 30}, "allreduce-w2-r1 was made with --steps 20, not 30: name another folder"),
        ({"lr": 0.01, "seed": 5}, "was made with --lr 0.0003, not 0.01; --seed 0, not 5"),
        ({"steps": 0, "epochs": 2}, "was made with --epochs auto, not 2; --steps 20, not none"),
        ({"dataset": "./mine"}, "was made with --dataset digits, not /"),
    ],
)
def test_what_could_not_be_compared_is_one_line(changed, says, tmp_path):
    finish(tmp_path, planned(repeats=1))
    with pytest.raises(UsageError, match=says.replace(".", r"\.")):
        kept(tmp_path, planned(repeats=1, config=dataclasses.replace(ASKED, **changed)))


def test_runs_that_would_have_the_same_names_are_not_made_again(tmp_path):
    finish(tmp_path, planned(repeats=1))
    with pytest.raises(
        UsageError, match="allreduce-w2-r1 is there already, with --batch-size 32 in place of --batch-size 64"
    ):
        kept(tmp_path, planned(batches=[64]))


def test_options_of_another_mode_and_of_what_is_shown_may_differ(tmp_path):
    finish(tmp_path, planned("ps-ssp", repeats=1, config=dataclasses.replace(ASKED, staleness=4)))
    assert kept(tmp_path, planned("ps-async", config=dataclasses.replace(ASKED, staleness=2, log_every=5))) == []
    with pytest.raises(
        UsageError, match="ps-ssp-w2-s1-r1 is there already, with --staleness 4 in place of --staleness 2"
    ):
        kept(tmp_path, planned("ps-ssp"))


def test_hosts_launcher_versions_and_images_are_looked_at(tmp_path):
    [run] = planned("allreduce", 1)
    finish(tmp_path, [run], launch={"launcher": "local", "hosts": []}, dataset_hash="abc")
    there = find_finished(tmp_path)
    over_hosts = plan(ASKED, Axes(["allreduce"]), [Host("a", 1), Host("b", 1)], "ssh")
    with pytest.raises(UsageError, match="made with --launcher local, not ssh; hosts none, not a:1,b:1"):
        match(there, over_hosts, tmp_path)
    there[0].run.manifest.versions["torch"] = "1.0"
    with pytest.raises(UsageError, match=f"made with torch 1.0, not {versions()['torch']}"):
        match(there, [run], tmp_path)
    check_images(there, "abc", "digits")
    with pytest.raises(UsageError, match="--dataset digits is not what .*allreduce-w2-r1 was trained on"):
        check_images(there, "def", "digits")


def test_workers_have_the_threads_of_the_runs_that_are_there(tmp_path):
    finish(tmp_path, planned("allreduce", 1))
    there, wide = find_finished(tmp_path), planned("single", 1, dataclasses.replace(ASKED, threads=8))
    assert [run.config.threads for run in keep_threads(there, wide, tmp_path)] == [1]
    assert keep_threads([], wide, tmp_path) == wide
    narrow = planned("single", 1)
    there = [dataclasses.replace(there[0], config=dataclasses.replace(there[0].config, threads=2))]
    with pytest.raises(UsageError, match="has runs of 2 threads a worker, and these have room for 1: .* --threads 2"):
        keep_threads(there, narrow, tmp_path)


def test_runs_of_a_version_with_other_options_are_told_and_left(tmp_path):
    [run] = planned("allreduce", 1)
    finish(tmp_path, [run])
    with (tmp_path / "runs" / run.name / "config.toml").open("a") as file:
        file.write("frob = 1\n")
    with pytest.raises(UsageError, match="unknown option in .*config.toml: 'frob'"):
        find_finished(tmp_path)


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "runs").mkdir()
    with pytest.raises(UsageError, match="holds a comparison"):
        find_finished(tmp_path)
    (tmp_path / "logs").mkdir()
    assert find_finished(tmp_path) == []
    (tmp_path / "report.md").write_text("mine")
    with pytest.raises(UsageError, match="is not empty and holds no earlier report"):
        find_finished(tmp_path)


def test_what_was_begun_is_moved_out_of_the_way_and_not_while_its_job_runs(tmp_path, monkeypatch):
    with claimed(tmp_path):
        assert set_aside(tmp_path, "a") is None
        for number in (1, 2):
            (tmp_path / "runs" / "a").mkdir()
            (tmp_path / "runs" / "a" / "config.toml").write_text(str(number))
            (tmp_path / "logs" / "a.log").write_text("why")
            assert set_aside(tmp_path, "a") == tmp_path / "unfinished" / f"a-{number}"
            assert (tmp_path / "unfinished" / f"a-{number}" / "compare.log").read_text() == "why"
        (tmp_path / "runs" / "a").mkdir()
        monkeypatch.setattr(earlier, "KILLED_JOB_END_S", 0.3)
        with (tmp_path / "runs" / "a" / "config.toml").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # as its first worker holds it
            with pytest.raises(UsageError, match="its job is still at work there"):
                set_aside(tmp_path, "a")
        with pytest.raises(UsageError, match="another comparison is at work there"), claimed(tmp_path):
            pass


@pytest.mark.timeout(110)
def test_a_killed_comparison_goes_on_where_it_stopped(tmp_path):
    out = tmp_path / "c"
    options = ["--modes", "single", "--width", "0.0625", "--steps", "8", "--out", str(out)]
    words = [*forked_hvdtrain(), "compare", *options]
    first, second = out / "runs" / "single-w1-r1" / "summary.json", out / "runs" / "single-w1-r2"
    with subprocess.Popen([*words, "--repeats", "2"], **SETTINGS, start_new_session=True) as job:
        until((second / "manifest.json").exists)
        os.killpg(job.pid, signal.SIGKILL)
    before = first.stat()
    done = subprocess.run([*words, "--repeats", "2"], **SETTINGS, timeout=60)
    assert done.returncode == 0, done.stdout
    assert (first.stat().st_ino, first.stat().st_mtime) == (before.st_ino, before.st_mtime)
    assert "1 of 2 runs are there already, and stay as they are" in done.stdout
    assert (out / "unfinished" / "single-w1-r2-1" / "manifest.json").exists()
    assert (second / "summary.json").exists() and (out / "results.csv").read_text().count("\n") == 3


def test_ctrl_c_says_with_what_to_go_on(tmp_path, monkeypatch):
    def ctrl_c(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("hvdtrain.compare.command.run_all", ctrl_c)
    said = CliRunner().invoke(compare, ["--modes", "single", "--device", "cpu", "--out", str(tmp_path / "a run")])
    assert f"finished runs stay: the same command with --out '{tmp_path}/a run' goes on\n" in said.output


# --until-sure


@pytest.mark.parametrize(("enough", "done"), [(None, 6), (2, 4), (1, 2), (9, 6)])
def test_repeats_end_between_repeats(enough, done, tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(running, "_run_one", lambda run, *_: made.append(run.name) or "")
    runs = planned(repeats=3)
    kept = {runs[0].name: tmp_path}
    is_settled = (lambda repeat: repeat >= enough) if enough else None
    assert running.run_all(runs, kept, tmp_path, 100, is_settled) == []
    assert made == [run.name for run in runs[1:done]]


def test_ranks_get_the_variables_that_are_named(tmp_path, monkeypatch):
    def stop(*_, secrets=None, **more):
        raise UsageError(f"ranks get {secrets}")

    monkeypatch.setattr(running, "prepare", stop)
    monkeypatch.setenv("MY_TOKEN", "t0ken")
    words = ["--modes", "single", "--device", "cpu", "--out", str(tmp_path / "run"), "--env"]
    assert "ranks get {'MY_TOKEN': 't0ken'}" in str(CliRunner().invoke(compare, [*words, "MY_TOKEN"]).exception)
    unset = CliRunner().invoke(compare, [*words, "NOT_SET_HERE"]).exception
    assert "--env NOT_SET_HERE: there is no variable of this name here" in str(unset)


def test_a_full_disk_is_named_where_a_run_could_not_even_say_why_it_failed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(running, "_run_one", lambda *_: "exit code 1: no output")
    for free, said in ((2**30, "exit code 1: no output\n"), (2**10, "exit code 1: no output; the disk is full\n")):
        monkeypatch.setattr("shutil.disk_usage", lambda _, free=free: SimpleNamespace(free=free))
        assert running.run_all(planned()[:1], {}, tmp_path, 100, None) == [planned()[0].name]
        assert capsys.readouterr().out.endswith(said)


def test_until_sure_needs_as_many_repeats_as_a_verdict():
    result = CliRunner().invoke(compare, ["--until-sure", "--repeats", "4"])
    assert str(result.exception) == "--until-sure with --repeats 4: no verdict is known before 5"


def comparison(folder, speeds):
    """Runs of two modes, whose speeds are [repeats, 2]."""
    runs = planned(repeats=len(speeds))
    speeds = np.asarray(speeds).tolist()
    finish(folder, runs, [speeds[run.config.repeat - 1][run.config.mode == "ps-sync"] for run in runs])
    return folder


@pytest.mark.parametrize(
    ("noise", "lead", "settled_at_5"), [(0.01, 1.3, True), (0.2, 1.3, False), (0.002, 1.0, True), (0.1, 1.0, False)]
)
def test_repeats_end_where_the_verdict_is_known(noise, lead, settled_at_5, tmp_path):
    spread = np.array([0.5, -1.0, 1.0, -0.8, 0.3])
    comparison(tmp_path, np.stack([100 * lead * np.exp(noise * spread), np.full(5, 100.0)], axis=1))
    assert settled.is_settled(tmp_path, 5, 20, DEFAULT) == settled_at_5
    assert not settled.is_settled(tmp_path, 4, 20, DEFAULT)
