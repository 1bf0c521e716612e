"""`hvdtrain status`: how far a job is; of one that runs, in test_launch_jobs."""

import fcntl
import json
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers import report_runs

from hvdtrain.base.config.run_config import RunConfig
from hvdtrain.base.errors import UsageError
from hvdtrain.cli import main
from hvdtrain.launch.status import status_lines
from hvdtrain.launch.supervise import log_file
from hvdtrain.runs.live import last_steps, samples_per_s


@pytest.fixture
def run(tmp_path):
    """A run folder of 30 steps, 100 samples/s, and nothing that works there."""
    folder = report_runs.write(tmp_path, "ps-sync", 2, 1)
    RunConfig(mode="ps-sync", servers=1, steps=90).write(folder / "config.toml", workers=2, job="1")
    (folder / "snapshots" / "step-00000012").mkdir(parents=True)
    return folder


def lines(run):
    return list(status_lines(run, run.name))


def test_a_finished_run(run):
    finished, figures, *_ = lines(run)
    assert (
        finished
        == "ps-sync-w2-s1-r1: finished (ps-sync with 2 workers and 1 server, by mpirun)".replace(
            "ps-sync-w2-s1-r1", run.name
        )
    )
    assert figures == "30 steps in 0:00:19 of training, 100 samples/s, validation accuracy 0.9800"


def test_a_script_that_reported_no_accuracy_has_none(run):
    summary = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps(summary | {"val_accuracy": None}))
    assert lines(run)[1] == "30 steps in 0:00:19 of training, 100 samples/s"


def test_a_run_that_stopped_says_how_it_goes_on(run):
    (run / "summary.json").unlink()
    state, step, last, snapshot = lines(run)
    again = f"`hvdtrain launch --resume --out {run.name}` continues it, with the same --launcher, "
    assert state.startswith(f"{run.name}: not running, and not finished; {again}")
    assert "-H and --sync-dst-dir if there were any (ps-sync with 2" in state
    assert re.fullmatch(r"step 30 of 90, epoch 6, 100 samples/s lately, loss 0\.\d{4}", step)
    assert re.fullmatch(r"last step 0:00:0\d ago, after 0:00:19 of training", last)
    assert snapshot == "last snapshot after step 12"


def test_the_command_to_go_on_can_be_pasted(run):
    spaced = run.rename(run.with_name("r t"))
    (spaced / "summary.json").unlink()
    (spaced / "config.toml").write_text('model = "/tmp/mine.py:build"\n')
    state = lines(spaced)[0]
    # It trusts no code that the folder names: `launch` says how.
    assert "`hvdtrain launch --resume --out 'r t'` continues it" in state


def test_a_run_that_failed_says_why_and_goes_on_only_from_a_snapshot(run, monkeypatch):
    (run / "summary.json").unlink()
    (run / "snapshots" / "step-00000012").rmdir()
    log_file(run).parent.mkdir()
    log_file(run).write_text(
        "[1]<stderr>: hvdtrain: rank 1 failed: a peer is gone\n[0]<stderr>: hvdtrain: rank 0 failed: no room\n"
        "   Process name: [prterun-a-1@1,0]\n   Exit code:    1\n"
    )
    state, *_, last = lines(run)
    assert ": not running, and not finished: no snapshot to go on from (" in state
    assert last == "reason: rank 0 failed: no room"
    log_file(run).unlink()
    (run / "logs").mkdir()
    (run / "logs" / "rank.0.err").write_text(
        "Traceback\nOSError: [Errno 28] No space left on device\n"
    )
    assert lines(run)[-1] == "last line: OSError: [Errno 28] No space left on device"
    (run / "logs" / "rank.0.err").write_text(
        "a.py:3: UserWarning: no device is known\n  device = of(group)\n"
    )
    assert lines(run)[-1] == "last line: a.py:3: UserWarning: no device is known"
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=2**10))
    assert (
        ", and not finished, on a disk that is full (make room there): no snapshot to go on from"
        in lines(run)[0]
    )


@pytest.mark.parametrize(("starter", "rank"), [("horovodrun", 1), ("mpirun", 2)])
def test_a_run_that_was_asked_to_leave_says_so_and_one_that_failed_names_the_rank(
    starter, rank, run
):
    (run / "summary.json").unlink()
    hosts = {"a": {"ranks": [0, 2]}, "b": {"ranks": [1]}}
    of = {
        "starter": starter,
        "launch": {"launcher": "ssh", "hosts": ["me@a:2", "b:1"]},
        "hosts": hosts,
    }
    (run / "manifest.json").write_text(
        json.dumps(json.loads((run / "manifest.json").read_text()) | of)
    )
    log_file(run).parent.mkdir()
    failed = "[0]<stdout>: epoch 1\n   Process name: [prterun-a-1@1,2]\n   Exit code:    143\n"
    log_file(run).write_text(failed)
    assert lines(run)[-1].startswith(f"reason: rank {rank} was ended by SIGTERM (see ")
    log_file(run).write_text(
        f"[1]<stdout>: ended by SIGTERM at step 30; the last snapshot is of step 30: go on\n{failed}"
    )
    state, *_, last = lines(run)
    assert state.startswith(
        f"{run.name}: stopped on request at step 30; `hvdtrain launch --resume --out "
    )
    assert last == "last snapshot after step 12"


def test_a_record_of_an_unknown_launcher_is_named(run):
    log_file(run).parent.mkdir()
    log_file(run).with_name("running.json").write_text('{"launcher": "mine", "job": "1"}')
    with pytest.raises(
        UsageError,
        match=r"unknown launcher in .*\.launch/running\.json: 'mine': choose from jobset",
    ):
        lines(run)


def test_a_run_whose_first_worker_holds_it_trains_and_a_schedulers_job_is_named(run):
    (run / "summary.json").unlink()
    (run.with_name(f"{run.name}.launch")).mkdir()
    log, record = (run.with_name(f"{run.name}.launch") / name for name in ("log", "running.json"))
    log.write_text("[1]<stdout>: epoch 3\n----\n")
    manifest = json.loads((run / "manifest.json").read_text())
    launch = {"launcher": "ssh", "hosts": ["a:2", "b:1"], "interface": "eth0", "folder": ""}
    (run / "manifest.json").write_text(json.dumps(manifest | {"launch": launch}))
    with (run / "config.toml").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        state, *_, last = lines(run)
    assert re.search(r": training since [\d: -]+ \(.*, by ssh on a:2, b:1\)$", state)
    assert last == "last line: [1]<stdout>: epoch 3"
    record.write_text(json.dumps({"launcher": "slurm", "job": "17"}))
    os.utime(log, (0, 0))
    log.with_name("slurm-17.log").write_text("[0]<stdout>: epoch 4\n")
    state, *_, last = lines(run)
    assert (
        ": handed to slurm as job 17 since " in state and last == "last line: [0]<stdout>: epoch 4"
    )
    record.write_text(json.dumps({"launcher": "ssh", "pid": os.getpid(), "host": "elsewhere"}))
    assert ": launched on elsewhere since " in lines(run)[0]


def test_a_run_says_which_workers_it_has_lost_and_does_not_count_their_speed(run):
    (run / "summary.json").unlink()
    step = lines(run)[1]
    life = {
        "member": 0,
        "rank": 1,
        "incarnation": 1,
        "pid": None,
        "joined": 1.0,
        "left": None,
        "why": "",
    }
    lost = life | {"member": 1, "rank": 2, "left": 9.0, "why": "its connection ended"}
    there = [life, lost | {"left": None, "why": ""}]

    def with_lives(*lives):
        (run / "membership.jsonl").write_text(
            "".join(json.dumps(one) + "\n" for one in lives) + '{"member": 1'
        )
        return lines(run)[1:3]

    assert with_lives(*there)[0] == step
    said, half = with_lives(*there, lost)
    assert said == "1 of 2 workers: rank 2 was lost after step 30"
    assert half == step.replace("100 samples/s", "50 samples/s")
    back = life | {"member": 2, "rank": 2, "incarnation": 2}
    assert with_lives(*there, lost, back) == ["2 of 2 workers: rank 2 was lost and came back", step]
    (run / "metrics.rank2.jsonl").unlink()
    assert with_lives(*there, lost)[0] == "1 of 2 workers: rank 2 was lost"


def test_where_there_is_no_run(tmp_path):
    with pytest.raises(UsageError, match="nosuch: no run was begun there"):
        lines(tmp_path / "nosuch")
    run = tmp_path / "comparison" / "runs" / "single-w1-r1"
    run.mkdir(parents=True)
    (run / "config.toml").touch()
    with pytest.raises(
        UsageError, match=f"no run was begun there; name one of the runs in it, such as {run}"
    ):
        lines(tmp_path / "comparison")


def test_half_a_line_and_what_is_no_step_are_left_out(tmp_path):
    file = tmp_path / "metrics.rank0.jsonl"
    assert last_steps(file) == [] and samples_per_s([]) is None
    rows = [{"step": n, "epoch": 1, "time": n / 10, "samples": 16} for n in range(1, 4)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows) + 'null\nx\n{"step": 4, "epo')
    assert last_steps(file) == rows
    assert last_steps(file, tail=len(json.dumps(rows[2])) + 30) == rows[2:]
    assert samples_per_s([rows, rows, rows[:1]]) == pytest.approx(320)


@pytest.mark.parametrize(
    "command", ["status", "stop", "launch --resume -n 1 --out", "explain", "report", "replay"]
)
def test_the_root_folder_is_no_run(command, tmp_path, monkeypatch, capsys):
    """It has no name, so that nothing can lie beside it."""
    if Path("/runs").exists():
        pytest.skip("this machine's root folder has runs")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["hvdtrain", *command.split(), "/"])
    with pytest.raises(SystemExit) as ended:
        main()
    [line] = capsys.readouterr().err.splitlines()
    refusal = (
        "hvdtrain: (no run in /|/ is (no|not a) |/ cannot be (a|read as a) run folder|--out /)"
    )
    assert ended.value.code == 2
    assert re.match(refusal, line), line
