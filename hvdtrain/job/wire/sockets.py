"""ZeroMQ's sockets of this process, and who may connect to them.

With a key, which the ranks of the job share, everything is encrypted, and a process without the key
is not let in:

- ZeroMQ asks for a password (PLAIN, its RFC 24), which follows from the key. It keeps strangers'
  bytes out of this process's memory.
- A channel is begun on each connection (`noise`), and all that follows is in it. The password is
  sent in clear: whoever has recorded it can connect, and can fill memory with what means nothing.

ZeroMQ's own encryption, CURVE, takes 3 ms of a core for each MB. AES takes 0.3 ms, since processors
have instructions for it.
"""

import contextlib
import logging
import struct
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import zmq
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

from hvdtrain.base.errors import Failure
from hvdtrain.base.world.network import WIRE_KEY
from hvdtrain.job.wire.messages import CONNECTION_ENDED
from hvdtrain.job.wire.noise import KEY, TAG, Channel, NotAuthentic, Opening, reply_to
from hvdtrain.job.wire.packing import Frames, receive, send

MOST_SOCKETS = 2**14
LARGEST = 2**30  # bytes of a frame; buckets have at most 32 MiB
USER = "hvdtrain"
# Channels that peers have begun and have not used yet, and that peers have used. Of each kind, the
# one that was not used for the longest time is forgotten where there are more.
MOST_GREETED = 2**12
MOST_CHANNELS = 2**14
PEER = 5  # bytes of the name that ZeroMQ gives a peer; this job's peers choose none
NO_KEY = "it does not have this job's key"  # why a rank is lost


def secret_of(key: str) -> bytes:
    """Returns the 32 bytes of a key; none where there is no key.

    Raises:
        Failure: it is no key.
    """
    try:
        secret = z85.decode(key)
    except (ValueError, KeyError, struct.error):
        secret = b"no key"
    if len(secret) not in (0, KEY):
        raise Failure(f"{WIRE_KEY} is no key: a key has 40 characters of Z85")
    return secret


class Line:
    """The connection to a rank that is called.

    Args:
        socket: a DEALER that connects to the rank.
    """

    def __init__(self, socket: "zmq.Socket[bytes]") -> None:
        self.socket = socket

    def send(self, frames: Frames) -> None:
        """Sends a message.

        Raises:
            zmq.ZMQError: the rank cannot take it.
        """
        send(self.socket, frames)

    def receive(self) -> Frames | None:
        """Returns a message, without frames where it is none for the caller; None: there is none.

        Raises:
            NotAuthentic: the rank is not to be trusted, with the reason.
        """
        return receive(self.socket) or None


class SecretLine(Line):
    """A connection that is encrypted.

    Args:
        socket: see Line.
        secret: the job's secret.
        endpoint: where the rank listens. A rank that listens elsewhere does not answer.
    """

    def __init__(self, socket: "zmq.Socket[bytes]", secret: bytes, endpoint: str) -> None:
        super().__init__(socket)
        opening = Opening(secret, endpoint.encode())
        self._state: Opening | Channel = opening
        self._waiting: list[Frames] = []  # until there is a channel
        # The rank may have refused the connection already, as an event will tell.
        with contextlib.suppress(zmq.ZMQError):
            send(socket, [opening.greeting])

    def send(self, frames: Frames) -> None:
        if isinstance(self._state, Channel):
            send(self.socket, self._state.encrypt(frames))
        else:
            self._waiting.append(frames)

    def receive(self) -> Frames | None:
        frames = receive(self.socket)
        if not frames:
            return None
        if isinstance(self._state, Opening):
            self._begin(self._state, frames)
            return []
        try:
            return self._state.decrypt(frames)
        except NotAuthentic:
            raise NotAuthentic(CONNECTION_ENDED) from None

    def _begin(self, opening: Opening, frames: "Sequence[zmq.Frame]") -> None:
        try:
            self._state = opening.channel(frames[0].bytes)
        except NotAuthentic:
            raise NotAuthentic(NO_KEY) from None
        with contextlib.suppress(zmq.ZMQError):  # the rank is gone, as an event will tell
            for waiting in self._waiting:
                self.send(waiting)
        self._waiting.clear()


class Listener:
    """The socket at which peers call this rank.

    Args:
        socket: a ROUTER that listens.

    Attributes:
        endpoint: where it listens.
    """

    def __init__(self, socket: "zmq.Socket[bytes]") -> None:
        self.socket = socket
        self.endpoint = socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def send(self, peer: bytes, frames: Frames) -> None:
        """Sends a message to a peer. Where the peer is gone, nobody gets it."""
        send(self.socket, [peer, *frames])

    def receive(self) -> list[Any] | None:
        """Returns the peer's frame and the frames of its message; None: there is no message.

        There are no frames where the message is none for the caller.
        """
        return receive(self.socket) or None

    def hang_up(self, peer: bytes) -> None:
        """Ends the connection with a peer that is not to be trusted."""


class SecretListener(Listener):
    """A socket where all connections are encrypted.

    A peer is whoever ZeroMQ has a connection with: a process that connects again is another peer.

    Args:
        socket: see Listener.
        secret: the job's secret.
    """

    def __init__(self, socket: "zmq.Socket[bytes]", secret: bytes) -> None:
        super().__init__(socket)
        self._secret = secret
        # Both are in the order of use. Those of peers that have gone stay, as long as there is room.
        self._channels: OrderedDict[bytes, Channel] = OrderedDict()
        self._greeted: OrderedDict[bytes, Channel] = OrderedDict()

    def send(self, peer: bytes, frames: Frames) -> None:
        channel = self._channels.get(peer)
        if channel:
            send(self.socket, [peer, *channel.encrypt(frames)])

    def receive(self) -> list[Any] | None:
        frames = receive(self.socket)
        if not frames:
            return None
        if len(frames[0]) != PEER:
            return []
        peer = frames[0].bytes
        channel = self._channels.get(peer) or self._greeted.get(peer)
        if channel is None:
            self._greet(peer, frames)
            return []
        try:
            message = channel.decrypt(frames[1:])
        except NotAuthentic:
            self.hang_up(peer)
            return []
        self._keep(peer, channel)
        return [frames[0], *message]

    def hang_up(self, peer: bytes) -> None:
        self._channels.pop(peer, None)
        self._greeted.pop(peer, None)
        self._say(peer, b"")  # nobody can decrypt that: the peer ends its connection

    def _greet(self, peer: bytes, frames: "Sequence[zmq.Frame]") -> None:
        """Begins a channel with a peer, if it has sent a greeting."""
        if len(frames[1]) != KEY + TAG:  # before it is copied: anybody may have sent it
            return
        try:
            reply, channel = reply_to(frames[1].bytes, self._secret, self.endpoint.encode())
        except NotAuthentic:
            return
        self._greeted[peer] = channel
        if len(self._greeted) > MOST_GREETED:
            self._greeted.popitem(last=False)
        self._say(peer, reply)

    def _say(self, peer: bytes, words: bytes) -> None:
        with contextlib.suppress(zmq.ZMQError):  # the peer is gone
            send(self.socket, [peer, words])

    def _keep(self, peer: bytes, channel: Channel) -> None:
        """Keeps a channel that was used: its peer has the secret."""
        self._greeted.pop(peer, None)
        self._channels[peer] = channel
        self._channels.move_to_end(peer)
        if len(self._channels) > MOST_CHANNELS:
            self._channels.popitem(last=False)


class Sockets:
    """Makes and closes this process's sockets.

    Args:
        key: the job's key, or empty.
        timeout: seconds that ZeroMQ's handshake may take.

    Attributes:
        secret: the key's bytes; empty: nothing is encrypted.

    Raises:
        Failure: it is no key.
    """

    def __init__(self, key: str, timeout: float) -> None:
        self.secret = secret_of(key)
        self.timeout = timeout
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, MOST_SOCKETS)
        self._password = _password(self.secret) if key else ""
        # pyzmq would log the password.
        silent = logging.Logger("zmq.auth", logging.CRITICAL)
        self._authenticator = ThreadAuthenticator(self._context, log=silent) if key else None
        if self._authenticator:  # have ZeroMQ ask for the password
            self._authenticator.start()
            self._authenticator.configure_plain("*", {USER: self._password})

    def listen(self, address: str) -> Listener:
        """Returns a socket that others connect to.

        Args:
            address: `tcp://ADDRESS:PORT`; `*` is any port.

        Raises:
            zmq.ZMQError: this process cannot listen there.
        """
        socket = self.make(zmq.ROUTER)
        socket.bind(address)
        return SecretListener(socket, self.secret) if self.secret else Listener(socket)

    def connect(self, dealer: "zmq.Socket[bytes]", endpoint: str) -> Line:
        """Connects a DEALER to the rank that listens there."""
        dealer.connect(endpoint)
        if not self.secret:
            return Line(dealer)
        return SecretLine(dealer, self.secret, endpoint)

    def make(self, kind: int) -> "zmq.Socket[bytes]":
        """Returns a new ROUTER, which others connect to, or a DEALER."""
        socket = self._context.socket(kind)
        # Without limits: what is under way is bounded by buckets.send_queue.UNDER_WAY.
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, LARGEST)
        # With a key, the other process's Python has a part in the handshake.
        socket.setsockopt(zmq.HANDSHAKE_IVL, int(1000 * self.timeout))
        if self._password and kind == zmq.ROUTER:
            socket.plain_server = True
        elif self._password:
            socket.plain_username = USER.encode()
            socket.plain_password = self._password.encode()
        return socket

    def close(self) -> None:
        """Closes all sockets at once."""
        if self._authenticator:
            self._authenticator.stop()
        self._context.destroy(linger=0)


def _password(secret: bytes) -> str:
    """Returns what shows that a process has the secret, and does not tell the secret."""
    return HKDF(SHA256(), KEY, None, b"hvdtrain's password for ZeroMQ").derive(secret).hex()
