"""This rank's place in its job: one frozen value, read once from the starter's environment."""

import contextlib
import dataclasses
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from hvdtrain.base.errors import Failure, UsageError

RESPAWNS = "HVDTRAIN_RESPAWN"  # set if lost workers are started again
SLOTS = "HVDTRAIN_SLOTS"  # the ranks on each host, as `2,2`; set if servers are spread over hosts
ELASTIC = "HVDTRAIN_ELASTIC"  # set if a ring goes on without workers that are lost


@dataclass(frozen=True)
class World:
    """One rank's place in the job. Ranks 0 … servers-1 serve, the others work.

    Attributes:
        starter: the program that started the ranks: alone, torchrun, horovodrun, mpirun, pmi, srun
            or env.
        rank, size: the rank and the number of all ranks, servers included.
        local_rank, local_size: the same among the ranks on this host.
        servers: how many of the ranks are parameter servers.
        started: the starter's rank for this process, if servers were spread over hosts afterwards;
            else None.
        joined: the number of this life of a worker that has joined a running job
            (coordination.roster); else None.
        elastic: whether a ring goes on without workers that are lost.
    """

    starter: str = "alone"
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    servers: int = 0
    started: int | None = None
    joined: int | None = None
    elastic: bool = False

    @property
    def workers(self) -> int:
        return self.size - self.servers

    @property
    def is_server(self) -> bool:
        return 0 <= self.rank < self.servers

    @property
    def worker(self) -> int:
        """This worker's number, 0 … workers-1."""
        return self.rank - self.servers

    @property
    def member(self) -> int:
        """The number of this life of a worker, by which servers know it.

        It is the worker's number, unless the worker has joined a running job.
        """
        return self.worker if self.joined is None else self.joined

    @property
    def is_chief(self) -> bool:
        """Whether this is the first worker at the job's start, which reports and saves.

        See Group.leads.
        """
        return self.rank == self.servers and self.joined is None

    @property
    def starts_horovod(self) -> bool:
        """Whether Horovod starts from the starter's variables alone, without a store."""
        return self.size == 1 or self.starter in ("horovodrun", "mpirun", "pmi")

    @property
    def is_local(self) -> bool:
        """Whether all ranks are on this host, so that nothing needs to listen beyond loopback."""
        return self.size == self.local_size


# For each starter the variable that reveals it, and the variables of rank, size, local rank and
# local size. Inner starters come first: torchrun under srun sets the variables of both, and its
# ranks are torchrun's.
_STARTERS = {
    "torchrun": ("TORCHELASTIC_RUN_ID", "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE"),
    "horovodrun": (
        "HOROVOD_RANK",
        "HOROVOD_RANK HOROVOD_SIZE HOROVOD_LOCAL_RANK HOROVOD_LOCAL_SIZE",
    ),
    "mpirun": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE OMPI_COMM_WORLD_LOCAL_RANK "
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "pmi": ("PMI_RANK", "PMI_RANK PMI_SIZE MPI_LOCALRANKID MPI_LOCALNRANKS"),
    "srun": (
        "SLURM_STEP_ID",
        "SLURM_PROCID SLURM_STEP_NUM_TASKS SLURM_LOCALID SLURM_STEP_TASKS_PER_NODE",
    ),
    "env": ("RANK", "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE"),
}


def read_world(servers: int = 0, env: Mapping[str, str] = os.environ) -> World:
    """Returns the world that the starter has set in the environment.

    Raises:
        UsageError: the environment contradicts itself, or leaves no worker beside the servers.
    """
    place = World()
    for starter, (sign, variables) in _STARTERS.items():
        if sign in env and _is_started_by(starter, env):
            place = _read(starter, env, variables)
            break
    if servers < 0:
        raise UsageError(f"--servers {servers} is negative")
    if servers and servers >= place.size:
        raise UsageError(
            f"{servers} servers of {place.size} ranks leave {place.size - servers} workers: "
            f"start at least {servers + 1} ranks, or lower --servers"
        )
    place = dataclasses.replace(place, servers=servers, elastic=ELASTIC in env and place.size > 1)
    if servers and SLOTS in env and place.starter == "horovodrun":
        return dataclasses.replace(place, rank=_spread(env[SLOTS], place), started=place.rank)
    return place


@contextlib.contextmanager
def naming_left_over(world: World, env: Mapping[str, str] = os.environ) -> Iterator[None]:
    """Adds to errors of the block which variables say that there are more ranks, and how to unset them.

    It does so where no program shows that has started ranks, or where a person has typed the
    command: a shell may still have the variables from another job, or from an interactive one, as
    of `srun -n 2 --pty bash`.
    """
    try:
        yield
    except (UsageError, Failure) as error:
        is_typed = sys.stdin is not None and sys.stdin.isatty()
        if world.size == 1 or not (world.starter == "env" or is_typed):
            raise
        raise type(error)(f"{error}; {_left_over(world.starter, env)}") from None


def check_is_started(world: World, env: Mapping[str, str] = os.environ) -> None:
    """Checks that ranks of which only variables tell can find each other.

    Raises:
        UsageError: they cannot. Most likely the variables are left over from another job.
    """
    if world.starter == "env" and world.size > 1 and "MASTER_ADDR" not in env:
        raise UsageError(
            f"{_left_over('env', env)}; else set MASTER_ADDR and MASTER_PORT too, where the ranks meet"
        )


def _left_over(starter: str, env: Mapping[str, str]) -> str:
    sign, variables = _STARTERS[starter]
    names = [*variables.split(), "MASTER_ADDR", "MASTER_PORT"]
    there = [name for name in names if name in env]
    sizes = [f"{name}={env[name]}" for name in there[:2]]
    told = " and ".join(sizes)
    verb = "make" if len(sizes) > 1 else "makes"
    if sign in env and sign not in there:
        there.insert(0, sign)
    return (
        f"{told} in the environment {verb} this a rank of a job: if left over from another, "
        f"`unset {' '.join(there)}`"
    )


def _spread(slots: str, place: World) -> int:
    """Returns the rank of a process if ranks are dealt out over hosts in rounds.

    Then servers, which have the first ranks, are on different hosts.
    """
    places = _places(slots, place.size)
    return sorted(places).index(places[place.rank])


def _places(slots: str, size: int) -> list[tuple[int, int]]:
    """Returns, host by host, each slot's number on its host and the host's number.

    Args:
        slots: the number of ranks on each host, as `2,2`.
        size: the number of ranks.
    """
    words = slots.split(",")
    counts = [int(word) for word in words if word.isascii() and word.isdigit() and len(word) < 10]
    if sum(counts) != size or len(counts) < len(words):
        raise UsageError(f"{SLOTS}={slots} does not add up to the {size} ranks that were started")
    places = []
    for host, count in enumerate(counts):
        places += [(slot, host) for slot in range(count)]
    return places


def workers_on_this_host(world: World, env: Mapping[str, str] = os.environ) -> int:
    """Returns how many workers are on this rank's host, without servers.

    On several hosts, which ranks are servers is known only if `hvdtrain launch` or `compare` placed
    the ranks. Otherwise all ranks of the host count as workers.
    """
    if world.is_local:
        return world.local_size - world.servers
    if not world.servers or SLOTS not in env:
        return world.local_size
    hosts = [host for _, host in sorted(_places(env[SLOTS], world.size))]
    return hosts[world.servers :].count(hosts[world.rank])


def in_step(env: Mapping[str, str]) -> bool:
    """Returns whether this process is in a step of Slurm that srun started.

    A batch script has SLURM_PROCID=0 too, but a reserved step id.
    """
    step = env.get("SLURM_STEP_ID", "")
    return step.isdigit() and int(step) < 0xFFFFFF00


def _is_started_by(starter: str, env: Mapping[str, str]) -> bool:
    """Returns whether a starter that shows in the environment did start this process."""
    if starter == "pmi":
        # `srun --mpi=pmi2` sets PMI_RANK too, but the local rank in Slurm's variables alone.
        return "MPI_LOCALRANKID" in env or not in_step(env)
    return starter != "srun" or in_step(env)


def _read(starter: str, env: Mapping[str, str], variables: str) -> World:
    rank_name, size_name, local_rank_name, local_size_name = variables.split()
    try:
        rank = int(env[rank_name])
        size = int(env[size_name])
        # A starter that sets no local rank is taken to run one rank on each host.
        local_rank = int(env.get(local_rank_name, 0))
        # srun lists the local sizes of all nodes. Other starters set one number.
        local_sizes = tasks_by_node(env.get(local_size_name, "1"))
        node = int(env.get("SLURM_NODEID", "0"))
        local_size = local_sizes[min(node, len(local_sizes) - 1)]
    except KeyError as missing:
        hint = f": {_left_over(starter, env)}" if starter == "env" else ""
        raise UsageError(
            f"started by {starter}, but {missing.args[0]} is not in the environment{hint}"
        ) from None
    except ValueError:
        raise UsageError(
            f"started by {starter}, but {_not_numbers(variables.split(), env)}"
        ) from None
    if not 0 <= rank < size:
        raise UsageError(
            f"started by {starter}: {rank_name}={rank} is not below {size_name}={size}"
        )
    if local_rank < 0:
        raise UsageError(f"started by {starter}: {local_rank_name}={local_rank} is negative")
    if not 1 <= local_size <= size:
        raise UsageError(
            f"started by {starter}: {local_size_name}={local_size} is not within 1 … "
            f"{size_name}={size}"
        )
    return World(starter, rank, size, local_rank, local_size)


def _not_numbers(names: Sequence[str], env: Mapping[str, str]) -> str:
    """Returns a clause about the variables of a rank that are no whole numbers, and what to do.

    Args:
        names: The variables of the rank, the size, the local rank and the local size.
        env: The environment.
    """
    wrong = [f"{name}={env[name]!a}" for name in names if not _is_tasks(env.get(name, "0"))]
    wrong = wrong or [f"SLURM_NODEID={env.get('SLURM_NODEID')!a}"]
    verb = "are not numbers" if len(wrong) > 1 else "is not a number"
    there = [name for name in names if name in env]
    return (
        f"{' and '.join(wrong)} {verb}: start ranks with a starter, or `unset {' '.join(there)}` "
        "to work alone"
    )


def _is_tasks(text: str) -> bool:
    try:
        tasks_by_node(text)
    except ValueError:
        return False
    return True


def tasks_by_node(text: str) -> list[int]:
    """Returns the tasks of each node, as 4, 4, 2 for Slurm's `4(x2),2`."""
    counts: list[int] = []
    for word in text.split(","):
        count, _, times = word.partition("(x")
        counts += [int(count)] * int(times.rstrip(")") or 1)
    return counts
