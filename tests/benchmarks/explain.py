"""Whether `hvdtrain explain` is right: jobs with a worker made slow, and as many without,
explained.

    python tests/benchmarks/explain.py --out explain-check
    python tests/benchmarks/explain.py --cases 4 --out explain-check
    python tests/benchmarks/explain.py --repeats 3 --out explain-check

A case is a mode, 2 or 4 workers, and one of them, drawn, made 2, 4 or 8 times as slow; beside it
runs the same job with nobody made slow. All thirty take about half an hour on two idle cores;
--cases does some of them, in an order that mixes modes. Finished runs in the folder stay, so that
what reads them can be changed and tried again.

All workers of a case sleep so much that together they compute on a quarter of the cores, and so
seldom meet there, as machines of a cluster do not: --slow all:8x for four workers on two cores.
--as-fast-as-they-can leaves that out; what is counted about speeds then says more about the
machine, where it has not far more cores than there are workers.

Counts runs whose slow rank was named, clean ones in which none was, runs whose parts of a step add
up to it within 2 %, where "without the straggler" is within 7 % of the clean run's samples/s, and
where the slow run's are within 10 % of theory, which starts from the clean run: in lockstep as slow
as the slowest, asynchronous the sum of the rates.

A machine that others use too computes faster in one minute than in the next, by a tenth or more,
and what explain says of a run is at the speed of that run. So "without the straggler" is compared a
second time, with both runs as fast at computing: the speed is taken from the workers that nobody
made slow. --repeats runs each case so often, slow and clean in turns: a case is then as far off as
the median of its repeats' errors, which have signs, and names and sums are counted over all runs.
"""

import argparse
import itertools
import json
import math
import random
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from hvdtrain.base import modes
from hvdtrain.base.system.cgroups import usable_cores
from hvdtrain.runs.live import WARM_UP
from hvdtrain.runs.read import load_run
from hvdtrain.runs.schema import each_share, read_steps

MODES = ("allreduce", "ddp", "ps-sync", "ps-ssp", "ps-async")
FACTORS, WORKERS = (2, 4, 8), (2, 4)
BATCH = 16  # of a worker


class Case(NamedTuple):
    mode: str
    workers: int
    factor: int
    slow: int  # the worker
    seed: int

    @property
    def servers(self) -> int:
        return int(self.mode.startswith("ps-"))


def cases(count: int) -> list[Case]:
    draw = random.Random(0)
    grid = list(itertools.product(MODES, WORKERS, FACTORS))
    draw.shuffle(grid)
    return [
        Case(mode, n, factor, draw.randrange(n), seed)
        for seed, (mode, n, factor) in enumerate(grid[:count])
    ]


def hvdtrain(*words: object) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "hvdtrain", *map(str, words)], capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(
            f"hvdtrain {' '.join(map(str, words))}: {(done.stderr or done.stdout).strip()[-2000:]}"
        )
    return done.stdout


def explained(case: Case, slow: str, folder: Path, steps: int) -> dict[str, Any]:
    """The job, unless it is there, and what explain says of it."""
    if not (folder / "summary.json").exists():
        shutil.rmtree(folder, ignore_errors=True)  # what an interrupted job left
        hvdtrain(
            "launch",
            "-n",
            case.workers,
            "-s",
            case.servers,
            "--out",
            folder,
            "--",
            "--mode",
            case.mode,
            "--slow",
            slow,
            "--steps",
            steps,
            "--batch-size",
            BATCH * case.workers,
            "--threads",
            1,
            "--seed",
            case.seed,
            "--snapshot-every",
            "never",
            "--save",
            "none",
        )
    file = folder / "explained.json"
    hvdtrain("explain", folder, "--json", file)
    return json.loads(file.read_text())


def measured_step_s(run: Path) -> float:
    """Mean seconds from the end of a step to that of the next, of all that workers take in the same
    time: explain's step, by the clock.
    """
    steps = []
    for file in run.glob("metrics.rank*.jsonl"):
        ends = [share.time for share in each_share(read_steps(file)[0])][WARM_UP - 1 :]
        steps.append((ends[-1] - ends[0]) / (len(ends) - 1))
    return statistics.harmonic_mean(steps)


def computing_s(run: Path, but: int | None = None) -> float:
    """Mean seconds that a step computes, over all workers, or all but this one."""
    ranks, _ = load_run(run).read_steps()
    return statistics.fmean(
        statistics.fmean(
            (step.forward_s + step.backward_s) / step.shares
            for step in steps[WARM_UP:]
            if step.shares
        )
        for name, steps in ranks.items()
        if name != f"rank{but}"
    )


def expected_speed(case: Case, clean: Path, parts: dict[str, float]) -> float:
    """Samples/s in theory, from the run without a slow worker, and what explain says of its steps.

    Where workers wait for each other, all are as slow as the slowest; asynchronous workers' rates
    add up. What of a step is not computing stays as it was, except that equal workers in lockstep
    wait for the one that happens to be the slowest in a step, and that ends where one always is.
    """
    summary = load_run(clean).summary
    seconds, base = summary.step_seconds, summary.samples_per_s or 0.0
    longer = (case.factor - 1) * (seconds["forward"] + seconds["backward"]) / sum(seconds.values())
    if case.mode == "ps-async":
        return base * (case.workers - 1 + 1 / (1 + longer)) / case.workers
    if modes.declared(case.mode).lockstep:
        longer = max(0.0, longer - parts["waiting_for_slowest"] / sum(parts.values()))
    return base / (1 + longer)


class Outcome(NamedTuple):
    """What explain said of a case's two runs, and how far off it was."""

    named: bool
    clean: bool
    whole: bool
    error: float  # of "without the straggler"
    as_fast: float  # the same, with both runs as fast at computing
    theory: float


def outcome(case: Case, name: str, out: Path, of_all: int, steps: int) -> Outcome:
    """Run a case once, slow and clean, unless that is there, and print what explain says of it."""
    folders = [out / f"{name}-{kind}" for kind in ("slow", "clean")]
    slow = explained(case, f"all:{of_all}x+{case.slow}:{case.factor}x", folders[0], steps)
    none = explained(case, f"all:{of_all}x", folders[1], steps)
    rank = case.servers + case.slow
    error = slow["what_if"]["without_straggler"]["samples_per_s"] / none["samples_per_s"] - 1
    as_fast = (1 + error) * computing_s(folders[0], rank) / computing_s(folders[1]) - 1
    theory = slow["samples_per_s"] / expected_speed(case, folders[1], none["parts"]) - 1
    sums = [
        abs(sum(run["parts"].values()) / measured_step_s(folder) - 1)
        for run, folder in zip((slow, none), folders, strict=True)
    ]
    print(
        f"{name}: named {slow['straggler']} of rank {rank}, {slow['factor'] or 1:.1f} times; clean: "
        f"{none['straggler']}; without it {slow['samples_per_s']:.0f} would be "
        f"{slow['what_if']['without_straggler']['samples_per_s']:.0f} samples/s, and were "
        f"{none['samples_per_s']:.0f} ({error:+.1%}, as fast at computing {as_fast:+.1%}); "
        f"beside theory {theory:+.1%}; parts off by {max(sums):.1%}",
        flush=True,
    )
    return Outcome(
        slow["straggler"] == rank,
        none["straggler"] is None,
        max(sums) <= 0.02,
        error,
        as_fast,
        theory,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=30)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--as-fast-as-they-can", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("explain-check"))
    args = parser.parse_args()
    if args.repeats < 1:
        parser.error("--repeats: 1 or more")
    outcomes: list[Outcome] = []  # of all runs
    middle: list[list[float]] = []  # of each case, the medians of error, as_fast and theory
    for number, case in enumerate(cases(args.cases)):
        name = f"{number:02}-{case.mode}-w{case.workers}-{case.slow}x{case.factor}"
        of_all = (
            1 if args.as_fast_as_they_can else max(1, math.ceil(4 * case.workers / usable_cores()))
        )
        names = [name, *(f"{name}-repeat{repeat}" for repeat in range(1, args.repeats))]
        of_case = [outcome(case, name, args.out.absolute(), of_all, args.steps) for name in names]
        outcomes += of_case
        middle.append(
            [
                statistics.median(column)
                for column in zip(*(one[3:] for one in of_case), strict=True)
            ]
        )
    total = len(outcomes)
    named, clean, whole = (sum(column) for column in list(zip(*outcomes, strict=True))[:3])
    errors, as_fast, theory = (
        [abs(error) for error in column] for column in zip(*middle, strict=True)
    )
    of_each = f" (medians of {args.repeats})" if args.repeats > 1 else ""
    print(
        f"named in {named} of {total}, none in {clean} of {total} clean ones; parts add up in {whole} of {total}; "
        f"of {len(middle)} cases{of_each}, without the straggler: {summary(errors, 0.07)}, as fast at computing "
        f"{summary(as_fast, 0.07)}; theory: {summary(theory, 0.1)}"
    )


def summary(errors: list[float], bar: float) -> str:
    within = sum(error <= bar for error in errors)
    return f"within {bar:.0%} in {within}, median {statistics.median(errors):.1%}, largest {max(errors):.1%}"


if __name__ == "__main__":
    main()
