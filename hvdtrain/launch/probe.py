"""The program that `preflight` starts on each host: `python -Pm hvdtrain.launch.probe`.

It gets requests as lines of JSON on stdin. The first asks for a description of the host. Once every
host listens, `connect` asks it to try connections to the others. If the network is measured, `send`
asks it to send to another host for a moment.
"""

import contextlib
import hashlib
import json
import os
import shutil
import socket
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from threading import Thread
from typing import Any

from hvdtrain.base.world.network import own_addresses, resolve

PACKAGE = Path(__file__).parent.parent
REPLY_PREFIX = "hvdtrain-probe: "  # tells replies from the output of the shell's start-up files
PATIENCE_S = 5.0  # how long to wait for an answer
BACKLOG = 1024  # connections that the kernel completes by itself
SEND_S = 0.5
# The part of SEND_S that is not measured. A new connection is slow, and a limited link may have
# saved up a burst.
WARM_UP_S = 0.15
CHUNK = bytes(2**18)


def main() -> None:
    request = json.loads(sys.stdin.readline())
    interface, address = choose_interface(request["address"], own_addresses(), request["interface"])
    listening = {"interface": interface, "address": address, "port": serve(address)}
    _reply(software() | describe(request) | listening)
    for line in sys.stdin:  # until preflight closes it
        request = json.loads(line)
        if "connect" in request:
            _reply({"unreachable": unreachable(request["connect"])})
        else:
            _reply({"gbit_s": gbit_s(tuple(request["send"]))})


def _reply(reply: dict[str, Any]) -> None:
    print(REPLY_PREFIX + json.dumps(reply), flush=True)


def software() -> dict[str, Any]:
    """Returns the versions that must be equal on all hosts."""
    digest = hashlib.blake2b(digest_size=8)
    for file in sorted(PACKAGE.rglob("*.py")):
        digest.update(str(file.relative_to(PACKAGE)).encode() + file.read_bytes())
    versions = {name: version(name) for name in ("torch", "horovod")}
    return {
        "Python": sys.version.split()[0],
        **versions,
        "hvdtrain": f"{version('hvdtrain')} ({digest.hexdigest()})",
    }


def describe(request: dict[str, Any]) -> dict[str, Any]:
    """Returns this host's name, hardware, clock, free memory, disk and files.

    Args:
        request: `shared` is a file near the run folder that the launching machine has just made,
            `files` are those that ranks read.
    """
    from hvdtrain.base.system.memory import free_memory
    from hvdtrain.base.world.host import hardware

    shared = Path(request["shared"])
    can_write = False
    disk = 0
    with contextlib.suppress(OSError):
        disk = shutil.disk_usage(shared.parent).free
        tempfile.TemporaryFile(dir=shared.parent).close()
        can_write = True
    name = socket.gethostname()
    return hardware() | {
        "time": time.time(),
        "memory_mb": free_memory() // 2**20,
        "disk_mb": disk // 2**20,
        "gpus": len([*Path("/dev").glob("nvidia[0-9]*")]),
        "name": name,
        "name_address": resolve(name),
        "missing_files": [file for file in request["files"] if not Path(file).exists()],
        "sees_shared_file": shared.is_file(),
        "can_write": can_write,
        "package": str(PACKAGE),
    }


def choose_interface(
    preferred: str, interfaces: dict[str, str], required: str = ""
) -> tuple[str, str]:
    """Returns the interface by which other hosts reach this one, and the address on it.

    They are loopback's if there is no other.

    Args:
        preferred: the address that the launching machine has for this host; loopback if it is the
            same machine.
        interfaces: the interface of each address.
        required: the interface that must be used, or empty.
    """
    usable = [
        address
        for address, interface in interfaces.items()
        if not address.startswith("127.") and required in ("", interface)
    ]
    for address in (preferred, resolve(socket.gethostname()), *usable):
        if address in usable:
            return interfaces[address], address
    return "lo", "127.0.0.1"


def unreachable(request: dict[str, Any]) -> dict[str, str]:
    """Returns the hosts to which this one cannot connect, each with the error.

    Args:
        request: `hosts` has address and port by name; `launcher` is a port of the launching
            machine, or 0 if that is this host.
    """
    targets = {name: (address, port) for name, (address, port) in request["hosts"].items()}
    client = os.environ.get("SSH_CONNECTION", "").split(" ")[0]
    if request["launcher"] and client and ":" not in client:
        targets["this machine"] = (client, request["launcher"])
    with ThreadPoolExecutor(64) as pool:
        errors = pool.map(_connection_error, targets.values())
        return {name: error for name, error in zip(targets, errors, strict=True) if error}


def _connection_error(target: tuple[str, int]) -> str:
    try:
        socket.create_connection(target, timeout=PATIENCE_S).close()
    except OSError as error:
        return f"{target[0]}: {error.strerror or error}"
    return ""


def serve(address: str) -> int:
    """Measures, in threads of this process, what others send to an address. Returns the port."""
    listener = socket.create_server((address, 0), backlog=BACKLOG)

    def accept() -> None:
        while True:
            connection, _ = listener.accept()
            Thread(target=_receive, args=(connection,), daemon=True).start()

    Thread(target=accept, daemon=True, name="measuring the network").start()
    return listener.getsockname()[1]


def _receive(connection: socket.socket) -> None:
    """Receives until the sender ends, and tells it the bytes per second after the warm-up."""
    buffer = bytearray(len(CHUNK))
    total = 0
    began = warm = now = time.perf_counter()
    try:
        with connection:
            connection.settimeout(PATIENCE_S)
            while received := connection.recv_into(buffer):
                now = time.perf_counter()
                if now - began < WARM_UP_S:
                    warm = now
                else:
                    total += received
            connection.sendall(str(total / (now - warm) if now > warm else 0.0).encode())
    except OSError:  # the sender notices it too
        pass


def gbit_s(to: tuple[str, int]) -> float | None:
    """Returns the throughput, in 10^9 bits per second, of one TCP connection to an address.

    None if the other end does not answer.
    """
    try:
        with socket.create_connection(to, timeout=PATIENCE_S) as connection:
            until = time.perf_counter() + SEND_S
            while time.perf_counter() < until:
                connection.sendall(CHUNK)
            connection.shutdown(socket.SHUT_WR)
            return round(8e-9 * float(connection.makefile().read()), 4)
    except (OSError, ValueError):
        return None


if __name__ == "__main__":
    main()
