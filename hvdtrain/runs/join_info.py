"""Files in the run folder by which a worker joins a running job, and a killed server restarts.

Their owner alone can read them.
"""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hvdtrain.base.config.run_config import OPEN_WIRES, RunConfig
from hvdtrain.base.config.untrusted import LARGEST_DOCUMENT, parse_json, read_whole
from hvdtrain.base.config.writing import write_whole
from hvdtrain.base.errors import UsageError
from hvdtrain.base.world.place import RESPAWNS


@dataclass(frozen=True)
class JoinInfo:
    """The rendezvous of a job's ranks.

    Attributes:
        host, port: the address of the ranks' store.
        key: the key of their wire, or empty.
        ranks: how many ranks the job began with.
        is_local: whether all ranks are on one host.
        boot: the boot id of the first server's machine.
        pid: the first server's process. A job on one machine may have a private network there.
        servers_return: whether servers that are killed are started again.
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
    """Writes the info and returns the file, which exists while the job can be joined."""
    file = join_file(folder)
    write_private(file, asdict(info))
    return file


def write_private(file: Path, content: Any) -> None:
    """Writes or replaces a JSON file that its owner alone can read."""
    write_whole(file, json.dumps(content), mode=0o600)


def servers_return(config: RunConfig) -> bool:
    """Returns whether servers of this job that are killed are started again, as workers are.

    They are not with delay compensation, which needs a copy of each worker's weights that no memory
    keeps.
    """
    are_ranks_restarted = bool(os.environ.get(RESPAWNS))
    return are_ranks_restarted and config.wire in OPEN_WIRES and not config.delay_compensation


MEMORY_NAME = "hvdtrain-kept"  # of the memory that outlives a killed server


@dataclass(frozen=True)
class RestartInfo:
    """Where the memory of a running server is, for the server that replaces it if it is killed.

    Attributes:
        pid: the server's process.
        memory_fd: the process's file descriptor of the memory of ps.crash_memory.
        memory: the process's file descriptor of the memory of wire.shared; -1 if there is none.
    """

    pid: int
    memory_fd: int
    memory: int


def restart_file(folder: Path, rank: int) -> Path:
    return folder / f"return.server{rank}.json"


def remove_join_files(folder: Path) -> None:
    """Removes the files, so that no worker can join the job and no server can be restarted."""
    for file in [join_file(folder), *folder.glob("return.server*.json")]:
        file.unlink(missing_ok=True)


def write_restart_info(folder: Path, rank: int, restart: RestartInfo) -> Path:
    file = restart_file(folder, rank)
    write_private(file, asdict(restart))
    return file


def read_restart_info(folder: Path, rank: int) -> RestartInfo | None:
    """Returns the server's info; None if the server has not begun, or has ended in order.

    Raises:
        UsageError: the file cannot be read.
    """
    file = restart_file(folder, rank)
    try:
        values = parse_json(read_whole(file, LARGEST_DOCUMENT))
        return RestartInfo(**values)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(f"{file} cannot be read: {error}") from None


def read_join_info(folder: Path) -> JoinInfo:
    """Returns what write_join_info wrote.

    Raises:
        UsageError: there is no file, or it cannot be read.
    """
    file = join_file(folder)
    try:
        values = parse_json(read_whole(file, LARGEST_DOCUMENT))
        info = JoinInfo(**values)
        for name, value in asdict(info).items():
            if type(value) is not JoinInfo.__annotations__[name]:
                raise ValueError("it is not as a server writes it")
        return info
    except FileNotFoundError:
        raise UsageError(
            f"{folder} has no job to join: it has not begun to train, has ended, or is a ring "
            "without --elastic"
        ) from None
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(f"{file} cannot be read: {error}") from None
