"""Jobs that `hvdtrain launch` starts on this machine: what they open, how they end, and that
nothing is left. What goes by way of ssh or mpirun is in test_testbed.py.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import time

import psutil
import pytest
from click.testing import CliRunner
from helpers.jobs import (
    ENDS_WHEN_TOLD,
    HVDTRAIN,
    SETTINGS,
    hvdtrain,
    read_rows,
    slow_steps,
    steps,
    until,
    until_told,
)
from helpers.launched import TINY, Launched

from hvdtrain.launch.processes import END_AFTER_SUMMARY_S
from hvdtrain.launch.status import status

pytestmark = pytest.mark.timeout(180)


def open_on_this_machine(job):
    """Where others than the job can reach one of its processes, the starter too."""
    found = set()
    for process in job.family:
        with contextlib.suppress(psutil.Error):
            found |= {
                c.laddr for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN
            }
    return found


def test_a_local_job_opens_no_port_and_nothing_is_left_of_it(tmp_path):
    with Launched(tmp_path / "run", "local", 2, 1, "--mode", "ps-async", *TINY) as job:
        job.wait_for_steps()
        assert sorted(job.ranks()) == [0, 1, 2]
        assert open_on_this_machine(job) == set()
        shown = CliRunner().invoke(status, [str(tmp_path / "run")]).output
        assert re.match(
            r".*run: training since .* \(ps-async with 2 workers and 1 server, by local\)\nstep \d+ of \d+, ",
            shown,
        )
        for _ in range(2):
            job.process.send_signal(signal.SIGINT)
            time.sleep(0.4)
        printed, _ = job.process.communicate(timeout=30)
        assert job.process.returncode == 128 + signal.SIGINT, printed
        assert re.search(
            r"^hvdtrain: interrupted: (`hvdtrain launch --resume --out|nothing had been saved)",
            printed,
            re.M,
        )
        until(lambda: not job.alive())
        until(
            lambda: (
                "not running, and not finished"
                in CliRunner().invoke(status, [str(tmp_path / "run")]).output
            )
        )


def test_a_killed_rank_is_named_and_its_end_is_the_jobs_exit_code(tmp_path):
    with Launched(
        tmp_path / "run", "local", 2, 0, "--mode", "allreduce", *TINY, forked=True
    ) as job:
        job.wait_for_steps()
        job.ranks()[1].send_signal(signal.SIGKILL)
        printed, _ = job.process.communicate(timeout=40)
        until(lambda: not job.alive())
    assert job.process.returncode == 128 + signal.SIGKILL, printed
    assert "hvdtrain: the job failed: rank 1 was ended by SIGKILL" in printed.splitlines()[-1]


ENDS = """
import os, signal
from hvdtrain.job.ps.worker import PushPull
begin = PushPull.begin
def end(self, step, lr):
    if step > 3 and os.environ["OMPI_COMM_WORLD_RANK"] == "2":
        {how}
    begin(self, step, lr)
PushPull.begin = end
"""
FAILS = "raise ValueError('its memory is broken')"
KILLED = "os.kill(os.getpid(), signal.SIGKILL)"
HANGS = "os.kill(os.getpid(), signal.SIGSTOP)"


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (
            FAILS,
            "hvdtrain: rank 2 failed: its memory is broken .*; the others have finished the job, rank 2 was lost",
        ),
        (KILLED, "hvdtrain: rank 2 is lost, and the others go on without it: its connection ended"),
        (HANGS, "hvdtrain: rank 2 is lost, and the others go on without it: no answer within 6 s"),
    ],
)
def test_a_job_that_goes_on_without_a_worker_has_done_what_was_asked_whatever_became_of_it(
    how, said, few_digits, tmp_path
):
    small = ["--dataset", few_digits, "--batch-size", "12", *TINY[:-2]]
    out, options = (
        tmp_path / "run",
        ["--mode", "ps-async", *small, "--steps", "20", "--timeout", "6s"],
    )
    with Launched(out, "local", 3, 1, *options, forked=True, first=ENDS.format(how=how)) as job:
        printed, _ = job.process.communicate(timeout=100)
        ended_at = time.time()
    assert job.process.returncode == 0, printed
    assert re.search(said, printed), printed
    summary = out / "summary.json"
    assert json.loads(summary.read_text())["lost_workers"] == [2]
    assert ended_at < summary.stat().st_mtime + END_AFTER_SUMMARY_S


@pytest.mark.parametrize(
    "words",
    [
        "doctor",
        "launch -n 1 -s 1 --retries 1 --respawn --out run -- --mode ps-async --wire zmq --dataset ./images",
        "launch -n 1 -H localhost:1 --out run -- --mode allreduce --dataset ./images",
    ],
)
def test_no_code_of_the_current_folder_runs(words, tmp_path):
    """In one that has modules of such names; ranks find no image there, and end."""
    (tmp_path / "images").mkdir()
    for name in ("hvdtrain", "horovod", "torch", "json", "socket", "sitecustomize"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(
            f"open({str(tmp_path / 'ran')!r}, 'a').write({name!r})"
        )
    done = subprocess.run([HVDTRAIN, *words.split()], **SETTINGS, cwd=tmp_path, timeout=100)
    assert not (tmp_path / "ran").exists(), (tmp_path / "ran").read_text()
    assert "No module" not in done.stdout
    if "launch" in words:
        assert done.returncode == 2 and "has no folder train" in done.stdout.splitlines()[-1], (
            done.stdout
        )


def test_whoever_is_killed_is_started_again_and_is_asked_to_leave_with_the_others(tmp_path):
    """Also the first worker."""
    out = tmp_path / "run"
    options = ["--mode", "ps-async", "--wire", "zmq", *TINY]
    place = ["--respawn"]
    pace = slow_steps(0.1)  # so that its processes leave room to those that start
    with Launched(out, "local", 2, 1, *options, place=place, forked=True, first=pace) as job:
        job.wait_for_steps()
        for rank in (2, 1):
            job.ranks()[rank].kill()
            until(
                lambda rank=rank: (
                    [life["incarnation"] for life in lives(out) if life["rank"] == rank][-1] == 2
                )
            )
        started = {life["pid"] for life in lives(out) if life["pid"]}
        before = len(steps(out, 1))
        until(lambda: len(steps(out, 1)) > before + 3)
        job.look()
        job.process.terminate()
        said, _ = job.process.communicate(timeout=60)
        assert job.process.returncode == 143, said
        assert "has joined, whose life number 2 this is" in said
        assert not job.alive() and len(started) == 2
        until(lambda: not any(psutil.pid_exists(pid) for pid in started))
    assert list((out / "snapshots").glob("step-*"))
    assert not (out / "join.json").exists()


@pytest.mark.hosts
def test_servers_that_are_killed_come_back_with_all_that_they_had_answered(tmp_path):
    """While a worker is killed too. Replay computes every push again, and finds the same weights."""
    out, over = tmp_path / "run", tmp_path / "over"
    options = [
        "--mode",
        "ps-async",
        "--wire",
        "zmq",
        "--record",
        "--schedule",
        "constant",
        *TINY[:-2],
        *ENDS_WHEN_TOLD,
    ]
    options += ["--shuffle-block", "64", "--batch-size", "32"]
    with Launched(
        out, "local", 2, 2, *options, place=["--respawn"], forked=True, first=until_told(over)
    ) as job:
        job.wait_for_steps()
        job.ranks()[3].kill()
        until(lambda: [life["incarnation"] for life in lives(out) if life["rank"] == 3][-1] >= 2)
        for rank in (0, 1):
            killed, before = kill_server(out, rank), len(steps(out, 2))
            until(lambda rank=rank, killed=killed: server_pid(out, rank) not in (None, killed))
            until(lambda before=before: len(steps(out, 2)) > before + 3)
        until(lambda: len(steps(out, 2)) > 100)
        over.touch()
        said, _ = job.process.communicate(timeout=90)
        assert job.process.returncode == 0, said
        assert "rank 0, a server, was killed and is back" in said
        assert not job.alive() and not [
            path for path in out.iterdir() if path.name.startswith(("return", "join"))
        ]
    assert "Traceback" not in (tmp_path / "run.launch" / "log").read_text()
    summary = json.loads((out / "summary.json").read_text())
    assert [(back["rank"], back["lost_updates"]) for back in summary["returned_servers"]] == [
        (0, 0),
        (1, 0),
    ]
    epochs, more = divmod(summary["steps"], 45)
    trained = epochs * 1438 + more * 32
    assert sum(life["samples"] for life in summary["membership"]) == summary["samples"] == trained
    assert summary["val_accuracy"] > 0.5
    replayed = hvdtrain("replay", out)
    assert replayed.returncode == 0 and "bit for bit" in replayed.stdout, replayed.stdout


def server_pid(out, rank):
    """The process of a server that comes back when it is killed."""
    with contextlib.suppress(FileNotFoundError):
        return json.loads((out / f"return.server{rank}.json").read_text())["pid"]


def kill_server(out, rank):
    os.kill(pid := server_pid(out, rank), signal.SIGKILL)
    return pid


def lives(out):
    """The last line of each life, of workers that joined those with a process."""
    return list({row["member"]: row for row in read_rows(out / "membership.jsonl")}.values())
