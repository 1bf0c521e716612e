"""Starts the ranks of a job through Ray: what launchers/ray.toml runs as `python -Pm hvdtrain.launch.on_ray`.

Each rank is an ordinary process that an actor starts on its node, in a bundle of one placement group. Ray does not say
that bundles on a node follow each other (ray-project/ray, issue 45799), so ranks are numbered here: dealt out over the
nodes in turn, as elsewhere, so that the first ones, which serve, are apart.
"""

import logging
import os
import queue
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

from hvdtrain.errors import Failure
from hvdtrain.launch.hosts import Host, hosts_of_ranks
from hvdtrain.launch.recipe import ALLOCATION
from hvdtrain.system.parent import die_with_parent
from hvdtrain.system.preempt import EXIT_CODE
from hvdtrain.world.network import free_port

STORE_BYTES = 80 * 2**20  # of shared memory for Ray's objects, of which there are none: nearly the least that it takes
END_S = 5.0  # that workers may take to end after the servers
SOON_S, MOST_IN_A_ROW = 20.0, 5  # of a worker that comes back: whoever is lost so soon so often is given up
LOST = 137  # the exit code of a rank that is gone with its node: Ray kills what it loses


class Rank:
    """An actor: one rank, on the node where Ray has put it."""

    def address(self) -> tuple[str, int]:
        """Where the first rank can listen. OSError where no port is free."""
        import ray.util

        return ray.util.get_node_ip_address(), free_port("")

    def run(self, program: Sequence[str], folder: str, environment: Mapping[str, str]) -> Iterator[str | int]:
        """Start the rank; yields the lines that it prints, and its exit code last."""
        around = {key: value for key, value in os.environ.items() if not ALLOCATION.fullmatch(key)}
        self.process = subprocess.Popen(
            program, cwd=folder, env=around | dict(environment), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, preexec_fn=partial(die_with_parent, signal.SIGKILL),
        )  # fmt: skip
        assert self.process.stdout
        for line in self.process.stdout:
            yield line.decode(errors="replace").rstrip("\n")
        code = self.process.wait()
        yield code if code >= 0 else 128 - code

    def leave(self) -> None:
        """Have the rank save and leave."""
        self.process.send_signal(signal.SIGUSR1)


class Job:
    """The ranks of a job, each seen to by a thread.

    Args:
        bundles: for each rank its bundle's number and its place: RANK, LOCAL_RANK and so on.
        resources: of each rank's actor, as Ray's `options` takes them.
        environment: what all ranks are given.
        join: what a worker runs that comes in place of one that is lost; empty where none does.
    """

    def __init__(
        self, group: Any, bundles: Sequence[tuple[int, dict[str, str]]], resources: Mapping[str, float], folder: str,
        program: Sequence[str], environment: Mapping[str, str], servers: int, join: Sequence[str],
    ) -> None:  # fmt: skip
        self.group, self.bundles, self.resources, self.folder = group, bundles, resources, folder
        self.program, self.environment, self.servers, self.join = program, dict(environment), servers, join
        self.actors = [self._actor(rank) for rank in range(len(bundles))]
        self.ended: queue.Queue[tuple[int, int]] = queue.Queue()  # ranks with their exit codes

    def _actor(self, rank: int) -> Any:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        place = PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=self.bundles[rank][0])
        made: Any = ray.remote(Rank)
        return made.options(scheduling_strategy=place, max_concurrency=2, **self.resources).remote()

    def _see_to(self, rank: int) -> None:
        """Run a rank, and again if it is a worker that is lost and may come back."""
        began, in_a_row = time.monotonic(), 0
        code = self._live(rank, self.program, self.environment | self.bundles[rank][1])
        while code > 128 and code != EXIT_CODE and self.join and rank >= self.servers and in_a_row < MOST_IN_A_ROW:
            in_a_row = in_a_row + 1 if time.monotonic() - began < SOON_S else 0
            self.actors[rank], began = self._actor(rank), time.monotonic()  # on another node, where its own is gone
            code = self._live(rank, self.join, self.environment)
        self.ended.put((rank, code))

    def _live(self, rank: int, program: Sequence[str], environment: Mapping[str, str]) -> int:
        """The exit code of a rank, whose lines are printed as they come."""
        import ray

        said = ""
        try:
            for reply in self.actors[rank].run.remote(program, self.folder, environment):
                said = ray.get(reply)
                if isinstance(said, int):
                    return said
                sys.stdout.write(f"[{rank}]<stdout>: {said}\n")
                sys.stdout.flush()
        except ray.exceptions.RayTaskError as error:
            sys.stdout.write(f"[{rank}]<stderr>: hvdtrain: rank {rank} cannot be started: {error.cause}\n")
            return 1
        except ray.exceptions.RayError:  # its node, or its actor
            pass
        return LOST

    def run(self, keep_going: bool, has_to_leave: threading.Event) -> int:
        """Start the ranks, and wait for the job's end; its exit code.

        Args:
            keep_going: the others go on where a worker dies.
            has_to_leave: that the ranks are to save and leave.
        """
        import ray

        host, port = ray.get(self.actors[0].address.remote())
        self.environment |= {"MASTER_ADDR": host, "MASTER_PORT": str(port)}
        for rank in range(len(self.actors)):
            threading.Thread(target=self._see_to, args=(rank,), daemon=True).start()
        codes: dict[int, int] = {}
        until = float("inf")
        while len(codes) < len(self.actors) and time.monotonic() < until:
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
                until = min(until, time.monotonic() + END_S)  # a worker may wait for a node
        failed = [(rank, code) for rank, code in codes.items() if code]
        if not failed or (keep_going and 0 in [codes.get(rank) for rank in range(self.servers, len(self.actors))]):
            return 0
        rank, code = next((pair for pair in failed if pair[1] != EXIT_CODE), failed[0])
        print(f"Process name: {rank}\nExit code: {code}", flush=True)  # as horovodrun has it
        return code


def placed(ranks: int, nodes: Mapping[int, str], here: str) -> list[tuple[int, dict[str, str]]]:
    """For each rank the number of its bundle, and its place in variables.

    Args:
        nodes: of each bundle.
        here: the node of this process, which nobody can do without: the first rank is there, if one is.
    """
    on_node: dict[str, list[int]] = {}
    for bundle in sorted(nodes, key=lambda bundle: (nodes[bundle] != here, bundle)):
        on_node.setdefault(nodes[bundle], []).append(bundle)
    hosts = hosts_of_ranks([Host(node, len(bundles)) for node, bundles in on_node.items()])
    made = []
    for rank, node in enumerate(hosts):
        local, size = hosts[:rank].count(node), hosts.count(node)
        place = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": size}
        made.append((on_node[node][local], {name: str(value) for name, value in place.items()}))
    return made


@click.command()
@click.option("--ranks", type=int, required=True)
@click.option("--servers", type=int, default=0)
@click.option("--cpus", type=float, default=1.0, help="That a rank takes of Ray's.")
@click.option("--gpus", type=float, default=0.0)
@click.option("--strategy", type=click.Choice(["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]), default="SPREAD")
@click.option("--room-s", type=float, default=600.0, help="How long to wait for nodes.")
@click.option("--folder", required=True)
@click.option("--keep-going", is_flag=True)
@click.option("--join", default="", help="For a shell: what a worker runs in place of one that is lost.")
@click.option("-x", "exported", multiple=True, help="A variable that ranks are given.")
@click.argument("program", nargs=-1, type=click.UNPROCESSED)
def main(
    ranks: int, servers: int, cpus: float, gpus: float, strategy: str, room_s: float, folder: str, keep_going: bool,
    join: str, exported: Sequence[str], program: Sequence[str],
) -> None:  # fmt: skip
    address = os.environ.get("RAY_ADDRESS")
    if not address:  # the job's own Ray lets nobody else in, and keeps no token in the home folder
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    try:
        import ray
    except ImportError:
        raise Failure(
            "--launcher ray needs Ray, which is not in this environment: `uv pip install ray`, here and on its nodes"
        ) from None
    has_to_leave = threading.Event()
    bundle = {"CPU": cpus} | ({"GPU": gpus} if gpus else {})
    with tempfile.TemporaryDirectory(prefix="ray-") as scratch:
        at: dict[str, Any] = {"address": address} if address else {
            "address": "local", "num_cpus": max(1, round(ranks * cpus + 0.5)), "include_dashboard": False,
            "object_store_memory": STORE_BYTES, "_temp_dir": scratch,
        }  # fmt: skip
        try:
            ray.init(**at, log_to_driver=False, logging_level=logging.ERROR)
            signal.signal(signal.SIGUSR1, lambda *_: has_to_leave.set())
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_CODE))
            group = ray.util.placement_group([bundle] * ranks, strategy=strategy)
            _wait_for_room(group, ranks, bundle, room_s)
            nodes = ray.util.placement_group_table(group)["bundles_to_node_id"]
            here = ray.get_runtime_context().get_node_id()
            environment = {name: os.environ[name] for name in exported}
            resources = {"num_cpus": cpus, "num_gpus": gpus}
            job = Job(
                group, placed(ranks, nodes, here), resources, folder, program, environment, servers, shlex.split(join)
            )  # fmt: skip
            code = job.run(keep_going, has_to_leave)
        except ConnectionError as error:
            raise Failure(f"no Ray answers at RAY_ADDRESS={address}: {error}") from None
        finally:
            ray.shutdown()  # which ends the actors, and their ranks with them
    sys.exit(code)


def _wait_for_room(group: Any, ranks: int, bundle: Mapping[str, float], room_s: float) -> None:
    """Wait for nodes that have room for all ranks, which a cluster that grows may have to start."""
    import ray

    if group.wait(10):
        return
    each = ", ".join(f"{number:g} {name}" for name, number in bundle.items())
    has = ", ".join(f"{number:g} {name}" for name, number in ray.cluster_resources().items() if name in bundle)
    asked = f"Ray has no room yet for {ranks} ranks of {each} each: it has {has or 'none of these'}"
    print(f"hvdtrain.launch.on_ray: {asked}; waiting", flush=True)
    if not group.wait(room_s):
        raise Failure(f"{asked}, and that has not changed in {room_s:g} s: start fewer ranks, or add nodes")


if __name__ == "__main__":
    try:
        main(standalone_mode=False)
    except Failure as failure:
        print(f"hvdtrain: {failure}", flush=True)
        sys.exit(failure.exit_code)
