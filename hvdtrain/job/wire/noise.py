"""Encrypted channels between processes that share a secret, by the protocol NNpsk0 of Noise.

The Noise Protocol Framework (noiseprotocol.org, revision 34) defines it, with X25519, AES-256-GCM
and SHA-256. It is a published protocol, and other implementations have test vectors. What it gives:

- Each process proves with its first message that it has the secret.
- A channel has keys of its own, one for each direction. What was recorded means nothing to another
  channel, or to the process that sent it.
- A message's number is its nonce, and both ends count. So a message that was changed, left out,
  repeated or moved is noticed.
- The keys come from private keys that are thrown away: who learns the secret later cannot read what
  was recorded.

A nonce must not come twice with one key (NIST SP 800-38D, section 8). A channel's nonce is a counter
of 64 bits, which ends before it begins again.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

NAME = b"Noise_NNpsk0_25519_AESGCM_SHA256"  # 32 bytes: as long as a hash, as Noise wants it
KEY = 32  # bytes of a secret, of a public key, and of a key of AES
TAG = 16  # bytes that authenticate a message
NONCE = 12  # bytes of a nonce
MOST = 2**64 - 1  # messages of a direction


class NotAuthentic(ValueError):
    """The other process did not send this, or not now."""


class Cipher:
    """Encrypts one direction of a channel, or decrypts it.

    Args:
        key: 32 bytes.

    Attributes:
        number: the number of the next message, from 0.
    """

    def __init__(self, key: bytes) -> None:
        self.number = 0
        self._aes = AESGCM(key)

    def encrypt(self, content: Any, context: bytes) -> bytes:
        """Encrypts the next message.

        Args:
            content: the message's bytes.
            context: what the other end has to know to decrypt the message.

        Raises:
            OverflowError: this direction has had all its messages.
        """
        encrypted = self._aes.encrypt(self._nonce(), content, context)
        self.number += 1
        return encrypted

    def decrypt(self, encrypted: Any, context: bytes) -> bytes:
        """Decrypts the next message; see encrypt.

        Raises:
            NotAuthentic: it is not the next message, or was changed.
            OverflowError: this direction has had all its messages.
        """
        try:
            content = self._aes.decrypt(self._nonce(), memoryview(encrypted), context)
        except InvalidTag:
            raise NotAuthentic from None
        self.number += 1
        return content

    def _nonce(self) -> bytes:
        if self.number >= MOST:
            raise OverflowError("a channel has had all its messages")
        return self.number.to_bytes(NONCE)


class Channel:
    """Encrypts and decrypts the headers of messages. Their tensors have keys of their own.

    Args:
        sending, receiving: the two directions.
    """

    def __init__(self, sending: Cipher, receiving: Cipher) -> None:
        self._sending = sending
        self._receiving = receiving

    def encrypt(self, frames: Sequence[Any]) -> list[Any]:
        """Returns the frames of the next message to send, with an encrypted header."""
        header, *tensors = frames
        return [self._sending.encrypt(header, _number(tensors)), *tensors]

    def decrypt(self, frames: Sequence[Any]) -> list[Any]:
        """Returns the frames of the next message that has come, with a readable header.

        Raises:
            NotAuthentic: the header is not that of the next message, or frames are missing.
        """
        if not frames:
            raise NotAuthentic
        header, *tensors = frames
        return [self._receiving.decrypt(header, _number(tensors)), *tensors]


def _number(tensors: Sequence[Any]) -> bytes:
    return len(tensors).to_bytes(8)


class Handshake:
    """What two processes have told each other while they begin a channel.

    Noise calls it SymmetricState. Both ends mix the same things into it. Where they differ, nothing
    can be decrypted.

    Args:
        secret: 32 bytes that both processes have.
        place: what both have to name as well, in the clear: Noise's prologue.
    """

    def __init__(self, secret: bytes, place: bytes) -> None:
        self._chain = NAME
        self._hash = NAME
        self._mix_hash(place)
        mixed, key = self._derive(secret, 2)
        self._mix_hash(mixed)
        self._cipher = Cipher(key)

    def mix_public(self, public: bytes) -> None:
        """Mixes in a public key that was sent."""
        self._mix_hash(public)
        self.mix_secret(public)

    def mix_secret(self, secret: bytes) -> None:
        """Mixes in what is not sent. What is encrypted from now on depends on it."""
        [key] = self._derive(secret, 1)
        self._cipher = Cipher(key)

    def encrypt(self, content: bytes) -> bytes:
        encrypted = self._cipher.encrypt(content, self._hash)
        self._mix_hash(encrypted)
        return encrypted

    def decrypt(self, encrypted: bytes) -> bytes:
        """Raises NotAuthentic where the other process has mixed in something else."""
        content = self._cipher.decrypt(encrypted, self._hash)
        self._mix_hash(encrypted)
        return content

    def split(self) -> tuple[Cipher, Cipher]:
        """Returns the channel's directions: from the process that has begun, and to it."""
        from_first, to_first = _hkdf(self._chain, b"", 2)
        return Cipher(from_first), Cipher(to_first)

    def _mix_hash(self, sent: bytes) -> None:
        self._hash = hashlib.sha256(self._hash + sent).digest()

    def _derive(self, secret: bytes, number: int) -> list[bytes]:
        """Moves the chain of keys on; returns so many keys beside it."""
        self._chain, *keys = _hkdf(self._chain, secret, 1 + number)
        return keys


def _hkdf(salt: bytes, secret: bytes, number: int) -> list[bytes]:
    """Returns so many keys by HKDF (RFC 5869), as Noise uses it."""
    keys = HKDF(SHA256(), KEY * number, salt, b"").derive(secret)
    return [keys[start : start + KEY] for start in range(0, len(keys), KEY)]


class Opening:
    """The end that begins a channel.

    Args:
        secret, place: see Handshake.
        own: a private key; None: a new one.

    Attributes:
        greeting: what to send to the other end.
    """

    def __init__(self, secret: bytes, place: bytes, own: X25519PrivateKey | None = None) -> None:
        self._own = own or X25519PrivateKey.generate()
        self._handshake = Handshake(secret, place)
        public = self._own.public_key().public_bytes_raw()
        self._handshake.mix_public(public)
        self.greeting = public + self._handshake.encrypt(b"")

    def channel(self, reply: bytes) -> Channel:
        """Returns the channel.

        Args:
            reply: what the other end has replied. It counts once.

        Raises:
            NotAuthentic: the other end has another secret, or replies to something else.
        """
        public, proof = _read(reply)
        self._handshake.mix_public(public)
        self._handshake.mix_secret(_agree(self._own, public))
        self._handshake.decrypt(proof)
        sending, receiving = self._handshake.split()
        return Channel(sending, receiving)


def reply_to(
    greeting: bytes, secret: bytes, place: bytes, own: X25519PrivateKey | None = None
) -> tuple[bytes, Channel]:
    """Takes part in a channel that another process begins.

    The greeting may be a repeated one. That the other process has the secret now, its first message
    in the channel proves.

    Args:
        greeting: what the other process has sent.
        secret, place: see Handshake.
        own: a private key; None: a new one.

    Returns:
        The reply to send, and the channel.

    Raises:
        NotAuthentic: the other process has another secret, or names another place.
    """
    peer, proof = _read(greeting)
    handshake = Handshake(secret, place)
    handshake.mix_public(peer)
    handshake.decrypt(proof)
    own = own or X25519PrivateKey.generate()
    public = own.public_key().public_bytes_raw()
    handshake.mix_public(public)
    handshake.mix_secret(_agree(own, peer))
    reply = public + handshake.encrypt(b"")
    receiving, sending = handshake.split()
    return reply, Channel(sending, receiving)


def _read(message: bytes) -> tuple[bytes, bytes]:
    """Returns the public key and the proof in a message of a handshake."""
    if len(message) != KEY + TAG:
        raise NotAuthentic
    return message[:KEY], message[KEY:]


def _agree(own: X25519PrivateKey, public: bytes) -> bytes:
    try:
        return own.exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:  # this public key gives the same result with every private key
        raise NotAuthentic from None
