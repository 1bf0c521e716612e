"""Seeing a launched job to its end: what it prints, what it leaves when it fails, and starting it again."""

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import click

from hvdtrain.launch.failure import failure, rank_of
from hvdtrain.launch.processes import sigterm_unwinds, started
from hvdtrain.launch.recipe import Start
from hvdtrain.preempt import EXIT_CODE, leave_file

LEAVING_S = 60.0  # how long ranks may take to save and leave, after SIGTERM
USAGE = 2  # exit code


def log_file(out: Path) -> Path:
    """What a launched job's starter and ranks print, beside the run folder."""
    return out.with_name(f"{out.name}.launch") / "log"


def stop_file(out: Path) -> Path:
    """What a launched job is ended by, while it runs or a scheduler has it."""
    return log_file(out).with_name("running.json")


def see_to_its_end(start: Start, out: Path, workers: int, servers: int, retries: int, leaves_results: bool) -> None:
    """Run a job, again after a failure for so many times: it goes on after its last snapshot.

    Args:
        leaves_results: whether the run folder is complete once the starter has ended: a scheduler's has only begun.

    Raises:
        Failure: it failed, the last time too; with the exit code of the rank that failed first.
        SystemExit: it was ended by SIGTERM.
    """
    log = log_file(out)
    for attempt in range(1, retries + 2):
        code, left = follow(start, log, leave_file(out))
        # An mpirun that lost all its hosts ends with 0.
        if code == 0 and (not leaves_results or (out / "summary.json").is_file()):
            return
        if left:
            click.echo(f"hvdtrain: the job was asked to leave: {_saved(out)}", err=True)
            raise SystemExit(EXIT_CODE)
        failed = failure(out, log, code, partial(rank_of, start, workers, servers))
        if attempt > retries or failed.exit_code == USAGE:
            raise failed
        click.echo(f"hvdtrain: {failed}; starting again, {attempt} of {retries} times", err=True)
        log.rename(log.with_name(f"log.{attempt}"))


def _saved(out: Path) -> str:
    """What a run that was left early can go on from."""
    if snapshots := sorted(path.name for path in (out / "snapshots").glob("step-*[0-9]")):
        return f"`hvdtrain launch --resume --out {out}` goes on after step {int(snapshots[-1][5:])}"
    return "nothing had been saved"


def follow(start: Start, log: Path, leave: Path) -> tuple[int, bool]:
    """Run a job to its end, showing what it prints; its exit code, and whether it was asked to leave.

    SIGTERM asks the ranks to save and leave. Ctrl-C, a second SIGTERM, or LEAVING_S of waiting end it on all hosts.

    Args:
        leave: the file that asks them, where the starter passes no signal on.
    """

    def ask() -> None:
        if start.leave is None:
            leave.touch()
        else:
            process.send_signal(start.leave)

    with sigterm_unwinds(), _removed(leave), started(start, log) as process, log.open("rb") as printed:
        with _asked_to_leave(ask) as asked:
            last = b"\n"
            while True:
                ended = process.poll() is not None
                text = printed.read()
                last = text[-1:] or last
                sys.stdout.buffer.write(text if not ended or last == b"\n" else text + b"\n")
                sys.stdout.flush()
                if ended:
                    return process.returncode, bool(asked)
                if asked and time.monotonic() - asked[0] > LEAVING_S:
                    raise SystemExit(EXIT_CODE)
                time.sleep(0.1)


@contextmanager
def _removed(file: Path) -> Iterator[None]:
    """It is neither there when the block begins nor when it is over."""
    file.unlink(missing_ok=True)
    try:
        yield
    finally:
        file.unlink(missing_ok=True)


@contextmanager
def _asked_to_leave(tell: Callable[[], None]) -> Iterator[list[float]]:
    """`tell` is called at the first SIGTERM, whose time the list holds then; another does what it did before."""
    asked: list[float] = []

    def ask(*_: object) -> None:
        asked.append(time.monotonic())
        signal.signal(signal.SIGTERM, before)
        tell()

    before = signal.signal(signal.SIGTERM, ask)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGTERM, before)
