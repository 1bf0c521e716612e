"""Who is where: hosts in groups of equal ones, each simulated once, and the pieces that weights are cut into."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import NamedTuple

from hvdtrain.plan.scenario import Scenario

# Workers in lockstep that are alike do the same at the same time: one of each kind is simulated, exactly. Groups of
# servers, and of workers that are not in lockstep, are approximate where they hold several: their messages interleave
# evenly then.
MOST_SERVER_GROUPS = 16
# Where servers hold whole tensors, those with most bytes are simulated one by one, and the others in so many groups.
HOT_SERVERS, OTHER_SERVER_GROUPS = 4, 4


class Detail(NamedTuple):
    """How many pieces weights are cut into at most, about, and workers that are not in lockstep into groups."""

    pieces: int
    groups: int


FINE, COARSE = Detail(160, 24), Detail(24, 6)


@dataclass(frozen=True)
class HostGroup:
    """Hosts that are alike.

    Attributes:
        hosts: how many.
        servers: of each host; the first group with servers has the first range of the weights.
        workers: of each host, by how much slower than others they compute: ((factor, count), …).
    """

    hosts: int
    servers: int
    workers: tuple[tuple[float, int], ...]


@dataclass(frozen=True)
class Piece:
    """A range of the weights that travels as one.

    Attributes:
        owner: the number of the group whose servers hold it.
        bytes: of weights.
        messages: how many it really is.
        layers: the numbers of the layers that lie in it, wholly or partly.
    """

    owner: int
    bytes: int
    messages: float
    layers: tuple[int, ...]


def host_groups(scenario: Scenario, most: int) -> list[HostGroup]:
    """The hosts of a job with servers, in order: alike and beside each other in one group, as far as that may be.

    Args:
        most: groups of workers alike that are not in lockstep.
    """
    per_host, slow = scenario.workers_per_host, scenario.slow.workers
    hosts: list[tuple[int, tuple[tuple[float, int], ...], int]] = []  # and a number where it is like no other
    for first in range(0, scenario.workers, per_host):
        factors = sorted(slow.get(worker, 1.0) for worker in range(first, min(first + per_host, scenario.workers)))
        hosts.append((0, tuple((factor, len(list(alike))) for factor, alike in groupby(factors)), 0))
    hot = _deal_tensors(scenario)[1][:HOT_SERVERS] if scenario.partition == "tensor" else []
    if scenario.placement == "shared":
        placed = [range(host, scenario.servers, len(hosts)) for host in range(len(hosts))]
        hosts = [
            (len(servers), workers, next((server + 1 for server in servers if server in hot), 0))
            for servers, (_, workers, _) in zip(placed, hosts, strict=True)
        ]
    else:
        hosts = [(1, (), server + 1 if server in hot else 0) for server in range(scenario.servers)] + hosts
    of_servers = MOST_SERVER_GROUPS if scenario.partition == "even" else OTHER_SERVER_GROUPS
    groups = []
    for (servers, workers, _), alike in groupby(hosts):
        number = len(list(alike))
        parts = min(number, of_servers if servers else 1 if scenario.mode == "ps-sync" else most)
        groups += [HostGroup(number * (i + 1) // parts - number * i // parts, servers, workers) for i in range(parts)]
    return groups


def local_part(scenario: Scenario) -> float:
    """The share of all messages between workers and servers that stay on their host."""
    groups = host_groups(scenario, 1)
    pairs = sum(group.hosts * group.servers * sum(count for _, count in group.workers) for group in groups)
    return pairs / (scenario.workers * scenario.servers)


def _deal_tensors(scenario: Scenario) -> tuple[dict[int, int], list[int]]:
    """The server of each layer where whole tensors are dealt out: in order, to the one with fewest bytes so far, as
    TensorFlow 1's GreedyLoadBalancingStrategy does. And the servers, those with most bytes first.
    """
    load = [(0, server) for server in range(scenario.servers)]
    owners = {}
    for number, layer in enumerate(scenario.layers):
        if layer.parameters:
            held, owners[number] = heapq.heappop(load)
            heapq.heappush(load, (held + layer.parameters, owners[number]))
    return owners, [server for _, server in sorted(load, key=lambda one: (-one[0], one[1]))]


def cut(scenario: Scenario, groups: Sequence[HostGroup], most_pieces: int) -> list[Piece]:
    """The weights as pieces, in forward order: as buckets.partition cuts them, but that the servers of a group are one.

    Args:
        most_pieces: about as many at most; larger ones stand for several messages.
    """
    ends = list(accumulate((4 * layer.parameters for layer in scenario.layers), initial=0))
    if scenario.partition == "tensor":
        group_of = [number for number, group in enumerate(groups) for _ in range(group.hosts * group.servers)]
        owners, _ = _deal_tensors(scenario)
        return [Piece(group_of[server], ends[n + 1] - ends[n], 1, (n,)) for n, server in owners.items()]
    total, servers, first, pieces = ends[-1], scenario.servers, 0, []
    for owner, group in enumerate(groups):
        count = group.hosts * group.servers
        if not count:
            continue
        begin, end = total * first // servers, total * (first + count) // servers
        first += count
        size = end - begin
        messages = count * max(1, -(-size // count // scenario.bucket_bytes))
        largest = max(scenario.bucket_bytes, total / most_pieces)
        number = max(1, min(messages, round(size / largest + 0.49)))
        for i in range(number):
            start, stop = begin + size * i // number, begin + size * (i + 1) // number
            if start < stop:
                inside = tuple(n for n in range(len(scenario.layers)) if ends[n] < stop and start < ends[n + 1])
                pieces.append(Piece(owner, stop - start, messages / number, inside))
    return pieces
