"""Expands a launcher's recipe into the command that starts a job, and the job script or resource that it hands over."""

import os
import re
import secrets
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

from hvdtrain.config.recipes import Launcher
from hvdtrain.config.run_config import RunConfig
from hvdtrain.errors import UsageError
from hvdtrain.launch import records
from hvdtrain.launch.filling import Filler, Value
from hvdtrain.launch.hosts import Host, hosts_of_ranks, in_folder, rank_of_process
from hvdtrain.runs.folder import launch_folder
from hvdtrain.world.network import WIRE_KEY

# Variables that are passed on to ranks on other hosts. Others are not: they would show on command lines there. What
# JobSpec.secrets names goes by a file.
FORWARDED = re.compile(
    r"(HVDTRAIN(?!_WIRE_KEY)|HOROVOD|OMPI_MCA|PRTE_MCA|UCX|FI|OMP|MKL|NCCL|CUDA|GLOO|TP|TORCH|THP)_\w+|PYTHONPATH|LD_LIBRARY_PATH"
)
# What Slurm, PBS, LSF and Grid Engine say of an allocation, and they and MPI of a rank. A starter on this machine alone
# would read it, and put ranks on the allocation's other nodes.
ALLOCATION = re.compile(r"(SLURM|SBATCH|SRUN|PMI\d?|PMIX(?!_MCA)|PBS|LSB)_\w+|PE_HOSTFILE")
SLOTS = "HVDTRAIN_SLOTS"  # where horovodrun numbers ranks host by host, and servers are to be spread: see world.place
# Variables that the starter itself needs here.
STARTER_NEEDS = (
    "PATH", "HOME", "USER", "LOGNAME", "LANG", "SSH_AUTH_SOCK", "KRB5CCNAME", "TMPDIR", "KUBECONFIG", "HADOOP_CONF_DIR",
    "SLURM_CONF",
)  # fmt: skip


@dataclass(frozen=True)
class JobSpec:
    """A job to be started, independent of the launcher.

    Attributes:
        ranks: workers and servers together.
        program: the command line of each rank.
        hosts: each with the slots that the job uses; empty where the launcher finds hosts itself.
        out: the run folder.
        interface: the network interface by which the hosts reach each other, or empty.
        working_folder: where the ranks start; by default the current folder.
        survives_lost_rank: whether the other ranks go on when one dies.
        join: the command line of a worker that comes in place of one that is lost; empty where none does.
        environment: variables for every rank, beside those of the recipe.
        secrets: variables for every rank that no command line may show.
        needs_network: whether ranks on this machine alone reach for others all the same, for a data set say.
        memory_mb: MiB to ask a scheduler for, for each rank; 0 to leave it to the scheduler.
        gpus: how many for each rank; likewise.
    """

    ranks: int
    program: Sequence[str]
    servers: int = 0
    hosts: Sequence[Host] = ()
    out: Path = Path("run")
    interface: str = ""
    working_folder: str = ""
    survives_lost_rank: bool = False
    join: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, str] = field(default_factory=dict)
    needs_network: bool = False
    memory_mb: int = 0
    gpus: int = 0


@dataclass(frozen=True)
class LaunchCommand:
    """The command that starts a job, and what it needs.

    Attributes:
        argv: the command line.
        files: files to write first, by path: a host file, a job script.
        environment: the command's whole environment.
        secrets_file: the one of the files that nobody else may read, and that does not outlive the job.
        to_scheduler: whether the job has only begun where the command ends well.
        name: the job's, as its scheduler knows it.
        stop_signal: the signal that the command passes on to the ranks, which then save and leave; None where it
            passes none on.
        private_network: whether the command is to run in a network that has loopback alone, where the system allows it.
    """

    argv: list[str]
    files: dict[Path, str]
    environment: dict[str, str]
    stop_signal: signal.Signals | None = signal.SIGTERM
    private_network: bool = False
    secrets_file: Path | None = None
    to_scheduler: bool = False
    name: str = ""

    def rank_of(self, process: int) -> int:
        """The rank of a process by its starter's number: see hosts.rank_of_process."""
        slots = self.environment.get(SLOTS) if Path(self.argv[0]).name == "horovodrun" else None
        return rank_of_process([int(number) for number in slots.split(",")], process) if slots else process

    def dry_run_text(self) -> str:
        """What `--dry-run` prints: the files and the command."""
        files = [
            f"# {path}\n{text.rstrip() if path != self.secrets_file else '(variables that are not shown)'}\n"
            for path, text in self.files.items()
        ]
        return "\n".join([*files, shlex.join(self.argv)])


def expand(recipe: Launcher, spec: JobSpec) -> LaunchCommand:
    """Fill in a launcher's recipe for a job.

    Raises:
        UsageError: the recipe needs hosts and there are none, or the other way round, or it has an unknown placeholder,
            or ranks cannot read a file with the secrets.
    """
    _check_hosts_suit(recipe, spec.hosts)
    job = _Job(recipe, spec)
    filler = Filler(recipe.file, job.values())
    # horovodrun would go to other addresses of this machine over ssh.
    is_here = (
        all(host.name in ("localhost", "127.0.0.1") for host in spec.hosts)
        if recipe.hosts == "needed"
        else recipe.local
    )
    return LaunchCommand(
        filler.command(recipe.command), job.files(filler), job.environment,
        stop_signal=None if recipe.stop_signal == "file" else signal.Signals[recipe.stop_signal],
        private_network=is_here and not spec.needs_network and spec.interface in ("", "lo"),
        secrets_file=job.secrets_file, to_scheduler=bool(recipe.script_name), name=job.name,
    )  # fmt: skip


def _check_hosts_suit(recipe: Launcher, hosts: Sequence[Host]) -> None:
    if recipe.hosts == "needed" and not hosts:
        raise UsageError(f"--launcher {recipe.name} needs hosts: give -H a:1,b:1 or --hostfile FILE")
    if hosts and not recipe.mentions(r"\{(hosts|hostfile|nodelist|rankfile)\}"):
        raise UsageError(f"--launcher {recipe.name} finds hosts itself: drop -H or --hostfile, or choose ssh or mpi")
    if not recipe.mentions("{hostfile}") and (named := [host.name for host in hosts if "@" in host.name]):
        raise UsageError(
            f"--launcher {recipe.name} takes no user in {named[0]}: write it into ~/.ssh/config (`User`), or choose mpi"
        )


class _Job:
    """What a recipe is filled in with for one job.

    Attributes:
        environment: the starter's.
        secrets_file: through which ranks get the secrets, where they do not have the starter's environment.
        program, join: what each rank runs, through that file.
        name: as a scheduler knows the job.
    """

    def __init__(self, recipe: Launcher, spec: JobSpec) -> None:
        self.recipe, self.spec = recipe, spec
        # Starters that are Python themselves, horovodrun for one, import nothing of the current folder either.
        self.variables = {"PYTHONSAFEPATH": "1"} | recipe.environment | dict(spec.environment)
        self.environment = _starter_environment(self.variables, recipe)
        self.secrets_file = None
        if recipe.local or recipe.inherits:
            self.environment |= spec.secrets
        elif spec.secrets and recipe.runs:
            _check_secrets_are_set(recipe, spec.secrets)
        elif spec.secrets:
            self.secrets_file = records.secrets_file(spec.out)
        through = ["sh", str(self.secrets_file)] if self.secrets_file else []
        self.program = [*through, *spec.program]
        self.join = shlex.join([*through, *spec.join]) if spec.join else ""
        self.name = f"hvdtrain-{re.sub(r'[^a-z0-9]+', '-', spec.out.name.lower())}"[: recipe.name_length].rstrip("-")
        if recipe.unique_name:
            self.name += f"-{secrets.token_hex(3)[:5]}"
        folder = launch_folder(spec.out)
        self.hostfile, self.rankfile = folder / "hosts", folder / "ranks"
        self.script = folder / (recipe.script_name or "job")

    def values(self) -> dict[str, Value]:
        """By placeholder."""
        spec, hosts, environment = self.spec, self.spec.hosts, Path(sys.executable).parent
        folder, slots = spec.working_folder or str(Path.cwd()), max((host.slots for host in hosts), default=0)
        exported = [key for key in sorted(self.environment) if key in self.variables or FORWARDED.fullmatch(key)]
        return {
            "bin": str(environment), "prefix": str(environment.parent), "version": version("hvdtrain"),
            "ranks": spec.ranks, "workers": spec.ranks - spec.servers, "servers": spec.servers,
            "hosts": ",".join(map(str, hosts)), "nodes": len(hosts) or "",
            "nodelist": ",".join(host.name for host in hosts), "first_host": hosts[0].name if hosts else "",
            "hostfile": str(self.hostfile) if hosts else "", "rankfile": str(self.rankfile) if hosts else "",
            "slots": slots or "", "reserved": slots * len(hosts) or spec.ranks, "interface": spec.interface,
            "memory_mb": (slots or spec.ranks) * spec.memory_mb or "", "gpus": spec.gpus or "",
            "name": self.name, "script": str(self.script), "folder": folder,
            "out": str(spec.out), "out_pattern": str(spec.out).replace("%", "%%"),
            "program": self.program, "join": self.join,
            "program_in_folder": _within_double_quotes(shlex.join(in_folder(folder, self.program))),
            "secrets": _within_double_quotes(shlex.quote(str(records.secrets_file(spec.out)))),
            "keep_going": self.recipe.if_rank_may_die if spec.survives_lost_rank else self.recipe.if_rank_must_not,
            "exports": [word for key in exported for word in ("-x", key)],
        }  # fmt: skip

    def files(self, filler: Filler) -> dict[Path, str]:
        """What is written before the job starts."""
        recipe, hosts, files = self.recipe, self.spec.hosts, {}
        if self.secrets_file:
            lines = [f"export {name}={shlex.quote(value)}\n" for name, value in self.spec.secrets.items()]
            files[self.secrets_file] = "".join([*lines, 'exec "$@"\n'])
        if hosts and recipe.mentions("{hostfile}"):
            files[self.hostfile] = "".join(f"{host.name} slots={host.slots}\n" for host in hosts)
        if hosts and recipe.mentions("{rankfile}"):
            files[self.rankfile] = "".join(f"{name}\n" for name in hosts_of_ranks(hosts))
        if recipe.script:
            files[self.script] = filler.script(recipe.script)
        if recipe.resource:
            files[self.script] = filler.resource(recipe.resource)
        return files


def _check_secrets_are_set(recipe: Launcher, secrets: Mapping[str, str]) -> None:
    """UsageError where a recipe whose ranks see nothing of this machine does not name each of them."""
    if missing := [name for name in secrets if not recipe.mentions(rf"\b{name}\b")]:
        instead = ", or give --wire rpc" if WIRE_KEY in missing else ""
        raise UsageError(
            f"{recipe.name} starts ranks without this machine's environment and folders: have "
            f"{recipe.file} set {', '.join(missing)} from a secret of the cluster{instead}"
        )


def train_program(config: RunConfig, out: Path, all_options: bool = False, interpreter: str = "") -> list[str]:
    """The command line of each rank of a training job.

    Args:
        all_options: name options that have their default values too. A run that is resumed takes options that are not
            named from its run folder.
        interpreter: the Python of where the ranks run; by default this one.
    """
    python = [interpreter or sys.executable, "-Pm", "hvdtrain"]
    return [*python, "train", *config.to_args(all_options), "--out", str(out)]


def join_program(out: Path, interpreter: str = "") -> list[str]:
    """The command line of a worker that joins the job that trains into that folder; see train_program."""
    python = [interpreter or sys.executable, "-Pm", "hvdtrain"]
    return [*python, "train", "--join", "--trust-model", "--out", str(out)]


def _within_double_quotes(text: str) -> str:
    """A shell's words, for where another shell first reads them within double quotes."""
    return re.sub(r'[\\"$`]', r"\\\g<0>", text)


def _starter_environment(job_variables: Mapping[str, str], recipe: Launcher) -> dict[str, str]:
    """The starter's environment. Some write it into command lines on other hosts, where everybody could read the tokens
    in it, and get what they need.
    """

    def passes(key: str) -> bool:
        if recipe.hosts == "needed":
            return key in STARTER_NEEDS or bool(FORWARDED.fullmatch(key))
        return not (recipe.local and ALLOCATION.fullmatch(key))

    return {key: value for key, value in os.environ.items() if passes(key)} | dict(job_variables)
