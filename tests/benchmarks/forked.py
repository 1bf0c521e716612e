"""Whether a rank that was forked from a process with torch loaded trains as fast as a new interpreter does.

    python tests/benchmarks/forked.py --pairs 10

`compare` forks the ranks of runs on this machine (hvdtrain/job/rank/fork_server.py). Here sprints are made both ways
in turns, A B, B A …, of one process, of a ring and of servers. The table has the ratio of their samples/s, forked over
new, and of the seconds that a whole run takes, as geometric means with 95 % intervals by Student's t.
"""

import argparse
import math
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from scipy.special import stdtrit

from hvdtrain.base.config import recipes
from hvdtrain.base.config.run_config import RunConfig
from hvdtrain.launch.forking import fork_server
from hvdtrain.launch.prepare import TrainingJob, prepare
from hvdtrain.launch.processes import launched_job
from hvdtrain.runs.read import load_run

JOBS = (("single", 1, 0), ("allreduce", 2, 0), ("ps-sync", 2, 1))


def run(mode: str, workers: int, servers: int, place: str, out: Path) -> tuple[float, float]:
    """A sprint's samples/s, and the seconds of the whole run."""
    config = RunConfig(
        mode=mode, servers=servers, width=0.125, sprint=1.5, epochs=0, snapshot_every="never"
    )
    began = time.perf_counter()
    command = prepare(
        recipes.launcher("local"), TrainingJob(config, workers, (), out, fork_server=place)
    )
    with launched_job(command, out.with_suffix(".log")) as job:
        code = job.wait()
    if code:
        sys.exit(out.with_suffix(".log").read_text())
    seconds = time.perf_counter() - began
    return load_run(out).summary.samples_per_s or 0.0, seconds


def interval(ratios: list[float]) -> str:
    """Their geometric mean, with its 95 % interval."""
    logs = [math.log(ratio) for ratio in ratios]
    mean = statistics.mean(logs)
    half = float(stdtrit(len(logs) - 1, 0.975)) * statistics.stdev(logs) / math.sqrt(len(logs))
    return f"{math.exp(mean):.3f} ({math.exp(mean - half):.3f} to {math.exp(mean + half):.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--pairs", type=int, default=10)
    pairs = parser.parse_args().pairs
    print("| | samples/s, forked / new | seconds of a run, forked / new | seconds, new |")
    print("|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder, fork_server(Path(folder, "log")) as place:
        for mode, workers, servers in JOBS:
            speeds, times, new = [], [], []
            for pair in range(pairs):
                came = {}
                for forked in (True, False) if pair % 2 else (False, True):
                    out = Path(folder, f"{mode}-{pair}-{forked}")
                    came[forked] = run(mode, workers, servers, place if forked else "", out)
                speeds.append(came[True][0] / came[False][0])
                times.append(came[True][1] / came[False][1])
                new.append(came[False][1])
            print(
                f"| {mode} | {interval(speeds)} | {interval(times)} | {statistics.median(new):.1f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
