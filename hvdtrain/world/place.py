"""Where am I: one frozen value, read from the environment once, whoever started the rank."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from hvdtrain.errors import UsageError

RESPAWNS = "HVDTRAIN_RESPAWN"  # set where lost workers are started again
ELASTIC = "HVDTRAIN_ELASTIC"  # set where a ring goes on without workers that are lost


@dataclass(frozen=True)
class World:
    """One rank's place in the job. Ranks 0 … servers-1 serve, the others work.

    Attributes:
        starter: what started the ranks: alone, torchrun, horovodrun, mpirun, pmi, srun or env.
        rank, size: this process among all of the job's, servers included.
        local_rank, local_size: the same among those on this host.
        servers: how many of the ranks are parameter servers.
        started: the starter's own number for this process, where servers were spread over hosts afterwards.
        joined: of a worker that has joined a job that was running: the number of this life of it (coordination.roster).
        elastic: a ring goes on without workers that are lost.
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
        """The number of this life of a worker, by which servers know it: that of the worker, but of one that joined."""
        return self.worker if self.joined is None else self.joined

    @property
    def is_chief(self) -> bool:
        """Whether this is the first worker, as the job begins: the one that reports and saves. See Group.leads."""
        return self.rank == self.servers and self.joined is None

    @property
    def starts_horovod(self) -> bool:
        """Whether Horovod can be joined with what the starter has set, and no store."""
        return self.size == 1 or self.starter in ("horovodrun", "mpirun", "pmi")

    @property
    def is_local(self) -> bool:
        """Whether all ranks are on this host, so that nothing needs to listen beyond loopback."""
        return self.size == self.local_size


# For each starter: the variable that shows it, then those of rank, size, local rank, local size.
# Inner starters come first: torchrun under srun sets both families, and its ranks are torchrun's.
_STARTERS = {
    "torchrun": ("TORCHELASTIC_RUN_ID", "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE"),
    "horovodrun": ("HOROVOD_RANK", "HOROVOD_RANK HOROVOD_SIZE HOROVOD_LOCAL_RANK HOROVOD_LOCAL_SIZE"),
    "mpirun": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE OMPI_COMM_WORLD_LOCAL_RANK OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "pmi": ("PMI_RANK", "PMI_RANK PMI_SIZE MPI_LOCALRANKID MPI_LOCALNRANKS"),
    "srun": ("SLURM_STEP_ID", "SLURM_PROCID SLURM_STEP_NUM_TASKS SLURM_LOCALID SLURM_STEP_TASKS_PER_NODE"),
    "env": ("RANK", "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE"),
}


def read_world(servers: int = 0, env: Mapping[str, str] = os.environ) -> World:
    """The world, from the environment that the starter set.

    Raises:
        UsageError: the environment contradicts itself, or leaves no worker beside the servers.
    """
    place = World()
    for starter, (sign, variables) in _STARTERS.items():
        if sign in env and _started_by(starter, env):
            place = _read(starter, env, variables)
            break
    if servers < 0:
        raise UsageError(f"--servers {servers} is negative")
    if servers and servers >= place.size:
        raise UsageError(
            f"{servers} servers of {place.size} ranks leave {place.size - servers} workers: "
            f"start at least {servers + 1} ranks, or lower --servers"
        )
    rank, started = place.rank, None
    if servers and "HVDTRAIN_SLOTS" in env and place.starter == "horovodrun":
        started, rank = rank, _spread(env["HVDTRAIN_SLOTS"], place)
    elastic = ELASTIC in env and place.size > 1
    return World(place.starter, rank, place.size, place.local_rank, place.local_size, servers, started, elastic=elastic)


def _spread(slots: str, place: World) -> int:
    """The number of a rank when ranks are dealt out in rounds over hosts: the first ones, which serve, are apart then.

    Args:
        slots: ranks on each host, as `2,2`.
    """
    counts = [int(count) for count in slots.split(",")]
    if sum(counts) != place.size:
        raise UsageError(f"HVDTRAIN_SLOTS={slots} does not add up to the {place.size} ranks that were started")
    places = [(local, host) for host, count in enumerate(counts) for local in range(count)]
    return sorted(places).index(places[place.rank])


def in_step(env: Mapping[str, str]) -> bool:
    """Whether srun started this. A batch script has SLURM_PROCID=0 too; its step id is one of the reserved ones."""
    step = env.get("SLURM_STEP_ID", "")
    return step.isdigit() and int(step) < 0xFFFFFF00


def _started_by(starter: str, env: Mapping[str, str]) -> bool:
    if starter == "pmi":
        # `srun --mpi=pmi2` sets PMI_RANK too, but gives the local rank in Slurm's own variables only.
        return "MPI_LOCALRANKID" in env or not in_step(env)
    return starter != "srun" or in_step(env)


def _read(starter: str, env: Mapping[str, str], variables: str) -> World:
    rank_name, size_name, local_rank_name, local_size_name = variables.split()
    try:
        rank, size = int(env[rank_name]), int(env[size_name])
        # A launcher that sets no local rank is taken to run one rank a host.
        local_rank = int(env.get(local_rank_name, 0))
        sizes = tasks_by_node(env.get(local_size_name, "1"))  # of srun's nodes; other starters' is one number
        local_size = sizes[min(int(env.get("SLURM_NODEID", "0")), len(sizes) - 1)]
    except KeyError as missing:
        raise UsageError(f"started by {starter}, but {missing.args[0]} is not in the environment") from None
    except ValueError as bad:
        raise UsageError(f"started by {starter}, but its rank variables are not numbers: {bad}") from None
    if not 0 <= rank < size:
        raise UsageError(f"started by {starter}: {rank_name}={rank} is not below {size_name}={size}")
    if local_rank < 0:
        raise UsageError(f"started by {starter}: {local_rank_name}={local_rank} is negative")
    if not 1 <= local_size <= size:
        raise UsageError(f"started by {starter}: {local_size_name}={local_size} is not within 1 … {size_name}={size}")
    return World(starter, rank, size, local_rank, local_size)


def tasks_by_node(text: str) -> list[int]:
    """4, 4, 2 from Slurm's `4(x2),2`."""
    counts: list[int] = []
    for word in text.split(","):
        count, _, times = word.partition("(x")
        counts += [int(count)] * int(times.rstrip(")") or 1)
    return counts
