"""Cutting connections of this process."""

import socket
import threading

import pytest

from hvdtrain.base.system.connections import OwnConnections


def connected(listener):
    here = socket.create_connection(listener.getsockname())
    there, _ = listener.accept()
    return here, there


def test_only_what_was_opened_in_the_block_is_cut_and_a_number_that_is_another_s_by_now_is_not():
    own = OwnConnections()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        before = connected(listener)
        with own.opening():
            within, closed = connected(listener), connected(listener)
        for end in closed:
            end.close()
        after = connected(listener)  # has the numbers of the closed ones
        own.cut()
        assert within[0].recv(1) == within[1].recv(1) == b""
        for here, there in (before, after, connected(listener)):  # the listener listens still
            here.sendall(b"x")
            assert there.recv(1) == b"x"
            here.close(), there.close()
        for end in within:
            end.close()


def test_those_of_other_addresses_are_left_alone_at_either_end():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        own = OwnConnections(lambda: {listener.getsockname()})
        with own.opening():
            here, there = connected(listener)
        own.cut()
        for sender, receiver in ((here, there), (there, here)):
            sender.sendall(b"x")
            assert receiver.recv(1) == b"x"
        here.close(), there.close()


def test_nobody_waits_for_a_peer_that_was_to_connect():
    """Nor where it begins to wait only after others have cut."""
    own = OwnConnections(ends_listening=True)
    with socket.create_server(("127.0.0.1", 0)) as before, own.opening():
        with socket.create_server(("127.0.0.1", 0)) as listener:
            cutting = threading.Timer(0.1, own.cut)
            cutting.start()
            with pytest.raises(OSError):
                listener.accept()
        with socket.create_server(("127.0.0.1", 0)) as later, pytest.raises(OSError):
            later.accept()
        for end in connected(before):  # which listened before the block
            end.close()


def test_those_that_are_being_opened_are_cut_too():
    own = OwnConnections()
    with socket.create_server(("127.0.0.1", 0)) as listener, own.opening():
        here, there = connected(listener)
        own.cut()
        assert there.recv(1) == b""
        here.close(), there.close()
