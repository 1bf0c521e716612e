"""Who is where: hosts in groups of equal ones, each simulated once, and the pieces that weights are cut into."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise
from typing import NamedTuple

from hvdtrain.planning.scenario import BUCKET_BYTES, Scenario

MOST_SERVER_GROUPS = 16  # their messages are taken to interleave: an approximation, as that of groups of workers


class Detail(NamedTuple):
    """At most so many pieces of the weights, groups of workers not in lockstep, and steps with few messages in each."""

    pieces: int
    groups: int
    steps: int


FINE, COARSE, ROUGH = Detail(160, 24, 60), Detail(24, 6, 12), Detail(6, 3, 4)


@dataclass(frozen=True)
class HostGroup:
    """So many hosts that are alike, with their servers and workers each; the latter by how much slower than others they
    compute: ((factor, count), …). The first group with servers has the first range of the weights.
    """

    hosts: int
    servers: int
    workers: tuple[tuple[float, int], ...]


@dataclass(frozen=True)
class Piece:
    """A range of the weights that travels as one, though it may really be several messages.

    Attributes:
        owner: the number of the group whose servers hold it.
        layers: the numbers of the layers that lie in it, wholly or partly.
    """

    owner: int
    bytes: int
    messages: float
    layers: tuple[int, ...]


def host_groups(scenario: Scenario, most: int) -> list[HostGroup]:
    """The hosts of a job with servers, in order: those beside each other that are alike in one group, or in so many at
    most where workers are not in lockstep, and twice as many of servers.
    """
    per_host, factors = scenario.workers_per_host, scenario.factors
    slices = [factors[first : first + per_host] for first in range(0, scenario.workers, per_host)]
    with_workers = [tuple(sorted(Counter(of_host).items())) for of_host in slices]
    if scenario.placement == "shared":
        hosts = [(len(range(n, scenario.servers, len(slices))), workers) for n, workers in enumerate(with_workers)]
    else:
        hosts = [(1, ())] * scenario.servers + [(0, workers) for workers in with_workers]
    groups = []
    for (servers, workers), alike in groupby(hosts):
        number = len(list(alike))
        parts = 1 if scenario.in_lockstep else most
        if servers:
            parts = min(MOST_SERVER_GROUPS, 2 * most)
        parts = min(number, parts)
        ends = [number * part // parts for part in range(parts + 1)]
        groups += [HostGroup(end - begin, servers, workers) for begin, end in pairwise(ends)]
    return groups


def local_part(scenario: Scenario) -> float:
    """The share of all messages between workers and servers that stay on their host."""
    groups = host_groups(scenario, 1)
    pairs = sum(group.hosts * group.servers * sum(count for _, count in group.workers) for group in groups)
    return pairs / (scenario.workers * scenario.servers)


def cut(scenario: Scenario, groups: Sequence[HostGroup], most_pieces: int) -> list[Piece]:
    """The weights as pieces, in forward order, about so many at most: as buckets.partition cuts them, but that the
    servers of a group are one, and larger pieces stand for several messages.
    """
    ends = list(accumulate((4 * layer.parameters for layer in scenario.layers), initial=0))
    counts = [group.hosts * group.servers for group in groups]
    total, first, pieces = ends[-1], 0, []
    for owner, count in enumerate(counts):
        if not count:
            continue
        begin = total * first // sum(counts)
        first += count
        size = total * first // sum(counts) - begin
        messages = count * max(1, -(-size // count // BUCKET_BYTES))
        largest = max(BUCKET_BYTES, total / most_pieces)
        number = max(1, min(messages, round(size / largest + 0.49)))
        for i in range(number):
            start, stop = begin + size * i // number, begin + size * (i + 1) // number
            if start < stop:
                inside = tuple(n for n in range(len(scenario.layers)) if ends[n] < stop and start < ends[n + 1])
                pieces.append(Piece(owner, stop - start, messages / number, inside))
    return pieces
