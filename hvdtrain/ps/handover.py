"""How somebody who wants to join a running job finds it: a file in the run folder that its user alone can read."""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from hvdtrain.errors import UsageError


@dataclass(frozen=True)
class Handover:
    """Where the ranks of a job find each other.

    Attributes:
        host, port: of their store.
        key: of their wire, or empty.
        ranks: how many the job began with.
        is_local: whether all of them are on one host.
        boot, pid: the first server's machine, since it was started, and process: a job that is all on one machine may
            have a network of its own there.
    """

    host: str
    port: int
    key: str
    ranks: int
    is_local: bool
    boot: str
    pid: int


def handover_file(folder: Path) -> Path:
    return folder / "join.json"


def hand_over(folder: Path, handover: Handover) -> Path:
    """Write it down, and return the file, which is there while the job can be joined."""
    file = handover_file(folder)
    file.unlink(missing_ok=True)
    with open(file, "w", opener=lambda path, flags: os.open(path, flags | os.O_EXCL, 0o600)) as opened:
        json.dump(asdict(handover), opened)
    return file


def read_handover(folder: Path) -> Handover:
    """What hand_over wrote. UsageError where there is none, or nobody can read it."""
    file = handover_file(folder)
    try:
        known = json.loads(file.read_text())
        handover = Handover(**known)
        if any(type(value) is not Handover.__annotations__[name] for name, value in asdict(handover).items()):
            raise ValueError("it is not as a server writes it")
        return handover
    except FileNotFoundError:
        raise UsageError(f"{folder} has no job to join: it has not begun to train, or has ended") from None
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(f"{file} cannot be read: {error}") from None
