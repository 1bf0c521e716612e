"""Where the first rank listens for the others, who know it by MASTER_ADDR."""

import socket

import pytest

from hvdtrain.base.errors import Failure
from hvdtrain.base.world.network import own_addresses
from hvdtrain.job.wire import rendezvous

OWN = next((address for address in own_addresses() if not address.startswith("127.")), None)


@pytest.mark.parametrize(
    ("host", "local", "listens", "reached"),
    [
        ("localhost", True, "127.0.0.1", "127.0.0.1"),
        ("127.0.1.1", False, "0.0.0.0", "127.0.0.1"),  # what Debian has a host's own name mean
        ("203.0.113.7", False, "0.0.0.0", "127.0.0.1"),  # a Service's, or NAT's
        ("2001:db8::7", False, "::", "::1"),
        ("::1", True, "::1", "::1"),
        (OWN, False, OWN, OWN),
    ],
)
def test_the_first_rank_listens_where_others_reach_it(host, local, listens, reached):
    if host is None:
        pytest.skip("there is loopback alone")
    listener, address = rendezvous._listener(host, 0, local)
    with listener:
        assert (listener.getsockname()[0], address) == (listens, reached)
        socket.create_connection((address, listener.getsockname()[1]), timeout=5).close()


def test_a_port_that_is_taken_is_told():
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(Failure, match="Address already in use; choose"),
    ):
        rendezvous._listener("127.0.0.1", taken.getsockname()[1], True)
    with pytest.raises(Failure, match="cannot listen at nosuch.invalid, port 5"):
        rendezvous._listener("nosuch.invalid", 5, False)
