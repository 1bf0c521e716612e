"""Looks at hosts before a job starts, so that all that is wrong is told at once, and nothing begins."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from socket import create_server
from threading import Timer
from typing import Any

from hvdtrain.errors import UsageError
from hvdtrain.launch import probe
from hvdtrain.launch.hosts import Host
from hvdtrain.launch.remote import address_of, in_folder, is_here, on

LONGEST_S = 60.0  # for a host to answer; the first import from a network disk is slow
LARGEST_SKEW_S = 5.0  # between clocks: more makes logs and times of several hosts misleading


@dataclass(frozen=True)
class Needs:
    """What a job needs of every host.

    Attributes:
        folder: where its ranks start.
        out: the run folder, which ranks on all hosts write in and this machine reads.
        files: what the ranks read.
        rank_mb: memory of a rank, in MiB.
        meets_by_name: whether ranks find each other by what their hosts' own names mean.
        interface: the network interface that they are to use; one is chosen where it is empty.
    """

    folder: str
    out: Path
    files: Sequence[str]
    rank_mb: float
    meets_by_name: bool
    interface: str = ""


def look_at(hosts: Sequence[Host], needs: Needs) -> str:
    """Check that the hosts can run a job, and return the name of the interface they reach each other by, or nothing.

    Raises:
        UsageError: with a line for each host that cannot, and why.
    """
    with contextlib.ExitStack() as stack:
        shared = stack.enter_context(_file_beside(needs.out))
        own_port = stack.enter_context(create_server(("", 0), backlog=probe.BACKLOG)).getsockname()[1]
        pool = stack.enter_context(ThreadPoolExecutor(len(hosts)))
        talks = [stack.enter_context(Talk(host.name, needs.folder)) for host in hosts]
        question = {"shared": shared, "files": list(needs.files), "interface": needs.interface}
        answers = list(pool.map(lambda talk: talk.ask(question), talks))
        listening = {
            talk.host: [answer["address"], answer["port"]]
            for talk, answer in zip(talks, answers, strict=True)
            if isinstance(answer, dict)
        }
        reached = list(pool.map(lambda talk: talk.connect(listening, own_port), talks))
    here, known_here = probe.software(), set(probe.own_addresses().values())
    missing = needs.interface not in ("", *known_here)
    problems = [f"this machine has no network interface {needs.interface}"] if missing else []
    for host, answer, unreachable in zip(hosts, answers, reached, strict=True):
        if isinstance(answer, str):
            problems.append(f"{host.name}: {answer}")
            continue
        found = [*_problems(host, answer, needs, here, len(hosts) > 1), *unreachable]
        found += _namesakes(host, answer, hosts, answers)
        problems += [f"{host.name}: {'; '.join(found)}"] if found else []
    if problems:
        raise UsageError(*problems)
    if all(is_here(host.name) for host in hosts):  # starters use loopback
        return ""
    interfaces = {answer["interface"] for answer in answers if isinstance(answer, dict)}
    return interfaces.pop() if len(interfaces) == 1 and interfaces <= known_here else ""


@contextlib.contextmanager
def _file_beside(out: Path) -> Iterator[str]:
    """The path of a new file in the run folder, or in the nearest folder above it that there is."""
    folder = next(path for path in (out, *out.parents) if path.is_dir())
    try:
        file = tempfile.NamedTemporaryFile(prefix=".hvdtrain-", dir=folder)
    except OSError as error:
        raise UsageError(f"--out {out} cannot be written: {error.strerror}") from None
    with file:
        yield file.name


class Talk:
    """A conversation with the probe on a host."""

    def __init__(self, host: str, folder: str) -> None:
        self.host = host
        code = os.environ.get("PYTHONPATH")  # ranks have it too
        python = [*(["env", f"PYTHONPATH={code}"] if code else []), sys.executable, "-m", "hvdtrain.launch.probe"]
        self.began = time.time()
        self.process = subprocess.Popen(
            on(host, in_folder(folder, python)), text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def __enter__(self) -> "Talk":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()  # the probe ends with its input
        with contextlib.suppress(ValueError):  # closed before
            self.process.communicate()

    def ask(self, question: dict[str, Any]) -> dict[str, Any] | str:
        """What the host has, or why it does not answer."""
        answer = self._turn(question | {"address": address_of(self.host)})
        if isinstance(answer, str):
            return answer
        took = time.time() - self.began
        return answer | {"skew": answer["time"] - self.began - took / 2, "took": took}

    def connect(self, listening: dict[str, Any], own_port: int) -> list[str]:
        """Whom the host cannot connect to, of those that listen and this machine."""
        if self.host not in listening:
            return []
        others = {name: at for name, at in listening.items() if name != self.host}
        answer = self._turn({"hosts": others, "launcher": 0 if is_here(self.host) else own_port})
        if isinstance(answer, str):
            return [answer]
        errors = ", ".join(f"{name} ({error})" for name, error in answer.items())
        hint = "ranks listen on ports that the system chooses: does a firewall close them?"
        return [f"it cannot connect to {errors}; {hint}"] if errors else []

    def _turn(self, question: dict[str, Any]) -> dict[str, Any] | str:
        assert self.process.stdin and self.process.stdout
        limit = Timer(LONGEST_S, self.process.kill)
        limit.start()
        try:
            self.process.stdin.write(json.dumps(question) + "\n")
            self.process.stdin.flush()
            for line in self.process.stdout:
                if line.startswith(probe.MARK):
                    return json.loads(line.removeprefix(probe.MARK))
        except OSError:  # it has gone already
            pass
        finally:
            limit.cancel()
        return self._end()

    def _end(self) -> str:
        """Why there was no answer."""
        try:
            said = self.process.communicate(timeout=1)[1]
        except (OSError, subprocess.TimeoutExpired):
            said = ""
        if self.process.returncode == -9:
            return f"no answer within {LONGEST_S:.0f} s"
        lines = [line.strip() for line in said.splitlines() if line.strip()]
        return lines[-1] if lines else f"no answer, exit code {self.process.returncode}"


def _problems(host: Host, answer: dict[str, Any], needs: Needs, here: dict[str, Any], several: bool) -> Iterator[str]:
    for name, own in here.items():
        if answer[name] != own:
            at = f" in {answer['where']}" if name == "hvdtrain" else ""
            yield f"{name} {answer[name]}{at}, here {own}"
    if abs(answer["skew"]) > LARGEST_SKEW_S + answer["took"] / 2:
        yield f"its clock is {answer['skew']:+.0f} s off ours"
    if answer["memory_mb"] < needs.rank_mb * host.slots:
        need = f"{host.slots} rank(s) need {needs.rank_mb * host.slots:,.0f} MB at least"
        yield f"{answer['memory_mb']:,} MB of memory are free, and {need}"
    if needs.interface not in ("", answer["interface"]):
        yield f"it has no network interface {needs.interface} with an address"
    if not answer["shares"]:
        yield (
            f"it does not see {needs.out.parent} of this machine: give --out a folder on storage that all hosts share, "
            "which its ranks write metrics and logs in"
        )
    elif not answer["writes"]:
        yield f"it cannot write in {needs.out.parent}: give --out another folder"
    for file in answer["absent"]:
        yield f"there is no {file}, which its ranks would read"
    if several and (not answer["name_means"] or (needs.meets_by_name and answer["name_means"].startswith("127."))):
        means = f"means {answer['name_means']}" if answer["name_means"] else "does not resolve"
        yield f"its own name {answer['name']} {means} there: give it in /etc/hosts the address that others reach"


def _namesakes(
    host: Host, answer: dict[str, Any], hosts: Sequence[Host], answers: Sequence[dict[str, Any] | str]
) -> list[str]:
    """Starters tell hosts apart by what these call themselves."""
    others = [
        other.name
        for other, its in zip(hosts, answers, strict=True)
        if other != host and isinstance(its, dict) and its["name"] == answer["name"]
    ]
    return [f"it calls itself {answer['name']}, as {', '.join(others)} does: give it another name"] if others else []
