"""Has ranks forked from a spare process when a job on this machine is started again: see rank/spare.py."""

import contextlib
import dataclasses
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from hvdtrain.launch import stand_in
from hvdtrain.launch.recipe import LaunchCommand

# Torch reads these when it is loaded; a rank takes its own number of threads later.
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "THP_MEM_ALLOC_ENABLE": "1"}


def through_stand_in(place: Path, program: Sequence[str]) -> list[str]:
    """The command that has a program of ours forked by the spare whose socket that is."""
    return [sys.executable, "-S", "-E", "-P", stand_in.__file__, str(place), *program]


@contextlib.contextmanager
def spare_ranks(command: LaunchCommand, folder: Path) -> Iterator[LaunchCommand]:
    """Have the spare process load what ranks need while the block lasts.

    Args:
        command: starts the job, on this machine.
        folder: gets the spare's socket.

    Returns:
        The command that starts the job again. Its ranks are forked from the spare, or start as before where that is
        not there, or not ready.
    """
    place = folder / "spare"
    words = [sys.executable, "-P", "-m", "hvdtrain"]
    at = next((n for n in range(len(command.argv)) if command.argv[n : n + 4] == words), None)
    if at is None:  # a recipe that starts ranks in another way
        yield command
        return
    folder.mkdir(parents=True, exist_ok=True)
    place.unlink(missing_ok=True)
    mode = [word for word in command.argv if word == "ddp"]  # it alone needs more imports than the others
    spare = subprocess.Popen(
        [sys.executable, "-P", "-m", "hvdtrain.rank.spare", str(place), *mode], env=command.environment | _ENVIRONMENT,
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        yield dataclasses.replace(command, argv=[*command.argv[:at], *through_stand_in(place, command.argv[at:])])
    finally:
        spare.kill()
        spare.wait()
        place.unlink(missing_ok=True)
