"""What a host says of itself before a job starts: `python -m hvdtrain.launch.probe`, run there by `preflight`.

It is asked twice, in lines of JSON: what is there; and, when every host listens, whom it can connect to.
"""

import hashlib
import json
import os
import socket
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parent.parent
MARK = "hvdtrain-probe: "  # before an answer; what a shell's start-up files print has none
CONNECT_S = 5.0
BACKLOG = 1024  # nobody accepts: the kernel answers so many


def main() -> None:
    question = json.loads(sys.stdin.readline())
    interfaces = own_addresses()
    interface, address = choose(question["address"], interfaces, question["interface"])
    with socket.create_server((address, 0), backlog=BACKLOG) as listener:
        listening = {"interface": interface, "address": address, "port": listener.getsockname()[1]}
        _say(software() | place(question) | listening)
        _say(unreachable(json.loads(sys.stdin.readline())))
        sys.stdin.readline()  # until the others have tried


def _say(answer: dict[str, Any]) -> None:
    print(MARK + json.dumps(answer), flush=True)


def software() -> dict[str, Any]:
    """What must be equal on all hosts."""
    digest = hashlib.blake2b(digest_size=8)
    for file in sorted(PACKAGE.rglob("*.py")):
        digest.update(str(file.relative_to(PACKAGE)).encode() + file.read_bytes())
    versions = {name: version(name) for name in ("torch", "horovod")}
    return {"Python": sys.version.split()[0], **versions, "hvdtrain": f"{version('hvdtrain')} ({digest.hexdigest()})"}


def place(question: dict[str, Any]) -> dict[str, Any]:
    """What this host is called and has.

    Args:
        question: `shared`, a file beside the run folder that was just made elsewhere; `files` that ranks read.
    """
    import psutil

    from hvdtrain.doctor.machine import memory_limit

    shared = Path(question["shared"])
    name = socket.gethostname()
    return {
        "time": time.time(),
        "memory_mb": int(min(psutil.virtual_memory().available, memory_limit())) // 2**20,
        "name": name,
        "name_means": _resolved(name),
        "absent": [file for file in question["files"] if not Path(file).exists()],
        "shares": shared.is_file(),
        "writes": _can_write(shared.parent),
        "where": str(PACKAGE),
    }


def own_addresses() -> dict[str, str]:
    """This host's IPv4 addresses, each with its interface's name."""
    import psutil

    addresses = psutil.net_if_addrs().items()
    return {a.address: name for name, own in addresses for a in own if a.family == socket.AF_INET}


def choose(known: str, interfaces: dict[str, str], named: str = "") -> tuple[str, str]:
    """The interface, and the address on it, that others reach this host by: loopback where there is no other.

    Args:
        known: the address that the launcher has for this host; it may be loopback, if this is the launcher's.
        interfaces: each address's.
        named: the interface that it must be, if any.
    """
    others = [a for a, interface in interfaces.items() if not a.startswith("127.") and named in ("", interface)]
    for address in (known, _resolved(socket.gethostname()), *others):
        if address in others:
            return interfaces[address], address
    return "lo", "127.0.0.1"


def unreachable(question: dict[str, Any]) -> dict[str, str]:
    """Whom this host cannot connect to, and why.

    Args:
        question: `hosts`, address and port by name; `launcher`, the port there, 0 where that is this host.
    """
    targets = {name: (address, port) for name, (address, port) in question["hosts"].items()}
    client = os.environ.get("SSH_CONNECTION", "").split(" ")[0]
    if question["launcher"] and client and ":" not in client:
        targets["this machine"] = (client, question["launcher"])
    with ThreadPoolExecutor(64) as pool:
        errors = pool.map(_try, targets.values())
        return {name: error for name, error in zip(targets, errors, strict=True) if error}


def _try(target: tuple[str, int]) -> str:
    try:
        socket.create_connection(target, timeout=CONNECT_S).close()
    except OSError as error:
        return f"{target[0]}: {error.strerror or error}"
    return ""


def _resolved(name: str) -> str:
    try:
        return socket.gethostbyname(name)
    except OSError:
        return ""


def _can_write(folder: Path) -> bool:
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:
        return False
    return True


if __name__ == "__main__":
    main()
