"""Ranks that are forked from a process with torch loaded: what their starter and users see of it."""

import os
import signal
import subprocess
import sys

import psutil
import pytest
from helpers.forked import fork_server as shared_server
from helpers.jobs import until

from hvdtrain.base.config import recipes
from hvdtrain.base.config.run_config import RunConfig
from hvdtrain.launch import forking
from hvdtrain.launch.forked_rank import forked_program
from hvdtrain.launch.prepare import TrainingJob, prepare

pytestmark = pytest.mark.timeout(120)
TELLS = "import os, sys; print(os.getpid(), os.environ['GREETING'], os.getcwd(), flush=True); "
WAITS = "import time; time.sleep(100)"


@pytest.fixture
def begin(tmp_path):
    """Starts a program that is forked; whatever is left of it is killed."""
    begun = []

    def start(code, first=""):
        words = forked_program(shared_server(), [sys.executable, "-Pc", first + TELLS + code])
        client = subprocess.Popen(
            words,
            cwd=tmp_path,
            env=os.environ | {"GREETING": "good-day"},
            stdout=subprocess.PIPE,
            text=True,
        )
        begun.append(client)
        pid, *told = client.stdout.readline().split()
        assert told == ["good-day", str(tmp_path)] and int(pid) != client.pid
        return client, psutil.Process(int(pid))

    yield start
    for client in begun:
        client.kill()
        client.communicate()


def test_the_client_ends_as_the_rank_does(begin):
    client, _ = begin("sys.exit(7)")
    assert client.wait(30) == 7
    client, rank = begin(WAITS)
    rank.kill()
    assert client.wait(30) == -signal.SIGKILL


def test_signals_go_to_the_rank(begin):
    handles = "import signal, sys; signal.signal(signal.SIGUSR1, lambda *_: sys.exit(3)); "
    client, _ = begin(WAITS, first=handles)
    client.send_signal(signal.SIGUSR1)
    assert client.wait(30) == 3


def test_a_rank_ends_with_its_client(begin):
    client, rank = begin(WAITS)
    client.kill()
    until(lambda: not rank.is_running())


def test_ranks_and_the_server_end_with_the_process_that_started_the_server(tmp_path):
    code = (
        "import subprocess, sys, time\n"
        "from pathlib import Path\n"
        "from hvdtrain.launch.forking import fork_server\n"
        "from hvdtrain.launch.forked_rank import forked_program\n"
        "with fork_server(Path(sys.argv[1])) as place:\n"
        "    print(place, flush=True)\n"
        f"    code = {'import os; print(os.getpid(), os.getppid(), flush=True); ' + WAITS!r}\n"
        "    subprocess.run(forked_program(place, [sys.executable, '-Pc', code]))\n"
    )
    log = tmp_path / "log"
    words = [sys.executable, "-c", code, str(log)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as starter:
        place = starter.stdout.readline().strip()
        assert oct(os.stat(os.path.dirname(place)).st_mode & 0o777) == "0o700"
        processes = [psutil.Process(int(pid)) for pid in starter.stdout.readline().split()]
        starter.kill()
        until(lambda: not any(process.is_running() for process in processes))
    assert log.read_text() == ""


def test_where_no_server_can_begin_ranks_are_new_interpreters(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    starts_a_thread = "import threading, time\nthreading.Thread(target=time.sleep, args=[9], daemon=True).start()\n"
    (tmp_path / "tomli_w.py").write_text(starts_a_thread)  # as a library may
    with forking.fork_server(tmp_path / "log") as place:
        assert place == ""
    assert "imports have started 1 threads" in (tmp_path / "log").read_text()
    config = RunConfig(mode="single", epochs=1)
    local = recipes.launcher("local")
    command = prepare(local, TrainingJob(config, 1, (), tmp_path / "run", fork_server=place))
    assert not any("forked_rank" in word for word in command.argv)


def test_the_time_that_the_server_takes_to_begin_is_used(tmp_path, monkeypatch):
    done = []
    monkeypatch.setattr(forking.sys, "executable", "/bin/false")
    monkeypatch.setattr(forking, "_begins", lambda *_: done == ["imported"])
    with forking.fork_server(tmp_path / "log", meanwhile=lambda: done.append("imported")) as place:
        assert place


def test_only_ranks_of_this_machine_that_compute_on_cpus_are_forked(monkeypatch, tmp_path):
    local, ssh = recipes.launcher("local"), recipes.launcher("ssh")
    on_cpu, on_any = RunConfig(device="cpu"), RunConfig()
    monkeypatch.setattr(forking, "_GPUS", [tmp_path])  # which is there
    assert forking.can_be_forked(local, on_cpu) and not forking.can_be_forked(ssh, on_cpu)
    assert not forking.can_be_forked(local, on_any)
    monkeypatch.setattr(forking, "_GPUS", [tmp_path / "none"])
    assert forking.can_be_forked(local, on_any)
