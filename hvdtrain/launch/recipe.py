"""Expanding a launcher's recipe into the command that starts a job, and the files it needs."""

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

from hvdtrain.base.config.recipes import Launcher
from hvdtrain.base.config.run_config import RunConfig
from hvdtrain.base.errors import UsageError
from hvdtrain.base.world.network import WIRE_KEY
from hvdtrain.base.world.place import SLOTS
from hvdtrain.launch import records
from hvdtrain.launch.filling import Filler, Value
from hvdtrain.launch.hosts import Host, hosts_of_ranks, in_folder, rank_of_process
from hvdtrain.runs.folder import launch_folder

# Variables that are passed on to ranks on other hosts. Others are not, since they would show on
# command lines there. JobSpec.secrets travel in a file.
FORWARDED = re.compile(
    r"(HVDTRAIN(?!_WIRE_KEY)|HOROVOD|OMPI_MCA|PRTE_MCA|UCX|FI|OMP|MKL|NCCL|CUDA|GLOO|TP|TORCH|THP)"
    r"_\w+|PYTHONPATH|LD_LIBRARY_PATH"
)
# Variables in which Slurm, PBS, LSF and Grid Engine describe an allocation, and they and MPI a
# rank. A starter on this machine alone would put ranks on the allocation's other nodes by them.
ALLOCATION = re.compile(r"(SLURM|SBATCH|SRUN|PMI\d?|PMIX(?!_MCA)|PBS|LSB)_\w+|PE_HOSTFILE")
# Variables that the starter needs on this machine.
STARTER_NEEDS = (
    "PATH",
    "HOME",
    "USER",
    "LOGNAME",
    "LANG",
    "SSH_AUTH_SOCK",
    "KRB5CCNAME",
    "TMPDIR",
    "KUBECONFIG",
    "HADOOP_CONF_DIR",
    "SLURM_CONF",
)


@dataclass(frozen=True)
class JobSpec:
    """A job to be started, independent of the launcher.

    Attributes:
        ranks: the number of workers and servers together.
        program: the command line of each rank.
        servers: the number of servers.
        hosts: the hosts, each with the slots that the job uses; empty if the launcher finds hosts
            itself.
        out: the run folder.
        interface: the network interface by which the hosts reach each other, or empty.
        working_folder: where the ranks start; empty for the current folder.
        survives_lost_rank: whether the other ranks go on when one dies.
        join: the command line of a worker that replaces one that is lost; empty if none does.
        environment: variables for every rank, beside the recipe's.
        secrets: variables for every rank that no command line may show.
        needs_network: whether ranks that are all on this machine need the network, for example for
            a data set.
        memory_mb: MiB to request from a scheduler for each rank; 0 to leave it to the scheduler.
        gpus: GPUs to request for each rank; likewise.
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
    """The command that starts a job, and its files and environment.

    Attributes:
        argv: the command line.
        files: files to write first, by path, such as a host file or a job script.
        environment: the command's whole environment.
        secrets_file: the file among them that nobody else may read, and that is removed with the
            job; None if there is none.
        to_scheduler: whether the command hands the job over to a scheduler.
        tells_number: whether the job can only be ended by the number that the command prints.
        name: the job's name for its scheduler.
        stop_signal: the signal that the command passes on to the ranks, which then save and leave;
            None if it passes none on.
        private_network: whether the command is to run in a network with loopback alone, if the
            system allows it.
    """

    argv: list[str]
    files: dict[Path, str]
    environment: dict[str, str]
    stop_signal: signal.Signals | None = signal.SIGTERM
    private_network: bool = False
    secrets_file: Path | None = None
    to_scheduler: bool = False
    tells_number: bool = False
    name: str = ""

    def rank_of(self, process: int) -> int:
        """Returns the rank of a process by its starter's number: see hosts.rank_of_process."""
        slots = self.environment.get(SLOTS)
        if not slots or Path(self.argv[0]).name != "horovodrun":
            return process
        return rank_of_process([int(number) for number in slots.split(",")], process)

    def dry_run_text(self) -> str:
        """Returns what `--dry-run` prints: the files and the command."""
        parts = []
        for path, text in self.files.items():
            is_secret = path == self.secrets_file
            shown = "(variables that are not shown)" if is_secret else text.rstrip()
            parts.append(f"# {path}\n{shown}\n")
        parts.append(shlex.join(self.argv))
        return "\n".join(parts)


def expand(recipe: Launcher, spec: JobSpec) -> LaunchCommand:
    """Fills in a launcher's recipe for a job.

    Raises:
        UsageError: the recipe needs hosts and there are none, or the other way round; it has an
            unknown placeholder; or ranks cannot read a file with the secrets.
    """
    _check_hosts_suit(recipe, spec.hosts)
    job = _Job(recipe, spec)
    filler = Filler(recipe.file, job.values(), recipe.doubled)
    is_here = recipe.local
    if recipe.hosts == "needed":
        # horovodrun would use ssh for other addresses of this machine.
        is_here = all(host.name in ("localhost", "127.0.0.1") for host in spec.hosts)
    return LaunchCommand(
        filler.command(recipe.command),
        job.files(filler),
        job.environment,
        stop_signal=None if recipe.stop_signal == "file" else signal.Signals[recipe.stop_signal],
        private_network=is_here and not spec.needs_network and spec.interface in ("", "lo"),
        secrets_file=job.secrets_file,
        to_scheduler=bool(recipe.script_name),
        tells_number=bool(recipe.stop) and not recipe.knows_names,
        name=job.name,
    )


def _check_hosts_suit(recipe: Launcher, hosts: Sequence[Host]) -> None:
    if recipe.hosts == "needed" and not hosts:
        raise UsageError(
            f"--launcher {recipe.name} needs hosts: give -H a:1,b:1 or --hostfile FILE"
        )
    if hosts and not recipe.mentions(r"\{(hosts|hostfile|nodelist|rankfile)\}"):
        raise UsageError(
            f"--launcher {recipe.name} finds hosts itself: drop -H or --hostfile, or choose ssh or "
            "mpi"
        )
    with_user = [host.name for host in hosts if "@" in host.name]
    if with_user and not recipe.mentions("{hostfile}"):
        raise UsageError(
            f"--launcher {recipe.name} takes no user in {with_user[0]}: write it into "
            "~/.ssh/config (`User`), or choose mpi"
        )


class _Job:
    """The values of one job for a recipe's placeholders, and the files that they name.

    Attributes:
        variables: variables that the recipe and the job set.
        environment: the starter's environment.
        secrets_file: the script through which ranks get the secrets; None if they have the
            starter's environment.
        program, join: the command lines of ranks, run through that script.
        name: the job's name for a scheduler.
    """

    def __init__(self, recipe: Launcher, spec: JobSpec) -> None:
        self.recipe = recipe
        self.spec = spec
        # Starters that are written in Python, such as horovodrun, import nothing of the current
        # folder either, and take what ranks print for UTF-8.
        python = {"PYTHONSAFEPATH": "1", "PYTHONIOENCODING": "utf-8"}
        self.variables = python | recipe.environment | dict(spec.environment)
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
        name = "hvdtrain-" + re.sub(r"[^a-z0-9]+", "-", spec.out.name.lower())
        self.name = name[: recipe.name_length].rstrip("-")
        if recipe.unique_name:
            self.name += f"-{secrets.token_hex(3)[:5]}"
        folder = launch_folder(spec.out)
        self.hostfile = folder / "hosts"
        self.rankfile = folder / "ranks"
        self.script = folder / (recipe.script_name or "job")

    def values(self) -> dict[str, Value]:
        """Returns the values by placeholder."""
        spec = self.spec
        hosts = spec.hosts
        bin_folder = Path(sys.executable).parent
        folder = spec.working_folder or str(Path.cwd())
        slots = max((host.slots for host in hosts), default=0)
        exports: list[str] = []
        for key in sorted(self.environment):
            if key in self.variables or FORWARDED.fullmatch(key):
                exports += ["-x", key]
        keep_going = self.recipe.if_rank_must_not
        if spec.survives_lost_rank:
            keep_going = self.recipe.if_rank_may_die
        return {
            "bin": str(bin_folder),
            "prefix": str(bin_folder.parent),
            "version": version("hvdtrain"),
            "ranks": spec.ranks,
            "workers": spec.ranks - spec.servers,
            "servers": spec.servers,
            "hosts": ",".join(map(str, hosts)),
            "nodes": len(hosts) or "",
            "nodelist": ",".join(host.name for host in hosts),
            "first_host": hosts[0].name if hosts else "",
            "hostfile": str(self.hostfile) if hosts else "",
            "rankfile": str(self.rankfile) if hosts else "",
            "slots": slots or "",
            "reserved": slots * len(hosts) or spec.ranks,
            "interface": spec.interface,
            # The order of hosts_of_ranks in the words of OpenMPI's --map-by and of Slurm's
            # --distribution.
            "map_by": "node" if spec.servers else "slot",
            "distribution": "cyclic" if spec.servers else "block",
            "memory_mb": (slots or spec.ranks) * spec.memory_mb or "",
            "gpus": spec.gpus or "",
            "name": self.name,
            "script": str(self.script),
            "folder": folder,
            "out": str(spec.out),
            "out_pattern": str(spec.out).replace("%", "%%"),
            "program": self.program,
            "join": self.join,
            "program_in_folder": _within_double_quotes(shlex.join(in_folder(folder, self.program))),
            "secrets": _within_double_quotes(shlex.quote(str(records.secrets_file(spec.out)))),
            "keep_going": keep_going,
            "exports": exports,
        }

    def files(self, filler: Filler) -> dict[Path, str]:
        """Returns the files to write before the job starts, by path."""
        recipe = self.recipe
        hosts = self.spec.hosts
        files: dict[Path, str] = {}
        if self.secrets_file:
            lines = [
                f"export {name}={shlex.quote(value)}\n" for name, value in self.spec.secrets.items()
            ]
            files[self.secrets_file] = "".join([*lines, 'exec "$@"\n'])
        if hosts and recipe.mentions("{hostfile}"):
            files[self.hostfile] = "".join(f"{host.name} slots={host.slots}\n" for host in hosts)
        if hosts and recipe.mentions("{rankfile}"):
            names = hosts_of_ranks(hosts, self.spec.servers)
            files[self.rankfile] = "".join(f"{name}\n" for name in names)
        if recipe.script:
            files[self.script] = filler.script(recipe.script)
        if recipe.resource:
            files[self.script] = filler.resource(recipe.resource)
        return files


def _check_secrets_are_set(recipe: Launcher, secrets: Mapping[str, str]) -> None:
    """Checks that a recipe sets every secret, since ranks see nothing of this machine.

    Raises:
        UsageError: it does not.
    """
    missing = [name for name in secrets if not recipe.mentions(rf"\b{name}\b")]
    if missing:
        instead = ", or give --wire rpc" if WIRE_KEY in missing else ""
        raise UsageError(
            f"{recipe.name} starts ranks without this machine's environment and folders: have "
            f"{recipe.file} set {', '.join(missing)} from a secret of the cluster{instead}"
        )


def train_program(
    config: RunConfig, out: Path, all_options: bool = False, interpreter: str = ""
) -> list[str]:
    """Returns the command line of each rank of a training job.

    Args:
        all_options: include options at their defaults. A resumed run takes options that are left
            out from its run folder.
        interpreter: the Python interpreter on the ranks' hosts; by default this one.
    """
    python = [interpreter or sys.executable, "-Pm", "hvdtrain"]
    return [*python, "train", *config.to_args(all_options), "--out", str(out)]


def join_program(out: Path, interpreter: str = "") -> list[str]:
    """Returns the command line of a worker that joins a run folder's job; see train_program."""
    python = [interpreter or sys.executable, "-Pm", "hvdtrain"]
    return [*python, "train", "--join", "--trust-model", "--out", str(out)]


def _within_double_quotes(text: str) -> str:
    """Escapes a shell's words for another shell, which reads them within double quotes first."""
    return re.sub(r'[\\"$`]', r"\\\g<0>", text)


def _starter_environment(job_variables: Mapping[str, str], recipe: Launcher) -> dict[str, str]:
    """Returns the starter's environment.

    Starters that write their environment into command lines on other hosts, where everybody could
    read tokens in it, get the variables that they need.
    """

    def passes(key: str) -> bool:
        if recipe.hosts == "needed":
            return key in STARTER_NEEDS or bool(FORWARDED.fullmatch(key))
        return not (recipe.local and ALLOCATION.fullmatch(key))

    inherited = {key: value for key, value in os.environ.items() if passes(key)}
    return inherited | dict(job_variables)
