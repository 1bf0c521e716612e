"""What the hosts of a job have: compared by its ranks in their first seconds, since a scheduler may have chosen any."""

import contextlib
import json
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdtrain.config.run_config import RunConfig
from hvdtrain.coordination.meeting import ENDS_S
from hvdtrain.errors import UsageError
from hvdtrain.launch import probe
from hvdtrain.launch.hosts import Host
from hvdtrain.launch.preflight import Requirements, new_file_near, problems_of
from hvdtrain.launch.prepare import requirements
from hvdtrain.world.network import own_address
from hvdtrain.world.place import World

if TYPE_CHECKING:
    from torch.distributed import Store


def check_hosts(config: RunConfig, world: World, folder: Path, store: "Store") -> None:
    """Compare code and versions, clocks, files, memory, disks, GPUs and names. All ranks call this together; the first
    one of each host looks, and listens where the first of all then tries to reach it.

    Args:
        folder: the run's.
        store: which all ranks share.

    Raises:
        UsageError: on the first rank, with a line for each host that cannot run the job, and why.
        SystemExit: then, on the others.
    """
    needs = requirements(config, world.workers, folder.absolute())
    asked, problems = time.time(), list[str]()
    with contextlib.ExitStack() as stack:
        if world.rank == 0:
            store.set("hosts/shared", stack.enter_context(new_file_near(needs.out or folder)))
        has = {"name": socket.gethostname()}
        if world.local_rank == 0:
            listener = stack.enter_context(socket.create_server((own_address(world), 0)))
            has |= probe.describe({"shared": store.get("hosts/shared").decode(), "files": needs.files})
            has |= probe.software() | {"interface": "", "listens": listener.getsockname()}
        store.set(f"hosts/{world.rank}", json.dumps(has))
        if world.rank == 0:
            replies = [json.loads(reply) for reply in store.multi_get([f"hosts/{rank}" for rank in range(world.size)])]
            problems = _problems(replies, needs, asked)
            store.set("hosts/verdict", "; ".join(problems))
        verdict = store.get("hosts/verdict")
    if problems:
        raise UsageError(*problems)
    if verdict:
        time.sleep(ENDS_S)  # the first rank says why
        raise SystemExit(UsageError.exit_code)


def _problems(replies: Sequence[dict[str, Any]], needs: Requirements, asked: float) -> list[str]:
    """What is wrong, a line for each host.

    Args:
        replies: of each rank; those of the first on a host say what it has.
        asked: when, in seconds since 1970.
    """
    times, names = {"asked": asked, "answered": time.time()}, [reply["name"] for reply in replies]
    answers = {reply["name"]: reply | times for reply in reversed(replies) if "listens" in reply}
    missed = probe.unreachable({"hosts": {name: reply["listens"] for name, reply in answers.items()}, "launcher": 0})
    own, lines = probe.software(), []
    for name in answers:
        faults = [*problems_of(Host(name, names.count(name)), answers, needs, own)]
        faults += [f"the first rank cannot connect to it: {missed[name]}"] if name in missed else []
        lines += [f"{name}: {'; '.join(faults)}"] if faults else []
    return lines
