"""Checks the hosts before a job starts, all of them and for everything, so that one message lists all that is wrong."""

import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from socket import create_server
from threading import Timer
from typing import Any, NamedTuple

from hvdtrain.errors import UsageError
from hvdtrain.launch import bandwidth, probe
from hvdtrain.launch.hosts import Host
from hvdtrain.launch.remote import code_path, command_on, in_folder, is_local
from hvdtrain.runs.folder import unwritable
from hvdtrain.runs.launched import Pair
from hvdtrain.world.network import own_addresses, resolve

REPLY_TIMEOUT_S = 60.0  # the first import of torch from a network disk is slow
MAX_CLOCK_SKEW_S = 5.0  # with more, logs and times of several hosts mislead


@dataclass(frozen=True)
class Requirements:
    """What a job requires of every host.

    Attributes:
        working_folder: where its ranks start, a copy of the code; the current folder where it is empty.
        out: the run folder, which ranks on all hosts write in and this machine reads; None where there is none.
        files: what the ranks read.
        rank_mb: memory of a rank, in MiB.
        interface: the network interface that ranks are to use; one is chosen where it is empty.
        url: of the data set, if it is at one.
        environment: variables that ranks are told besides, to read that with.
    """

    working_folder: str
    out: Path | None
    files: Sequence[str]
    rank_mb: float
    interface: str = ""
    url: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)


class Checked(NamedTuple):
    """What was found of hosts that can run a job.

    Attributes:
        interface: by which they reach each other; empty where loopback is enough, or their names for it differ.
        network: what was measured of it.
    """

    interface: str = ""
    network: tuple[Pair, ...] = ()


def check_hosts(hosts: Sequence[Host], requirements: Requirements, measure: bool = False) -> Checked:
    """Check that the hosts can run a job, and if asked to, measure the network between them.

    Raises:
        UsageError: with a line for each host that cannot run the job, and why.
    """
    with contextlib.ExitStack() as stack:
        out = requirements.out
        shared_file = stack.enter_context(_new_file_near(out)) if out else ""
        own_port = stack.enter_context(create_server(("", 0), backlog=probe.BACKLOG)).getsockname()[1]
        pool = stack.enter_context(ThreadPoolExecutor(len(hosts)))
        probes = [stack.enter_context(HostProbe(host.name, requirements.working_folder)) for host in hosts]
        request = {
            "shared": shared_file, "files": list(requirements.files), "interface": requirements.interface,
            "url": requirements.url, "environment": dict(requirements.environment),
        }  # fmt: skip
        replies = list(pool.map(lambda host_probe: host_probe.describe(request), probes))
        listening = {
            host.name: [reply["address"], reply["port"]]
            for host, reply in zip(hosts, replies, strict=True)
            if isinstance(reply, dict) and requirements.interface in ("", reply["interface"])
        }
        connections = pool.map(lambda host_probe: host_probe.try_connections(listening, own_port), probes)
        connection_problems = list(connections)
        can_measure = measure and len(listening) == len(hosts) > 1 and not any(connection_problems)
        own_names = {
            host.name: reply["name"] for host, reply in zip(hosts, replies, strict=True) if isinstance(reply, dict)
        }
        network = _measure(probes, listening, own_names, pool) if can_measure else ()
    own_software, own_interfaces = probe.software(), set(own_addresses().values())
    missing = requirements.interface not in ("", *own_interfaces)
    problems = [f"this machine has no network interface {requirements.interface}"] if missing else []
    for host, reply, unreachable in zip(hosts, replies, connection_problems, strict=True):
        if isinstance(reply, str):
            problems.append(f"{host.name}: {reply}")
            continue
        found = [*_problems(host, reply, requirements, own_software, len(hosts) > 1), *unreachable]
        found += _duplicate_name(host, reply, hosts, replies)
        problems += [f"{host.name}: {'; '.join(found)}"] if found else []
    if problems:
        raise UsageError(*problems)
    if all(is_local(host.name) for host in hosts):  # starters use loopback
        return Checked("", network)
    interfaces = {reply["interface"] for reply in replies if isinstance(reply, dict)}
    return Checked(interfaces.pop() if len(interfaces) == 1 and interfaces <= own_interfaces else "", network)


def _measure(
    probes: Sequence["HostProbe"], listening: dict[str, Any], own_names: dict[str, str], pool: Executor
) -> tuple[Pair, ...]:
    """Bandwidth and round trip from host to host; a pair that does not answer is left out.

    Args:
        own_names: what each host calls itself, as its ranks do in the manifest.
    """
    by_name = {host_probe.host: host_probe for host_probe in probes}
    ports = dict(zip(by_name, pool.map(lambda host_probe: host_probe.request({"serve": True}), probes), strict=True))
    at = {name: [listening[name][0], reply["port"]] for name, reply in ports.items() if isinstance(reply, dict)}
    if len(at) < len(by_name):
        return ()

    def ask(what: str, pair: tuple[str, str]) -> float | None:
        reply = by_name[pair[0]].request({what: at[pair[1]]})
        return reply["measured"] if isinstance(reply, dict) else None

    found: list[Pair] = []
    for pairs in bandwidth.rounds(list(by_name)):
        trips = list(pool.map(partial(ask, "round_trip"), pairs))  # before anything fills the queues
        speeds = list(pool.map(partial(ask, "send"), pairs))
        for (one, other), trip, speed in zip(pairs, trips, speeds, strict=True):
            if trip and speed:
                found.append({"from": own_names[one], "to": own_names[other], "gbit_s": speed, "round_trip_us": trip})
    return tuple(found)


def describe_hosts(hosts: Sequence[Host]) -> dict[str, dict[str, Any]]:
    """What each host has, by its name: see world.host.hardware. UsageError where one does not answer."""
    request = {"shared": "", "files": [], "interface": ""}
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(len(hosts)))
        probes = [stack.enter_context(HostProbe(host.name)) for host in hosts]
        replies = dict(pool.map(lambda host_probe: (host_probe.host, host_probe.describe(request)), probes))
    if silent := [f"{name}: {reply}" for name, reply in replies.items() if isinstance(reply, str)]:
        raise UsageError(*silent)
    return {name: reply for name, reply in replies.items() if isinstance(reply, dict)}


@contextlib.contextmanager
def _new_file_near(out: Path) -> Iterator[str]:
    """The path of a temporary file in the run folder, or in its nearest parent that exists."""
    folder = next(path for path in (out, *out.parents) if path.is_dir())
    try:
        file = tempfile.NamedTemporaryFile(prefix=".hvdtrain-", dir=folder)
    except OSError as error:
        raise unwritable(out, error) from None
    with file:
        yield file.name


class HostProbe:
    """`probe.py` on a host, and the requests to it."""

    def __init__(self, host: str, working_folder: str = "") -> None:
        self.host = host
        code = code_path(working_folder)  # as ranks have it
        python = [*(["env", f"PYTHONPATH={code}"] if code else []), sys.executable, "-Pm", "hvdtrain.launch.probe"]
        self.began = time.time()
        self.process = subprocess.Popen(
            command_on(host, in_folder(working_folder or str(Path.cwd()), python)), text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def __enter__(self) -> "HostProbe":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()  # where this is ssh, the probe itself ends because its stdin closes
        with contextlib.suppress(ValueError):  # closed before
            self.process.communicate()

    def describe(self, request: dict[str, Any]) -> dict[str, Any] | str:
        """What the host has, or why it does not answer."""
        reply = self.request(request | {"address": resolve(self.host)})
        if isinstance(reply, str):
            return reply
        elapsed = time.time() - self.began
        return reply | {"skew": reply["time"] - self.began - elapsed / 2, "elapsed": elapsed}

    def try_connections(self, listening: dict[str, Any], own_port: int) -> list[str]:
        """What is wrong with connections from the host to the others that listen, and to this machine."""
        if self.host not in listening:
            return []
        others = {name: address for name, address in listening.items() if name != self.host}
        reply = self.request({"hosts": others, "launcher": 0 if is_local(self.host) else own_port})
        if isinstance(reply, str):
            return [reply]
        errors = ", ".join(f"{name} ({error})" for name, error in reply.items())
        hint = "ranks listen on ports that the system chooses: does a firewall close them?"
        return [f"it cannot connect to {errors}; {hint}"] if errors else []

    def request(self, request: dict[str, Any]) -> dict[str, Any] | str:
        """Send a request and wait for its reply; return why there is none, if so."""
        assert self.process.stdin and self.process.stdout
        timeout = Timer(REPLY_TIMEOUT_S, self.process.kill)
        timeout.start()
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
            for line in self.process.stdout:
                if line.startswith(probe.REPLY_PREFIX):
                    return json.loads(line.removeprefix(probe.REPLY_PREFIX))
        except OSError:  # the process has ended
            pass
        finally:
            timeout.cancel()
        return self._why_no_reply()

    def _why_no_reply(self) -> str:
        try:
            stderr = self.process.communicate(timeout=1)[1]
        except (OSError, subprocess.TimeoutExpired):
            stderr = ""
        if self.process.returncode == -9:
            return f"no answer within {REPLY_TIMEOUT_S:.0f} s"
        lines = [line.strip() for line in stderr.splitlines() if line.strip()]
        return lines[-1] if lines else f"no answer, exit code {self.process.returncode}"


def _problems(
    host: Host, reply: dict[str, Any], requirements: Requirements, own_software: dict[str, Any], several: bool
) -> Iterator[str]:
    """What is wrong with a host, by its reply.

    Args:
        own_software: what this machine has.
        several: whether the job uses more hosts than this one.
    """
    for name, own in own_software.items():
        if reply[name] != own:
            package = f" in {reply['package']}" if name == "hvdtrain" else ""
            yield f"{name} {reply[name]}{package}, here {own}"
    if abs(reply["skew"]) > MAX_CLOCK_SKEW_S + reply["elapsed"] / 2:
        yield f"its clock is {reply['skew']:+.0f} s off ours"
    if reply["memory_mb"] < requirements.rank_mb * host.slots:
        need = f"{host.slots} rank(s) need {requirements.rank_mb * host.slots:,.0f} MB at least"
        yield f"{reply['memory_mb']:,} MB of memory are free, and {need}"
    if requirements.interface not in ("", reply["interface"]):
        yield f"it has no network interface {requirements.interface} with an address"
    yield from _unusable_folder(requirements.out, reply)
    for file in reply["missing_files"]:
        yield f"there is no {file}, which its ranks would read"
    if reply["url_error"]:
        yield f"it cannot read {requirements.url}: {reply['url_error']}"
    if several and not reply["name_address"]:
        yield f"its own name {reply['name']} means nothing there: give it in /etc/hosts the address that others reach"


def _unusable_folder(out: Path | None, reply: dict[str, Any]) -> Iterator[str]:
    """What is wrong with the run folder there."""
    if out and not reply["sees_shared_file"]:
        yield (
            f"it does not see {out.parent} of this machine: give --out a folder on storage that all hosts share, which "
            "its ranks write metrics and logs in"
        )
    elif out and not reply["can_write"]:
        yield f"it cannot write in {out.parent}: give --out another folder"


def _duplicate_name(
    host: Host, reply: dict[str, Any], hosts: Sequence[Host], replies: Sequence[dict[str, Any] | str]
) -> list[str]:
    """The problem of a host whose own name other hosts have too: starters tell hosts apart by their own names."""
    others = [
        other.name
        for other, other_reply in zip(hosts, replies, strict=True)
        if other != host and isinstance(other_reply, dict) and other_reply["name"] == reply["name"]
    ]
    return [f"it calls itself {reply['name']}, as {', '.join(others)} does: give it another name"] if others else []
