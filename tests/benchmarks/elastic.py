"""How long the survivors of an elastic ring stand still: of three workers one is killed at a random
moment. What becomes of a job of two workers when one that joins is killed at a random moment of
that, and when one that has joined leaves at SIGTERM. And what it costs that all or none take a step:
steps of two workers with --elastic over those without, by Gloo too, in turns.

    python tests/benchmarks/elastic.py ddp --kills 10
    python tests/benchmarks/elastic.py ddp --kills 0 --joins 10
    python tests/benchmarks/elastic.py ddp --kills 0 --leaves 10
    python tests/benchmarks/elastic.py ddp --kills 0 --rounds 3

Each job that loses a worker has to end with 0 in the processes that began, with every step once and
the samples of a job without a kill. The pause is the longest time between two steps of the first
worker; evaluations do not count. Where a worker joins or leaves, what is shown is how long the first
worker took no step, evaluations included.
"""

import argparse
import contextlib
import itertools
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from helpers.jobs import read_rows, started, steps, until
from helpers.launched import Launched

WORKERS, EPOCHS = 3, 3
LATEST_S = 8.0  # after the first step
STANDS_STILL_S = 60.0
JOINING_S = 0.9  # from when a worker is admitted to its first step, and a little more


def job(mode: str, out: Path, kill: random.Random | None) -> tuple[str, float, str]:
    """One job: its digest of samples, the longest pause in seconds, and what is wrong with it."""
    options = ("--mode", mode, "--threads", 1, "--epochs", EPOCHS)
    with Launched(out, "local", WORKERS, 0, *options, place=("--elastic",)) as running:
        running.wait_for_steps(1)
        begun, killed = running.ranks(), -1
        if kill:
            time.sleep(kill.uniform(0, LATEST_S))
            killed = kill.randrange(1, WORKERS)
            begun[killed].kill()
            time.sleep(1)
        alive = {rank for rank, process in begun.items() if process.is_running()}
        said, _ = running.process.communicate(timeout=300)
    if running.process.returncode:
        return "", 0.0, said.strip().splitlines()[-1]
    times, numbers = zip(*((row["time"], row["step"]) for row in steps(out, 0)), strict=True)
    summary = json.loads((out / "summary.json").read_text())
    wrong = ["steps missing or twice"] * (list(numbers) != list(range(1, summary["steps"] + 1)))
    wrong += ["survivors have ended"] * bool(set(range(WORKERS)) - {killed} - alive)
    pause = max(after - before for before, after in itertools.pairwise(times))
    return summary["samples_digest"], pause, "; ".join(wrong)


def joining(out: Path) -> list[dict]:
    """The lives that began after the job had."""
    return [life for life in read_rows(out / "membership.jsonl") if life["pid"] and not life["why"]]


def wait_for_step(running: Launched, more: int) -> float:
    """Waits until the first worker has taken so many steps more.

    Returns:
        The longest time without a step, in seconds; infinite where the job has ended, or the time
        was longer than STANDS_STILL_S.
    """
    last = len(steps(running.out, 0))
    until_step = last + more
    longest = 0.0
    since = time.monotonic()
    while last < until_step:
        count = len(steps(running.out, 0))
        waited = time.monotonic() - since
        longest = max(longest, waited)
        if running.process.poll() is not None or waited > STANDS_STILL_S:
            return float("inf")
        if count > last:
            last = count
            since = time.monotonic()
        time.sleep(0.01)
    return longest


def one_that_joins(running: Launched) -> contextlib.AbstractContextManager:
    return started("forked", 1, "--join", "--trust-model", "--out", str(running.out))


def wait_for_first_step(running: Launched, before: int) -> dict:
    """Waits until a worker has joined and taken a step; returns its life.

    Args:
        before: how many had joined before.
    """
    until(lambda: len(joining(running.out)) > before)
    life = joining(running.out)[-1]
    metrics = running.out / f"metrics.rank{life['rank']}.jsonl"
    first_at = life["joined"]
    until(lambda: metrics.exists() and metrics.stat().st_mtime > first_at)
    return life


def kill_one_that_joins(running: Launched, after_s: float) -> float:
    """Kills a worker so long after it was admitted; returns as wait_for_step."""
    before = len(joining(running.out))
    with one_that_joins(running):
        while len(joining(running.out)) == before:
            time.sleep(0.002)
        time.sleep(after_s)
        os.kill(joining(running.out)[-1]["pid"], signal.SIGKILL)
        return wait_for_step(running, 1)


def leave_after(running: Launched, after_s: float) -> float:
    """Has a worker leave so long after it took its first step; returns as wait_for_step."""
    before = len(joining(running.out))
    with one_that_joins(running) as joined:
        wait_for_first_step(running, before)
        time.sleep(after_s)
        joined.send_signal(signal.SIGTERM)
        pause = wait_for_step(running, 40)
        joined.communicate(timeout=60)
    return pause


def disturb(
    mode: str, folder: Path, count: int, seed: int, act: Callable[[Launched, float], float]
) -> None:
    """Does something so many times to jobs of two workers, at random moments of JOINING_S.

    Args:
        act: does it so many seconds after something, and returns as wait_for_step.
    """
    pauses = []
    tried = 0
    while tried < count:
        out = folder / f"{act.__name__}{tried}"
        options = ("--mode", mode, "--threads", 1, "--epochs", 1000, "--snapshot-every", "never")
        with Launched(out, "local", 2, 0, *options, place=("--elastic",), forked=True) as running:
            running.wait_for_steps(5)
            while tried < count:
                tried += 1
                after_s = random.Random(f"{seed} {tried}").uniform(0, JOINING_S)
                pause = act(running, after_s)
                running.look()
                if pause == float("inf"):
                    break
                pauses.append(pause)
                print(f"after {after_s:.2f} s: {pause:.2f} s", flush=True)
            else:
                running.process.terminate()
            began = time.monotonic()
            said, _ = running.process.communicate(timeout=120)
            if running.process.returncode != 143:
                print(
                    f"after {after_s:.2f} s: the job ended within {time.monotonic() - began:.0f} s: "
                    f"{said.strip().splitlines()[-1]}",
                    flush=True,
                )
    longest = f", standing still {max(pauses):.2f} s at most" if pauses else ""
    print(f"{mode}, {act.__name__}: {len(pauses)} of {count} went on{longest}", flush=True)


def median_step(mode: str, out: Path, place: tuple[str, ...]) -> float:
    """Milliseconds."""
    options = ("--mode", mode, "--threads", 1, "--epochs", EPOCHS, "--snapshot-every", "never")
    options += ("--ring-transport", "gloo") if mode != "ddp" else ()
    with Launched(out, "local", 2, 0, *options, place=place) as running:
        said, _ = running.process.communicate(timeout=300)
    assert running.process.returncode == 0, said
    return 1e3 * json.loads((out / "summary.json").read_text())["step_time"]["p50_s"]


def cost(mode: str, folder: Path, rounds: int) -> None:
    ratios = []
    for number in range(rounds):
        places = {"plain": (), "elastic": ("--elastic",)}
        order = list(places) if number % 2 else list(places)[::-1]
        found = {
            name: median_step(mode, folder / f"{name}{number}", places[name]) for name in order
        }
        ratios.append(found["elastic"] / found["plain"])
        print(
            f"round {number + 1}: {found['elastic']:.2f} ms over {found['plain']:.2f} ms",
            flush=True,
        )
    print(
        f"{mode}: a step has {statistics.median(ratios):.3f} of the time ({min(ratios):.3f} to {max(ratios):.3f})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("mode", choices=("ddp", "allreduce", "sharded"))
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--joins", type=int, default=0)
    parser.add_argument("--leaves", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if asked.rounds:
            cost(asked.mode, Path(folder), asked.rounds)
        if asked.joins:
            disturb(asked.mode, Path(folder), asked.joins, asked.seed, kill_one_that_joins)
        if asked.leaves:
            disturb(asked.mode, Path(folder), asked.leaves, asked.seed, leave_after)
        if not asked.kills:
            return
        digest, longest, _ = job(asked.mode, Path(folder, "undisturbed"), None)
        print(f"undisturbed: the longest step {longest:.2f} s", flush=True)
        pauses = []
        for number in range(asked.kills):
            found, pause, wrong = job(
                asked.mode, Path(folder, str(number)), random.Random(f"{asked.seed} {number}")
            )
            wrong = wrong or "other samples" * (found != digest)
            print(f"kill {number + 1}: {wrong or f'{pause:.2f} s'}", flush=True)
            pauses += [] if wrong else [pause]
    print(f"{asked.mode}: {len(pauses)} of {asked.kills} went on", end="")
    print(
        f", {min(pauses):.2f} to {max(pauses):.2f} s, median {statistics.median(pauses):.2f}"
        if pauses
        else ""
    )


if __name__ == "__main__":
    main()
