"""Checks the hosts before a job starts, all of them and for everything, so that one message lists all that is wrong."""

import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from socket import create_server
from threading import Timer
from typing import Any

from hvdtrain.errors import UsageError
from hvdtrain.launch import probe
from hvdtrain.launch.hosts import Host, code_path, command_on, in_folder, is_local
from hvdtrain.runs.folder import unwritable
from hvdtrain.runs.launched import Pair
from hvdtrain.world.network import own_addresses, resolve

REPLY_TIMEOUT_S = 60.0  # the first import of torch from a network disk is slow
ROUNDS = 4  # of measuring the network, at most
MAX_CLOCK_SKEW_S = 5.0  # with more, logs and times of several hosts mislead
Requests = Mapping[str, Mapping[str, Any]]  # by host
Ask = Callable[[Requests], dict[str, dict[str, Any]]]


@dataclass(frozen=True)
class Requirements:
    """What a job requires of every host.

    Attributes:
        working_folder: where its ranks start, a copy of the code; the current folder where it is empty.
        out: the run folder, which ranks on all hosts write in and this machine reads; None where there is none.
        files: what the ranks read.
        rank_mb: memory of a rank, in MiB.
        interface: the network interface that ranks are to use; one is chosen where it is empty.
        disk_mb: MiB that a snapshot may take.
        cuda: whether ranks compute on GPUs.
    """

    working_folder: str
    out: Path | None
    files: Sequence[str]
    rank_mb: float
    interface: str = ""
    disk_mb: float = 0.0
    cuda: bool = False


def check_hosts(
    hosts: Sequence[Host], requirements: Requirements, measure: bool = False
) -> tuple[str, tuple[Pair, ...]]:
    """Check that the hosts can run a job, and if asked to, measure the network between them.

    Returns:
        The interface by which they reach each other, empty where loopback is enough, or their names for it differ; and
        what was measured.

    Raises:
        UsageError: with a line for each host that cannot run the job, and why.
    """
    out, interface = requirements.out, requirements.interface
    with contextlib.ExitStack() as stack:
        shared_file = stack.enter_context(new_file_near(out)) if out else ""
        launcher_port = stack.enter_context(create_server(("", 0), backlog=probe.BACKLOG)).getsockname()[1]
        ask = stack.enter_context(_probes(hosts, requirements.working_folder))
        replies = ask(_descriptions(hosts, shared_file, requirements.files, interface))
        answers = {name: reply for name, reply in replies.items() if "error" not in reply}
        listening = {
            name: [reply["address"], reply["port"]]
            for name, reply in answers.items()
            if interface in ("", reply["interface"])
        }
        ports = {name: 0 if is_local(name) else launcher_port for name in listening}
        connections = ask({name: {"connect": {"hosts": listening, "launcher": ports[name]}} for name in listening})
        unreachable = {name: problem for name, reply in connections.items() if (problem := _why_unreachable(reply))}
        can_measure = measure and len(listening) == len(hosts) and not unreachable
        network = _measure(ask, listening, answers) if can_measure else ()
    local_software, local_interfaces = probe.software(), set(own_addresses().values())
    problems = []
    if interface not in ("", *local_interfaces):
        problems.append(f"this machine has no network interface {interface}")
    for host in hosts:
        faults = [replies[host.name].get("error", "")]
        if host.name in answers:
            faults = [*problems_of(host, answers, requirements, local_software), unreachable.get(host.name)]
        problems += [f"{host.name}: {'; '.join(filter(None, faults))}"] if any(faults) else []
    if problems:
        raise UsageError(*problems)
    if all(is_local(host.name) for host in hosts):  # starters use loopback
        return "", network
    interfaces = {reply["interface"] for reply in answers.values()}
    return (interfaces.pop() if len(interfaces) == 1 and interfaces <= local_interfaces else ""), network


def describe_hosts(hosts: Sequence[Host]) -> dict[str, dict[str, Any]]:
    """What each host has, by its name: see world.host.hardware. UsageError where one does not answer."""
    with _probes(hosts) as ask:
        replies = ask(_descriptions(hosts))
    if silent := [f"{name}: {reply['error']}" for name, reply in replies.items() if "error" in reply]:
        raise UsageError(*silent)
    return replies


def _descriptions(hosts: Sequence[Host], shared: str = "", files: Sequence[str] = (), interface: str = "") -> Requests:
    """For each host the request to describe it; see probe.describe."""
    request = {"shared": shared, "files": list(files), "interface": interface}
    return {host.name: request | {"address": resolve(host.name)} for host in hosts}


def _measure(ask: Ask, listening: Mapping[str, Any], answers: Mapping[str, Any]) -> tuple[Pair, ...]:
    """Bandwidth from host to host, by the names that these have for themselves, without silent pairs."""
    measured: list[Pair] = []
    for pairs in rounds(list(listening)):
        replies = ask({sender: {"send": listening[receiver]} for sender, receiver in pairs})
        for sender, receiver in pairs:
            if speed := replies[sender].get("gbit_s"):
                measured.append({"from": answers[sender]["name"], "to": answers[receiver]["name"], "gbit_s": speed})
    return tuple(measured)


def rounds(hosts: Sequence[str]) -> list[list[tuple[str, str]]]:
    """Who sends to whom in each round: every host to one other, and receives from one, all at once, as in a ring.
    Beyond five hosts not all pairs have a turn: the rounds are spread over them.
    """
    n = len(hosts)
    count = min(ROUNDS, n - 1)
    shifts = [1 + i * (n - 1) // count for i in range(count)]
    return [[(hosts[i], hosts[(i + shift) % n]) for i in range(n)] for shift in shifts]


@contextlib.contextmanager
def new_file_near(out: Path) -> Iterator[str]:
    """The path of a temporary file in the run folder, or in its nearest parent that exists."""
    folder = next(path for path in (out, *out.parents) if path.is_dir())
    try:
        file = tempfile.NamedTemporaryFile(prefix=".hvdtrain-", dir=folder)
    except OSError as error:
        raise unwritable(out, error) from None
    with file:
        yield file.name


@contextlib.contextmanager
def _probes(hosts: Sequence[Host], working_folder: str = "") -> Iterator[Ask]:
    """In the block `probe.py` runs on each host, with the code that ranks have there.

    Yields:
        A function that makes requests of hosts, all at once, and returns their replies, by host.
    """
    code, folder = code_path(working_folder), working_folder or str(Path.cwd())
    python = [*(["env", f"PYTHONPATH={code}"] if code else []), sys.executable, "-Pm", "hvdtrain.launch.probe"]
    processes: dict[str, subprocess.Popen[str]] = {}

    def ask(requests: Requests) -> dict[str, dict[str, Any]]:
        asked = [processes[name] for name in requests]
        return dict(zip(requests, pool.map(_reply, asked, requests.values()), strict=True))

    with ThreadPoolExecutor(len(hosts)) as pool:
        try:
            for host in hosts:
                processes[host.name] = subprocess.Popen(
                    command_on(host.name, in_folder(folder, python)), text=True,
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                )  # fmt: skip
            yield ask
        finally:
            for process in processes.values():
                process.kill()  # where this is ssh, the probe itself ends because its stdin closes
                with contextlib.suppress(ValueError):  # closed before
                    process.communicate()


def _reply(process: "subprocess.Popen[str]", request: Mapping[str, Any]) -> dict[str, Any]:
    """The reply of a probe, with `asked` and `answered`, the times in seconds since 1970 between which it was made;
    where there is none, `error` says why.
    """
    assert process.stdin and process.stdout
    timeout = Timer(REPLY_TIMEOUT_S, process.kill)
    timeout.start()
    times = {"asked": time.time()}
    try:
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        for line in process.stdout:
            if line.startswith(probe.REPLY_PREFIX):
                return json.loads(line.removeprefix(probe.REPLY_PREFIX)) | times | {"answered": time.time()}
    except OSError:  # the process has ended
        pass
    finally:
        timeout.cancel()
    return {"error": _why_no_reply(process)}


def _why_no_reply(process: "subprocess.Popen[str]") -> str:
    try:
        stderr = process.communicate(timeout=1)[1]
    except (OSError, subprocess.TimeoutExpired):
        stderr = ""
    if process.returncode == -9:
        return f"no answer within {REPLY_TIMEOUT_S:.0f} s"
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    return lines[-1] if lines else f"no answer, exit code {process.returncode}"


def _why_unreachable(reply: Mapping[str, Any]) -> str:
    """What is wrong with connections from a host to the others and to this machine; empty where nothing is."""
    if "error" in reply:
        return reply["error"]
    errors = ", ".join(f"{name} ({error})" for name, error in reply.get("unreachable", {}).items())
    hint = "ranks listen on ports that the system chooses: does a firewall close them?"
    return f"it cannot connect to {errors}; {hint}" if errors else ""


def _lacking(ranks: int, reply: Mapping[str, Any], requirements: Requirements) -> Iterator[str]:
    """What so many ranks need of a host, and it has not."""
    if reply["memory_mb"] < requirements.rank_mb * ranks:
        need = f"{ranks} rank(s) need {requirements.rank_mb * ranks:,.0f} MB at least"
        yield f"{reply['memory_mb']:,} MB of memory are free, and {need}"
    if reply["disk_mb"] < requirements.disk_mb:
        need = f"a snapshot may need {requirements.disk_mb:,.0f}"
        yield f"{reply['disk_mb']:,} MB are free where the run folder is, and {need}"
    if requirements.cuda and not reply["gpus"]:
        yield "it has no GPU, /dev/nvidia0, which --device cuda asks for"


def problems_of(
    host: Host, answers: Mapping[str, Any], requirements: Requirements, local_software: dict[str, Any]
) -> Iterator[str]:
    """What is wrong with a host that has answered.

    Args:
        answers: of all such hosts.
        local_software: what this machine has.
    """
    reply = answers[host.name]
    for name, local in local_software.items():
        if reply[name] != local:
            package = f" in {reply['package']}" if name == "hvdtrain" else ""
            yield f"{name} {reply[name]}{package}, here {local}"
    skew = reply["time"] - (reply["asked"] + reply["answered"]) / 2
    if abs(skew) > MAX_CLOCK_SKEW_S + (reply["answered"] - reply["asked"]) / 2:
        yield f"its clock is {skew:+.0f} s off ours"
    yield from _lacking(host.slots, reply, requirements)
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
