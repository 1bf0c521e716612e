"""Two hosts of the testbed, for a test."""

import contextlib
import fcntl
import os
import shutil
from pathlib import Path

import psutil
import pytest

from helpers.processes import ranks_among
from hvdtrain.launch import testbed


def why_not():
    if os.geteuid():
        return "network namespaces need root"
    missing = [tool for tool in testbed.TOOLS if not shutil.which(tool)]
    if missing or not Path(testbed.SSHD).exists():
        return f"not installed: {', '.join(missing) or 'sshd'}"
    return ""


def leave_out(reason):
    """Skip the test if there is a reason to, or fail it where HVDTRAIN_TESTBED=required."""
    if reason and os.environ.get("HVDTRAIN_TESTBED") == "required":
        pytest.fail(reason)
    if reason:
        pytest.skip(reason)


@contextlib.contextmanager
def two_nodes():
    """node1 and node2 are up, joined by 1 Gbit/s. Their names are this machine's: one test at a
    time.
    """
    leave_out(why_not())
    with open("/tmp/hvdtrain-testbed.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        testbed.up(["1gbit"] * 2)
        try:
            yield
        finally:
            testbed.down()


def on_node(node):
    """What runs a command in a node's network, and under its name; `ip netns exec` would hide
    control groups.
    """
    named = f'hostname {node} && exec "$@"'
    return [
        "nsenter",
        f"--net=/run/netns/hvdtrain-{node}",
        "unshare",
        "--uts",
        "sh",
        "-c",
        named,
        "sh",
    ]


def ranks_of_job(job, named, ranked):
    """{rank: process} of a scheduler's job, by the variables that have its name and a process's
    rank.
    """
    of_job = [
        one
        for one in psutil.process_iter(["environ"])
        if (one.info["environ"] or {}).get(named) == job
    ]
    return ranks_among(of_job, ranked)
