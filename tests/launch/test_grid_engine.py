"""Grid Engine's job script, run as Grid Engine would."""

import os
import signal
import subprocess
import sys

import pytest
from helpers.recipes import PROGRAM, script

# In place of mpirun: it says what it was given, and leaves with a rank's exit code when it is asked to.
MPIRUN = """#!/bin/bash
trap 'exit 143' USR1 USR2
printf '%s\\n' "$@"; cat "$2"
for i in $(seq ${WAIT:-0}); do sleep 0.1; done
exit ${CODE:-0}
"""


@pytest.fixture
def out(tmp_path):
    return tmp_path / "run"


@pytest.fixture
def grid_engine(tmp_path, monkeypatch):
    """Starts the job script for a run folder as Grid Engine would, on two hosts."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "mpirun").write_text(MPIRUN)
    (tmp_path / "bin" / "mpirun").chmod(0o755)
    (tmp_path / "pe").write_text("node1 3 all.q@node1 UNDEFINED\nnode2 1 all.q@node2 UNDEFINED\n")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))

    def run(out, **env):
        text = script("sge", out)[1]
        out.with_name(f"{out.name}.launch").mkdir(parents=True)
        env = os.environ | {"PE_HOSTFILE": str(tmp_path / "pe"), "JOB_ID": "17"} | env
        return subprocess.Popen(
            ["bash", "-c", text], env=env, cwd=tmp_path, stdout=subprocess.PIPE, text=True, start_new_session=True
        )

    return run


def test_grid_engines_job_takes_its_hosts_from_the_parallel_environment(grid_engine, out):
    words, text = script("sge", out)
    assert words[:2] == ["qsub", "-terse"]
    assert {"#$ -pe mpi 4", "#$ -notify"} < set(text.splitlines())
    printed, _ = (job := grid_engine(out)).communicate(timeout=20)
    assert job.returncode == 0 and printed.endswith("node1 slots=3\nnode2 slots=1\n")
    assert "\n-np\n4\n" + "\n".join(PROGRAM) in printed and "recoverable" not in printed
    assert "--runtime-options recoverable" in script("sge", out, survives_lost_rank=True)[1]


def test_nothing_in_the_name_of_a_run_folder_is_run(grid_engine, tmp_path):
    out = tmp_path / "a b'$(touch ran)`touch ran`"
    printed, _ = (job := grid_engine(out)).communicate(timeout=20)
    assert job.returncode == 0 and f"--hostfile\n{out}.launch/sge-17.hosts\n" in printed
    assert not (tmp_path / "ran").exists() and len(list(tmp_path.glob("a b*/sge-17.hosts"))) == 1


@pytest.mark.parametrize(
    ("signals", "code", "ends"),
    [(signal.SIGUSR2, "0", 99), (signal.SIGUSR1, "0", 99), (None, "143", 143), (None, "7", 7)],
)
def test_a_job_that_grid_engine_tells_to_leave_goes_back_in_the_queue(signals, code, ends, grid_engine, out):
    """Its exit code 99 says so. The signal goes to all of the job's processes at once."""
    job = grid_engine(out, CODE=code, WAIT="100" if signals else "0")
    if signals:
        [job.stdout.readline() for _ in range(3)]
        os.killpg(job.pid, signals)
    job.communicate(timeout=20)
    assert job.returncode == ends
