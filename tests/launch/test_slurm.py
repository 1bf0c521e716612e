"""Jobs through a real Slurm: a controller, a node and an authentication service of the test's own, on loopback."""

import contextlib
import json
import os
import shutil
import socket
import subprocess

import pytest
from helpers.jobs import HVDTRAIN, SETTINGS, steps, until
from helpers.nodes import two_nodes

from hvdtrain.launch import testbed

pytestmark = [pytest.mark.timeout(240), pytest.mark.xdist_group("testbed")]  # one needs its nodes
TOOLS = ("slurmctld", "slurmd", "munged", "sbatch", "srun")
TINY = ["--width", "0.0625", "--threads", "1"]


def free_ports(count):
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [s.getsockname()[1] for s in sockets]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    """The environment in which Slurm's commands find a cluster of one node with eight slots."""
    with cluster(tmp_path_factory.mktemp("slurm"), {socket.gethostname(): ("127.0.0.1", [])}, 8) as env:
        yield env


@pytest.fixture
def slurm_on_two_nodes(tmp_path):
    """The same with two hosts of the testbed, of two slots each."""
    with two_nodes():
        own = f"{testbed.NETWORK}.{testbed.OWN_HOST_NUMBER}"
        hosts = {node: (socket.gethostbyname(node), on_node(node)) for node in testbed.running_nodes()}
        with cluster(tmp_path, hosts, 2, own) as env:
            yield env


def on_node(node):
    """What runs a command in a node's network, and under its name; `ip netns exec` would hide control groups."""
    named = f'hostname {node} && exec "$@"'
    return ["nsenter", f"--net=/run/netns/hvdtrain-{node}", "unshare", "--uts", "sh", "-c", named, "sh"]


@contextlib.contextmanager
def cluster(folder, hosts, slots, controller_address="127.0.0.1"):
    """Slurm on hosts, each with its address and what runs a command there."""
    missing = [tool for tool in TOOLS if not shutil.which(tool)] + (["root"] if os.geteuid() else [])
    if missing:
        if os.environ.get("HVDTRAIN_TESTBED") == "required":
            pytest.fail(f"not installed: {', '.join(missing)}")
        pytest.skip(f"not installed: {', '.join(missing)}")
    controller, port = free_ports(2)
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o600)
    for name in ("state", *(f"spool/{host}" for host in hosts)):
        (folder / name).mkdir(parents=True)
    cores = f"CPUs={slots} SocketsPerBoard=1 CoresPerSocket={slots} ThreadsPerCore=1 State=UNKNOWN"
    nodes = [f"NodeName={host} NodeAddr={address} {cores}" for host, (address, _) in hosts.items()]
    (folder / "slurm.conf").write_text(f"""
ClusterName=test
SlurmctldHost={socket.gethostname()}({controller_address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
SlurmctldPort={controller}
SlurmdPort={port}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/pgid
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
{os.linesep.join(nodes)}
PartitionName=all Nodes={",".join(hosts)} Default=YES MaxTime=INFINITE State=UP
""")
    env = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}
    munge = [
        "munged", "--foreground", "--force", f"--socket={folder}/munge.socket", f"--key-file={folder}/munge.key",
        f"--pid-file={folder}/munged.pid", f"--log-file={folder}/munged.log", f"--seed-file={folder}/munged.seed",
    ]  # fmt: skip
    with contextlib.ExitStack() as stack:

        def serve(name, *words):
            log = stack.enter_context(open(folder / f"{name}.out", "w"))
            process = subprocess.Popen(words, env=env, stdout=log, stderr=subprocess.STDOUT)
            stack.callback(end, process)

        serve("munged", *munge)
        until((folder / "munge.socket").exists)
        serve("slurmctld", "slurmctld", "-D", "-f", str(folder / "slurm.conf"))
        for host, (_, there) in hosts.items():
            serve(f"slurmd-{host}", *there, "slurmd", "-D", "-f", str(folder / "slurm.conf"))
        until(lambda: output(env, "sinfo", "-h", "-N", "-o", "%T").split() == ["idle"] * len(hosts))
        yield env


def end(process):
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def output(env, *words):
    return subprocess.run(words, env=env, capture_output=True, text=True, timeout=30).stdout.strip()


def submit(env, out, workers, servers, *options, place=()):
    words = [HVDTRAIN, "launch", "--launcher", "slurm", "-n", str(workers), "-s", str(servers), "--out", str(out)]
    words += place
    done = subprocess.run([*words, "--", *options, *TINY], **SETTINGS | {"env": env}, timeout=60, cwd=out.parent)
    assert done.returncode == 0, done.stdout
    assert done.stdout.strip().isdigit()  # the job's number
    return done.stdout.strip()


def test_a_batch_job_trains(slurm, tmp_path):
    out = tmp_path / "A run"
    job = submit(slurm, out, 2, 1, "--mode", "ps-async", "--steps", "5")
    until(lambda: not output(slurm, "squeue", "-h", "-j", job), 90)
    log = (tmp_path / "A run.launch" / f"slurm-{job}.log").read_text()
    assert (out / "summary.json").exists(), log
    manifest = json.loads((out / "manifest.json").read_text())
    assert (manifest["starter"], manifest["workers"], manifest["servers"]) == ("srun", 2, 1)


def test_a_batch_job_is_cancelled(slurm, tmp_path):
    out = tmp_path / "run"
    job = submit(slurm, out, 2, 0, "--mode", "allreduce", "--epochs", "1000")
    until(lambda: (out / "metrics.rank0.jsonl").is_file() and len(steps(out, 0)) > 3, 60)
    stopped = subprocess.run([HVDTRAIN, "stop", str(out)], **SETTINGS | {"env": slurm}, timeout=30)
    assert stopped.returncode == 0, stopped.stdout
    until(lambda: not output(slurm, "squeue", "-h", "-j", job), 60)


def test_a_batch_job_that_is_told_to_leave_goes_back_in_the_queue_and_goes_on(slurm, tmp_path):
    """SIGUSR1 is what Slurm sends two minutes before a job's time is over; it waits a little before the next run."""
    out = tmp_path / "run"
    job = submit(slurm, out, 2, 0, "--mode", "allreduce", "--steps", "240", "--batch-size", "64")
    until(lambda: (out / "metrics.rank0.jsonl").is_file() and len(steps(out, 0)) > 5, 60)
    output(slurm, "scancel", "--signal=USR1", job)
    until(lambda: output(slurm, "squeue", "-h", "-j", job, "-o", "%T") == "PENDING", 30)
    assert list((out / "snapshots").glob("step-*")) and not (out / "summary.json").exists()
    until((out / "summary.json").exists, 100)
    until(lambda: not output(slurm, "squeue", "-h", "-j", job), 30)
    assert [row["step"] for row in steps(out, 1)] == list(range(1, 241))
    manifest = json.loads((out / "manifest.json").read_text())
    assert len(manifest["parts"]) == 2
    assert (manifest["starter"], manifest["workers"], manifest["servers"]) == ("srun", 2, 0)


def test_ranks_that_are_dealt_out_over_two_nodes_train(slurm_on_two_nodes, tmp_path):
    """Two tasks on each: the recipe deals them out in turn, so that the first two ranks, which serve, are apart."""
    place = ["-H", "node1:2,node2:2", "--network-interface", testbed.INTERFACE]
    for mode, workers, servers in (("allreduce", 4, 0), ("ps-sync", 2, 2)):
        out = tmp_path / mode
        job = submit(slurm_on_two_nodes, out, workers, servers, "--mode", mode, "--steps", "4", place=place)
        until(lambda job=job: not output(slurm_on_two_nodes, "squeue", "-h", "-j", job), 90)
        log = (tmp_path / f"{mode}.launch" / f"slurm-{job}.log").read_text()
        assert (out / "summary.json").exists(), log
        manifest = json.loads((out / "manifest.json").read_text())
        assert (manifest["starter"], manifest["workers"], manifest["servers"]) == ("srun", workers, servers)
        assert (manifest["hardware"]["hosts"], manifest["interface"]) == (["node1", "node2"], testbed.INTERFACE)


def test_a_comparison_runs_inside_an_allocation(slurm, tmp_path):
    """Its threads are those of the allocation, and runs follow each other as steps of one job."""
    out = tmp_path / "c"
    words = ["compare", "--launcher", "srun", "--modes", "ddp,ps-sync", *TINY, "--steps", "4", "--out", str(out)]
    command = ["salloc", "--quiet", "--ntasks=3", HVDTRAIN, *words]
    done = subprocess.run(command, **SETTINGS | {"env": slurm}, timeout=150, cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    host = socket.gethostname()
    for name, ranks in (("ddp-w2-r1", 2), ("ps-sync-w2-s1-r1", 3)):
        manifest = json.loads((out / "runs" / name / "manifest.json").read_text())
        assert (manifest["starter"], manifest["processes"]) == ("srun", ranks)
        assert (manifest["launch"]["launcher"], manifest["launch"]["hosts"]) == ("srun", [f"{host}:{ranks}"])
    outside = subprocess.run([HVDTRAIN, *words], **SETTINGS | {"env": slurm}, timeout=30)
    assert (outside.returncode, outside.stdout.strip()) == (
        2, "hvdtrain: --launcher srun is for use inside a Slurm allocation: start this in salloc or sbatch",
    )  # fmt: skip
