"""How the flat weights are cut over servers and buckets."""

from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.buckets.partition import cut, fragment_buckets

SIZES = st.lists(st.integers(1, 400), min_size=1, max_size=30)


@given(SIZES, st.integers(1, 12), st.integers(1, 500))
def test_buckets_are_the_vector_cut_into_equal_shards_and_small_pieces(sizes, servers, most):
    pieces = cut(sizes, servers, most)
    assert [piece.start for piece in pieces] == [0, *(piece.stop for piece in pieces[:-1])]
    assert pieces[-1].stop == sum(sizes)
    assert all(0 < piece.stop - piece.start <= most for piece in pieces)
    shards = [sum(p.stop - p.start for p in pieces if p.server == server) for server in range(servers)]
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
    assert sorted(number for of_fragment in of_fragments for number in of_fragment) == list(range(len(pieces)))
    elements = [sum(pieces[n].stop - pieces[n].start for n in of_fragment) for of_fragment in of_fragments]
    assert sum(elements) == sum(sizes)
    assert max(elements) - min(elements) <= -(-len(pieces) // fragments) + servers
