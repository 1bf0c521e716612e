"""Checks the hosts before a job starts, all of them and for everything, so that one message lists all that is wrong."""

import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
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
    """

    working_folder: str
    out: Path | None
    files: Sequence[str]
    rank_mb: float
    interface: str = ""


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
    out, several = requirements.out, len(hosts) > 1
    with contextlib.ExitStack() as stack:
        shared_file = stack.enter_context(_new_file_near(out)) if out else ""
        own_port = stack.enter_context(create_server(("", 0), backlog=bandwidth.BACKLOG)).getsockname()[1]
        pool = stack.enter_context(ThreadPoolExecutor(len(hosts)))
        probes = _probes(stack, hosts, requirements.working_folder)
        request = {"shared": shared_file, "files": list(requirements.files), "interface": requirements.interface}
        replies = _ask_all(pool, probes, lambda one: one.describe(request))
        answers = {name: reply for name, reply in replies.items() if "error" not in reply}
        listening = {
            name: [reply["address"], reply["port"]]
            for name, reply in answers.items()
            if requirements.interface in ("", reply["interface"])
        }
        unreachable = _ask_all(pool, probes, lambda one: one.try_connections(listening, own_port))
        can_measure = measure and several and len(listening) == len(hosts) and not any(unreachable.values())
        network = _measure(probes, listening, answers, pool) if can_measure else ()
    own_software, own_interfaces = probe.software(), set(own_addresses().values())
    missing = requirements.interface not in ("", *own_interfaces)
    problems = [f"this machine has no network interface {requirements.interface}"] if missing else []
    for host in hosts:
        found = [replies[host.name].get("error", "")]
        if host.name in answers:
            found = [*_problems(host, answers, requirements, own_software), unreachable[host.name]]
        problems += [f"{host.name}: {'; '.join(filter(None, found))}"] if any(found) else []
    if problems:
        raise UsageError(*problems)
    if all(is_local(host.name) for host in hosts):  # starters use loopback
        return Checked("", network)
    interfaces = {reply["interface"] for reply in answers.values()}
    return Checked(interfaces.pop() if len(interfaces) == 1 and interfaces <= own_interfaces else "", network)


def _measure(
    probes: Mapping[str, "HostProbe"], listening: Mapping[str, Any], answers: Mapping[str, Any], pool: Executor
) -> tuple[Pair, ...]:
    """Bandwidth and round trip from host to host, by the names that these have for themselves, without silent pairs."""

    def ask(what: str, pair: tuple[str, str]) -> float | None:
        return probes[pair[0]].request({what: listening[pair[1]]}).get("measured")

    found: list[Pair] = []
    for pairs in bandwidth.rounds(list(probes)):
        trips = list(pool.map(partial(ask, "round_trip"), pairs))  # before anything fills the queues
        speeds = list(pool.map(partial(ask, "send"), pairs))
        for pair, trip, speed in zip(pairs, trips, speeds, strict=True):
            if trip and speed:
                sender, receiver = (answers[name]["name"] for name in pair)
                found.append({"from": sender, "to": receiver, "gbit_s": speed, "round_trip_us": trip})
    return tuple(found)


def describe_hosts(hosts: Sequence[Host]) -> dict[str, dict[str, Any]]:
    """What each host has, by its name: see world.host.hardware. UsageError where one does not answer."""
    request = {"shared": "", "files": [], "interface": ""}
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(len(hosts)))
        probes = _probes(stack, hosts)
        replies = _ask_all(pool, probes, lambda one: one.describe(request))
    if silent := [f"{name}: {reply['error']}" for name, reply in replies.items() if "error" in reply]:
        raise UsageError(*silent)
    return replies


def _probes(stack: contextlib.ExitStack, hosts: Sequence[Host], working_folder: str = "") -> dict[str, "HostProbe"]:
    return {host.name: stack.enter_context(contextlib.closing(HostProbe(host.name, working_folder))) for host in hosts}


def _ask_all(pool: Executor, probes: Mapping[str, "HostProbe"], ask: Callable[["HostProbe"], Any]) -> dict[str, Any]:
    """By host, what is asked of all at once."""
    return dict(zip(probes, pool.map(ask, probes.values()), strict=True))


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

    def close(self) -> None:
        self.process.kill()  # where this is ssh, the probe itself ends because its stdin closes
        with contextlib.suppress(ValueError):  # closed before
            self.process.communicate()

    def describe(self, request: dict[str, Any]) -> dict[str, Any]:
        """What the host has, or as its `error` why it does not answer."""
        reply = self.request(request | {"address": resolve(self.host)})
        elapsed = time.time() - self.began
        if "error" not in reply:
            reply |= {"skew": reply["time"] - self.began - elapsed / 2, "elapsed": elapsed}
        return reply

    def try_connections(self, listening: Mapping[str, Any], own_port: int) -> str:
        """What is wrong with connections from the host to the others that listen, and to this machine."""
        if self.host not in listening:
            return ""
        others = {name: address for name, address in listening.items() if name != self.host}
        reply = self.request({"connect": {"hosts": others, "launcher": 0 if is_local(self.host) else own_port}})
        if "error" in reply:
            return str(reply["error"])
        errors = ", ".join(f"{name} ({error})" for name, error in reply.items())
        hint = "ranks listen on ports that the system chooses: does a firewall close them?"
        return f"it cannot connect to {errors}; {hint}" if errors else ""

    def request(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send a request and wait for its reply; where there is none, `error` says why."""
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
        return {"error": self._why_no_reply()}

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
    host: Host, answers: Mapping[str, Any], requirements: Requirements, own_software: dict[str, Any]
) -> Iterator[str]:
    """What is wrong with a host that has answered.

    Args:
        answers: of all such hosts.
        own_software: what this machine has.
    """
    reply = answers[host.name]
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
    if requirements.out and not (reply["sees_shared_file"] and reply["can_write"]):
        yield (
            f"it does not see {requirements.out.parent} of this machine, or cannot write in it: give --out a folder on "
            "storage that all hosts share, which its ranks write metrics and logs in"
        )
    for file in reply["missing_files"]:
        yield f"there is no {file}, which its ranks would read"
    if len(answers) > 1 and not reply["name_address"]:
        yield f"its own name {reply['name']} means nothing there: give it in /etc/hosts the address that others reach"
    # Starters tell hosts apart by what these call themselves.
    if same := [name for name in answers if name != host.name and answers[name]["name"] == reply["name"]]:
        yield f"it calls itself {reply['name']}, as {', '.join(same)} does: give it another name"
