"""What --trace costs: steps that are traced, between others of the same run, and how large a trace of eight ranks is.

    python tests/benchmarks/trace.py --rounds 5

Each round is a run of each mode, two workers of the default model, of which the middle third of the steps is traced:
two runs of one job differ by more than tracing could cost. Printed are the median over rounds of the ratio of the
median traced step to the median of the others, with its range, and the size of trace.pftrace of six workers and two
servers in 50 steps, in 10^6 bytes. What the hooks cost that ask whether a step is traced is in both kinds of steps: so
first, in one process, steps of two models take random turns, one with these hooks and recording, one without.
"""

import argparse
import random
import statistics
import tempfile
import time
from pathlib import Path

import torch
from torch.nn import functional

from hvdtrain import models
from hvdtrain.config.run_config import DEFAULT_WIDTH, RunConfig
from hvdtrain.launch.job_log import failure_reason
from hvdtrain.launch.processes import local_job
from hvdtrain.launch.recipe import train_program
from hvdtrain.numerics.clock import Clock
from hvdtrain.runs.live import WARM_UP
from hvdtrain.runs.read import load_run
from hvdtrain.runs.trace_file import TRACE
from hvdtrain.system import trace

MODES = {"allreduce": 0, "ddp": 0, "ps-sync": 1, "ps-async": 1}  # and their servers


def train(mode: str, workers: int, servers: int, steps: int, traced: str, folder: Path) -> Path:
    config = RunConfig(
        mode=mode, servers=servers, steps=steps, threads=1, trace=True, trace_steps=traced, snapshot_every="never",
        save="none", batch_size=16 * workers,
    )  # fmt: skip
    run, log = folder / mode, folder / "log"
    with local_job("local", workers + servers, train_program(config, run), log) as job:
        code = job.wait()
    if code:
        raise SystemExit(failure_reason(log, code))
    return run


def layers(steps: int) -> float:
    """The median forward and backward whose layers are traced over the median of one without."""
    images, labels = torch.randn(16, 3, 32, 32), torch.randint(0, 10, (16,))
    made, found = [], [[], []]
    for trace.is_on in (False, True):
        model = models.make("vggf", 10, DEFAULT_WIDTH)
        made.append((model, Clock(model, torch.device("cpu"))))
    trace.at_step(1)
    for number in [random.randrange(2) for _ in range(steps)]:
        model, clock = made[number]
        for seconds in ([], found[number]):  # the first after the other model has cold caches
            began = time.perf_counter()
            clock.start()
            functional.cross_entropy(model(images), labels).backward()
            model.zero_grad(set_to_none=True)
            seconds.append(time.perf_counter() - began)
    return statistics.median(found[1]) / statistics.median(found[0])


def measured(folder: Path, first: int, last: int) -> float:
    """The median step from one to another over the median of as many before and after."""
    ranks, _ = load_run(folder).read_steps()
    traced, others = [], []
    for steps in ranks.values():
        for number, step in enumerate(steps, 1):
            if number > WARM_UP and step.shares:
                (traced if first <= number <= last else others).append(step.seconds / step.shares)
    return statistics.median(traced) / statistics.median(others)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--modes", default=",".join(MODES))
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"forward and backward with traced layers take {layers(3 * args.steps) - 1:+.1%}")
    first, last = args.steps // 3 + 1, 2 * args.steps // 3
    ratios: dict[str, list[float]] = {mode: [] for mode in args.modes.split(",")}
    for _ in range(args.rounds):
        for mode, found in ratios.items():
            with tempfile.TemporaryDirectory() as folder:
                run = train(mode, 2, MODES[mode], args.steps, f"{first}-{last}", Path(folder))
                found.append(measured(run, first, last))
    for mode, found in ratios.items():
        middle, low, high = (f"{value - 1:+.1%}" for value in (statistics.median(found), min(found), max(found)))
        print(f"{mode:9} a traced step takes {middle} ({low} to {high}, n={len(found)})")
    with tempfile.TemporaryDirectory() as folder:
        size = (train("ps-async", 6, 2, 50, "1-50", Path(folder)) / TRACE).stat().st_size
    print(f"six workers, two servers, 50 steps: {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
