"""A Slurm of a test's own: a controller, nodes and an authentication service."""

import contextlib
import os
import shutil
import socket
import subprocess

from helpers.jobs import until
from helpers.nodes import leave_out, on_node, two_nodes
from hvdtrain.base.world.network import free_port
from hvdtrain.launch import testbed

TOOLS = ("slurmctld", "slurmd", "munged", "sbatch", "srun")


@contextlib.contextmanager
def cluster_on_two_nodes(folder):
    """Slurm on two hosts of the testbed, node1 and node2, of two slots each."""
    with two_nodes():
        own = f"{testbed.NETWORK}.{testbed.THIS_HOST_NUMBER}"
        hosts = {
            node: (socket.gethostbyname(node), on_node(node)) for node in testbed.running_nodes()
        }
        with cluster(folder, hosts, 2, own) as env:
            yield env


@contextlib.contextmanager
def cluster(folder, hosts, slots, controller_address="127.0.0.1"):
    """Slurm on hosts, each with its address and what runs a command there."""
    missing = [tool for tool in TOOLS if not shutil.which(tool)] + (
        ["root"] if os.geteuid() else []
    )
    leave_out(f"not installed: {', '.join(missing)}" if missing else "")
    controller, port = free_port("127.0.0.1"), free_port("127.0.0.1")
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o600)
    for name in ("state", *(f"spool/{host}" for host in hosts)):
        (folder / name).mkdir(parents=True)
    cores = f"CPUs={slots} SocketsPerBoard=1 CoresPerSocket={slots} ThreadsPerCore=1 State=UNKNOWN"
    has = f"{cores} RealMemory=64000 Gres=gpu:2"
    nodes = [f"NodeName={host} NodeAddr={address} {has}" for host, (address, _) in hosts.items()]
    # as if they were GPUs
    (folder / "gres.conf").write_text("Name=gpu File=/dev/null\nName=gpu File=/dev/zero\n")
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
SelectTypeParameters=CR_Core_Memory
GresTypes=gpu
SlurmdParameters=config_overrides
{os.linesep.join(nodes)}
PartitionName=all Nodes={",".join(hosts)} Default=YES MaxTime=INFINITE State=UP
""")
    env = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}
    munge = [
        "munged",
        "--foreground",
        "--force",
        f"--socket={folder}/munge.socket",
        f"--key-file={folder}/munge.key",
        f"--pid-file={folder}/munged.pid",
        f"--log-file={folder}/munged.log",
        f"--seed-file={folder}/munged.seed",
    ]
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
