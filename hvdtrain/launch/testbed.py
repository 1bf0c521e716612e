"""Hosts on one machine, to see a slow network from a laptop: network namespaces with a name and an sshd each.

node1 … nodeN hang on a bridge that has an address of this machine's, so that `ssh node1` works from here as it does
from node2. Their links are limited with a token bucket (tbf) in both directions. All of it is under /run, in /etc/hosts
between two marks, and in one file for ssh; `down` removes it, whoever made it.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from hvdtrain.errors import Failure, UsageError

STATE = Path("/run/hvdtrain-hosts")
LINK = "hvdtrain0"  # the interface, under one name on the nodes and here: what Horovod asks of hosts
NETWORK = "10.77.77"
HERE = 254  # this machine's address in it
NAMES = Path("/etc/hosts")
SSH = Path("/etc/ssh/ssh_config.d/hvdtrain-hosts.conf")
BEGIN, END = "# hvdtrain hosts: begin", "# hvdtrain hosts: end"
MOST = 64
TOOLS = ("ip", "tc", "ssh", "ssh-keygen", "unshare")
SSHD = "/usr/sbin/sshd"
READY_S = 10.0


def name(number: int) -> str:
    return f"node{number}"


def nodes() -> list[str]:
    """The nodes that are up."""
    return sorted((path.stem for path in STATE.glob("node*.pid")), key=lambda node: int(node[4:]))


def up(count: int, rate: str) -> None:
    """Make node1 … nodeN; what there was before is removed.

    Args:
        rate: of every node's link, each way, in tc's words: `1gbit`, `100mbit`.

    Raises:
        UsageError: this cannot be done here, and why.
        Failure: a step failed; nothing of it is left.
    """
    _check()
    if not 1 <= count <= MOST:
        raise UsageError(f"--count {count} is not from 1 to {MOST}")
    down()
    try:
        _make(count, rate)
    except BaseException:
        down()
        raise


def down() -> None:
    """Remove the nodes, and end whatever runs on them; nothing happens where there are none."""
    _check()
    spaces = [s for s in _output("ip", "netns", "list").split() if s.startswith("hvdtrain-node")]
    for signals in (signal.SIGTERM, signal.SIGKILL):
        pids = [int(pid) for space in spaces for pid in _output("ip", "netns", "pids", space).split()]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signals)
        deadline = time.monotonic() + 3
        while pids and time.monotonic() < deadline and any(Path(f"/proc/{pid}").exists() for pid in pids):
            time.sleep(0.05)
    for space in spaces:
        subprocess.run(["ip", "netns", "del", space], check=False)
    for link in _output("ip", "-o", "link", "show").splitlines():
        made = link.split(": ")[1].split("@")[0]
        if made == LINK or made.startswith("hvdtrain-n"):
            subprocess.run(["ip", "link", "del", made], check=False, stderr=subprocess.DEVNULL)
    text = NAMES.read_text()
    if BEGIN in text:
        before, _, rest = text.partition(BEGIN)
        NAMES.write_text(before + rest.partition(END)[2].removeprefix("\n"))
    SSH.unlink(missing_ok=True)
    shutil.rmtree(STATE, ignore_errors=True)


def _check() -> None:
    if sys.platform != "linux":
        raise UsageError("`hvdtrain hosts` needs Linux's network namespaces")
    if os.geteuid():
        raise UsageError("`hvdtrain hosts` makes network interfaces, which only root may: use sudo")
    missing = [tool for tool in TOOLS if not shutil.which(tool)] + ([] if Path(SSHD).exists() else ["sshd"])
    if missing:
        raise UsageError(
            f"`hvdtrain hosts` needs {', '.join(missing)} (Debian: apt install iproute2 openssh-client openssh-server)"
        )


def _make(count: int, rate: str) -> None:
    STATE.mkdir(mode=0o700, parents=True)
    for key in ("key", "host_key"):
        _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "hvdtrain hosts", "-f", str(STATE / key))
    shutil.copy(STATE / "key.pub", STATE / "authorized_keys")
    addresses = {name(n): f"{NETWORK}.{n}" for n in range(1, count + 1)}
    lines = [f"{address} {node}" for node, address in addresses.items()]
    text = NAMES.read_text()
    gap = "" if text.endswith("\n") or not text else "\n"
    NAMES.write_text(text + gap + "\n".join([BEGIN, *lines, END]) + "\n")
    SSH.parent.mkdir(parents=True, exist_ok=True)
    SSH.write_text(
        f"Host {' '.join(addresses)}\n  User root\n  IdentityFile {STATE}/key\n  IdentitiesOnly yes\n"
        "  StrictHostKeyChecking no\n  UserKnownHostsFile /dev/null\n  LogLevel ERROR\n"
    )
    _run("ip", "link", "add", LINK, "type", "bridge")
    _run("ip", "addr", "add", f"{NETWORK}.{HERE}/24", "dev", LINK)
    _run("ip", "link", "set", LINK, "up")
    for number, (node, address) in enumerate(addresses.items(), 1):
        space, end = f"hvdtrain-{node}", f"hvdtrain-n{number}"
        _run("ip", "netns", "add", space)
        _run("ip", "link", "add", end, "type", "veth", "peer", "name", LINK, "netns", space)
        _run("ip", "link", "set", end, "master", LINK, "up")
        _run("ip", "-n", space, "addr", "add", f"{address}/24", "dev", LINK)
        _run("ip", "-n", space, "link", "set", "lo", "up")
        _run("ip", "-n", space, "link", "set", LINK, "up")
        for where in (["-n", space, "qdisc", "add", "dev", LINK], ["qdisc", "add", "dev", end]):
            _run("tc", *where, "root", "tbf", "rate", rate, "burst", "256kb", "latency", "50ms")
        _start_sshd(node, address)
    for node, address in addresses.items():
        _wait_for(node, address)


def _start_sshd(node: str, address: str) -> None:
    """An sshd of the node's own, which believes to be on a host of that name."""
    Path("/run/sshd").mkdir(exist_ok=True)
    settings = {
        "ListenAddress": address, "HostKey": f"{STATE}/host_key", "AuthorizedKeysFile": f"{STATE}/authorized_keys",
        "PidFile": f"{STATE}/{node}.pid", "PermitRootLogin": "prohibit-password", "PasswordAuthentication": "no",
        "UsePAM": "no", "StrictModes": "no", "MaxStartups": "100", "MaxSessions": "100", "PrintMotd": "no",
    }  # fmt: skip
    config = STATE / f"{node}.conf"
    config.write_text("".join(f"{key} {value}\n" for key, value in settings.items()))
    named = f'hostname {node} && exec {SSHD} -f "{config}" -E "{STATE}/{node}.log"'
    _run("ip", "netns", "exec", f"hvdtrain-{node}", "unshare", "--uts", "sh", "-c", named)


def _wait_for(node: str, address: str) -> None:
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection((address, 22), timeout=1):
            if (STATE / f"{node}.pid").exists():  # which sshd writes a moment after it listens
                return
        time.sleep(0.05)
    log = STATE / f"{node}.log"
    raise Failure(f"the sshd of {node} does not answer: {log.read_text().strip()[-200:] if log.exists() else 'no log'}")


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise Failure(f"`{' '.join(words[:6])} …` failed: {said[-1] if said else done.returncode}")


def _output(*words: str) -> str:
    return subprocess.run(words, capture_output=True, text=True).stdout
