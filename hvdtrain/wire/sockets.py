"""ZeroMQ's sockets of this process, and who may connect to them.

With a key, shared by the ranks of the job, everything is encrypted by CURVE (curvezmq.org, RFC 26), and who does not
have it is not let in.
"""

import zmq
from zmq.auth.thread import ThreadAuthenticator

from hvdtrain.errors import Failure
from hvdtrain.world.network import WIRE_KEY

MOST_SOCKETS = 2**14
LARGEST = 2**30  # bytes of a frame; buckets have at most 32 MiB


def check_key(key: str) -> None:
    """Raises Failure where it is neither empty nor a secret key of CURVE."""
    try:
        if key:
            zmq.curve_public(key.encode())
    except (ValueError, zmq.ZMQError):
        raise Failure(f"{WIRE_KEY} is no secret key of CURVE, which has 40 characters of Z85") from None


class Sockets:
    """
    Args:
        key: CURVE's secret key, or empty.
        patience: seconds that a handshake may take.
    """

    def __init__(self, key: str, patience: float) -> None:
        self.patience = patience
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, MOST_SOCKETS)
        self._secret = key.encode()
        self._public = zmq.curve_public(self._secret) if key else b""
        self._authenticator = ThreadAuthenticator(self._context) if key else None
        if self._authenticator:  # have ZeroMQ ask who may connect
            self._authenticator.start()
            self._authenticator.configure_curve_callback("*", credentials_provider=self)

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether the owner of this public key is let in: whoever has the job's."""
        return key == self._public

    def make(self, kind: int) -> "zmq.Socket[bytes]":
        """A ROUTER, to which others connect, or a DEALER."""
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.SNDHWM, 0)  # what is under way is bounded above: see exchange.UNDER_WAY
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, LARGEST)
        # With a key, the other's Python has a part in it.
        socket.setsockopt(zmq.HANDSHAKE_IVL, int(1000 * self.patience))
        if self._secret:
            socket.curve_secretkey, socket.curve_publickey = self._secret, self._public
            if kind == zmq.ROUTER:
                socket.curve_server = True
            else:
                socket.curve_serverkey = self._public
        return socket

    def close(self) -> None:
        """Close all of them at once."""
        if self._authenticator:
            self._authenticator.stop()
        self._context.destroy(linger=0)
