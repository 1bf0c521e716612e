"""Hosts in a private network of this machine, joined by links of a limited rate.

A rank of a probe is such a host. The network ends with the processes in it, and nothing outside
sees it. `hvdtrain.launch.testbed` makes hosts that stay, for whole jobs.
"""

import ctypes
import os
import shutil
import socket
import subprocess
from pathlib import Path

from hvdtrain.launch.private_network import enter_private_network

# The port of the first host. The network has no other process.
PORT = 20_000
# The interface of each host.
INTERFACE = "hvdtrain0"
# linux/sched.h
_CLONE_NEWUTS = 0x04000000
_BRIDGE = "hvdtrain-links"
# A burst is as large as the largest packet, and a small part of what is sent.
_LIMIT = ("burst", "128kb", "latency", "50ms")


def address_of(number: int) -> str:
    return f"10.77.99.{number + 1}"


def may_be_made() -> bool:
    """Returns whether this user may make such hosts here, and has the tools for it.

    Other users may have a private network too, but programs that they start there have no rights.
    """
    return not os.geteuid() and all(map(shutil.which, ("ip", "tc")))


def make_switch(scratch: Path) -> None:
    """Moves this process, which must have one thread, into a private network with a switch.

    Args:
        scratch: as in enter_private_network.

    Raises:
        OSError, subprocess.SubprocessError: this is not possible here.
    """
    enter_private_network(scratch)
    _ip("link", "add", _BRIDGE, "type", "bridge")
    _ip("link", "set", _BRIDGE, "up")


def become_host(scratch: Path, number: int) -> None:
    """Makes this process, which must have one thread, a host with a name, which has no link yet.

    Raises:
        OSError: this is not possible here.
    """
    enter_private_network(scratch)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWUTS):
        raise OSError(ctypes.get_errno(), "unshare")
    # Horovod takes ranks with the same host name to be on one host, and looks the name up.
    socket.sethostname(address_of(number))


def join_link(pid: int, number: int, gbit: float) -> None:
    """Joins a host to the switch of this process, and limits what comes to the host.

    Args:
        pid: the process that has become the host.
        gbit: of the link, each way.
    """
    port = f"hvdtrain-l{number}"
    _ip("link", "add", port, "type", "veth", "peer", "name", INTERFACE, "netns", str(pid))
    _ip("link", "set", port, "master", _BRIDGE, "up")
    _limit(port, gbit)


def use_link(number: int, gbit: float) -> None:
    """Gives the link of this host an address, and limits what goes out from the host.

    Libraries are told to use it.
    """
    _ip("addr", "add", f"{address_of(number)}/24", "dev", INTERFACE)
    _ip("link", "set", INTERFACE, "up")
    _limit(INTERFACE, gbit)
    os.environ["HVDTRAIN_INTERFACE"] = INTERFACE


def _limit(interface: str, gbit: float) -> None:
    rate = f"{round(gbit * 1e3)}mbit"
    _run("tc", "qdisc", "replace", "dev", interface, "root", "tbf", "rate", rate, *_LIMIT)


def _ip(*words: str) -> None:
    _run("ip", *words)


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, timeout=5)
