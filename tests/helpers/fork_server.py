"""A process that has loaded torch, and forks a rank for whoever asks (see fork_proxy.py): real ranks, without two
seconds of imports each. It ends when its input does.

It runs no thread and computes nothing, so that forks lack nothing.
"""

import contextlib
import ctypes
import faulthandler
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import threading
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from helpers.fork_proxy import LENGTH, NAMESPACES, NUMBER
from hvdtrain.system.memory import importing
from hvdtrain.system.parent import die_with_parent

# What ranks import on their way in every mode. None of it starts a thread, which a fork would not have.
MODULES = (
    "hvdtrain.cli", "hvdtrain.rank.command", "hvdtrain.rank.process", "hvdtrain.rank.work", "hvdtrain.modes.single",
    "hvdtrain.modes.allreduce", "hvdtrain.modes.ddp", "hvdtrain.modes.ps_sync", "hvdtrain.modes.ps_async",
    "hvdtrain.modes.ps_ssp", "hvdtrain.wire.zeromq", "torch.utils.tensorboard", "torch.nested._internal.nested_tensor",
    "PIL.PngImagePlugin", "PIL.JpegImagePlugin", "numpy.random", "platformdirs", "tomli_w", "rich._emoji_codes",
    "torch._dynamo", "hvdtrain.checks.replay",
)  # fmt: skip


@dataclass(frozen=True)
class _Fork:
    """A rank, and who asked for it."""

    pid: int
    ended: int  # a file descriptor that can be read when it has
    client: socket.socket


class ForkServer:
    """Listens at the socket, forks a rank for each client, and tells that how it ended."""

    def __init__(self, place: Path) -> None:
        self.listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        os.umask(0o077)  # nobody else may connect
        folder = os.open(place.parent, os.O_PATH)
        self.listening.bind(f"/proc/self/fd/{folder}/new")
        self.listening.listen(4096)
        place.with_name("new").rename(place)  # who finds it may connect
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.listening, selectors.EVENT_READ)
        self.selector.register(0, selectors.EVENT_READ)
        self.forks: list[_Fork] = []

    def serve(self) -> None:
        while True:
            for key, _ in self.selector.select():
                if key.fd == 0:
                    for fork in list(self.forks):
                        self._over(fork, has_ended=False)
                    return
                if key.fileobj is self.listening:
                    self._fork()
                elif key.data in self.forks:
                    self._over(key.data, has_ended=key.fd == key.data.ended)

    def _fork(self) -> None:
        """A rank for the next client."""
        client, _ = self.listening.accept()
        head, handles, *_ = socket.recv_fds(client, LENGTH.size, 3 + len(NAMESPACES))
        text = client.recv(LENGTH.unpack(head)[0], socket.MSG_WAITALL) if len(head) == LENGTH.size else b""
        if len(handles) < 3 + len(NAMESPACES) or not text.endswith(b"}"):  # it was killed while it asked
            for handle in handles:
                os.close(handle)
            client.close()
            return
        pid = os.fork()
        if not pid:
            for opened in (self.listening, self.selector, client, *(fork.client for fork in self.forks)):
                opened.close()
            _become_rank(json.loads(text), handles)
        for handle in handles:
            os.close(handle)
        fork = _Fork(pid, os.pidfd_open(pid), client)
        self.forks.append(fork)
        self.selector.register(fork.ended, selectors.EVENT_READ, fork)
        self.selector.register(client, selectors.EVENT_READ, fork)
        with contextlib.suppress(OSError):
            client.sendall(NUMBER.pack(pid))

    def _over(self, fork: _Fork, has_ended: bool) -> None:
        """The rank has ended, or its client, and so does the rank: before another is forked for its place."""
        if not has_ended:
            os.kill(fork.pid, signal.SIGKILL)
        _, status = os.waitpid(fork.pid, 0)
        with contextlib.suppress(OSError):
            fork.client.sendall(NUMBER.pack(os.waitstatus_to_exitcode(status)))
        for registered in (fork.ended, fork.client):
            self.selector.unregister(registered)
        os.close(fork.ended)
        fork.client.close()
        self.forks.remove(fork)


def _become_rank(request: dict, handles: list[int]) -> NoReturn:
    """Be where the client is, as it was called, and run its program."""
    os.setsid()
    die_with_parent(signal.SIGKILL)
    outputs, namespaces = handles[:3], handles[3:]
    libc = ctypes.CDLL(None, use_errno=True)
    for kind, handle in zip(NAMESPACES, namespaces, strict=True):
        if os.fstat(handle).st_ino != os.stat(f"/proc/self/ns/{kind}").st_ino and libc.setns(handle, 0):
            print(f"hvdtrain: cannot enter the job's {kind} namespace", file=sys.stderr, flush=True)
            os._exit(1)
    for number, handle in enumerate(outputs):
        os.dup2(handle, number)
    for handle in handles:
        os.close(handle)
    faulthandler.register(signal.SIGQUIT)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    _, _, module, *sys.argv[1:] = request["program"]  # python -Pm hvdtrain …
    code: object = 0
    try:
        exec(request.get("first", ""), {"__name__": "__main__"})
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        code = ended.code
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else bool(code))


if __name__ == "__main__":
    with importing():
        for name in MODULES:
            importlib.import_module(name)
    assert len(os.listdir("/proc/self/task")) == 1, "forks would lack the threads that imports have started"
    ForkServer(Path(sys.argv[1])).serve()
    os._exit(0)
