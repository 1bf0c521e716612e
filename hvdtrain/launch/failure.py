"""Which rank of a failed job failed first, with its last lines and its exit code."""

from collections.abc import Callable
from pathlib import Path

import click

from hvdtrain.errors import Failure
from hvdtrain.launch.job_log import failure_reason, first_failed, log_text, messages_of
from hvdtrain.launch.recipe import LaunchCommand
from hvdtrain.world.place import read_world

MAX_LINES, MAX_LINE_LENGTH = 12, 200  # shown of a rank that failed


def job_failure(folder: Path, log: Path, exit_code: int, rank_of: Callable[[int], int]) -> Failure:
    """The Failure to raise, with the exit code of the rank that failed first. Its last lines are printed, unless it has
    said itself what was wrong.

    Args:
        folder: the run folder.
        log: what the starter and the ranks printed.
        exit_code: the starter's, negative where a signal ended it.
        rank_of: the rank of a process that the starter numbers.
    """
    first = first_failed(log)
    if first and not messages_of(log, first[0]):
        file = folder / "logs" / f"rank.{rank_of(first[0])}.err"
        if lines := log_text(file).splitlines():  # nothing where the rank has not come so far as to open it
            click.echo(f"the last lines of rank {rank_of(first[0])}, in {file}:", err=True)
        for line in lines[-MAX_LINES:]:
            click.echo(f"    {line[:MAX_LINE_LENGTH]}", err=True)
    failure = Failure(f"the job failed: {failure_reason(log, exit_code, rank_of)}")
    failure.exit_code = first[1] if first else 128 - exit_code if exit_code < 0 else exit_code or 1
    return failure


def rank_of_process(command: LaunchCommand, workers: int, servers: int, process: int) -> int:
    """The rank of a process: horovodrun's numbers, which go host by host, are not our ranks (see `World.started`)."""
    if Path(command.argv[0]).name != "horovodrun":
        return process
    variables = {"RANK": process, "SIZE": workers + servers, "LOCAL_RANK": 0, "LOCAL_SIZE": 1}
    env = command.environment | {f"HOROVOD_{name}": str(value) for name, value in variables.items()}
    return read_world(servers, env).rank
