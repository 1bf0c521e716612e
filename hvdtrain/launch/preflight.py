"""Looks at hosts before a job starts: run on each of them, `python -m hvdtrain.launch.preflight` says what is there."""

import json
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

from hvdtrain.errors import UsageError
from hvdtrain.launch.hosts import Host

SSH = ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10"]
LONGEST_S = 60.0  # for a host to answer; the first import from a network disk is slow
LARGEST_SKEW_S = 5.0  # between clocks: more makes logs and times of several hosts misleading
LEAST_MB = 700  # a rank with a small model
COMPARED = ("hvdtrain", "torch", "horovod")


def look_at(hosts: Sequence[Host], folder: Path) -> str:
    """Check that the hosts can run a job, and return the name of the interface they reach each other by, or nothing.

    Args:
        folder: where the ranks are started there.

    Raises:
        UsageError: with a line for each host that cannot, and why.
    """
    with ThreadPoolExecutor(32) as pool:
        answers = list(pool.map(lambda host: _ask(host, folder), hosts))
    here = found()
    problems = [
        problem for host, answer in zip(hosts, answers, strict=True) for problem in _problems(host, answer, here)
    ]
    if problems:
        raise UsageError("; ".join(problems))
    interfaces = [_interface(host, answer) for host, answer in zip(hosts, answers, strict=True)]
    return interfaces[0] if len(set(interfaces)) == 1 else ""


def found() -> dict[str, Any]:
    """What matters of this host."""
    import psutil

    addresses = psutil.net_if_addrs().items()
    return {
        "versions": {name: version(name) for name in COMPARED},
        "python": sys.version.split()[0],
        "time": time.time(),
        "memory_mb": psutil.virtual_memory().available // 2**20,
        "interfaces": {name: [a.address for a in own if a.family == socket.AF_INET] for name, own in addresses},
    }


def _ask(host: Host, folder: Path) -> dict[str, Any] | str:
    """What the host says, or why it does not."""
    program = f"cd {shlex.quote(str(folder))} && exec {shlex.quote(sys.executable)} -m hvdtrain.launch.preflight"
    began = time.time()
    try:
        done = subprocess.run(
            [*SSH, host.name, program], capture_output=True, text=True, timeout=LONGEST_S, stdin=subprocess.DEVNULL
        )
        if done.returncode:
            said = [line.strip() for line in (done.stderr + done.stdout).splitlines() if line.strip()]
            return said[-1] if said else f"exit code {done.returncode}"
        answer = json.loads(done.stdout.splitlines()[-1])
        return answer | {"skew": answer["time"] - (began + time.time()) / 2, "took": time.time() - began}
    except subprocess.TimeoutExpired:
        return f"no answer within {LONGEST_S:.0f} s"
    except (OSError, ValueError, IndexError, KeyError) as error:
        return f"it does not answer as expected: {error}"


def _problems(host: Host, answer: dict[str, Any] | str, here: dict[str, Any]) -> list[str]:
    if isinstance(answer, str):
        return [f"{host.name}: {answer}"]
    problems = [
        f"{name} {answer['versions'].get(name)}, here {own}"
        for name, own in here["versions"].items()
        if answer["versions"].get(name) != own
    ]
    if answer["python"] != here["python"]:
        problems.append(f"Python {answer['python']}, here {here['python']}")
    if abs(answer["skew"]) > LARGEST_SKEW_S + answer["took"] / 2:
        problems.append(f"its clock is {answer['skew']:+.0f} s off ours")
    if answer["memory_mb"] < LEAST_MB * host.slots:
        problems.append(f"{answer['memory_mb']:,} MB are free for {host.slots} rank(s): at least {LEAST_MB} each")
    return [f"{host.name}: {', '.join(problems)}"] if problems else []


def _interface(host: Host, answer: dict[str, Any] | str) -> str:
    """The interface with the address that the host's name means here."""
    assert isinstance(answer, dict)
    try:
        address = socket.gethostbyname(host.name)
    except OSError:
        return ""
    return next((name for name, own in answer["interfaces"].items() if address in own), "")


if __name__ == "__main__":
    print(json.dumps(found()))
