"""Checking all hosts before a job starts, for everything, so that one error lists all problems."""

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

from hvdtrain.base.errors import UsageError
from hvdtrain.base.world.network import own_addresses, resolve
from hvdtrain.launch import probe
from hvdtrain.launch.hosts import Host, code_path, command_on, in_folder, is_local
from hvdtrain.runs.folder import unwritable
from hvdtrain.runs.launched import Pair

REPLY_TIMEOUT_S = 60.0  # the first import of torch from a network disk is slow
ROUNDS = 4  # the most rounds in which the network is measured
MAX_CLOCK_SKEW_S = 5.0  # with more, logs and times of several hosts mislead
Requests = Mapping[str, Mapping[str, Any]]  # by host
Ask = Callable[[Requests], dict[str, dict[str, Any]]]


@dataclass(frozen=True)
class Requirements:
    """The requirements of a job on every host.

    Attributes:
        working_folder: where ranks start, a copy of the code; empty for the current folder.
        out: the run folder, in which ranks on all hosts write, and which this machine reads; None
            if there is none.
        files: files that the ranks read.
        rank_mb: the memory of a rank, in MiB.
        interface: the network interface that ranks are to use; empty if one is to be chosen.
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
    """Checks that the hosts can run a job, and measures the network between them if asked to.

    Returns:
        The interface by which the hosts reach each other, and the measured pairs. The interface is
        empty if loopback is enough, or if the hosts' names for it differ.

    Raises:
        UsageError: hosts cannot run the job. The error has a line for each of them, with the
            reasons.
    """
    out = requirements.out
    interface = requirements.interface
    with contextlib.ExitStack() as stack:
        shared_file = stack.enter_context(new_file_near(out)) if out else ""
        listener = stack.enter_context(create_server(("", 0), backlog=probe.BACKLOG))
        launcher_port = listener.getsockname()[1]
        ask = stack.enter_context(_probes(hosts, requirements.working_folder))
        replies = ask(_descriptions(hosts, shared_file, requirements.files, interface))
        answers = {name: reply for name, reply in replies.items() if "error" not in reply}
        listening = {
            name: [reply["address"], reply["port"]]
            for name, reply in answers.items()
            if interface in ("", reply["interface"])
        }
        ports = {name: 0 if is_local(name) else launcher_port for name in listening}
        connections = ask(
            {name: {"connect": {"hosts": listening, "launcher": ports[name]}} for name in listening}
        )
        unreachable = {name: _why_unreachable(reply) for name, reply in connections.items()}
        can_measure = measure and len(listening) == len(hosts) and not any(unreachable.values())
        network = _measure(ask, listening, answers) if can_measure else ()
    local_software = probe.software()
    local_interfaces = set(own_addresses().values())
    problems = []
    if interface not in ("", *local_interfaces):
        problems.append(f"this machine has no network interface {interface}")
    for host in hosts:
        if host.name in answers:
            faults = [*problems_of(host, answers, requirements, local_software)]
            faults.append(unreachable.get(host.name, ""))
        else:
            faults = [replies[host.name]["error"]]
        if any(faults):
            problems.append(f"{host.name}: {'; '.join(filter(None, faults))}")
    if problems:
        raise UsageError(*problems)
    if all(is_local(host.name) for host in hosts):  # starters use loopback
        return "", network
    interfaces = {reply["interface"] for reply in answers.values()}
    has_one_name = len(interfaces) == 1 and interfaces <= local_interfaces
    return interfaces.pop() if has_one_name else "", network


def describe_hosts(hosts: Sequence[Host]) -> dict[str, dict[str, Any]]:
    """Returns a description of each host by name: see world.host.hardware.

    Raises:
        UsageError: hosts do not answer.
    """
    with _probes(hosts) as ask:
        replies = ask(_descriptions(hosts))
    silent = [f"{name}: {reply['error']}" for name, reply in replies.items() if "error" in reply]
    if silent:
        raise UsageError(*silent)
    return replies


def _descriptions(
    hosts: Sequence[Host], shared: str = "", files: Sequence[str] = (), interface: str = ""
) -> Requests:
    """Returns a request for a description of each host; see probe.describe."""
    request = {"shared": shared, "files": list(files), "interface": interface}
    return {host.name: request | {"address": resolve(host.name)} for host in hosts}


def _measure(
    ask: Ask, listening: Mapping[str, Any], answers: Mapping[str, Any]
) -> tuple[Pair, ...]:
    """Returns the throughput from host to host, without pairs that did not answer.

    Hosts have the names that they have for themselves.
    """
    measured: list[Pair] = []
    for pairs in rounds(list(listening)):
        replies = ask({sender: {"send": listening[receiver]} for sender, receiver in pairs})
        for sender, receiver in pairs:
            speed = replies[sender].get("gbit_s")
            if speed:
                names = {"from": answers[sender]["name"], "to": answers[receiver]["name"]}
                measured.append({**names, "gbit_s": speed})
    return tuple(measured)


def rounds(hosts: Sequence[str]) -> list[list[tuple[str, str]]]:
    """Returns rounds of (sender, receiver), which send at the same time.

    In each round every host sends to one other, and receives from one, as in a ring. With more than
    five hosts not all pairs have a turn, and the rounds are spread over them.
    """
    n = len(hosts)
    count = min(ROUNDS, n - 1)
    shifts = [1 + i * (n - 1) // count for i in range(count)]
    return [[(hosts[i], hosts[(i + shift) % n]) for i in range(n)] for shift in shifts]


@contextlib.contextmanager
def new_file_near(out: Path) -> Iterator[str]:
    """Yields a temporary file in the run folder, or in its nearest parent that exists.

    Raises:
        UsageError: the folder cannot be written in.
    """
    folder = next(path for path in (out, *out.parents) if path.is_dir())
    try:
        file = tempfile.NamedTemporaryFile(prefix=".hvdtrain-", dir=folder)
    except OSError as error:
        raise unwritable(out, error) from None
    with file:
        yield file.name


@contextlib.contextmanager
def _probes(hosts: Sequence[Host], working_folder: str = "") -> Iterator[Ask]:
    """Runs `probe.py` on each host during the block, with the code that ranks have there.

    Yields:
        A function that sends requests to hosts, all at once, and returns their replies by host.
    """
    folder = working_folder or str(Path.cwd())
    python = [sys.executable, "-Pm", "hvdtrain.launch.probe"]
    code = code_path(working_folder)
    if code:
        python = ["env", f"PYTHONPATH={code}", *python]
    processes: dict[str, subprocess.Popen[str]] = {}

    def ask(requests: Requests) -> dict[str, dict[str, Any]]:
        replies = pool.map(_reply, [processes[name] for name in requests], requests.values())
        return dict(zip(requests, replies, strict=True))

    with ThreadPoolExecutor(len(hosts)) as pool:
        try:
            for host in hosts:
                processes[host.name] = subprocess.Popen(
                    command_on(host.name, in_folder(folder, python)),
                    encoding="utf-8",
                    errors="replace",
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                )
            yield ask
        finally:
            for process in processes.values():
                process.kill()  # if this is ssh, the probe ends because its stdin closes
                with contextlib.suppress(ValueError):  # closed before
                    process.communicate()


def _reply(process: "subprocess.Popen[str]", request: Mapping[str, Any]) -> dict[str, Any]:
    """Sends a request to a probe and returns the reply.

    The reply gets `asked` and `answered`, the times between which it was made, in seconds since
    1970. Without a reply, `error` says why there is none.
    """
    assert process.stdin and process.stdout
    timeout = Timer(REPLY_TIMEOUT_S, process.kill)
    timeout.start()
    asked = time.time()
    try:
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        for line in process.stdout:
            if line.startswith(probe.REPLY_PREFIX):
                reply = json.loads(line.removeprefix(probe.REPLY_PREFIX))
                return reply | {"asked": asked, "answered": time.time()}
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
    """Returns what is wrong with a host's connections to others and to this machine, or empty."""
    if "error" in reply:
        return reply["error"]
    errors = [f"{name} ({error})" for name, error in reply.get("unreachable", {}).items()]
    if not errors:
        return ""
    hint = "ranks listen on ports that the system chooses: does a firewall close them?"
    return f"it cannot connect to {', '.join(errors)}; {hint}"


def _lacking(ranks: int, reply: Mapping[str, Any], requirements: Requirements) -> Iterator[str]:
    """Yields what a host lacks for so many ranks."""
    if reply["memory_mb"] < requirements.rank_mb * ranks:
        need = f"{ranks} rank(s) need {requirements.rank_mb * ranks:,.0f} MB at least"
        yield f"{reply['memory_mb']:,} MB of memory are free, and {need}"
    if reply["disk_mb"] < requirements.disk_mb:
        need = f"a snapshot may need {requirements.disk_mb:,.0f}"
        yield f"{reply['disk_mb']:,} MB are free where the run folder is, and {need}"
    if requirements.cuda and not reply["gpus"]:
        yield "it has no GPU, /dev/nvidia0, which --device cuda asks for"


def problems_of(
    host: Host,
    answers: Mapping[str, Any],
    requirements: Requirements,
    local_software: dict[str, Any],
) -> Iterator[str]:
    """Yields what is wrong with a host that has answered.

    Args:
        answers: the answers of all hosts that have answered.
        local_software: the versions on this machine.
    """
    reply = answers[host.name]
    for name, local in local_software.items():
        if reply[name] != local:
            package = f" in {reply['package']}" if name == "hvdtrain" else ""
            yield f"{name} {reply[name]}{package}, here {local}"
    skew = reply["time"] - (reply["asked"] + reply["answered"]) / 2
    uncertainty = (reply["answered"] - reply["asked"]) / 2
    if abs(skew) > MAX_CLOCK_SKEW_S + uncertainty:
        yield f"its clock is {skew:+.0f} s off ours"
    yield from _lacking(host.slots, reply, requirements)
    if requirements.interface not in ("", reply["interface"]):
        yield f"it has no network interface {requirements.interface} with an address"
    if requirements.out and not (reply["sees_shared_file"] and reply["can_write"]):
        yield (
            f"it does not see {requirements.out.parent} of this machine, or cannot write in it: "
            "give --out a folder on storage that all hosts share, which its ranks write metrics "
            "and logs in"
        )
    for file in reply["missing_files"]:
        yield f"there is no {file}, which its ranks would read"
    if len(answers) > 1 and not reply["name_address"]:
        yield (
            f"its own name {reply['name']} means nothing there: "
            "give it in /etc/hosts the address that others reach"
        )
    # Starters tell hosts apart by the names that these have for themselves.
    others = [name for name in answers if name != host.name]
    same = [name for name in others if answers[name]["name"] == reply["name"]]
    if same:
        yield f"it calls itself {reply['name']}, as {', '.join(same)} does: give it another name"
