"""Jobs over several hosts: network namespaces with a name and an sshd each, joined by 1 Gbit/s. Needs root."""

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from test_jobs import HVDTRAIN, SETTINGS, steps, until

from hvdtrain.launch import testbed

pytestmark = pytest.mark.timeout(240)
TINY = ["--width", "0.0625", "--threads", "1", "--steps", "6"]


def why_not():
    if os.geteuid():
        return "network namespaces need root"
    missing = [tool for tool in testbed.TOOLS if not shutil.which(tool)]
    if missing or not Path(testbed.SSHD).exists():
        return f"not installed: {', '.join(missing) or 'sshd'}"
    return ""


@contextlib.contextmanager
def alone():
    """The nodes' names are this machine's: one test at a time."""
    with open("/tmp/hvdtrain-testbed.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.fixture
def nodes():
    if reason := why_not():
        if os.environ.get("HVDTRAIN_TESTBED") == "required":
            pytest.fail(reason)
        pytest.skip(reason)
    with alone():
        testbed.up(2, "1gbit")
        try:
            yield
        finally:
            testbed.down()


def made():
    """What of the testbed is on this machine."""
    found = [
        line for line in subprocess.check_output(["ip", "netns", "list"], text=True).split() if "hvdtrain-" in line
    ]
    links = subprocess.check_output(["ip", "-o", "link", "show"], text=True)
    found += [line.split(": ")[1] for line in links.splitlines() if "hvdtrain" in line.split(": ")[1]]
    found += [str(path) for path in (testbed.STATE, testbed.SSH) if path.exists()]
    found += ["names"] if testbed.BEGIN in testbed.NAMES.read_text() else []
    return found


def processes():
    """What runs on the nodes, beside their sshds' listeners."""
    pids = [
        pid
        for node in testbed.nodes()
        for pid in subprocess.check_output(["ip", "netns", "pids", f"hvdtrain-{node}"], text=True).split()
    ]
    return [pid for pid in pids if b"hvdtrain" in Path(f"/proc/{pid}/cmdline").read_bytes() and not is_listener(pid)]


def is_listener(pid):
    return b"sshd" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0]


def hvdtrain(*words, timeout=150):
    return subprocess.run([HVDTRAIN, *map(str, words)], **SETTINGS, timeout=timeout)


def test_nodes_come_and_go_and_leave_nothing(nodes):
    names = testbed.NAMES.read_text()
    testbed.up(3, "100mbit")  # again, and others
    assert testbed.nodes() == ["node1", "node2", "node3"]
    done = hvdtrain("hosts", "run", "node3", "sh", "-c", "hostname; exit 7")
    assert (done.stdout, done.returncode) == ("node3\n", 7)
    done = hvdtrain("hosts", "run", "node1", "ssh", "node2", "hostname")
    assert (done.stdout, done.returncode) == ("node2\n", 0)
    rates = subprocess.check_output(["tc", "-n", "hvdtrain-node1", "qdisc", "show"], text=True)
    assert "tbf" in rates and "rate 100Mbit" in rates
    shutil.rmtree(testbed.STATE)  # as if something had failed half way
    assert hvdtrain("hosts", "down").returncode == 0
    assert made() == []
    assert hvdtrain("hosts", "down").returncode == 0
    testbed.up(2, "1gbit")
    assert testbed.NAMES.read_text() == names


@pytest.mark.parametrize(
    ("launcher", "mode", "workers", "servers"),
    [("ssh", "allreduce", 2, 0), ("ssh", "ps-sync", 2, 2), ("mpi", "allreduce", 2, 0), ("mpi", "ps-async", 2, 1)],
)
def test_a_job_runs_across_hosts(launcher, mode, workers, servers, nodes, tmp_path):
    out = tmp_path / "run"
    words = ["--launcher", launcher, "-n", workers, "-s", servers, "-H", "node1:2,node2:2", "--out", out]
    done = hvdtrain("launch", *words, "--", "--mode", mode, *TINY)
    assert done.returncode == 0, done.stdout
    manifest, summary = (json.loads((out / f"{name}.json").read_text()) for name in ("manifest", "summary"))
    assert manifest["hardware"]["hosts"] == ["node1", "node2"]
    assert (manifest["workers"], manifest["servers"], summary["steps"]) == (workers, servers, 6)
    if servers == 2:  # they are apart: each host has a server and a worker
        hosts = [(out / "logs" / f"rank.{rank}.err").exists() for rank in range(4)]
        assert all(hosts)
    assert processes() == []


def test_a_job_that_is_interrupted_leaves_nothing_running_on_any_host(nodes, tmp_path):
    out = tmp_path / "run"
    words = [HVDTRAIN, "launch", "--launcher", "ssh", "-n", "2", "-s", "1", "-H", "node1:2,node2:1", "--out", str(out)]
    job = subprocess.Popen(
        [*words, "--", "--mode", "ps-async", *TINY[:4], "--epochs", "1000"], **SETTINGS, start_new_session=True
    )
    try:
        until(lambda: (out / "metrics.rank1.jsonl").is_file() and len(steps(out, 1)) > 3, 90)
        assert processes()
        job.send_signal(signal.SIGINT)
        assert job.wait(timeout=30) == 130
        deadline = time.monotonic() + 20
        while processes() and time.monotonic() < deadline:
            time.sleep(0.2)
        assert processes() == []
    finally:
        job.kill()
        job.communicate()


@pytest.mark.parametrize("how", ["stop", "a dropped connection"])
def test_a_job_ends_on_all_hosts_when_it_is_stopped_or_a_connection_drops(how, nodes, tmp_path):
    out = tmp_path / "run"
    words = [HVDTRAIN, "launch", "--launcher", "ssh", "-n", "2", "-H", "node1:1,node2:1", "--out", str(out)]
    job = subprocess.Popen(
        [*words, "--", "--mode", "allreduce", *TINY[:4], "--epochs", "1000"], **SETTINGS, start_new_session=True
    )
    try:
        until(lambda: (out / "metrics.rank0.jsonl").is_file() and len(steps(out, 0)) > 3, 90)
        if how == "stop":
            stopped = hvdtrain("stop", out)
            assert (stopped.returncode, stopped.stdout) == (0, f"{out}: its job has ended\n")
            assert hvdtrain("stop", out).returncode == 2
        else:  # the ssh clients of both ranks are killed, as when their network goes
            for client in psutil.Process(job.pid).children(recursive=True):
                if client.name() == "ssh":
                    client.kill()
        assert job.wait(timeout=60) == (143 if how == "stop" else 1)
        until(lambda: processes() == [], 30)
    finally:
        job.kill()
        job.communicate()


def test_a_comparison_over_hosts_says_that_it_crossed_a_network(nodes, tmp_path):
    out = tmp_path / "compare"
    done = hvdtrain("compare", "-H", "node1:1,node2:1", "--modes", "allreduce", *TINY, "--out", out)
    assert done.returncode == 0, done.stdout
    assert "ran on one host" not in (out / "report.md").read_text()


def test_a_host_that_refuses_is_named_with_the_others_problems(nodes, tmp_path, monkeypatch):
    done = hvdtrain("launch", "--launcher", "ssh", "-n", 2, "-H", "node1:1,nosuch.invalid:1", "--out", tmp_path / "x")
    assert done.returncode == 2
    assert done.stdout.count("\n") == 1 and "nosuch.invalid: " in done.stdout and "node1" not in done.stdout
