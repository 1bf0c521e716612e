"""How the flat vector of weights is cut into buckets that are sent one by one.

Each server has an equal range of the vector, which is cut into buckets.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from hvdtrain.base.numerics.split import even_range


@dataclass(frozen=True)
class BucketRange:
    """A bucket's range of the flat vector.

    Attributes:
        server: the rank of the server that holds the bucket.
        number: the bucket's number on that server, from 0.
        start: the first element of the range.
        stop: the end of the range, excluded.
        parameters: indices of the parameters that lie in the bucket, wholly or partly, in the order
            of model.parameters().
        lengths: how many elements of each of these parameters lie in the bucket.
    """

    server: int
    number: int
    start: int
    stop: int
    parameters: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def elements(self) -> int:
        """The number of elements."""
        return self.stop - self.start


def cut(
    sizes: Sequence[int],
    servers: int,
    most: int,
    fragments: int = 1,
    multiple: int = 1,
    borders: Sequence[int] = (),
) -> list[BucketRange]:
    """Cuts a vector over servers, and each server's range into buckets.

    Servers hold contiguous ranges that differ by one element at most, whatever the sizes of the
    parameters. So do the buckets of a server. Empty buckets are left out: with more servers than
    elements, some servers have no bucket.

    Args:
        sizes: elements of each parameter.
        servers: the number of servers.
        most: the largest number of elements of a bucket.
        fragments: each server's number of buckets is a multiple of this: see fragment_buckets.
        multiple: each bucket has a multiple of this number of elements, except the last one of a
            server, or before a border.
        borders: elements at which a bucket begins, however few it then has.
    """
    ends = list(accumulate(sizes, initial=0))
    buckets: list[BucketRange] = []
    for server in range(servers):
        shard = even_range(ends[-1], server, servers)
        number = 0
        for piece in _between(shard, borders):
            for start, stop in _even_pieces(piece, most, fragments, multiple):
                inside = tuple(
                    i for i in range(len(sizes)) if ends[i] < stop and start < ends[i + 1]
                )
                lengths = tuple(min(stop, ends[i + 1]) - max(start, ends[i]) for i in inside)
                buckets.append(BucketRange(server, number, start, stop, inside, lengths))
                number += 1
    return buckets


def borders_of_whole(sizes: Sequence[int], first: int, most: int) -> list[int]:
    """Returns the elements at which buckets of whole parameters begin.

    A parameter with more elements than a bucket may have is a bucket by itself.

    Args:
        sizes: elements of each parameter.
        first: the largest number of elements of the first bucket.
        most: the same of each other bucket.
    """
    borders: list[int] = []
    limit = first
    begin = 0  # of the bucket that is being filled
    end = 0
    for size in sizes:
        if begin < end and end + size - begin > limit:
            borders.append(end)
            begin = end
            limit = most
        end += size
    return borders


def _between(shard: range, borders: Sequence[int]) -> list[range]:
    """Returns the parts of a shard between borders."""
    inner = [border for border in borders if shard.start < border < shard.stop]
    return [range(start, stop) for start, stop in pairwise([shard.start, *inner, shard.stop])]


def _even_pieces(
    piece: range, most: int, fragments: int, multiple: int
) -> Iterator[tuple[int, int]]:
    """Yields the start and end of each bucket of a part of a shard."""
    largest = max(1, most // multiple)  # of a bucket, in units of `multiple` elements
    units = -(-len(piece) // multiple)
    count = -(-units // (largest * fragments)) * fragments
    for number in range(count):
        of_bucket = even_range(units, number, count)
        if of_bucket:
            start = piece.start + of_bucket.start * multiple
            yield start, min(piece.start + of_bucket.stop * multiple, piece.stop)


def shard_bounds(length: int, ranks: int) -> list[int]:
    """Returns where in a bucket the ranks' shards begin, and where the last shard ends.

    All shards are of one length, except at the bucket's end, where the last ranks have less or
    nothing.

    Args:
        length: elements of the bucket.
        ranks: the number of ranks.
    """
    each = -(-length // ranks)
    return [min(rank * each, length) for rank in range(ranks + 1)]


def fragment_buckets(buckets: Sequence[BucketRange], fragments: int) -> list[list[int]]:
    """Returns the indices of the buckets of each fragment.

    Each fragment has every so manieth bucket of each server, so that all are of one size.
    """
    of_fragments: list[list[int]] = [[] for _ in range(fragments)]
    for index, bucket in enumerate(buckets):
        of_fragments[bucket.number % fragments].append(index)
    return of_fragments
