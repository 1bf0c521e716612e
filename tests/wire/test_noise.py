"""Channels between processes that share a secret, and what is not let through."""

import os

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.job.wire.envelope import disclose, enclose
from hvdtrain.job.wire.noise import MOST, Handshake, NotAuthentic, Opening, reply_to

SECRET, PLACE = bytes(range(32)), b"tcp://10.0.0.1:5555"
# Noise_NNpsk0_25519_AESGCM_SHA256 among the vectors of cacophony, an implementation in Haskell
# (github.com/haskell-cryptography/cacophony, vectors/cacophony.txt).
PSK = b"This is my Austrian perspective!"
PROLOGUE = b"John Galt"
PRIVATE = [
    "893e28b9dc6ca8d611ab664754b8ceb7bac5117349a4439a6b0569da977c464a",
    "bbdb4cdbd309f1a1f2e1456967fe288cadd6f712d65dc7b7793d5e63da6b375b",
]
MESSAGES = {
    b"Ludwig von Mises": "ca35def5ae56cec33dc2036731ab14896bc4c75dbb07a61f879f8e3afa4c79447c37a89fc178"
    "13788d30df2d59501d6066f5f8aecc3406bbd9829f2d24a531b1",
    b"Murray Rothbard": "95ebc60d2b1fa672c1f46a8aa265ef51bfe38e7ccb39ec5be34069f1448088432f29d79368ef9"
    "de4e1ae7a362fb05bf0ad668e026bf5714554497b3a720461",
    b"F. A. Hayek": "7c01e898a6201f36aecee532e29cd0b7f8ffa29d3366ad0dce39a6",
    b"Carl Menger": "a9ff535aace3db6a1da1a7fb00fe2de2622bb373abad9fb42c00e0",
    b"Jean-Baptiste Say": "6cfc49a3e65472edc2d0152abe5ce950170a8a47c959f30bd48b5f0aacf29adbfd",
    "Eugen Böhm von Bawerk".encode(
        "latin-1"
    ): "9bc86e6d974ed21ba04604a94aa68de21677eb409ead070c0cd569b069ee19ba142aa4c1a9",
}


def private_keys():
    return [X25519PrivateKey.from_private_bytes(bytes.fromhex(key)) for key in PRIVATE]


def by_hand(payloads):
    """Both messages of a handshake, with payloads, and the two directions as each end has them."""
    first, second = private_keys()
    ends = [Handshake(PSK, PROLOGUE), Handshake(PSK, PROLOGUE)]
    sent = []
    public = [key.public_key().public_bytes_raw() for key in (first, second)]
    for number, payload in enumerate(payloads):
        for end in ends:
            end.mix_public(public[number])
        if number == 1:
            ends[0].mix_secret(first.exchange(second.public_key()))
            ends[1].mix_secret(second.exchange(first.public_key()))
        encrypted = ends[number].encrypt(payload)
        assert ends[1 - number].decrypt(encrypted) == payload
        sent.append(public[number] + encrypted)
    return sent, [end.split() for end in ends]


def test_messages_are_those_of_another_implementation():
    payloads = list(MESSAGES)
    sent, directions = by_hand(payloads[:2])
    for number, payload in enumerate(payloads[2:]):
        way = number % 2  # they take turns
        sent.append(directions[way][way].encrypt(payload, b""))
        assert directions[1 - way][way].decrypt(sent[-1], b"") == payload
    assert [message.hex() for message in sent] == list(MESSAGES.values())


def test_both_ends_take_these_steps():
    first, second = private_keys()
    sent, _ = by_hand([b"", b""])
    opening = Opening(PSK, PROLOGUE, first)
    reply, _ = reply_to(opening.greeting, PSK, PROLOGUE, second)
    assert [opening.greeting, reply] == sent


class Pair:
    """Both ends of a channel, and what was said to begin it."""

    def __init__(self):
        self.opening = Opening(SECRET, PLACE)
        self.reply, self.there = reply_to(self.opening.greeting, SECRET, PLACE)
        self.here = self.opening.channel(self.reply)


def refused(act, *arguments):
    with pytest.raises(NotAuthentic):
        act(*arguments)


def test_a_channel_carries_messages_both_ways():
    pair = Pair()
    for number in range(5):
        message = [b"header %d" % number, b"a tensor"][: 1 + number % 2]
        sent = pair.here.encrypt(message)
        assert message[0] not in sent[0] and pair.there.decrypt(sent) == message
        assert pair.here.decrypt(pair.there.encrypt(message)) == message


FLIPS = st.tuples(st.integers(0, 10**6), st.integers(0, 7))


def flipped(content, flip):
    """The content with one bit changed."""
    changed = bytearray(content)
    changed[flip[0] % len(changed)] ^= 1 << flip[1]
    return bytes(changed)


@given(FLIPS)
def test_a_handshake_that_was_changed_is_refused(flip):
    opening = Opening(SECRET, PLACE)
    changed = flipped(opening.greeting, flip)
    # X25519 ignores the highest bit of a public key. The hash of what was said does not.
    refused(reply_to, changed, SECRET, PLACE)
    reply, _ = reply_to(opening.greeting, SECRET, PLACE)
    refused(opening.channel, flipped(reply, flip))


@given(st.binary(max_size=100))
def test_whatever_else_is_said_to_begin_a_channel_is_refused(said):
    refused(reply_to, said, SECRET, PLACE)
    refused(Opening(SECRET, PLACE).channel, said)


@pytest.mark.parametrize(
    ("secret", "place"), [(bytes(32), PLACE), (SECRET, b"tcp://10.0.0.2:5555")]
)
def test_another_secret_or_another_place_begins_no_channel(secret, place):
    opening = Opening(SECRET, PLACE)
    refused(reply_to, opening.greeting, secret, place)
    # The same from the other end: who replies without being able to read the greeting.
    reply, _ = reply_to(Opening(secret, place).greeting, secret, place)
    refused(opening.channel, reply)


def test_a_reply_to_one_greeting_is_none_to_another():
    first, second = Pair(), Opening(SECRET, PLACE)
    refused(second.channel, first.reply)


def test_a_public_key_that_makes_every_secret_the_same_is_refused():
    handshake = Handshake(SECRET, PLACE)
    handshake.mix_public(bytes(32))
    refused(reply_to, bytes(32) + handshake.encrypt(b""), SECRET, PLACE)


@given(st.binary(max_size=200), FLIPS)
def test_a_message_that_was_changed_is_refused(content, flip):
    pair = Pair()
    [sent] = pair.here.encrypt([content])
    refused(pair.there.decrypt, [flipped(sent, flip)])
    for cut in (b"", sent[:-1], sent[:15], sent + b"\0"):
        refused(pair.there.decrypt, [cut])
    assert pair.there.decrypt([sent]) == [content]


def test_messages_that_are_repeated_moved_left_out_or_sent_back_are_refused():
    pair = Pair()
    sent = [pair.here.encrypt([b"%d" % number]) for number in range(3)]
    refused(pair.there.decrypt, sent[1])  # one is left out
    assert pair.there.decrypt(sent[0]) == [b"0"]
    refused(pair.there.decrypt, sent[0])  # repeated
    refused(pair.there.decrypt, sent[2])  # moved
    refused(pair.here.decrypt, sent[1])  # sent back
    refused(Pair().there.decrypt, sent[0])  # another connection


def test_what_was_recorded_means_nothing_to_a_new_channel():
    """Though its greeting is repeated too."""
    recorded = Pair()
    sent = recorded.here.encrypt([b"push"])
    reply, there = reply_to(recorded.opening.greeting, SECRET, PLACE)
    assert reply != recorded.reply
    refused(there.decrypt, sent)


def test_frames_that_are_missing_or_too_many_are_refused():
    pair = Pair()
    header, tensor = pair.here.encrypt([b"header", b"tensor"])
    for frames in ([], [header], [header, tensor, tensor]):
        refused(pair.there.decrypt, frames)
    assert pair.there.decrypt([header, tensor]) == [b"header", b"tensor"]


def test_a_channel_ends_before_a_number_comes_twice():
    pair = Pair()
    pair.here._sending.number = pair.there._receiving.number = MOST - 1
    assert pair.there.decrypt(pair.here.encrypt([b"the last"])) == [b"the last"]
    with pytest.raises(OverflowError):
        pair.here.encrypt([b"one more"])
    with pytest.raises(OverflowError):
        pair.there.decrypt([os.urandom(50)])


TENSORS = st.lists(st.binary(min_size=1, max_size=300), min_size=1, max_size=4)


@given(st.binary(max_size=50), st.lists(st.binary(max_size=300), max_size=4))
def test_what_is_enclosed_comes_back(header, tensors):
    enclosed = enclose([header, *tensors])
    assert [bytes(frame) for frame in disclose(enclosed)] == [header, *tensors]


@given(TENSORS, FLIPS, st.data())
def test_tensors_that_were_changed_are_refused(tensors, flip, data):
    header, *encrypted = map(bytes, enclose([b"header", *tensors]))
    chosen = data.draw(st.integers(0, len(tensors) - 1))
    for changed in (flipped(encrypted[chosen], flip), encrypted[chosen][:-1], b"", b"\0" * 15):
        refused(disclose, [header, *encrypted[:chosen], changed, *encrypted[chosen + 1 :]])


def test_tensors_of_another_message_or_in_another_order_are_refused():
    header, first, second = enclose([b"header", b"one tensor", b"another"])
    _, other = enclose([b"header", b"one tensor"])
    refused(disclose, [header, second, first])
    refused(disclose, [header, other, second])


def test_the_same_tensors_are_never_encrypted_alike():
    first, second = (enclose([b"header", b"a tensor"]) for _ in range(2))
    assert first[0] != second[0] and bytes(first[1]) != bytes(second[1])
