"""A rank that is forked from a process that has torch loaded, in place of a new interpreter.

As a program, it is what a starter starts as a rank:

    python -S -E -P forked_rank.py SOCKET PROGRAM…

It asks the fork server (job/rank/fork_server.py) that listens at the socket for a process that runs
PROGRAM. The process has this process's environment, folder, output and namespaces. Signals are
passed on to it. It is killed when this process ends, and this process ends as it does.

The program imports next to nothing of the standard library, and nothing of hvdtrain, so that it is
ready at once.
"""

import json
import os
import select
import signal
import socket
import struct
import sys

PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
NAMESPACES = ("user", "net", "uts", "mnt")  # in the order in which they are entered
LENGTH = struct.Struct("!Q")
NUMBER = struct.Struct("!i")


def ask(
    place: str,
    outputs: tuple[int, int, int],
    program: list[str],
    environment: dict[str, str],
    folder: str,
) -> socket.socket:
    """Asks the fork server at a socket for a process.

    Args:
        place: the socket's path.
        outputs: descriptors that become the process's input, output and errors.
        program: what the process runs: `python -Pm MODULE …` or `python -Pc CODE …`.

    Returns:
        The connection. `number` reads two numbers from it: the process, and its exit code when it
        has ended, negative for a signal. The process is killed when the connection is closed.
    """
    parent, name = os.path.split(place)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    at = os.open(parent, os.O_PATH)  # a socket's path may have no more than 107 bytes
    connection.connect(f"/proc/self/fd/{at}/{name}")
    request = {"program": program, "environment": environment, "folder": folder}
    text = json.dumps(request).encode()
    entered = [os.open(f"/proc/self/ns/{kind}", os.O_RDONLY) for kind in NAMESPACES]
    socket.send_fds(connection, [LENGTH.pack(len(text))], [*outputs, *entered])
    connection.sendall(text)
    for opened in (at, *entered):
        os.close(opened)
    return connection


def number(connection: socket.socket) -> int:
    """Returns the next number that the fork server sends.

    Raises:
        EOFError: the fork server has ended.
    """
    received = connection.recv(NUMBER.size, socket.MSG_WAITALL)
    if len(received) < NUMBER.size:
        raise EOFError("the process that ranks are forked from is gone")
    value: int = NUMBER.unpack(received)[0]
    return value


def _wait_for_answer(connection: socket.socket) -> None:
    """Blocks until there is something to read from the connection, and lets signals be handled.

    Python runs a signal's handler between two of its instructions. So a signal that comes just
    before a blocking call would wait for the end of that call. Here it writes to a socket too.
    """
    woken, waker = socket.socketpair()
    waker.setblocking(False)
    signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
    is_answered = False
    while not is_answered:
        readable, _, _ = select.select([connection, woken], [], [])
        if woken in readable:
            woken.recv(len(PASSED_ON))
        is_answered = connection in readable


def forked_program(place: str, program: list[str]) -> list[str]:
    """Returns the command that has a program forked by the fork server at a socket."""
    return [sys.executable, "-S", "-E", "-P", __file__, place, *program]


def main() -> None:
    """Has the program forked, and ends as it ends."""
    place, *program = sys.argv[1:]
    # Signals that come before there is a rank wait for it.
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
    connection = ask(place, (0, 1, 2), program, dict(os.environ), os.getcwd())
    rank = number(connection)
    for passed in PASSED_ON:
        signal.signal(passed, lambda number, _: os.kill(rank, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
    _wait_for_answer(connection)
    code = number(connection)
    if code < 0:  # a signal ended it, and ends this process too, so that the starter sees that
        if -code in PASSED_ON:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    main()
