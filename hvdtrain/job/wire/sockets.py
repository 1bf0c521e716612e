"""ZeroMQ's sockets of this process, and who may connect to them.

With a key, which the ranks of the job share, everything is encrypted by CURVE (curvezmq.org, RFC
26), and a process without the key is not let in.
"""

import zmq
from zmq.auth.thread import ThreadAuthenticator

from hvdtrain.base.errors import Failure
from hvdtrain.base.world.network import WIRE_KEY

MOST_SOCKETS = 2**14
LARGEST = 2**30  # bytes of a frame; buckets have at most 32 MiB


def check_key(key: str) -> None:
    """Checks that a key is empty or a secret key of CURVE.

    Raises:
        Failure: it is neither.
    """
    try:
        if key:
            zmq.curve_public(key.encode())
    except (ValueError, zmq.ZMQError):
        raise Failure(
            f"{WIRE_KEY} is no secret key of CURVE, which has 40 characters of Z85"
        ) from None


class Sockets:
    """Makes and closes this process's sockets.

    Args:
        key: CURVE's secret key, or empty.
        timeout: seconds that a handshake may take.
    """

    def __init__(self, key: str, timeout: float) -> None:
        self.timeout = timeout
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, MOST_SOCKETS)
        self._secret = key.encode()
        self._public = zmq.curve_public(self._secret) if key else b""
        self._authenticator = ThreadAuthenticator(self._context) if key else None
        if self._authenticator:  # have ZeroMQ ask who may connect
            self._authenticator.start()
            self._authenticator.configure_curve_callback("*", credentials_provider=self)

    def callback(self, domain: str, key: bytes) -> bool:
        """Returns whether the owner of this public key is let in: called by ZeroMQ."""
        return key == self._public

    def make(self, kind: int) -> "zmq.Socket[bytes]":
        """Returns a new ROUTER, which others connect to, or a DEALER."""
        socket = self._context.socket(kind)
        # Without limits: what is under way is bounded by ps.push_exchange.UNDER_WAY.
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, LARGEST)
        # With a key, the other process's Python has a part in the handshake.
        socket.setsockopt(zmq.HANDSHAKE_IVL, int(1000 * self.timeout))
        if self._secret:
            socket.curve_secretkey = self._secret
            socket.curve_publickey = self._public
            if kind == zmq.ROUTER:
                socket.curve_server = True
            else:
                socket.curve_serverkey = self._public
        return socket

    def close(self) -> None:
        """Closes all sockets at once."""
        if self._authenticator:
            self._authenticator.stop()
        self._context.destroy(linger=0)
