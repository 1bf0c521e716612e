"""Short runs of one process, which show what a training step takes beside its layers."""

import dataclasses
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from hvdtrain.base.config.run_config import RunConfig
from hvdtrain.base.errors import UsageError
from hvdtrain.base.world.load import FOREIGN_SHARE
from hvdtrain.planning.check import finished
from hvdtrain.planning.watch import MOST_TIMES, Watch
from hvdtrain.runs.read import Run

# A run trains for so many seconds. It ends within LIMIT_S, or does not count.
SPRINT_S = 3.0
LIMIT_S = 40.0
# Of a longer step, what is beside the layers is a small part, and a sprint has too few of them.
LONGEST_STEP_S = 0.2


@contextmanager
def sprints(
    config: RunConfig, batch: int, threads: Sequence[int], say: Callable[[str], None]
) -> Iterator[list[Run]]:
    """Trains with one process for a few seconds, with each of these numbers of threads.

    A run beside other work is made again, and does not count if it is disturbed again. Nor does a
    run that fails.

    Args:
        config: has the model, dataset, optimizer and image size.
        batch: samples of a step.
        threads: the numbers of threads.
        say: shows the user a line.

    Yields:
        The runs. Their folders are gone at the end of the block.
    """
    say("training: one process, for some seconds …")
    with tempfile.TemporaryDirectory(prefix="hvdtrain-calibrate-") as folder:
        runs = []
        for number in threads:
            run = _undisturbed(config, batch, number, Path(folder), say)
            if run is not None:
                runs.append(run)
        yield runs


def _undisturbed(
    config: RunConfig, batch: int, threads: int, folder: Path, say: Callable[[str], None]
) -> Run | None:
    for attempt in range(MOST_TIMES):
        out = folder / f"{threads}-{attempt}"
        watch = Watch()
        try:
            run = _sprint(config, batch, threads, out)
        except (OSError, subprocess.SubprocessError, UsageError) as error:
            say(f"a training is left out: {_reason(error)}")
            return None
        if watch.others() <= FOREIGN_SHARE:
            return run
    say("a training is left out: the machine did other work")
    return None


def _reason(error: Exception) -> str:
    """Returns why a training failed: the last line that it printed, if it printed one."""
    printed = getattr(error, "stderr", None) or b""
    lines = printed.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else str(error)


def _sprint(config: RunConfig, batch: int, threads: int, out: Path) -> Run:
    """Returns a run of `SPRINT_S`.

    Raises:
        OSError, subprocess.SubprocessError, UsageError: it failed.
    """
    of_sprint = dataclasses.replace(
        config, mode="single", device="cpu", batch_size=batch, threads=threads, sprint=SPRINT_S
    )
    command = [sys.executable, "-Pm", "hvdtrain", "train", "--out", str(out)]
    command += of_sprint.to_args()
    subprocess.run(command, check=True, capture_output=True, timeout=LIMIT_S)
    return finished(out)
