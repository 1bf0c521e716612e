"""Starting ranks for real, and seeing to it that none outlives its job."""

import contextlib
import dataclasses
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from hvdtrain.base.config import recipes
from hvdtrain.base.config.run_config import RunConfig
from hvdtrain.base.errors import Failure, UsageError
from hvdtrain.launch import processes
from hvdtrain.launch.hosts import Host
from hvdtrain.launch.job_log import failure_reason, first_failed, log_lines
from hvdtrain.launch.prepare import TrainingJob, prepare
from hvdtrain.launch.private_network import needs_network
from hvdtrain.launch.processes import launched_job, local_job
from hvdtrain.launch.recipe import JobSpec, expand
from hvdtrain.launch.supervise import log_file, supervise

pytestmark = pytest.mark.timeout(120)

# A rank that will not go: it ignores SIGTERM, and so does the child that it starts. Both process
# ids go into a file.
STUBBORN = """
import os, pathlib, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
quiet = dict(stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
child = subprocess.Popen([sys.executable, "-c", '''
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.write(1, b"ready")
time.sleep(60)
'''], **quiet)
child.stdout.read(5)
file = pathlib.Path(sys.argv[1], os.environ["OMPI_COMM_WORLD_RANK"])
file.with_suffix(".part").write_text(f"{os.getpid()} {child.pid}")
file.with_suffix(".part").rename(file.with_suffix(".pids"))
time.sleep(60 if sys.argv[2] == "stay" else 0)
"""


HERE = (Host("localhost", 2),)


def stubborn(folder, then="stay"):
    return [sys.executable, "-c", STUBBORN, str(folder), then]


def ids(folder):
    """The four process ids of two stubborn ranks, once they are all there."""
    deadline = time.monotonic() + 50
    while len(files := list(folder.glob("*.pids"))) < 2:
        assert time.monotonic() < deadline, "the ranks did not start"
        time.sleep(0.02)
    return [int(word) for file in files for word in file.read_text().split()]


def alive(pids):
    """Those of the processes that still run; a zombie that nobody has buried does not."""
    running = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                running.append(pid)
    return running


@pytest.fixture
def folder(tmp_path):
    """A new folder; stubborn processes that a failed test leaves in it do not outlive the test."""
    yield tmp_path
    for file in tmp_path.glob("*.pids"):
        for pid in alive(map(int, file.read_text().split())):
            os.kill(pid, signal.SIGKILL)


# What is started


def test_two_ranks_run_and_print_into_the_log(tmp_path):
    code = (
        "import os, sys; e = os.environ;"
        "print('rank', e['OMPI_COMM_WORLD_RANK'], 'of', e['OMPI_COMM_WORLD_SIZE'], e['MARK'], e['OMPI_MCA_btl']);"
        "print('aside', file=sys.stderr)"
    )
    log = tmp_path / "log"
    with local_job(2, [sys.executable, "-c", code], log, {"MARK": "seven"}) as job:
        assert job.wait(timeout=30) == 0
    assert sorted(log_lines(log)) == [
        (0, "aside"),
        (0, "rank 0 of 2 seven self,sm"),
        (1, "aside"),
        (1, "rank 1 of 2 seven self,sm"),
    ]
    assert "[1]<stderr>: aside" in log.read_text().splitlines()  # as horovodrun has it


ALLOCATION = {
    "SLURM_JOBID": "7",
    "SLURM_NODELIST": "nowhere1,nowhere2",
    "SLURM_TASKS_PER_NODE": "1(x2)",
    "SBATCH_X": "1",
    "SRUN_X": "1",
    "PBS_ENVIRONMENT": "x",
    "PBS_JOBID": "8",
    "PBS_NODEFILE": "nodes",
    "LSB_JOBID": "9",
    "LSB_HOSTS": "nowhere1 nowhere2",
    "SGE_ROOT": "/x",
    "ARC": "x",
    "JOB_ID": "4",
    "PE_HOSTFILE": "nodes",
    "PMI_RANK": "3",
    "PMIX_RANK": "3",
    "PMIX_NAMESPACE": "other",
}


def test_a_job_on_this_machine_stays_here_inside_an_allocation_of_other_nodes(
    tmp_path, monkeypatch
):
    """mpirun would read it, and put ranks there."""
    (tmp_path / "nodes").write_text("nowhere1 1 q UNDEFINED\nnowhere2 1 q UNDEFINED\n")
    for name, value in ALLOCATION.items():
        monkeypatch.setenv(name, value.replace("nodes", str(tmp_path / "nodes")))
    monkeypatch.setenv("PMIX_MCA_gds", "hash")  # a setting, and no place
    names = f"[n for n in {[*ALLOCATION]} if n in os.environ and os.environ[n] == {ALLOCATION}[n]]"
    code = f"import os; print({names}, os.environ['PMIX_MCA_gds'])"
    with local_job(2, [sys.executable, "-c", code], tmp_path / "log") as job:
        assert job.wait(timeout=30) == 0, (tmp_path / "log").read_text()
    kept = ["SGE_ROOT", "ARC", "JOB_ID"]
    assert sorted(log_lines(tmp_path / "log")) == [(rank, f"{kept} hash") for rank in range(2)]


def test_a_log_that_is_named_from_the_current_folder_has_what_the_rank_said_last(
    tmp_path, monkeypatch
):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with local_job(
        1, [sys.executable, "-c", "import sys; sys.exit('no disk')"], Path("../log")
    ) as job:
        assert job.wait(timeout=30) == 1
    assert (tmp_path / "log").read_text() == "[0]<stderr>: no disk\n"
    assert failure_reason(Path("../log"), 1) == "exit code 1: no disk (see ../log)"


def test_a_launcher_that_cannot_be_started_is_a_failure(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))  # its folder has no mpirun
    with pytest.raises(
        Failure,
        match=f"{tmp_path}/mpirun is not on this machine: .*; `hvdtrain doctor` says what is here",
    ):
        with local_job(2, ["true"], tmp_path / "log"):
            pass


# What is told to ranks alone


@pytest.mark.parametrize("launcher", ["local", "mpi"])
def test_ranks_have_the_variables_that_are_named_and_nobody_else_sees_them(launcher, tmp_path):
    token, words = "t0 k'en", [sys.executable, "-c", "import os; print(os.environ['MY_TOKEN'])"]
    hosts = HERE if launcher == "mpi" else ()
    command = expand(
        recipes.launcher(launcher),
        JobSpec(1, words, hosts=hosts, out=tmp_path / "a run", secrets={"MY_TOKEN": token}),
    )
    assert "t0 k" not in command.dry_run_text()
    # which horovodrun writes into command lines
    assert ("MY_TOKEN" in command.environment) == (launcher == "local")
    with launched_job(command, tmp_path / "log") as job:
        assert not command.secrets_file or command.secrets_file.stat().st_mode & 0o777 == 0o600
        assert job.wait(timeout=30) == 0
    assert log_lines(tmp_path / "log") == [(0, token)]
    assert not list(tmp_path.rglob("environment"))


@pytest.mark.parametrize("launcher", ["sge", "yarn"])
def test_a_scheduler_without_this_environment_has_ranks_read_a_file_that_is_there_while_it_has_the_job(
    launcher, tmp_path
):
    words = [sys.executable, "-c", "import os; print(os.environ['MY_TOKEN'])"]
    command = expand(
        recipes.launcher(launcher),
        JobSpec(1, words, out=tmp_path / "a run", secrets={"MY_TOKEN": "t0 k'en"}),
    )
    file = command.secrets_file
    assert "t0 k" not in command.dry_run_text() and "MY_TOKEN" not in command.environment
    assert shlex.join(["sh", str(file), *words[:2]]) in "".join(command.files.values())
    for submits in ("false", "true"):
        with launched_job(dataclasses.replace(command, argv=[submits]), tmp_path / "log") as job:
            job.wait(timeout=30)
        assert file.exists() == (submits == "true")
    assert file.stat().st_mode & 0o777 == 0o600
    assert (
        subprocess.run(["sh", str(file), *words], capture_output=True, text=True).stdout
        == "t0 k'en\n"
    )


def test_ranks_in_pods_have_variables_from_a_secret_of_the_cluster_or_not_at_all(tmp_path):
    spec = JobSpec(1, ["x"], out=tmp_path / "run", secrets={"MY_TOKEN": "t0ken"})
    assert expand(recipes.launcher("slurm"), spec).argv[0] == "sbatch"  # which passes all of it on
    set_it = "folders: have .*launchers/kubernetes.toml set {} from a secret of the cluster{}$"
    with pytest.raises(UsageError, match=set_it.format("MY_TOKEN", "")):
        expand(recipes.launcher("kubernetes"), spec)
    config = RunConfig(mode="ps-async", servers=1, dataset="synthetic", wire="zmq")
    with pytest.raises(
        UsageError, match=set_it.format("HVDTRAIN_WIRE_KEY", ", or give --wire rpc")
    ):
        prepare(recipes.launcher("kubernetes"), TrainingJob(config, 1, (), tmp_path / "run"))


# Which network it is in


# Prints its network, its interfaces, and whether it sees other files of MPI than the one that it
# leaves.
PLACE = """
import os, pathlib
print(os.readlink('/proc/self/ns/net'), *sorted(os.listdir('/proc/self/net/dev_snmp6')))
folder = pathlib.Path(os.environ.get("OMPI_MCA_btl_sm_backing_directory", "."))
(folder / "left").write_text("by a rank")
print(len(list(folder.iterdir())) > 1)
"""


def place_of(log):
    with local_job(1, [sys.executable, "-c", PLACE], log) as job:
        assert job.wait(timeout=30) == 0, log.read_text()
    return [text for _, text in log_lines(log)]


def test_a_job_here_has_a_network_with_loopback_alone_and_its_files_end_with_it(tmp_path):
    if os.geteuid():
        pytest.skip("not every system allows it to others than root")
    network, sees_files_of_mpirun = place_of(tmp_path / "log")
    assert (
        re.fullmatch(r"net:\[\d+\] lo", network) and os.readlink("/proc/self/ns/net") not in network
    )
    assert sees_files_of_mpirun == "True"
    assert [path.name for path in tmp_path.iterdir()] == ["log"]


def test_a_job_runs_where_no_network_of_its_own_can_be_made(tmp_path, monkeypatch):
    def refuse(scratch):
        raise PermissionError

    monkeypatch.setattr(processes, "enter_private_network", refuse)
    monkeypatch.chdir(tmp_path)
    assert os.readlink("/proc/self/ns/net") in place_of(tmp_path / "log")[0]


@pytest.mark.parametrize(
    ("launcher", "hosts", "own"),
    [
        ("local", (), True),
        ("ssh", (Host("localhost", 2),), True),
        ("mpi", (Host("127.0.0.1", 2),), True),
        ("mpi", (Host("localhost", 1), Host("a", 1)), False),
        ("slurm", (Host("localhost", 2),), False),
    ],
)
def test_jobs_that_stay_on_this_machine_have_a_network_of_their_own(launcher, hosts, own, tmp_path):
    assert (
        expand(
            recipes.launcher(launcher), JobSpec(2, ["x"], hosts=hosts, out=tmp_path)
        ).private_network
        == own
    )
    assert not expand(
        recipes.launcher(launcher), JobSpec(2, ["x"], hosts=hosts, out=tmp_path, needs_network=True)
    ).private_network


@pytest.mark.parametrize(
    ("options", "needs"),
    [
        ({"dataset": "digits"}, False),
        ({"dataset": "/some/folder"}, False),
        ({"dataset": "s3://bucket/coil"}, True),
        ({"dataset": "coil100"}, True),
        ({"pretrained": "imagenet"}, True),
        ({"pretrained": "/some/weights.pth"}, False),
    ],
)
def test_a_job_that_downloads_something_stays_in_this_machines_network(
    options, needs, tmp_path, monkeypatch
):
    monkeypatch.setenv("HVDTRAIN_CACHE", str(tmp_path))
    assert needs_network(RunConfig(**options)) == needs
    command = prepare(
        recipes.launcher("local"), TrainingJob(RunConfig(**options), 2, (), tmp_path / "run")
    )
    assert command.private_network == (not needs)


# What is left: nothing


@pytest.mark.parametrize("how", ["ends", "raises"])
def test_ranks_that_ignore_sigterm_and_their_children_are_gone_after_the_block(folder, how):
    with (
        contextlib.suppress(KeyboardInterrupt),
        local_job(2, stubborn(folder), folder / "log") as job,
    ):
        pids = ids(folder)
        assert sorted(alive([*pids, job.pid])) == sorted([*pids, job.pid])
        if how == "raises":
            raise KeyboardInterrupt
    assert alive([*pids, job.pid]) == []


@pytest.mark.parametrize("then", ["leave", "stay"])
def test_ranks_that_outlive_their_starter_are_gone_after_the_block(then, folder, monkeypatch):
    """It ends with ranks that leave children behind, or is killed."""
    monkeypatch.setattr(processes, "GRACE_S", 0.5)
    with local_job(2, stubborn(folder, then), folder / "log") as job:
        pids = ids(folder)
        if then == "stay":
            job.kill()
        assert job.wait(timeout=30) == (-signal.SIGKILL if then == "stay" else 0)
        assert len(alive(pids)) == (4 if then == "stay" else 2)
    assert alive(pids) == []


PARENT = """
import json, sys, time
from pathlib import Path
from hvdtrain.launch.processes import local_job
with local_job(2, json.loads(sys.argv[1]), Path(sys.argv[2])) as job:
    job.wait()
"""


@pytest.mark.parametrize(
    "signals",
    [[signal.SIGKILL], [signal.SIGTERM], [signal.SIGINT, signal.SIGINT]],
    ids=["killed", "terminated", "interrupted twice"],
)
def test_no_rank_outlives_its_parent(folder, signals):
    words = [sys.executable, "-c", PARENT, json.dumps(stubborn(folder)), str(folder / "log")]
    with subprocess.Popen(words, stderr=subprocess.DEVNULL) as parent:
        pids = ids(folder)
        assert len(alive(pids)) == 4
        for number in signals:
            parent.send_signal(number)
            time.sleep(0.3)
    deadline = time.monotonic() + 50
    while (left := alive(pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left == []


# Why it failed


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (b"noise\nhvdtrain: no such folder\nhvdtrain: also this\nmpirun noise\n", "no such folder"),
        (b"", "exit code 3: no output (see {log})"),
        (  # what a rank said of itself, whatever its starter says last
            b"[0]<stderr>: ValueError: no\n[0]<stdout>: step 1\n-----\nWe attempted to remove a file:\n  Error: none\n",
            "exit code 3: ValueError: no (see {log})",
        ),
        (b"\xff\xfe broken \xff\n", "exit code 3: \ufffd\ufffd broken \ufffd (see {log})"),
        (
            b"[0]<stderr>: [n1:00000] *** An error occurred in Socket closed\n[0]<stderr>: \n",
            "another rank is gone: process 0 lost its connection (see {log})",
        ),
        (
            b"[1]<stderr>:hvdtrain: rank 1 failed: no\n[0]<stderr>: hvdtrain: x\n",
            "rank 1 failed: no",
        ),
        (  # what the job had survived is no reason
            b"[0]<stdout>: hvdtrain: rank 2 is lost, and the others go on without it: x\nhvdtrain: rank 2 has joined\n"
            b"hvdtrain: rank 0 failed: the disk is full\n",
            "rank 0 failed: the disk is full",
        ),
    ],
)
def test_the_reason_is_our_own_line_or_the_last_one(tmp_path, text, line):
    log = tmp_path / "log"
    log.write_bytes(text)
    assert failure_reason(log, 3) == line.format(log=log)


@pytest.mark.parametrize(
    ("report", "reason"),
    [
        ("exited on  signal 9", "was ended by SIGKILL, and had printed last: step 7"),
        ("exited on  signal 6", "was ended by SIGABRT: step 7"),
        (
            "\n   Process name: [prterun-n1-1@1,1]\n   Exit code:    161",
            "ended with exit code 161: step 7",
        ),
    ],
)
def test_the_last_line_of_a_rank_is_a_reason_unless_it_was_killed(tmp_path, report, reason):
    log = tmp_path / "log"
    rank = "process rank 1 with PID 5 on node n1"
    log.write_text(f"[1]<stdout>: step 7\n{rank} {report}\n")
    assert failure_reason(log, 143) == f"process 1 {reason} (see {log})"


# A process of this job fails after the others have begun to wait: by itself, by an exit code, or by
# a signal. Another says some seconds later that it is lost.
FAILING = """
import os, pathlib, signal, sys, time
what, folder = sys.argv[1], pathlib.Path(sys.argv[2])
def wait_for(name):
    while not (folder / name).exists():
        time.sleep(0.01)
if [v for k, v in os.environ.items() if k in ("OMPI_COMM_WORLD_RANK", "HOROVOD_RANK")][0] == "0":
    (folder / "waits").touch()
    wait_for("fails")
    time.sleep(5)
    sys.exit("hvdtrain: the others are lost")
wait_for("waits")
(folder / "fails").touch()
if what == "signal":
    os.kill(os.getpid(), signal.SIGKILL)
print("hvdtrain: rank 1 has no disk" if what == "own" else "it all went wrong", file=sys.stderr)
sys.exit(7)
"""


OWN = "own", 7, "rank 1 has no disk"
EXIT = "exit", 7, "process 1 ended with exit code 7: it all went wrong"
SIGNAL = "signal", 137, "process 1 was ended by SIGKILL"


@pytest.mark.parametrize(
    ("launcher", "what", "code", "line"),
    [
        ("local", *OWN),  # whoever starts it
        *((launcher, *how) for launcher in ("local", "mpi", "ssh") for how in (EXIT, SIGNAL)),
    ],
)
def test_the_first_that_fails_is_told_with_its_exit_code(launcher, what, code, line, tmp_path):
    log = tmp_path / "log"
    hosts = () if launcher == "local" else HERE
    start = expand(
        recipes.launcher(launcher),
        JobSpec(
            2,
            [sys.executable, "-c", FAILING, what, str(tmp_path)],
            hosts=hosts,
            out=tmp_path / "run",
        ),
    )
    with launched_job(start, log) as job:
        assert job.wait(timeout=30) != 0
    assert first_failed(log) == (1, code)
    assert failure_reason(log, 3).startswith(line)


def test_a_job_whose_starter_does_not_end_is_over_some_time_after_its_summary(
    tmp_path, monkeypatch
):
    """A summary of before, with which the job goes on, is not this job's."""
    monkeypatch.setattr(processes, "END_AFTER_SUMMARY_S", 1.0)
    out = tmp_path / "run"
    out.mkdir()
    (out / "summary.json").write_text("{}")
    log_file(out).parent.mkdir()
    words = f"sleep 2; echo '{{}}' > {shlex.quote(str(out))}/summary.json; sleep 90"
    began = time.monotonic()
    supervise(expand(recipes.launcher("local"), JobSpec(1, ["sh", "-c", words], out=out)), out, 0)
    assert 3 < time.monotonic() - began < 60


def test_results_of_a_start_before_do_not_make_up_for_a_failure(tmp_path):
    out = tmp_path / "run"
    out.mkdir()
    (out / "summary.json").write_text("{}")
    log_file(out).parent.mkdir()
    with pytest.raises(Failure, match="the job failed"):
        supervise(
            expand(recipes.launcher("local"), JobSpec(1, ["sh", "-c", "exit 3"], out=out)), out, 0
        )


@pytest.mark.parametrize(("what", "shown"), [("own", False), ("exit", True)])
def test_a_job_that_failed_says_how_to_go_on_and_shows_lines_of_a_rank_that_said_nothing(
    what, shown, tmp_path, capsys
):
    out = tmp_path / "run"
    (out / "snapshots" / "step-00000012").mkdir(parents=True)
    (out / "snapshots" / "step-00000024.part").mkdir()
    (out / "logs").mkdir()
    (out / "logs" / "rank.1.err").write_text(
        "Traceback (most recent call last):\n  a line\nValueError: x\n"
    )
    log_file(out).parent.mkdir()
    words = [sys.executable, "-c", FAILING, what, str(tmp_path)]
    command = expand(recipes.launcher("local"), JobSpec(2, words, out=out))
    with pytest.raises(
        Failure,
        match="the job failed: .*; `hvdtrain launch --resume --out .*run` goes on after step 12",
    ):
        supervise(command, out, 0)
    assert ("ValueError" in capsys.readouterr().err) == shown
