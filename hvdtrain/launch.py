"""Starts the ranks of a job as a launcher's recipe says, and sees to it that none outlives it."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil

from hvdtrain import recipes
from hvdtrain.config import RunConfig
from hvdtrain.errors import Failure

GRACE_S = 5.0  # between asking ranks to stop and making them


def command(launcher: str, ranks: int, program: list[str], survives: bool = False) -> list[str]:
    """The words that start `ranks` processes of `program` by a launcher's recipe.

    Args:
        survives: whether the other ranks are to live when one dies.
    """
    recipe = recipes.load("launchers", launcher)
    words: list[str] = []
    for word in recipe["command"]:
        if word == "{program}":
            words += program
        elif word == "{survive}":
            words += recipe["survive"] if survives else []
        else:
            words.append(word.format(bin=Path(sys.executable).parent, ranks=ranks))
    return words


def train_program(config: RunConfig, out: Path) -> list[str]:
    """What each rank of a job runs."""
    return [sys.executable, "-m", "hvdtrain", "train", *config.to_args(), "--out", str(out)]


@contextlib.contextmanager
def running(
    launcher: str,
    ranks: int,
    program: list[str],
    log: Path,
    environment: Mapping[str, str] | None = None,
    survives: bool = False,
) -> Iterator[subprocess.Popen[bytes]]:
    """A job while it runs; whatever is left of it when the block ends, by an exception too, is ended.

    Args:
        log: takes what the launcher and the ranks print.
        environment: variables for the ranks, beside those of the recipe.
        survives: whether the other ranks are to live when one dies.

    Raises:
        Failure: the launcher cannot be started.
    """
    words = command(launcher, ranks, program, survives)
    env = os.environ | recipes.load("launchers", launcher).get("environment", {}) | dict(environment or {})
    with log.open("wb") as output:
        try:
            process = subprocess.Popen(
                words, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                start_new_session=True, preexec_fn=_die_with_parent,
            )  # fmt: skip
        except OSError as error:
            raise Failure(f"cannot start {words[0]}: {error.strerror}; see `hvdtrain doctor`") from None
        try:
            yield process
        finally:
            end(process)


def end(process: "subprocess.Popen[bytes]") -> None:
    """End a job: SIGTERM to its launcher, which ends the ranks, then, after GRACE_S, SIGKILL to whatever is left.

    Where the launcher has gone already, its ranks and what they started are told themselves.
    """
    family = _family(process.pid)
    if process.poll() is None:
        process.terminate()
    else:
        for orphan in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                orphan.terminate()
    deadline = time.monotonic() + GRACE_S
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(GRACE_S)
    _, alive = psutil.wait_procs(family, timeout=max(0.0, deadline - time.monotonic()))
    survivors = list({*alive, *_family(process.pid)})  # and what was started meanwhile
    for survivor in survivors:
        with contextlib.suppress(psutil.NoSuchProcess):
            survivor.kill()
    process.kill()
    process.wait()
    psutil.wait_procs(survivors, timeout=GRACE_S)


def _family(launcher: int) -> list[psutil.Process]:
    """All processes of the launcher's session, orphans too, and those below it that have left the session."""
    found = set()
    with contextlib.suppress(psutil.NoSuchProcess):
        found.update(psutil.Process(launcher).children(recursive=True))
    for pid in psutil.pids():
        with contextlib.suppress(OSError, psutil.NoSuchProcess):
            if pid != launcher and os.getsid(pid) == launcher:
                found.add(psutil.Process(pid))
    return list(found)


def reason(log: Path, code: int) -> str:
    """Why a job failed, in one line, from what its ranks printed."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    ours = [line.removeprefix("hvdtrain: ") for line in lines if line.startswith("hvdtrain: ")]
    return ours[0] if ours else f"exit code {code}: {lines[-1] if lines else 'no output'} (see {log})"


def _die_with_parent() -> None:
    """Linux: have the kernel end this process when its parent dies, however that happens."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)
