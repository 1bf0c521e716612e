"""Asking the fork server (fork_server.py) for a rank; and as a program, what a starter starts in place of a rank.

    python -S -E -P fork_proxy.py SOCKET PROGRAM…

It imports next to nothing, so that it is ready at once. The rank has this process's environment, folder, output and
namespaces; signals are passed on to it, and it ends with this process, and this with it.
"""

import json
import os
import signal
import socket
import struct
import sys

PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
NAMESPACES = ("user", "net", "uts", "mnt")  # in the order in which they are entered
LENGTH, NUMBER = struct.Struct("!Q"), struct.Struct("!i")


def ask(place: str, outputs: tuple[int, int, int], **request: object) -> socket.socket:
    """Have the server at that socket fork a rank with these descriptors as its input, output and errors. What comes
    back are two numbers: the rank's process, and when that has ended its exit code. It is killed if this end closes.

    Args:
        request: its `program` (python -Pm MODULE …), `environment` and `folder`, and the code that it runs `first`.
    """
    folder, name = os.path.split(place)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    at = os.open(folder, os.O_PATH)  # a socket's path may have no more than 107 bytes
    connection.connect(f"/proc/self/fd/{at}/{name}")
    text = json.dumps(request).encode()
    entered = [os.open(f"/proc/self/ns/{kind}", os.O_RDONLY) for kind in NAMESPACES]
    socket.send_fds(connection, [LENGTH.pack(len(text))], [*outputs, *entered])
    connection.sendall(text)
    for opened in (at, *entered):
        os.close(opened)
    return connection


def number(connection: socket.socket) -> int:
    """The next number that the server says. EOFError where it has ended."""
    received = connection.recv(NUMBER.size, socket.MSG_WAITALL)
    if len(received) < NUMBER.size:
        raise EOFError("the process that ranks are forked from is gone")
    return NUMBER.unpack(received)[0]


def through_proxy(place: str, program: list[str]) -> list[str]:
    """The command that has a program of ours forked by the server whose socket that is."""
    return [sys.executable, "-S", "-E", "-P", __file__, place, *program]


def fork_ranks(place: str) -> None:
    """Have the ranks of the jobs that this process starts forked by the server at that socket."""
    from dataclasses import replace

    from hvdtrain.launch import prepare

    expand = prepare.expand

    def through_proxies(launcher, spec):
        at = spec.program.index("-Pm") - 1  # what a scheduler starts begins with `env` and variables
        program = [*spec.program[:at], *through_proxy(place, spec.program[at:])]
        return expand(launcher, replace(spec, program=program))

    prepare.expand = through_proxies


def main() -> None:
    connection = ask(sys.argv[1], (0, 1, 2), program=sys.argv[2:], environment=dict(os.environ), folder=os.getcwd())
    rank = number(connection)
    for passed in PASSED_ON:
        signal.signal(passed, lambda number, _: os.kill(rank, number))
    code = number(connection)
    if code < 0:  # it was ended by a signal, and so is this, so that the starter sees it
        if -code in PASSED_ON:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    main()
