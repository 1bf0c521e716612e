"""Measuring the network between hosts; over the testbed's links in test_testbed."""

import itertools
import time

import pytest

from hvdtrain.launch import bandwidth


@pytest.mark.parametrize("count", range(2, 12))
def test_in_a_round_every_host_sends_to_one_and_receives_from_one(count):
    hosts = [f"h{n}" for n in range(count)]
    made = bandwidth.rounds(hosts)
    assert 1 <= len(made) <= bandwidth.ROUNDS
    for pairs in made:
        assert sorted(one for one, _ in pairs) == sorted(other for _, other in pairs) == sorted(hosts)
        assert all(one != other for one, other in pairs)
    asked = [pair for pairs in made for pair in pairs]
    assert len(set(asked)) == len(asked)
    if count <= bandwidth.ROUNDS + 1:
        assert set(asked) == set(itertools.permutations(hosts, 2))


def test_a_connection_is_measured_in_a_bounded_time():
    to = ["127.0.0.1", bandwidth.serve("127.0.0.1")]
    began = time.monotonic()
    assert 1 < bandwidth.asked({"round_trip": to})["measured"] < 1e5
    assert 0.5 < bandwidth.asked({"send": to})["measured"] < 1e4  # memory is faster than that
    assert time.monotonic() - began < 10


def test_what_does_not_answer_is_not_measured(monkeypatch):
    monkeypatch.setattr(bandwidth, "PATIENCE_S", 0.2)
    assert bandwidth.asked({"send": ["127.0.0.1", 1]}) == {"measured": None}
