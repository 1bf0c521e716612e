"""What --trace costs: steps with it and without, in turns, and how large the trace of eight ranks is.

    python tests/benchmarks/trace.py --rounds 5

Each round runs each mode once with --trace and once without, two workers of the default model; printed are the median
over rounds of the ratio of their median steps, with its range, the same of the processor time of all their processes,
which other work on the machine disturbs less, and the size of trace.pftrace of six workers and two servers in 50 steps,
in 10^6 bytes.
"""

import argparse
import itertools
import statistics
import tempfile
from pathlib import Path

from hvdtrain.config.run_config import RunConfig
from hvdtrain.launch.job_log import failure_reason
from hvdtrain.launch.processes import local_job
from hvdtrain.launch.recipe import train_program
from hvdtrain.runs.live import WARM_UP
from hvdtrain.runs.read import load_run
from hvdtrain.runs.trace_file import TRACE

MODES = {"allreduce": 0, "ddp": 0, "ps-sync": 1, "ps-async": 1}  # and their servers


def train(mode: str, workers: int, servers: int, steps: int, trace: bool, folder: Path) -> Path:
    config = RunConfig(
        mode=mode, servers=servers, steps=steps, threads=1, trace=trace, snapshot_every="never", save="none",
        batch_size=16 * workers,
    )  # fmt: skip
    run, log = folder / f"{mode}-{trace}", folder / "log"
    with local_job("local", workers + servers, train_program(config, run), log) as job:
        code = job.wait()
    if code:
        raise SystemExit(failure_reason(log, code))
    return run


def measured(folder: Path) -> tuple[float, float]:
    """Seconds of the median step, and processor seconds of the job."""
    run = load_run(folder)
    ranks, _ = run.read_steps()
    ends = [[step.time for step in steps[WARM_UP:]] for steps in ranks.values()]
    step = statistics.median(after - before for own in ends for before, after in itertools.pairwise(own))
    return step, sum(process.cpu_s for process in run.summary.processes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--modes", default=",".join(MODES))
    args = parser.parse_args()
    ratios: dict[str, list[tuple[float, float]]] = {mode: [] for mode in args.modes.split(",")}
    for number in range(args.rounds):
        for mode, found in ratios.items():
            seconds = {}
            for trace in (True, False) if number % 2 else (False, True):
                with tempfile.TemporaryDirectory() as folder:
                    seconds[trace] = measured(train(mode, 2, MODES[mode], args.steps, trace, Path(folder)))
            found.append((seconds[True][0] / seconds[False][0], seconds[True][1] / seconds[False][1]))
    for mode, found in ratios.items():
        for what, own in zip(("a traced step takes", "its processor time is"), zip(*found, strict=True), strict=True):
            middle, low, high = (f"{value - 1:+.1%}" for value in (statistics.median(own), min(own), max(own)))
            print(f"{mode:9} {what} {middle} ({low} to {high}, n={len(own)})")
    with tempfile.TemporaryDirectory() as folder:
        size = (train("ps-async", 6, 2, 50, True, Path(folder)) / TRACE).stat().st_size
    print(f"six workers, two servers, 50 steps: {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
