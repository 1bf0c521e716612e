"""How `hvdtrain launch` tells that a job failed: which rank, its last lines, and the exit code."""

from collections.abc import Callable
from pathlib import Path

import click

from hvdtrain.errors import Failure
from hvdtrain.launch.processes import first_failed, reason
from hvdtrain.launch.recipe import Start
from hvdtrain.world import read_world

LAST_LINES, LONGEST_LINE = 12, 200  # of a rank that failed


def failure(folder: Path, log: Path, code: int, rank: Callable[[int], int]) -> Failure:
    """What to raise when a job ended without results; the last lines of the rank that failed first are shown.

    Args:
        folder: the run folder.
        log: what the starter and the ranks printed.
        code: the starter's exit code, negative where a signal ended it.
        rank: of a process that the starter numbers.
    """
    first = first_failed(log)
    if first:
        _show_last_lines(folder, rank(first[0]))
    found = Failure(f"the job failed: {reason(log, code, rank)}")
    found.exit_code = first[1] if first else 128 - code if code < 0 else code or 1
    return found


def rank_of(start: Start, workers: int, servers: int, process: int) -> int:
    """The rank of a process, which horovodrun counts host by host; see `World.started`."""
    if Path(start.words[0]).name != "horovodrun":
        return process
    place = {"RANK": process, "SIZE": workers + servers, "LOCAL_RANK": 0, "LOCAL_SIZE": 1}
    env = start.environment | {f"HOROVOD_{name}": str(value) for name, value in place.items()}
    return read_world(servers, env).rank


def _show_last_lines(out: Path, rank: int) -> None:
    """What a rank wrote last into its log of errors, on stderr; nothing where it came to no log."""
    file = out / "logs" / f"rank.{rank}.err"
    if file.is_file() and (lines := file.read_text(errors="replace").splitlines()):
        click.echo(f"the last lines of rank {rank}, in {file}:", err=True)
        for line in lines[-LAST_LINES:]:
            click.echo(f"    {line[:LONGEST_LINE]}", err=True)
