"""How somebody who wants to join a running job finds it, and who starts its servers again what they had: files in the
run folder that its user alone can read.
"""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hvdtrain.config.run_config import OPEN_WIRES, RunConfig
from hvdtrain.config.untrusted import parse_json, read_whole
from hvdtrain.errors import UsageError
from hvdtrain.world.place import RESPAWNS


@dataclass(frozen=True)
class JoinInfo:
    """Where the ranks of a job find each other.

    Attributes:
        host, port: of their store.
        key: of their wire, or empty.
        ranks: how many the job began with.
        is_local: whether all of them are on one host.
        boot, pid: the first server's machine, since it was started, and process: a job that is all on one machine may
            have a network of its own there.
        servers_return: servers that are killed are started again.
    """

    host: str
    port: int
    key: str
    ranks: int
    is_local: bool
    boot: str
    pid: int
    servers_return: bool = False


def join_file(folder: Path) -> Path:
    return folder / "join.json"


def write_join_info(folder: Path, info: JoinInfo) -> Path:
    """Write it down, and return the file, which is there while the job can be joined."""
    file = join_file(folder)
    write_private(file, asdict(info))
    return file


def write_private(file: Path, content: Any) -> None:
    """Write JSON that its owner alone can read, in place of what is there."""
    part = file.with_suffix(".writing")
    part.unlink(missing_ok=True)
    with open(part, "w", opener=lambda path, flags: os.open(path, flags | os.O_EXCL, 0o600)) as opened:
        json.dump(content, opened)
    os.replace(part, file)


def servers_return(config: RunConfig) -> bool:
    """Whether servers of this job that are killed are started again, as workers are. Not with delay compensation: the
    weights that each worker has, which it needs, are not kept.
    """
    return bool(os.environ.get(RESPAWNS)) and config.wire in OPEN_WIRES and not config.delay_compensation


@dataclass(frozen=True)
class RestartInfo:
    """What is needed to start a server again that was killed. While it runs it is in a file in the run folder.

    Attributes:
        pid: its process.
        memory_fd: as which file descriptor that has the memory of ps.crash_memory.
        memory: and that of wire.shared; -1 where there is none.
    """

    pid: int
    memory_fd: int
    memory: int


def restart_file(folder: Path, rank: int) -> Path:
    return folder / f"return.server{rank}.json"


def remove_join_files(folder: Path) -> None:
    """Nobody can join the job any more, nor bring one of its servers back."""
    for file in [join_file(folder), *folder.glob("return.server*.json")]:
        file.unlink(missing_ok=True)


def write_restart_info(folder: Path, rank: int, restart: RestartInfo) -> Path:
    file = restart_file(folder, rank)
    write_private(file, asdict(restart))
    return file


def read_restart_info(folder: Path, rank: int) -> RestartInfo | None:
    """None where there is none: the server has not begun, or has ended in order."""
    try:
        return RestartInfo(**parse_json(read_whole(restart_file(folder, rank))))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(f"{restart_file(folder, rank)} cannot be read: {error}") from None


def read_join_info(folder: Path) -> JoinInfo:
    """What write_join_info wrote. UsageError where there is none, or nobody can read it."""
    file = join_file(folder)
    try:
        known = parse_json(read_whole(file))
        info = JoinInfo(**known)
        if any(type(value) is not JoinInfo.__annotations__[name] for name, value in asdict(info).items()):
            raise ValueError("it is not as a server writes it")
        return info
    except FileNotFoundError:
        raise UsageError(
            f"{folder} has no job to join: it has not begun to train, has ended, or is a ring without --elastic"
        ) from None
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(f"{file} cannot be read: {error}") from None
