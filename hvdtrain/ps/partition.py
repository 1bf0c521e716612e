"""How the flat weights are cut: equal ranges for the servers, and each of them into buckets that travel alone."""

from collections.abc import Iterator, Sequence
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


def cut(sizes: Sequence[int], servers: int, most: int) -> list[Piece]:
    """Cut a vector of sum(sizes) elements over the servers, and over buckets of at most `most` elements.

    Servers hold contiguous ranges that differ by one element at most, whatever the parameters' sizes, and so do the
    buckets of a server. Empty buckets are left out: more servers than elements leave some without any.
    """
    ends = list(accumulate(sizes, initial=0))
    pieces = []
    for server in range(servers):
        shard = even_range(ends[-1], server, servers)
        buckets = -(-len(shard) // most)
        for number in range(buckets):
            own = even_range(len(shard), number, buckets)
            start, stop = shard.start + own.start, shard.start + own.stop
            inside = tuple(i for i in range(len(sizes)) if ends[i] < stop and start < ends[i + 1])
            lengths = tuple(min(stop, ends[i + 1]) - max(start, ends[i]) for i in inside)
            pieces.append(Piece(server, number, start, stop, inside, lengths))
    return pieces


class Completion:
    """Which buckets a step's gradients complete, as they come, in any order.

    Args:
        sizes: elements of each parameter.
        pieces: the buckets.

    Attributes:
        of_parameter: the numbers of the buckets that each parameter lies in.
    """

    def __init__(self, sizes: Sequence[int], pieces: Sequence[Piece]) -> None:
        self.pieces = pieces
        self._starts = list(accumulate(sizes, initial=0))
        self.of_parameter: list[list[int]] = [[] for _ in sizes]
        for number, piece in enumerate(pieces):
            for parameter in piece.parameters:
                self.of_parameter[parameter].append(number)
        self.begin()

    def begin(self) -> None:
        """Another step: no gradient has come yet."""
        self._missing = [len(piece.parameters) for piece in self.pieces]

    def come(self, parameter: int) -> Iterator[tuple[int, int, slice, bool]]:
        """A parameter's gradient is here: for each bucket that it lies in, the bucket's number, where in it the
        gradient begins, which range of the gradient, laid flat, it has, and whether the bucket is complete now.
        """
        first, end = self._starts[parameter : parameter + 2]
        for number in self.of_parameter[parameter]:
            piece = self.pieces[number]
            start, stop = max(piece.start, first), min(piece.stop, end)
            self._missing[number] -= 1
            yield number, start - piece.start, slice(start - first, stop - first), not self._missing[number]
