"""What a starter starts in place of a rank in tests: it has the fork server fork the rank.

    python -S -E -P fork_proxy.py SOCKET PROGRAM…

It imports next to nothing, so that it is there at once. The rank has this process's environment, folder, output and
namespaces; signals are passed on to it, and it ends with this process, and this with it. See fork_server.py for the
other end.
"""

import json
import os
import signal
import socket
import struct
import sys

PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
NAMESPACES = ("user", "net", "mnt")  # in the order in which they are entered
LENGTH, NUMBER = struct.Struct("!Q"), struct.Struct("!i")


def main() -> None:
    place, program = sys.argv[1], sys.argv[2:]
    folder, name = os.path.split(place)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    at = os.open(folder, os.O_PATH)  # a socket's path may have no more than 107 bytes
    connection.connect(f"/proc/self/fd/{at}/{name}")
    request = json.dumps({"program": program, "environment": dict(os.environ), "folder": os.getcwd()}).encode()
    entered = [os.open(f"/proc/self/ns/{kind}", os.O_RDONLY) for kind in NAMESPACES]
    socket.send_fds(connection, [LENGTH.pack(len(request))], [0, 1, 2, *entered])
    connection.sendall(request)
    rank = _number(connection)
    for passed in PASSED_ON:
        signal.signal(passed, lambda number, _: os.kill(rank, number))
    code = _number(connection)
    if code < 0:  # it was ended by a signal, and so is this, so that the starter sees it
        if -code in PASSED_ON:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _number(connection: socket.socket) -> int:
    received = connection.recv(NUMBER.size, socket.MSG_WAITALL)
    if len(received) < NUMBER.size:
        print("hvdtrain: the process that ranks are forked from is gone", file=sys.stderr, flush=True)
        os._exit(1)
    return NUMBER.unpack(received)[0]


if __name__ == "__main__":
    main()
