"""A process that has torch loaded, and forks ranks from it.

It runs as `python -Pm hvdtrain.job.rank.fork_server SOCKET MODULE…`, and ends when its input does.
Each rank is a process of its own, as without it; what it saves is two seconds of imports for each
rank. `compare` starts one for the runs on this machine, most of which last a second. The client is
launch/forked_rank.py.

The server runs no thread and computes nothing, so that forks lack nothing.
"""

import contextlib
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from hvdtrain.base import modes
from hvdtrain.base.errors import Failure
from hvdtrain.base.system.parent import die_with_parent
from hvdtrain.job.rank.preloading import TRAINING, preload
from hvdtrain.launch.forked_rank import LENGTH, NAMESPACES, NUMBER
from hvdtrain.launch.private_network import enter_network

_DESCRIPTORS = 3 + len(NAMESPACES)  # that come with a request


@dataclass(frozen=True)
class _Fork:
    """A rank and its client.

    Attributes:
        ended: a descriptor that can be read when the rank has ended.
    """

    pid: int
    ended: int
    client: socket.socket


class ForkServer:
    """Listens at a socket, forks a rank for each client, and tells the client how the rank ended.

    Args:
        place: the socket's path, in a folder that nobody else may enter.
    """

    def __init__(self, place: Path) -> None:
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        os.umask(0o077)  # nobody else may connect
        folder = os.open(place.parent, os.O_PATH)  # a socket's path may have 107 bytes
        self._listening.bind(f"/proc/self/fd/{folder}/new")
        os.close(folder)
        self._listening.listen(4096)
        place.with_name("new").rename(place)  # whoever finds it may connect
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listening, selectors.EVENT_READ)
        self._selector.register(0, selectors.EVENT_READ)
        self._forks: list[_Fork] = []

    def serve(self) -> None:
        """Blocks until this process's input ends. Ranks that are left then are killed."""
        while True:
            for key, _ in self._selector.select():
                if key.fd == 0:
                    for fork in list(self._forks):
                        self._end(fork, has_ended=False)
                    return
                if key.fileobj is self._listening:
                    self._serve_client()
                elif key.data in self._forks:
                    self._end(key.data, has_ended=key.fd == key.data.ended)

    def _serve_client(self) -> None:
        """Forks a rank for the next client."""
        client, _ = self._listening.accept()
        head, descriptors, *_ = socket.recv_fds(client, LENGTH.size, _DESCRIPTORS)
        text = b""
        if len(head) == LENGTH.size:
            text = client.recv(LENGTH.unpack(head)[0], socket.MSG_WAITALL)
        is_whole = len(descriptors) == _DESCRIPTORS and text.endswith(b"}")
        if is_whole:
            self._fork(client, json.loads(text), descriptors)
        else:  # the client was killed while it asked
            client.close()
        for descriptor in descriptors:
            os.close(descriptor)

    def _fork(
        self, client: socket.socket, request: dict[str, Any], descriptors: Sequence[int]
    ) -> None:
        pid = os.fork()
        if not pid:
            self._close(client)
            _become_rank(request, descriptors)
        fork = _Fork(pid, os.pidfd_open(pid), client)
        self._forks.append(fork)
        self._selector.register(fork.ended, selectors.EVENT_READ, fork)
        self._selector.register(client, selectors.EVENT_READ, fork)
        with contextlib.suppress(OSError):
            client.sendall(NUMBER.pack(pid))

    def _close(self, client: socket.socket) -> None:
        """Closes what a rank must not have open."""
        self._listening.close()
        self._selector.close()
        client.close()
        for fork in self._forks:
            fork.client.close()
            os.close(fork.ended)

    def _end(self, fork: _Fork, has_ended: bool) -> None:
        """Takes leave of a rank that has ended, or ends it since its client has ended.

        The rank's process is gone when this returns, before another is forked in its place.
        """
        if not has_ended:
            os.kill(fork.pid, signal.SIGKILL)
        _, status = os.waitpid(fork.pid, 0)
        with contextlib.suppress(OSError):
            fork.client.sendall(NUMBER.pack(os.waitstatus_to_exitcode(status)))
        self._selector.unregister(fork.ended)
        self._selector.unregister(fork.client)
        os.close(fork.ended)
        fork.client.close()
        self._forks.remove(fork)


def _become_rank(request: dict[str, Any], descriptors: Sequence[int]) -> NoReturn:
    """Makes this process what the client would have been, and runs its program."""
    os.setsid()
    die_with_parent(signal.SIGKILL)
    outputs = descriptors[:3]
    _enter_namespaces(descriptors[3:])
    for number, descriptor in enumerate(outputs):
        os.dup2(descriptor, number)
    for descriptor in descriptors:
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    code: object = 0
    try:
        _run(request["program"])
    except SystemExit as ended:
        code = ended.code
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else bool(code))


def _enter_namespaces(descriptors: Sequence[int]) -> None:
    """Enters the client's namespaces: a job on this machine may have a private network."""
    try:
        enter_network(dict(zip(NAMESPACES, descriptors, strict=True)))
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        print(
            f"hvdtrain: cannot enter the job's namespaces: {error.strerror}: {reason}",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)


def _run(program: Sequence[str]) -> None:
    """Runs a command line of Python: `python -Pm MODULE …` or `python -Pc CODE …`."""
    _, how, what, *arguments = program
    sys.argv = [how, *arguments]
    if how == "-Pc":
        exec(what, {"__name__": "__main__"})
    else:
        runpy.run_module(what, run_name="__main__", alter_sys=True)


def main() -> None:
    """Loads what ranks need, and serves."""
    place, *more = sys.argv[1:]
    try:
        preload([*TRAINING, *more])
    except Failure as error:
        print(f"hvdtrain: {error}")
        sys.exit(1)
    modes.names()  # imports all modes
    ForkServer(Path(place)).serve()
    os._exit(0)


if __name__ == "__main__":
    main()
