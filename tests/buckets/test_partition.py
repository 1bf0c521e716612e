"""How the flat weights are cut over servers and buckets."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.job.buckets.partition import (
    borders_of_whole,
    cut,
    fragment_buckets,
    shard_bounds,
)

SIZES = st.lists(st.integers(1, 400), min_size=1, max_size=30)


@given(SIZES, st.integers(1, 12), st.integers(1, 500))
def test_buckets_are_the_vector_cut_into_equal_shards_and_small_pieces(sizes, servers, most):
    pieces = cut(sizes, servers, most)
    assert [piece.start for piece in pieces] == [0, *(piece.stop for piece in pieces[:-1])]
    assert pieces[-1].stop == sum(sizes)
    assert all(0 < piece.stop - piece.start <= most for piece in pieces)
    shards = [
        sum(p.stop - p.start for p in pieces if p.server == server) for server in range(servers)
    ]
    assert max(shards) - min(shards) <= 1
    for server in range(servers):
        own = [piece for piece in pieces if piece.server == server]
        assert [piece.number for piece in own] == list(range(len(own)))
        lengths = [piece.stop - piece.start for piece in own]
        assert not own or max(lengths) - min(lengths) <= 1


@given(SIZES, st.integers(1, 12), st.integers(1, 500))
def test_a_bucket_knows_whose_gradients_complete_it(sizes, servers, most):
    owner = [index for index, size in enumerate(sizes) for _ in range(size)]
    for piece in cut(sizes, servers, most):
        own = owner[piece.start : piece.stop]
        assert piece.parameters == tuple(dict.fromkeys(own))
        assert piece.lengths == tuple(own.count(index) for index in piece.parameters)


@given(SIZES, st.integers(1, 12), st.integers(1, 500), st.integers(1, 6))
def test_fragments_are_of_one_size_but_for_an_element_a_bucket(sizes, servers, most, fragments):
    pieces = cut(sizes, servers, most, fragments)
    of_fragments = fragment_buckets(pieces, fragments)
    assert sorted(number for of_fragment in of_fragments for number in of_fragment) == list(
        range(len(pieces))
    )
    elements = [
        sum(pieces[n].stop - pieces[n].start for n in of_fragment) for of_fragment in of_fragments
    ]
    assert sum(elements) == sum(sizes)
    assert max(elements) - min(elements) <= -(-len(pieces) // fragments) + servers


@given(SIZES, st.integers(1, 12), st.integers(1, 500), st.integers(1, 9))
def test_buckets_may_be_multiples_of_a_number_but_for_the_last(sizes, servers, most, multiple):
    pieces = cut(sizes, servers, most, multiple=multiple)
    assert [piece.start for piece in pieces] == [0, *(piece.stop for piece in pieces[:-1])]
    assert pieces[-1].stop == sum(sizes)
    for piece, following in zip(pieces, [*pieces[1:], None], strict=True):
        length = piece.stop - piece.start
        assert 0 < length <= max(most, multiple)
        assert length % multiple == 0 or following is None or following.server > piece.server


@given(st.lists(st.integers(1, 60), min_size=1, max_size=5), st.integers(1, 7))
def test_each_rank_finds_its_shards_where_horovod_over_nccl_puts_them(lengths, ranks):
    """Buckets that it fuses, with zeros behind them, lie rank by rank: each rank's shards of all
    buckets. Each receives at its number times the elements that the first rank has.
    """
    shards = []
    for number, length in enumerate(lengths):
        bounds = shard_bounds(length, ranks)
        assert bounds[0] == 0 and bounds[-1] == length and sorted(bounds) == bounds
        elements = [(number, place) for place in range(length)]
        elements += [None] * (bounds[1] * ranks - length)
        shards.append(
            [elements[rank * bounds[1] : (rank + 1) * bounds[1]] for rank in range(ranks)]
        )
    fused = [
        element for rank in range(ranks) for of_bucket in shards for element in of_bucket[rank]
    ]
    first = sum(len(of_bucket[0]) for of_bucket in shards)
    for rank in range(ranks):
        received = fused[rank * first : (rank + 1) * first]
        parts = [shard_bounds(length, ranks)[rank:][:2] for length in lengths]
        mine = [
            (number, place)
            for number, (start, stop) in enumerate(parts)
            for place in range(start, stop)
        ]
        assert [element for element in received if element] == mine


@given(SIZES, st.integers(1, 500), st.integers(1, 500))
def test_buckets_of_whole_parameters_are_as_few_as_their_limits_allow(sizes, first, most):
    buckets = cut(sizes, 1, sum(sizes), borders=borders_of_whole(sizes, first, most))
    assert sum(len(bucket.parameters) for bucket in buckets) == len(sizes)
    limit = first
    for bucket, following in itertools.pairwise([*buckets, None]):
        assert bucket.elements <= limit or len(bucket.parameters) == 1
        assert following is None or bucket.elements + following.lengths[0] > limit
        limit = most
