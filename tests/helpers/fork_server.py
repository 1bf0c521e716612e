"""A process that has loaded torch, and forks a rank for each proxy (see fork_proxy.py) that asks for one.

It runs no thread and computes nothing, so that forks lack nothing.
"""

import contextlib
import ctypes
import json
import os
import runpy
import selectors
import signal
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from helpers.fork_proxy import LENGTH, NAMESPACES, NUMBER
from hvdtrain.system.parent import die_with_parent


@dataclass(frozen=True)
class _Fork:
    """A rank, and the proxy that it is for."""

    pid: int
    ended: int  # a file descriptor that can be read when it has
    proxy: socket.socket


class ForkServer:
    """Listens at the socket, forks a rank for each proxy, and tells that how it ended."""

    def __init__(self, place: Path) -> None:
        self.listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        os.umask(0o077)  # nobody else may connect
        folder = os.open(place.parent, os.O_PATH)
        self.listening.bind(f"/proc/self/fd/{folder}/{place.name}")
        self.listening.listen(4096)
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.listening, selectors.EVENT_READ)
        self.forks: list[_Fork] = []

    def serve(self) -> NoReturn:
        while True:
            for key, _ in self.selector.select():
                if key.fileobj is self.listening:
                    self._fork()
                elif key.data in self.forks:
                    self._over(key.data, has_ended=key.fd == key.data.ended)

    def _fork(self) -> None:
        """A rank for the next proxy."""
        proxy, _ = self.listening.accept()
        head, handles, *_ = socket.recv_fds(proxy, LENGTH.size, 3 + len(NAMESPACES))
        text = proxy.recv(LENGTH.unpack(head)[0], socket.MSG_WAITALL) if len(head) == LENGTH.size else b""
        if len(handles) < 3 + len(NAMESPACES) or not text.endswith(b"}"):  # it was killed while it asked
            for handle in handles:
                os.close(handle)
            proxy.close()
            return
        pid = os.fork()
        if not pid:
            self.listening.close()
            self.selector.close()
            for fork in self.forks:
                fork.proxy.close()
            proxy.close()
            _become_rank(json.loads(text), handles)
        for handle in handles:
            os.close(handle)
        fork = _Fork(pid, os.pidfd_open(pid), proxy)
        self.forks.append(fork)
        self.selector.register(fork.ended, selectors.EVENT_READ, fork)
        self.selector.register(proxy, selectors.EVENT_READ, fork)
        with contextlib.suppress(OSError):
            proxy.sendall(NUMBER.pack(pid))

    def _over(self, fork: _Fork, has_ended: bool) -> None:
        """The rank has ended, or its proxy, and so does the rank: before another is forked for its place."""
        if not has_ended:
            os.kill(fork.pid, signal.SIGKILL)
        _, status = os.waitpid(fork.pid, 0)
        with contextlib.suppress(OSError):
            fork.proxy.sendall(NUMBER.pack(os.waitstatus_to_exitcode(status)))
        for registered in (fork.ended, fork.proxy):
            self.selector.unregister(registered)
        os.close(fork.ended)
        fork.proxy.close()
        self.forks.remove(fork)


def _become_rank(request: dict, handles: list[int]) -> NoReturn:
    """Be where the proxy is, as it was called, and run its program."""
    die_with_parent(signal.SIGKILL)
    *outputs, user, network, mounts = handles
    libc = ctypes.CDLL(None, use_errno=True)
    for kind, handle in zip(NAMESPACES, (user, network, mounts), strict=True):
        if os.fstat(handle).st_ino != os.stat(f"/proc/self/ns/{kind}").st_ino and libc.setns(handle, 0):
            print(f"hvdtrain: cannot enter the job's {kind} namespace", file=sys.stderr, flush=True)
            os._exit(1)
    for number, handle in enumerate(outputs):
        os.dup2(handle, number)
    for handle in handles:
        os.close(handle)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    _, _, module, *sys.argv[1:] = request["program"]  # python -Pm hvdtrain …
    code: object = 1
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        code = ended.code
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code if isinstance(code, int) else bool(code))
