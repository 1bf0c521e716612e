"""How long the survivors of an elastic ring stand still: of three workers one is killed at a random
moment. And what it costs that all or none take a step: steps of two workers with --elastic over
those without, by Gloo too, in turns.

    python tests/benchmarks/elastic.py ddp --kills 10
    python tests/benchmarks/elastic.py ddp --kills 0 --rounds 3

Each job has to end with 0 in the processes that began, with every step once and the samples of a
job without a kill. The pause is the longest time between two steps of the first worker; evaluations
do not count.
"""

import argparse
import itertools
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from helpers.jobs import steps
from helpers.launched import Launched

WORKERS, EPOCHS = 3, 3
LATEST_S = 8.0  # after the first step


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
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if asked.rounds:
            cost(asked.mode, Path(folder), asked.rounds)
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
