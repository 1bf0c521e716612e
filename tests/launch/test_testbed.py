"""Jobs over several hosts: network namespaces with a name and an sshd each, joined by 1 Gbit/s.
Needs root.
"""

import contextlib
import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from helpers.forked_jobs import forks_first
from helpers.jobs import ENV, HVDTRAIN, SETTINGS, until
from helpers.jobs import hvdtrain as forked
from helpers.launched import TOKEN, Launched, command_line
from helpers.nodes import two_nodes
from helpers.processes import ranks_among

from hvdtrain.base.config import recipes
from hvdtrain.base.errors import UsageError
from hvdtrain.launch import testbed
from hvdtrain.launch.recipe import JobSpec, expand

# One process runs them all: the nodes' names are this machine's.
pytestmark = [pytest.mark.timeout(240), pytest.mark.hosts, pytest.mark.xdist_group("testbed")]
ROOT = Path(__file__).parent.parent.parent
TINY = ["--width", "0.0625", "--threads", "1", "--steps", "6"]


@pytest.fixture(scope="module")
def nodes():
    """A test that changes them puts them up again."""
    with two_nodes():
        yield


def made():
    """What of the testbed is on this machine."""
    found = [
        line
        for line in subprocess.check_output(["ip", "netns", "list"], text=True).split()
        if "hvdtrain-" in line
    ]
    links = subprocess.check_output(["ip", "-o", "link", "show"], text=True)
    found += [
        line.split(": ")[1]
        for line in links.splitlines()
        if line.split(": ")[1].startswith(("hvdtrain", "hvd-"))
    ]
    found += [str(testbed.STATE)] if testbed.STATE.exists() else []
    found += [str(path) for path in testbed._cpu_groups().glob("hvdtrain-*")]
    return found + testbed.mounted()


def under_mounts():
    """The machine's own files, which the testbed only mounts others over: from a namespace without
    those mounts.
    """
    places = " ".join(testbed.mounted())
    script = f"umount --lazy {places}; cat {testbed.HOSTS_FILE}; ls {testbed.SSH_CONFIGS}"
    return subprocess.check_output(["unshare", "--mount", "sh", "-c", script], text=True)


def processes():
    """What runs on the nodes, beside their sshds that listen."""
    lines = {
        pid: command_line(pid)
        for node in testbed.running_nodes()
        for pid in subprocess.check_output(
            ["ip", "netns", "pids", f"hvdtrain-{node}"], text=True
        ).split()
    }
    return {int(pid): line for pid, line in lines.items() if line and "[listener]" not in line}


def ranks():
    """{the number that its starter gave it: process} of the ranks on the nodes."""
    pids = processes()
    on_nodes = [process for process in psutil.process_iter() if process.pid in pids]
    return ranks_among(on_nodes, "OMPI_COMM_WORLD_RANK", "HOROVOD_RANK")


def hvdtrain(*words, timeout=150):
    return subprocess.run([HVDTRAIN, *map(str, words)], **SETTINGS, timeout=timeout)


def on_host(node, command):
    return subprocess.check_output(["ssh", node, command], text=True, timeout=60)


def rate_of(device, *namespace):
    shown = subprocess.check_output(["tc", *namespace, "qdisc", "show", "dev", device], text=True)
    return re.search(r"rate (\S+)", shown)[1]


def test_nodes_come_and_go_and_leave_nothing(nodes):
    names = testbed.HOSTS_FILE.read_text()
    words = ["--rate", "100mbit,100mbit,50mbit", "--cpus", "1,0.5,0.25"]
    assert hvdtrain("hosts", "up", *words).returncode == 0  # again, and others
    assert testbed.running_nodes() == ["node1", "node2", "node3"]
    assert (
        on_host("node3", "hostname") == "node3\n"
        and on_host("node1", "ssh node2 hostname") == "node2\n"
    )
    spin = "from hvdtrain.base.system.cgroups import usable_cores\nimport time\nbegan = time.monotonic()\n"
    spin += "while time.monotonic() < began + 1: pass\nprint(usable_cores(), time.process_time())"
    allowed, spent = on_host("node3", shlex.join([sys.executable, "-c", spin])).split()
    assert (float(allowed), float(spent)) == (0.25, pytest.approx(0.3, abs=0.15))
    rates = subprocess.check_output(["tc", "-n", "hvdtrain-node1", "qdisc", "show"], text=True)
    assert "tbf" in rates and "rate 100Mbit" in rates
    routes = subprocess.check_output(
        ["ip", "-n", "hvdtrain-node1", "route"], text=True
    ).splitlines()
    # not BBR, whose pauses would show in figures
    assert ["congctl cubic" in route for route in routes] == [True]
    assert rate_of("hvdtrain-n3") == rate_of(testbed.INTERFACE, "-n", "hvdtrain-node3") == "50Mbit"
    assert hvdtrain("hosts", "rate", "node3", "20mbit").returncode == 0
    assert rate_of("hvdtrain-n3") == rate_of(testbed.INTERFACE, "-n", "hvdtrain-node3") == "20Mbit"
    # as if something had failed half way
    gone = testbed.STATE.rename(testbed.STATE.with_name("gone"))
    shutil.rmtree(gone)  # not in place: an sshd may be writing its log there
    assert "node1" in names and "node1" not in under_mounts() and "hvdtrain" not in under_mounts()
    assert hvdtrain("hosts", "down").returncode == 0
    assert made() == []
    assert "node1" not in testbed.HOSTS_FILE.read_text()
    assert hvdtrain("hosts", "down").returncode == 0
    testbed.up(["1gbit"] * 2)
    assert testbed.HOSTS_FILE.read_text() == names


def test_hosts_in_use_stay_and_another_set_is_beside_them(nodes):
    """Another user's job is on node1 and node2."""
    names = testbed.HOSTS_FILE.read_text()
    job = subprocess.Popen(["ssh", "node1", "sleep 86399"], stdin=subprocess.DEVNULL)
    try:
        until(lambda: any("sleep 86399" in line for line in testbed.jobs_on(testbed.NodeSet())))
        refused = hvdtrain("hosts", "up", "--count", "3")
        assert refused.returncode == 2, refused.stdout
        assert "sleep 86399" in refused.stdout and "--prefix lab" in refused.stdout
        done = hvdtrain("hosts", "up", "--prefix", "lab", "--rate", "12.5mbps")
        assert done.returncode == 0, done.stdout
        assert "lab1, lab2 are up, 12.5mbps (tc's bytes a second: 100mbit) each way" in done.stdout
        assert testbed.running_nodes() == ["lab1", "lab2", "node1", "node2"]
        assert on_host("lab1", "ssh lab2 hostname") == "lab2\n"
        assert on_host("node2", "hostname") == "node2\n" and job.poll() is None
        lab = testbed.NodeSet("lab")
        assert (
            rate_of(lab.bridge_end(2)) == rate_of(lab.interface, "-n", "hvdtrain-lab2") == "100Mbit"
        )
        assert rate_of("hvdtrain-n1") == "1Gbit"
        assert hvdtrain("hosts", "rate", "lab2", "50mbit").returncode == 0
        assert rate_of(lab.bridge_end(2)) == "50Mbit"
        out = hvdtrain("hosts", "down", "--prefix", "lab").stdout
        assert "node1, node2 are left" in out
        assert not [what for what in made() if "lab" in what or "hvd-" in what]
        assert "lab1" not in testbed.HOSTS_FILE.read_text()
        assert testbed.HOSTS_FILE.read_text().split() == names.split() and job.poll() is None
        assert on_host("node1", "hostname") == "node1\n"
        assert hvdtrain("hosts", "up", "--force").returncode == 0
        assert job.wait(20)
    finally:
        job.kill()
        job.wait()


@pytest.mark.parametrize("prefix", ["", "lab1", "Lab", "a-b", "muchtoolong", "a;b"])
def test_a_prefix_is_a_short_word(prefix, nodes):
    assert hvdtrain("hosts", "up", "--prefix", prefix).returncode == 2


def test_cores_are_limited_by_control_groups_of_version_2_too(tmp_path, monkeypatch):
    """A kernel has one version; here a folder stands for the other."""
    monkeypatch.setattr(testbed, "CGROUPS", tmp_path)
    (tmp_path / "cgroup.controllers").write_text("cpuset cpu io\n")
    (tmp_path / "cgroup.subtree_control").write_text("io\n")
    testbed._limit_cpus([1, 0.5, 0.01])
    assert (tmp_path / "cgroup.subtree_control").read_text() == "+cpu"
    assert (tmp_path / "hvdtrain-node2" / "cpu.max").read_text() == "5000 10000"
    assert (
        tmp_path / "hvdtrain-node3" / "cpu.max"
    ).read_text() == "1000 100000"  # no less than a kernel allows
    monkeypatch.setattr(testbed, "CGROUPS", tmp_path / "absent")
    with pytest.raises(UsageError, match="--cpus needs control groups with the controller `cpu`"):
        testbed._limit_cpus([1])


@pytest.mark.parametrize(
    ("launcher", "user", "mode", "workers", "servers"),
    [("ssh", "", "ps-sync", 2, 2), ("mpi", "root@", "ps-async", 2, 1)],
)
def test_a_job_runs_across_hosts(launcher, user, mode, workers, servers, nodes, tmp_path):
    out = tmp_path / "run"
    hosts = f"{user}node1:2,{user}node2:2"
    words = ["--launcher", launcher, "-n", workers, "-s", servers, "-H", hosts, "--out", out]
    done = hvdtrain("launch", *words, "--", "--mode", mode, *TINY)
    assert done.returncode == 0, done.stdout
    manifest, summary = (
        json.loads((out / f"{name}.json").read_text()) for name in ("manifest", "summary")
    )
    assert manifest["hardware"]["hosts"] == ["node1", "node2"]
    assert (manifest["workers"], manifest["servers"], summary["steps"]) == (workers, servers, 6)
    slots = [f"{user}node1:2", f"{user}node2:{servers}"]
    assert manifest["launch"] == {
        "launcher": launcher,
        "hosts": slots,
        "interface": testbed.INTERFACE,
        "folder": "",
        "recipe": recipes.launcher(launcher).digest,
    }
    again = f"hvdtrain launch -n {workers} -s {servers} --launcher {launcher} -H {','.join(slots)}".split()
    assert manifest["command"][: len(again)] == again
    pairs = manifest["network"]["pairs"]
    assert [(pair["from"], pair["to"]) for pair in pairs] == [
        ("node1", "node2"),
        ("node2", "node1"),
    ]
    assert all(0.3 < pair["gbit_s"] < 1.05 for pair in pairs), pairs
    if servers == 2:  # they are apart: each host has a server and a worker
        hosts = [(out / "logs" / f"rank.{rank}.err").exists() for rank in range(4)]
        assert all(hosts)
    until(lambda: not processes())


def sent_by(node):
    """Bytes that have left a node by its link, headers and acknowledgements among them."""
    counter = f"/sys/class/net/{testbed.INTERFACE}/statistics/tx_bytes"
    return int(subprocess.check_output(["ip", "netns", "exec", f"hvdtrain-{node}", "cat", counter]))


@pytest.mark.parametrize(
    ("mode", "workers", "servers", "floor"),
    [
        (
            "allreduce",
            4,
            0,
            3 / 2,
        ),  # 2(n-1)/n of the weights, however many of the n workers are on the host
        (
            "ps-sync",
            2,
            2,
            1.0,
        ),  # half of the gradients to the other's server, half of the weights to its worker
    ],
)
def test_bytes_at_the_hosts_links_are_what_the_algorithm_needs(
    mode, workers, servers, floor, nodes, tmp_path
):
    sent, weights = [], 0
    few, more = 4, 104
    for steps in (few, more):  # what start and end of a job send is in both
        before = {node: sent_by(node) for node in ("node1", "node2")}
        words = ["--launcher", "ssh", "-n", workers, "-s", servers, "-H", "node1:2,node2:2"]
        options = ["--mode", mode, *TINY[:4], "--steps", steps, "--snapshot-every", "never"]
        done = hvdtrain("launch", *words, "--out", tmp_path / str(steps), "--", *options)
        assert done.returncode == 0, done.stdout
        sent.append({node: sent_by(node) - before[node] for node in before})
        weights = (
            4 * json.loads((tmp_path / str(steps) / "manifest.json").read_text())["parameters"]
        )
    # measuring the network before a job sends for a time, and not always the same
    for node in sent[0]:
        of_a_step = (sent[1][node] - sent[0][node]) / (more - few)
        assert 0.97 < of_a_step / (floor * weights) < 1.15


def test_others_hosts_are_not_hidden(nodes):
    """By a name in /etc/hosts, or an address of the same network; what was up is down then."""
    testbed.down()
    before = testbed.HOSTS_FILE.read_text()
    try:
        testbed.HOSTS_FILE.write_text(f"{before.rstrip()}\n192.0.2.9 node2\n")
        done = hvdtrain("hosts", "up")
        assert (
            done.returncode == 2
            and "other hosts of the same name: here node2 is 192.0.2.9" in done.stdout
        )
        testbed.HOSTS_FILE.write_text(before)
        subprocess.run(["ip", "route", "add", "blackhole", "10.77.0.0/16"], check=True)
        done = hvdtrain("hosts", "up")
        assert (
            done.returncode == 2
            and "hosts in 10.77.77.0/24: `ip route` has blackhole 10.77.0.0/16" in done.stdout
        )
        assert made() == []
    finally:
        subprocess.run(["ip", "route", "del", "blackhole", "10.77.0.0/16"], check=False)
        testbed.HOSTS_FILE.write_text(before)
        testbed.up(["1gbit"] * 2)


def test_an_mpijobs_launcher_starts_a_rank_in_each_pod(nodes, tmp_path):
    """What Kubernetes' MPI operator gives its launcher, with nodes as worker pods, and this machine
    for an image. The ranks live for a second: of those that end at once mpirun may miss the end
    (openpmix/prrte, issue 1839).
    """
    program = ["sh", "-c", "hostname; sleep 1"]
    made = expand(
        recipes.launcher("kubernetes"),
        JobSpec(2, program, out=tmp_path / "run", interface=testbed.INTERFACE),
    )
    [text] = made.files.values()
    pod = json.loads(text)["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"][
        0
    ]
    (tmp_path / "hostfile").write_text("node1 slots=1\nnode2 slots=1\n")
    in_image = {"/opt/hvdtrain": str(Path(sys.executable).parent.parent), "/etc/mpi": str(tmp_path)}
    words = [*pod["command"], *pod["args"]]
    for there, here in in_image.items():
        words = [word.replace(there, here) for word in words]
    env = {variable["name"]: variable["value"] for variable in pod["env"]}
    # which OpenMPI 5 does not read
    env["OMPI_MCA_orte_default_hostfile"] = str(tmp_path / "hostfile")
    done = subprocess.run(words, **SETTINGS | {"env": ENV | env}, timeout=60)
    assert sorted(re.findall(r"^\[\d\]<stdout>: (.*)$", done.stdout, re.MULTILINE)) == [
        "node1",
        "node2",
    ], done.stdout


@pytest.mark.parametrize("launcher", ["ssh", "mpi"])
def test_a_job_interrupted_twice_leaves_nothing_running_on_any_host_and_told_no_token(
    launcher, nodes, tmp_path
):
    options = ["--mode", "ps-async", *TINY[:4], "--epochs", "1000"]
    place, env = ["-H", "node1:1,node2:1"], {"AWS_SECRET_ACCESS_KEY": TOKEN}
    # its daemon ends ranks; those of ssh see that their connection is gone
    is_forked = launcher == "mpi"
    with Launched(
        tmp_path / "run", launcher, 1, 1, *options, place=place, env=env, forked=is_forked
    ) as job:
        job.wait_for_steps()
        assert sorted(ranks()) == [0, 1]
        here = [command_line(process.pid) for process in job.family]
        assert not [line for line in [*here, *processes().values()] if TOKEN in line]
        for _ in range(2):
            job.process.send_signal(signal.SIGINT)
            time.sleep(0.5)
        assert job.process.wait(timeout=30) == 130
        until(lambda: not job.alive() and not processes())


@pytest.mark.parametrize("launcher", ["ssh", "mpi"])
@pytest.mark.parametrize("how", ["a killed rank", "a dropped connection", "stop"])
def test_a_job_ends_on_all_hosts_and_says_why(how, launcher, nodes, tmp_path):
    options, place = (
        ["--mode", "allreduce", *TINY[:4], "--epochs", "1000"],
        ["-H", "node1:1,node2:1"],
    )
    is_forked = launcher == "mpi" or how == "stop"
    with Launched(tmp_path / "run", launcher, 2, 0, *options, place=place, forked=is_forked) as job:
        job.wait_for_steps()
        if how == "stop":
            stopped = hvdtrain("stop", job.out)
            # not one of an epoch: those are still running
            assert list((job.out / "snapshots").glob("step-*"))
            assert (stopped.returncode, stopped.stdout) == (0, f"{job.out}: its job has ended\n")
            assert hvdtrain("stop", job.out).returncode == 2
        elif how == "a killed rank":
            ranks()[1].kill()
        else:  # the ssh clients of all hosts are killed, as when their network goes
            for client in job.family:
                with contextlib.suppress(psutil.NoSuchProcess):  # the first one's end ends others
                    if client.name() == "ssh":
                        client.kill()
        printed, _ = job.process.communicate(timeout=60)
        until(lambda: not job.alive() and not processes())
    code, last = job.process.returncode, ["", *printed.splitlines()][-1]
    if how == "stop":
        assert code == 143
    elif how == "a killed rank":
        why = last.removeprefix("hvdtrain: the job failed: ")
        if launcher == "ssh" and why.startswith("rank 0 failed"):  # as below
            assert code == 1, printed
        elif launcher == "ssh":
            assert (
                code,
                why.startswith("rank 1 was ended by a signal, or the ssh connection"),
            ) == (255, True), printed
        elif "rank 0" in why:  # whose MPI was faster to miss the other than its host was to tell
            assert why.startswith(("a rank on node2", "another rank")), printed
            assert "is gone: rank 0 lost its connection" in why
        else:
            assert (code, why.startswith("rank 1 was ended by SIGKILL")) == (137, True), printed
    else:
        assert code not in (0, 2) and last.startswith("hvdtrain: the job failed: "), printed


def test_ranks_run_the_copied_code(nodes, small, tmp_path):
    source, copy, out = tmp_path / "source", tmp_path / "a copy; of $HOME", tmp_path / "run"
    for name in ("hvdtrain", "datasets", "launchers"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    with (source / "hvdtrain/job/rank/command.py").open(
        "a"
    ) as file:  # which ranks import, and `launch` does not
        file.write("\nimport socket\nPath(f'where.{socket.gethostname()}').write_text(__file__)\n")
    place = ["-H", "node1:1,node2:1", "--sync-dst-dir", str(copy), "--out", str(out)]
    words = [sys.executable, "-m", "hvdtrain", "launch", "--launcher", "ssh", "-n", "2", *place]
    options = ["--mode", "allreduce", *TINY[:4], "--steps", "2", "--dataset", str(small)]
    settings = SETTINGS | {"env": ENV | {"PYTHONPATH": str(source)}}
    done = subprocess.run([*words, "--", *options], **settings, cwd=source, timeout=150)
    assert done.returncode == 0, done.stdout
    for node in ("node1", "node2"):
        assert (copy / f"where.{node}").read_text() == str(copy / "hvdtrain/job/rank/command.py")
    manifest, summary = (
        json.loads((out / f"{name}.json").read_text()) for name in ("manifest", "summary")
    )
    assert manifest["hardware"]["hosts"] == ["node1", "node2"]
    assert (manifest["workers"], manifest["servers"], summary["steps"]) == (2, 0, 2)
    assert not list(source.glob("where*"))


def test_what_is_wrong_with_hosts_is_one_line_for_each(nodes, tmp_path):
    """node2 does not share the run folder's place, nor reach node1."""
    sshd = (testbed.STATE / "node2.pid").read_text().strip()
    subprocess.run(
        ["nsenter", "-t", sshd, "-m", "mount", "-t", "tmpfs", "none", tmp_path], check=True
    )
    subprocess.run(
        ["ip", "-n", "hvdtrain-node2", "route", "add", "prohibit", "10.77.77.1"], check=True
    )
    words = [
        "--launcher",
        "ssh",
        "-n",
        2,
        "-H",
        "node1:1,nosuch.invalid:1,node2:1",
        "--out",
        tmp_path / "run",
    ]
    done = hvdtrain("launch", *words, "-s", 1, "--", "--mode", "ps-sync")
    assert done.returncode == 2
    first, second, third = done.stdout.splitlines()
    assert first.startswith("hvdtrain: node1: it cannot connect to node2 (10.77.77.2: ")
    assert second.startswith("hvdtrain: nosuch.invalid: ")
    assert (
        third.startswith("hvdtrain: node2: ")
        and "it cannot connect to node1 (10.77.77.1: " in third
    )
    assert (
        f"it does not see {tmp_path} of this machine, or cannot write in it: give --out a folder on storage"
        in third
    )
    assert list(tmp_path.iterdir()) == []
    testbed.up(["1gbit"] * 2)


@pytest.mark.timeout(480)
def test_a_comparison_over_hosts_says_that_it_crossed_a_network(nodes, tmp_path):
    """Two sprints of each setting come first, each of which horovodrun starts over ssh."""
    out = tmp_path / "compare"
    words = ["-H", "node1:1,node2:1", "--modes", "single,allreduce", *TINY, "--out", out]
    done = forked("compare", *words, first=forks_first(), timeout=400)
    assert done.returncode == 0, done.stdout
    hosts = {
        path.parent.name: list(json.loads(path.read_text())["hosts"])
        for path in out.glob("runs/*/manifest.json")
    }
    assert hosts.pop("single-w1-r1") == ["node1"]
    assert hosts.pop("allreduce-w2-r1") == ["node1", "node2"]
    # A ring on one host stands for one machine too, if it seemed faster than one process.
    assert set(hosts) <= {"ddp-w2-one-host-r1", "allreduce-w2-one-host-r1"}
    assert all(its == ["node1"] for its in hosts.values())
    assert "ran on one host" not in (out / "report.md").read_text()
