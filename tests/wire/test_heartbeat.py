"""Ranks that say that they are alive, and waits for them."""

import pytest
from torch.distributed import HashStore

from hvdtrain.base.errors import Failure
from hvdtrain.job.wire import heartbeat
from hvdtrain.job.wire.heartbeat import LOOKS, Silence, begin_beating, wait_for_ranks

TIMEOUT_S = 1.0  # for which a busy machine lets no thread wait


def test_a_rank_is_silent_when_it_says_nothing_new_between_many_looks_in_a_row():
    silence = Silence()
    for look in range(3 * LOOKS):
        beats = {0: b"%d" % look, 1: b"7", 2: b"%d" % (look // (LOOKS - 1)), 3: b""}
        silent = silence.look(beats)
        assert silent == [rank for rank in (1, 3) if look >= LOOKS - (rank == 3)]
    assert silence.look({1: b"8", 3: b""}) == [3]


def test_a_rank_that_beats_is_waited_for_beyond_the_timeout_and_told_of_until_it_comes(monkeypatch):
    """It comes when it has been told of, which is after two timeouts."""
    store, told = HashStore(), []

    def tell(line):
        told.append(line)
        store.set("came/1", "")

    monkeypatch.setattr(heartbeat, "tell", tell)
    begin_beating(store, 1, TIMEOUT_S)
    store.set("came/0", "")
    wait_for_ranks(store, {0: "came/0", 1: "came/1"}, TIMEOUT_S, rank=0)
    assert told == ["waiting for rank 1, alive, for 1 min"]
    with pytest.raises(
        Failure, match=r"^rank 2 is lost: no sign of life within 1 s \(see --timeout\)$"
    ):
        wait_for_ranks(store, {1: "left/1", 2: "left/2"}, TIMEOUT_S)
