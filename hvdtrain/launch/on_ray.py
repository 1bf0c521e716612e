"""A starter of ranks through Ray: launchers/ray.toml runs `python -Pm hvdtrain.launch.on_ray`.

Each rank is an ordinary process that an actor starts on its node, in a bundle of one placement
group. Ray does not promise that bundles on a node have consecutive numbers (ray-project/ray, issue
45799), so ranks are numbered here, in the order of hosts_of_ranks, as elsewhere.
"""

import logging
import os
import queue
import re
import secrets
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import click

from hvdtrain.base.errors import Failure
from hvdtrain.base.system.parent import die_with_parent
from hvdtrain.base.system.preempt import EXIT_CODE
from hvdtrain.base.world.network import free_port
from hvdtrain.launch.hosts import Host, hosts_of_ranks
from hvdtrain.launch.recipe import ALLOCATION

# Shared memory for Ray's objects, of which there are none: nearly the least that Ray accepts.
STORE_BYTES = 80 * 2**20
END_S = 5.0  # seconds that workers may take to end after the servers
LOOPBACK = "127.0.0.1"
# Settings of a Ray for one job on this machine: it asks for a token, and listens on loopback alone,
# as Ray does on Windows and macOS. On Linux it would take 127.0.0.1 for the network's address.
OWN_RAY = {"RAY_AUTH_MODE": "token", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
# A worker that is lost within SOON_S of its start, MOST_IN_A_ROW times in a row, is given up.
SOON_S = 20.0
MOST_IN_A_ROW = 5
LEAST = (2, 52)  # Ray's version. Earlier ones let in whoever reaches a port.
LOST = 137  # the exit code of a rank that is lost with its node, since Ray kills what it loses


class Rank:
    """An actor with one rank, on the node where Ray has put it."""

    def address(self) -> tuple[str, int]:
        """Returns an address at which the first rank can listen.

        Raises:
            OSError: no port is free.
        """
        import ray.util

        return ray.util.get_node_ip_address(), free_port("")

    def run(
        self, program: Sequence[str], folder: str, environment: Mapping[str, str]
    ) -> Iterator[str | int]:
        """Starts the rank. Yields the lines that it prints, and its exit code last."""
        inherited = {
            key: value for key, value in os.environ.items() if not ALLOCATION.fullmatch(key)
        }
        self.process = subprocess.Popen(
            program,
            cwd=folder,
            env=inherited | dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            preexec_fn=partial(die_with_parent, signal.SIGKILL),
        )
        assert self.process.stdout
        for line in self.process.stdout:
            yield line.decode(errors="replace").rstrip("\n")
        code = self.process.wait()
        yield code if code >= 0 else 128 - code

    def leave(self) -> None:
        """Asks the rank to save and leave."""
        self.process.send_signal(signal.SIGUSR1)


class RayJob:
    """The ranks of a job, each supervised by a thread.

    Args:
        group: the placement group.
        bundles: for each rank the number of its bundle, and its place in variables: RANK,
            LOCAL_RANK and so on.
        resources: the resources of each rank's actor, as Ray's `options` takes them.
        folder: where ranks start.
        program: the command line of each rank.
        environment: variables of all ranks.
        servers: how many of the ranks are servers.
        join: the command line of a worker that replaces one that is lost; empty if none does.
    """

    def __init__(
        self,
        group: Any,
        bundles: Sequence[tuple[int, dict[str, str]]],
        resources: Mapping[str, float],
        folder: str,
        program: Sequence[str],
        environment: Mapping[str, str],
        servers: int,
        join: Sequence[str],
    ) -> None:
        self.group = group
        self.bundles = bundles
        self.resources = resources
        self.folder = folder
        self.program = program
        self.environment = dict(environment)
        self.servers = servers
        self.join = join
        self.actors = [self._actor(rank) for rank in range(len(bundles))]
        self.ended: queue.Queue[tuple[int, int]] = queue.Queue()  # ranks with their exit codes

    def _actor(self, rank: int) -> Any:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        bundle, _ = self.bundles[rank]
        place = PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=bundle)
        actor_class: Any = ray.remote(Rank)
        options = actor_class.options(
            scheduling_strategy=place, max_concurrency=2, **self.resources
        )
        return options.remote()

    def _supervise(self, rank: int) -> None:
        """Runs a rank to its end. Replaces a worker that is lost, if `join` allows it."""
        began = time.monotonic()
        losses_in_a_row = 0
        _, place = self.bundles[rank]
        code = self._run_rank(rank, self.program, self.environment | place)
        can_return = bool(self.join) and rank >= self.servers
        while can_return and _is_lost(code) and losses_in_a_row < MOST_IN_A_ROW:
            was_soon = time.monotonic() - began < SOON_S
            losses_in_a_row = losses_in_a_row + 1 if was_soon else 0
            self.actors[rank] = self._actor(rank)  # on another node, if the first is gone
            began = time.monotonic()
            code = self._run_rank(rank, self.join, self.environment)
        self.ended.put((rank, code))

    def _run_rank(self, rank: int, program: Sequence[str], environment: Mapping[str, str]) -> int:
        """Runs a program as a rank and prints its lines. Returns its exit code."""
        import ray

        try:
            for reply in self.actors[rank].run.remote(program, self.folder, environment):
                line_or_code = ray.get(reply)
                if isinstance(line_or_code, int):
                    return line_or_code
                sys.stdout.write(f"[{rank}]<stdout>: {line_or_code}\n")
                sys.stdout.flush()
        except ray.exceptions.RayTaskError as error:
            sys.stdout.write(
                f"[{rank}]<stderr>: hvdtrain: rank {rank} cannot be started: {error.cause}\n"
            )
            return 1
        except ray.exceptions.RayError:  # the rank's node or actor is gone
            pass
        return LOST

    def run(self, keep_going: bool, has_to_leave: threading.Event) -> int:
        """Starts the ranks, and blocks until the job's end.

        Args:
            keep_going: whether the other ranks go on when a worker dies.
            has_to_leave: when it is set, the ranks are asked to save and leave.

        Returns:
            The job's exit code.
        """
        import ray

        host, port = ray.get(self.actors[0].address.remote())
        self.environment |= {"MASTER_ADDR": host, "MASTER_PORT": str(port)}
        for rank in range(len(self.actors)):
            threading.Thread(target=self._supervise, args=(rank,), daemon=True).start()
        codes: dict[int, int] = {}
        deadline = float("inf")
        while len(codes) < len(self.actors) and time.monotonic() < deadline:
            if has_to_leave.is_set():
                has_to_leave.clear()
                for actor in self.actors:
                    actor.leave.remote()
            try:
                rank, code = self.ended.get(timeout=0.1)
            except queue.Empty:
                continue
            codes[rank] = code
            if code not in (0, EXIT_CODE) and (not keep_going or rank < self.servers):
                break
            if self.servers and all(server in codes for server in range(self.servers)):
                # A worker that waits for a node would never end.
                deadline = min(deadline, time.monotonic() + END_S)
        return self._exit_code(codes, keep_going)

    def _exit_code(self, codes: Mapping[int, int], keep_going: bool) -> int:
        """Returns the job's exit code, and prints which rank failed."""
        failed = [(rank, code) for rank, code in codes.items() if code]
        if not failed:
            return 0
        worker_codes = [codes.get(rank) for rank in range(self.servers, len(self.actors))]
        if keep_going and 0 in worker_codes:
            return 0
        crashed = [(rank, code) for rank, code in failed if code != EXIT_CODE]
        rank, code = (crashed or failed)[0]
        print(f"Process name: {rank}\nExit code: {code}", flush=True)  # as horovodrun prints it
        return code


def _is_lost(code: int) -> bool:
    """Returns whether a rank with this exit code was killed, and not asked to leave."""
    return code > 128 and code != EXIT_CODE


def placed(
    ranks: int, servers: int, nodes: Mapping[int, str], here: str
) -> list[tuple[int, dict[str, str]]]:
    """Returns for each rank the number of its bundle, and its place in variables.

    Args:
        nodes: the node of each bundle.
        here: the node of this process, without which the job ends anyway. The first rank is there,
            if any is.
    """
    on_node: dict[str, list[int]] = {}
    for bundle in sorted(nodes, key=lambda bundle: (nodes[bundle] != here, bundle)):
        on_node.setdefault(nodes[bundle], []).append(bundle)
    hosts = hosts_of_ranks([Host(node, len(bundles)) for node, bundles in on_node.items()], servers)
    places = []
    for rank, node in enumerate(hosts):
        local_rank = hosts[:rank].count(node)
        variables = {
            "RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(hosts.count(node)),
        }
        places.append((on_node[node][local_rank], variables))
    return places


@click.command()
@click.option("--ranks", type=int, required=True)
@click.option("--servers", type=int, default=0)
@click.option("--cpus", type=float, default=1.0, help="That a rank takes of Ray's.")
@click.option("--gpus", type=float, default=0.0)
@click.option(
    "--strategy",
    type=click.Choice(["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]),
    default="SPREAD",
)
@click.option("--room-s", type=float, default=600.0, help="How long to wait for nodes.")
@click.option("--folder", required=True)
@click.option("--keep-going", is_flag=True)
@click.option(
    "--join", default="", help="For a shell: what a worker runs in place of one that is lost."
)
@click.option("-x", "exported", multiple=True, help="A variable that ranks are given.")
@click.argument("program", nargs=-1, type=click.UNPROCESSED)
def main(
    ranks: int,
    servers: int,
    cpus: float,
    gpus: float,
    strategy: str,
    room_s: float,
    folder: str,
    keep_going: bool,
    join: str,
    exported: Sequence[str],
    program: Sequence[str],
) -> None:
    address = os.environ.get("RAY_ADDRESS")
    if not address:
        os.environ |= OWN_RAY
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)  # not in a file of the home folder
    try:
        import ray
    except ImportError:
        raise Failure(
            "--launcher ray needs Ray, which is not in this environment: `uv pip install ray`, "
            "here and on its nodes"
        ) from None
    major, minor = re.findall(r"\d+", ray.__version__)[:2]
    if (int(major), int(minor)) < LEAST:
        raise Failure(
            f"--launcher ray needs Ray 2.52 or later: {ray.__version__}, which is here, lets in "
            "whoever reaches it; `uv pip install --upgrade ray`, here and on its nodes"
        )
    has_to_leave = threading.Event()
    bundle = {"CPU": cpus}
    if gpus:
        bundle["GPU"] = gpus
    with tempfile.TemporaryDirectory(prefix="ray-") as scratch:
        cluster: dict[str, Any] = {"address": address}
        if not address:
            cluster = {
                "address": "local",
                "num_cpus": max(1, round(ranks * cpus + 0.5)),
                "include_dashboard": False,
                "object_store_memory": STORE_BYTES,
                "_temp_dir": scratch,
                "_node_ip_address": LOOPBACK,
            }
        try:
            ray.init(**cluster, log_to_driver=False, logging_level=logging.ERROR)
            signal.signal(signal.SIGUSR1, lambda *_: has_to_leave.set())
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_CODE))
            group = ray.util.placement_group([bundle] * ranks, strategy=strategy)
            _wait_for_room(group, ranks, bundle, room_s)
            nodes = ray.util.placement_group_table(group)["bundles_to_node_id"]
            here = ray.get_runtime_context().get_node_id()
            environment = {name: os.environ[name] for name in exported}
            resources = {"num_cpus": cpus, "num_gpus": gpus}
            places = placed(ranks, servers, nodes, here)
            job = RayJob(
                group, places, resources, folder, program, environment, servers, shlex.split(join)
            )
            code = job.run(keep_going, has_to_leave)
        except ConnectionError as error:
            raise Failure(f"no Ray answers at RAY_ADDRESS={address}: {error}") from None
        finally:
            ray.shutdown()  # ends the actors, and their ranks with them
    sys.exit(code)


def _wait_for_room(group: Any, ranks: int, bundle: Mapping[str, float], room_s: float) -> None:
    """Blocks until nodes have room for all ranks, which a cluster that grows may have to start.

    Raises:
        Failure: they have none within `room_s` seconds.
    """
    import ray

    if group.wait(10):
        return
    each = ", ".join(f"{number:g} {name}" for name, number in bundle.items())
    resources = ray.cluster_resources()
    has = ", ".join(f"{number:g} {name}" for name, number in resources.items() if name in bundle)
    problem = (
        f"Ray has no room yet for {ranks} ranks of {each} each: it has {has or 'none of these'}"
    )
    print(f"hvdtrain.launch.on_ray: {problem}; waiting", flush=True)
    if not group.wait(room_s):
        raise Failure(
            f"{problem}, and that has not changed in {room_s:g} s: start fewer ranks, or add nodes"
        )


if __name__ == "__main__":
    try:
        main(standalone_mode=False)
    except Failure as failure:
        print(f"hvdtrain: {failure}", flush=True)
        sys.exit(failure.exit_code)
