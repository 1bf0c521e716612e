"""A comparison of a job's hosts by its ranks, before training, if a scheduler chose the hosts."""

import contextlib
import json
import socket
import time
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdtrain.base.config.run_config import RunConfig
from hvdtrain.base.errors import UsageError
from hvdtrain.base.world.network import own_address
from hvdtrain.base.world.place import World
from hvdtrain.job.wire.heartbeat import ENDS_S, wait_for_ranks, while_served
from hvdtrain.launch import probe
from hvdtrain.launch.hosts import Host
from hvdtrain.launch.preflight import Requirements, new_file_near, problems_of
from hvdtrain.launch.prepare import requirements

if TYPE_CHECKING:
    from torch.distributed import Store


@while_served()
def check_hosts(config: RunConfig, world: World, folder: Path, store: "Store") -> None:
    """Compares code and versions, clocks, files, memory, disks, GPUs and names of the hosts.

    All ranks call this together. The first rank of each host describes the host, and listens. The
    first rank of all tries to connect to each host, and compares the descriptions.

    Args:
        config: the configuration of the run.
        world: where this rank is.
        folder: the run folder.
        store: the store that all ranks share.

    Raises:
        UsageError: on the first rank, some hosts cannot run the job. The error has a line for each
            of them, with the reasons.
        SystemExit: on the other ranks, for the same reason.
        Failure: a rank is lost, or the first rank has ended.
    """
    needs = requirements(config, world.workers, folder.absolute())
    asked_at = time.time()
    problems: list[str] = []
    # The shared file and the listener are there until the first rank has compared the hosts.
    with contextlib.ExitStack() as stack:
        if world.rank == 0:
            shared = stack.enter_context(new_file_near(needs.out or folder))
            store.set("hosts/shared", shared)
        reply: dict[str, Any] = {"name": socket.gethostname()}
        if world.local_rank == 0:
            listener = stack.enter_context(socket.create_server((own_address(world), 0)))
            wait_for_ranks(store, {0: "hosts/shared"}, config.timeout)
            shared = store.get("hosts/shared").decode()
            reply |= probe.describe({"shared": shared, "files": needs.files})
            reply |= probe.software()
            reply |= {"interface": "", "listens": listener.getsockname()}
        store.set(f"hosts/{world.rank}", json.dumps(reply))
        if world.rank == 0:
            replies = _gather_replies(config, world, store)
            problems = _problems(replies, needs, asked_at)
            store.set("hosts/verdict", "; ".join(problems))
        wait_for_ranks(store, {0: "hosts/verdict"}, config.timeout)
        verdict = store.get("hosts/verdict")
    store.set(f"hosts/told/{world.rank}", "")
    if problems:
        told = [f"hosts/told/{rank}" for rank in range(world.size)]
        # A rank that is lost by now will never say that it has read the verdict.
        with contextlib.suppress(RuntimeError):
            store.wait(told, timedelta(seconds=ENDS_S))
        raise UsageError(*problems)
    if verdict:
        time.sleep(ENDS_S)  # the first rank says why
        raise SystemExit(UsageError.exit_code)


def _gather_replies(config: RunConfig, world: World, store: "Store") -> list[dict[str, Any]]:
    """Returns the replies of all ranks, by rank, once they are there."""
    keys = {rank: f"hosts/{rank}" for rank in range(world.size)}
    wait_for_ranks(store, keys, config.timeout, world.rank)
    return [json.loads(reply) for reply in store.multi_get(list(keys.values()))]


def _problems(replies: Sequence[dict[str, Any]], needs: Requirements, asked_at: float) -> list[str]:
    """Returns a line for each host that cannot run the job.

    Args:
        replies: a reply of each rank. The first rank of a host describes the host.
        needs: the requirements of the job.
        asked_at: when the ranks began to describe their hosts, in seconds since 1970.
    """
    times = {"asked": asked_at, "answered": time.time()}
    slots = Counter(reply["name"] for reply in replies)
    answers = {reply["name"]: reply | times for reply in reversed(replies) if "listens" in reply}
    addresses = {name: reply["listens"] for name, reply in answers.items()}
    missed = probe.unreachable({"hosts": addresses, "launcher": 0})
    own_software = probe.software()
    lines = []
    for name in answers:
        faults = list(problems_of(Host(name, slots[name]), answers, needs, own_software))
        if name in missed:
            faults.append(f"the first rank cannot connect to it: {missed[name]}")
        if faults:
            lines.append(f"{name}: {'; '.join(faults)}")
    return lines
