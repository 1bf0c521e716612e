"""How the flat weights are cut: equal ranges for the servers, and each of them into buckets that travel alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from hvdtrain.numerics.split import even_range


@dataclass(frozen=True)
class Piece:
    """A bucket's place.

    Attributes:
        server: the rank that holds it.
        number: which of that server's buckets it is, from 0.
        start, stop: its range of the flat vector.
        parameters: indices of the parameters that lie in it, wholly or partly, in the order of model.parameters().
        lengths: how many elements of each of them.
    """

    server: int
    number: int
    start: int
    stop: int
    parameters: tuple[int, ...]
    lengths: tuple[int, ...]


def cut(sizes: Sequence[int], servers: int, most: int, fragments: int = 1) -> list[Piece]:
    """Cut a vector of sum(sizes) elements over the servers, and over buckets of at most `most` elements.

    Servers hold contiguous ranges that differ by one element at most, whatever the parameters' sizes, and so do the
    buckets of a server, of which each fragment has as many (see fragment_buckets). Empty buckets are left out: more
    servers than elements leave some without any.
    """
    ends = list(accumulate(sizes, initial=0))
    pieces = []
    for server in range(servers):
        shard = even_range(ends[-1], server, servers)
        buckets = -(-len(shard) // (most * fragments)) * fragments
        for number in range(buckets):
            bucket = even_range(len(shard), number, buckets)
            start, stop = shard.start + bucket.start, shard.start + bucket.stop
            if not bucket:
                continue
            inside = tuple(i for i in range(len(sizes)) if ends[i] < stop and start < ends[i + 1])
            lengths = tuple(min(stop, ends[i + 1]) - max(start, ends[i]) for i in inside)
            pieces.append(Piece(server, number, start, stop, inside, lengths))
    return pieces


def fragment_buckets(pieces: Sequence[Piece], fragments: int) -> list[list[int]]:
    """The buckets of each fragment: every so manieth of each server, so that all fragments are of one size."""
    return [[n for n, p in enumerate(pieces) if p.number % fragments == fragment] for fragment in range(fragments)]
