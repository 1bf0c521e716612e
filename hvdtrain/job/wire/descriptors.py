"""A rank's limit of open files and sockets, and what the rank needs."""

import math
import resource

from hvdtrain.base.config.run_config import RunConfig
from hvdtrain.base.errors import UsageError
from hvdtrain.base.world.place import World

# Open files and sockets, as counted in /proc/PID/fd of small jobs with a peer more or less.
ALONE = 256  # without peers: as a rule some 50, and what data, logs and compilers may open
STORE = 3  # for each rank, on the first one: connections to its store to wait, beat and watch
CALLS = {"zmq": 5, "rpc": 6}  # for each peer that is called, and calls
RING = 4  # for each peer: Horovod's Gloo has up to four connections to each, torch and MPI fewer
SHARED = 2  # for each peer on the same host: its memory, see wire.shared


def needed(config: RunConfig, world: World) -> int:
    """Returns how many files and sockets this rank has open at most."""
    peers = world.size - 1
    store = STORE * peers if world.rank == 0 else 0
    if not world.servers:
        watched = peers if world.elastic and world.rank == 0 else 1
        return ALONE + store + RING * peers + CALLS["zmq"] * watched
    partners = peers if world.is_server else world.servers
    each = CALLS[config.wire] + (SHARED if world.is_local else 0)
    return ALONE + store + each * partners


def allow_descriptors(config: RunConfig, world: World) -> None:
    """Raises the soft limit of this process and its children to what the rank needs.

    The limit is up to twice as high, since other ranks may join.

    Raises:
        UsageError: the hard limit is below what the rank needs.
    """
    need = needed(config, world)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = [math.inf if limit == resource.RLIM_INFINITY else limit for limit in limits]
    if hard < need and world.size > 1:
        raise UsageError(
            f"rank {world.rank} of {world.size} may have {hard:,} files and sockets open, and needs "
            f"up to {need:,}: raise the hard limit where it is started (`ulimit -Hn`; nofile in "
            "limits.conf, LimitNOFILE= of a service), or start fewer ranks"
        )
    wanted = min(2 * need, hard)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (int(wanted), limits[1]))
