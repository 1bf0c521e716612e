"""Who is where: hosts in groups of equal ones, each simulated once, and the pieces that weights are cut into."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import NamedTuple

from hvdtrain.planning.scenario import BUCKET_BYTES, Scenario

# Workers in lockstep that are alike do the same at the same time: one of each kind is simulated, exactly. Groups of
# servers, and of workers that are not in lockstep, are approximate where they hold several: their messages interleave
# evenly then.
MOST_SERVER_GROUPS = 16


class Detail(NamedTuple):
    """How many pieces weights are cut into at most, about, and workers that are not in lockstep into groups; how many
    steps there are at most, where few messages are drawn in each.
    """

    pieces: int
    groups: int
    steps: int = 12


FINE, COARSE, ROUGH = Detail(160, 24), Detail(24, 6), Detail(6, 3, 4)


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
        most: groups of workers alike that are not in lockstep; twice as many of servers.
    """
    per_host, of_worker = scenario.workers_per_host, scenario.factors
    hosts: list[tuple[int, tuple[tuple[float, int], ...]]] = []  # servers and workers of each
    for first in range(0, scenario.workers, per_host):
        factors = sorted(of_worker[first : first + per_host])
        hosts.append((0, tuple((factor, len(list(alike))) for factor, alike in groupby(factors))))
    if scenario.placement == "shared":
        counts = [len(range(host, scenario.servers, len(hosts))) for host in range(len(hosts))]
        hosts = [(servers, workers) for servers, (_, workers) in zip(counts, hosts, strict=True)]
    else:
        hosts = [(1, ())] * scenario.servers + hosts
    groups = []
    for (servers, workers), alike in groupby(hosts):
        number = len(list(alike))
        parts = min(number, min(MOST_SERVER_GROUPS, 2 * most) if servers else 1 if scenario.in_lockstep else most)
        groups += [HostGroup(number * (i + 1) // parts - number * i // parts, servers, workers) for i in range(parts)]
    return groups


def local_part(scenario: Scenario) -> float:
    """The share of all messages between workers and servers that stay on their host."""
    groups = host_groups(scenario, 1)
    pairs = sum(group.hosts * group.servers * sum(count for _, count in group.workers) for group in groups)
    return pairs / (scenario.workers * scenario.servers)


def cut(scenario: Scenario, groups: Sequence[HostGroup], most_pieces: int) -> list[Piece]:
    """The weights as pieces, in forward order: as buckets.partition cuts them, but that the servers of a group are one.

    Args:
        most_pieces: about as many at most; larger ones stand for several messages.
    """
    ends = list(accumulate((4 * layer.parameters for layer in scenario.layers), initial=0))
    servers = sum(group.hosts * group.servers for group in groups)
    total, first, pieces = ends[-1], 0, []
    for owner, group in enumerate(groups):
        count = group.hosts * group.servers
        if not count:
            continue
        begin, end = total * first // servers, total * (first + count) // servers
        first += count
        size = end - begin
        messages = count * max(1, -(-size // count // BUCKET_BYTES))
        largest = max(BUCKET_BYTES, total / most_pieces)
        number = max(1, min(messages, round(size / largest + 0.49)))
        for i in range(number):
            start, stop = begin + size * i // number, begin + size * (i + 1) // number
            if start < stop:
                inside = tuple(n for n in range(len(scenario.layers)) if ends[n] < stop and start < ends[n + 1])
                pieces.append(Piece(owner, stop - start, messages / number, inside))
    return pieces
