"""Hosts in groups of alike ones, each simulated once, and the pieces that the weights are cut
into.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, groupby, pairwise
from typing import NamedTuple

from hvdtrain.launch.hosts import Host, allocate, hosts_of_ranks
from hvdtrain.planning.scenario import Scenario

# The messages of a group are taken to interleave, which is an approximation, as for groups of
# workers.
MOST_SERVER_GROUPS = 16
# How many layouts are kept: the same job is simulated again and again with other costs.
KEPT = 256


class Detail(NamedTuple):
    """How detailed a simulation is, as upper bounds.

    Attributes:
        pieces: that the weights are cut into.
        groups: of workers where these are not in lockstep.
        steps: that are simulated where a step has few messages.
    """

    pieces: int
    groups: int
    steps: int


FINE = Detail(160, 24, 60)
COARSE = Detail(24, 6, 12)
ROUGH = Detail(6, 3, 4)


@dataclass(frozen=True)
class HostGroup:
    """Some hosts that are alike.

    The first group with servers has the first range of the weights.

    Attributes:
        servers: of each host.
        workers: of each host, by how many times as long they compute: ((factor, count), …).
    """

    hosts: int
    servers: int
    workers: tuple[tuple[float, int], ...]

    @property
    def workers_per_host(self) -> int:
        return sum(count for _, count in self.workers)


@dataclass(frozen=True)
class Piece:
    """A range of the weights that travels as one, though in a real job it may be several messages.

    Attributes:
        owner: the number of the group of hosts with the servers that hold it.
        layers: the numbers of the layers that lie in it, wholly or partly.
    """

    owner: int
    bytes: int
    messages: float
    layers: tuple[int, ...]


def host_groups(scenario: Scenario, most: int) -> list[HostGroup]:
    """Returns the hosts of a job with servers, in order, neighbours that are alike in one group.

    Args:
        most: the number of groups into which alike hosts are divided at most where workers are not
            in lockstep; hosts with servers into twice as many.
    """
    groups = []
    alike_hosts = _alike_hosts(
        tuple(scenario.factors),
        scenario.servers,
        scenario.workers_per_host,
        scenario.placement,
        scenario.ranks_by_host,
    )
    for number, servers, workers in alike_hosts:
        parts = 1 if scenario.in_lockstep else most
        if servers:
            parts = min(MOST_SERVER_GROUPS, 2 * most)
        parts = min(number, parts)
        ends = [number * part // parts for part in range(parts + 1)]
        groups += [HostGroup(end - begin, servers, workers) for begin, end in pairwise(ends)]
    return groups


@lru_cache(KEPT)
def _alike_hosts(
    factors: tuple[float, ...],
    servers: int,
    workers_per_host: int,
    placement: str,
    ranks_by_host: tuple[tuple[int, ...], ...],
) -> list[tuple[int, int, tuple[tuple[float, int], ...]]]:
    """Returns (hosts, servers, workers) as HostGroup has them, for neighbours that are alike.

    Args:
        factors: how many times as long each worker computes.
        servers, workers_per_host, placement, ranks_by_host: see Scenario.
    """
    ranks_by_host = ranks_by_host or launched_ranks(
        len(factors), servers, workers_per_host, placement
    )
    hosts = []
    for ranks in ranks_by_host:
        workers = Counter(factors[rank - servers] for rank in ranks if rank >= servers)
        number_of_servers = sum(rank < servers for rank in ranks)
        hosts.append((number_of_servers, tuple(sorted(workers.items()))))
    return [(len(list(alike)), *of_each) for of_each, alike in groupby(hosts)]


def launched_ranks(
    workers: int, servers: int, workers_per_host: int, placement: str
) -> tuple[tuple[int, ...], ...]:
    """Returns the ranks on each host as `hvdtrain launch` places a job with servers.

    Each host of workers is given as many slots as it has workers. Hosts of servers come first.
    """
    hosts = []
    if placement == "dedicated":
        hosts += [Host(f"server{number}", 1) for number in range(servers)]
    for number in range(-(-workers // workers_per_host)):
        hosts.append(Host(f"worker{number}", workers_per_host))
    ranks_by_host: dict[str, list[int]] = {}
    names = hosts_of_ranks(allocate(hosts, workers, servers), servers)
    for rank, name in enumerate(names):
        ranks_by_host.setdefault(name, []).append(rank)
    return tuple(map(tuple, ranks_by_host.values()))


def local_part(scenario: Scenario) -> float:
    """Returns the share of all messages between workers and servers that stay on their host."""
    pairs = 0
    for group in host_groups(scenario, 1):
        pairs += group.hosts * group.servers * group.workers_per_host
    return pairs / (scenario.workers * scenario.servers)


def cut(scenario: Scenario, groups: Sequence[HostGroup], most_pieces: int) -> list[Piece]:
    """Returns the weights cut into pieces, in forward order.

    They are cut as buckets.partition cuts them, except that the servers of a group count as one,
    and that larger pieces stand for several messages.

    Args:
        most_pieces: about so many at most.
    """
    parameters = tuple(layer.parameters for layer in scenario.layers)
    servers_by_group = tuple(group.hosts * group.servers for group in groups)
    return _cut(parameters, servers_by_group, scenario.bucket_bytes, most_pieces)


@lru_cache(KEPT)
def _cut(
    parameters: tuple[int, ...],
    servers_by_group: tuple[int, ...],
    bucket_bytes: int,
    most_pieces: int,
) -> list[Piece]:
    """Returns the pieces of layers with so many parameters: see cut."""
    layer_ends = list(accumulate((4 * each for each in parameters), initial=0))
    total = layer_ends[-1]
    all_servers = sum(servers_by_group)
    servers_before = 0
    pieces = []
    for owner, servers in enumerate(servers_by_group):
        if not servers:
            continue
        begin = total * servers_before // all_servers
        servers_before += servers
        size = total * servers_before // all_servers - begin
        messages = servers * max(1, -(-size // servers // bucket_bytes))
        largest = max(bucket_bytes, total / most_pieces)
        number = max(1, min(messages, round(size / largest + 0.49)))
        ends = [begin + size * part // number for part in range(number + 1)]
        for start, stop in pairwise(ends):
            if start == stop:
                continue
            layers = _layers_within(start, stop, layer_ends)
            pieces.append(Piece(owner, stop - start, messages / number, layers))
    return pieces


def _layers_within(start: int, stop: int, layer_ends: Sequence[int]) -> tuple[int, ...]:
    """Returns the numbers of the layers of which bytes lie in a range.

    Args:
        layer_ends: 0, and the byte at which each layer ends.
    """
    return tuple(
        number
        for number, (begin, end) in enumerate(pairwise(layer_ends))
        if begin < stop and start < end
    )
