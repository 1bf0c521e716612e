"""Jobs through a real Slurm: a controller, a node and an authentication service of the test's own, on loopback."""

import contextlib
import json
import os
import shutil
import socket
import subprocess

import pytest
from helpers.jobs import HVDTRAIN, SETTINGS, steps, until

pytestmark = [pytest.mark.timeout(240), pytest.mark.xdist_group("slurm")]  # one process runs them all
TOOLS = ("slurmctld", "slurmd", "munged", "sbatch", "srun")
TINY = ["--width", "0.0625", "--threads", "1"]


def free_ports(count):
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [s.getsockname()[1] for s in sockets]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    """The environment in which Slurm's commands find a cluster of one node with eight slots."""
    missing = [tool for tool in TOOLS if not shutil.which(tool)] + (["root"] if os.geteuid() else [])
    if missing:
        if os.environ.get("HVDTRAIN_TESTBED") == "required":
            pytest.fail(f"not installed: {', '.join(missing)}")
        pytest.skip(f"not installed: {', '.join(missing)}")
    folder, host = tmp_path_factory.mktemp("slurm"), socket.gethostname()
    controller, node = free_ports(2)
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o600)
    for name in ("state", "spool"):
        (folder / name).mkdir()
    (folder / "slurm.conf").write_text(f"""
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
SlurmctldPort={controller}
SlurmdPort={node}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/pgid
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
NodeName={host} NodeAddr=127.0.0.1 CPUs=8 SocketsPerBoard=1 CoresPerSocket=8 ThreadsPerCore=1 State=UNKNOWN
PartitionName=all Nodes={host} Default=YES MaxTime=INFINITE State=UP
""")
    env = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}
    munge = [
        "munged", "--foreground", "--force", f"--socket={folder}/munge.socket", f"--key-file={folder}/munge.key",
        f"--pid-file={folder}/munged.pid", f"--log-file={folder}/munged.log", f"--seed-file={folder}/munged.seed",
    ]  # fmt: skip
    with contextlib.ExitStack() as stack:

        def serve(*words):
            log = stack.enter_context(open(folder / f"{words[0]}.out", "w"))
            process = subprocess.Popen(words, env=env, stdout=log, stderr=subprocess.STDOUT)
            stack.callback(end, process)

        serve(*munge)
        until((folder / "munge.socket").exists)
        serve("slurmctld", "-D", "-f", str(folder / "slurm.conf"))
        serve("slurmd", "-D", "-f", str(folder / "slurm.conf"))
        until(lambda: output(env, "sinfo", "-h", "-o", "%T") == "idle")
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


def submit(env, out, workers, servers, *options):
    words = [HVDTRAIN, "launch", "--launcher", "slurm", "-n", str(workers), "-s", str(servers), "--out", str(out)]
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
