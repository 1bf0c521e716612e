"""Whether a worker that is stopped again and again costs its own share and nothing else: no run with a long wait.

    python tests/benchmarks/stalls.py --rounds 50

Each round is a job of two workers and one server; the last worker is stopped for three quarters of each tenth of a
second from its first step on. A line a round: seconds of training, samples/s, and the longest that either worker
waited at once for weights, for a share or for the others. A wait beyond --limit is a stall, as is a job that has not
ended after five minutes; the exit code is 1 where there was one.
"""

import argparse
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from recovery import last_step, victim

PERIOD = 0.1  # seconds
MOST_S = 300.0  # of one job
WAITS = ("comm_s", "lease_s", "barrier_s")


def hold_back(job: subprocess.Popen, rank: int, factor: float, until: float) -> None:
    """Let the rank run for 1/factor of the time, until the job or the process ends, or time.monotonic() is so much."""
    try:
        process = victim(job.pid, rank)
        while job.poll() is None and time.monotonic() < until:
            process.send_signal(signal.SIGSTOP)
            time.sleep(PERIOD * (1 - 1 / factor))
            process.send_signal(signal.SIGCONT)
            time.sleep(PERIOD / factor)
    except psutil.Error:  # it is done
        pass


def one(mode: str, factor: float, epochs: int, width: str) -> tuple[float, float, float]:
    """Seconds of training, samples/s, and the longest wait in seconds; of a job that failed, infinite."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        words = [
            "mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np", "3",
            sys.executable, "-m", "hvdtrain", "train", "--mode", mode, "--servers", "1", "--threads", "1",
            "--epochs", str(epochs), "--width", width, "--snapshot-every", "never", "--save", "none", "--out", str(out),
        ]  # fmt: skip
        began = time.monotonic()
        until = began + MOST_S
        job = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            while job.poll() is None and not last_step(out / "metrics.rank2.jsonl"):
                time.sleep(0.1)
            hold_back(job, 2, factor, until)
            job.wait(max(0.1, until - time.monotonic()))
            summary = json.loads((out / "summary.json").read_text())
        except (subprocess.TimeoutExpired, OSError):
            return time.monotonic() - began, 0.0, float("inf")
        finally:
            job.kill()
            job.wait()
        rows = [json.loads(line) for rank in (1, 2) for line in (out / f"metrics.rank{rank}.jsonl").open()]
        longest = max(row.get(name, 0.0) for row in rows for name in WAITS)
        return summary["wall_s"], summary["samples_per_s"], longest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", default="ps-async", choices=["ps-async", "ps-ssp", "ps-sync"])
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--width", default="auto", help="of the model: a small one where time is short")
    parser.add_argument("--factor", type=float, default=4.0)
    parser.add_argument("--limit", type=float, default=5.0, help="seconds")
    args = parser.parse_args()
    walls, waits = [], []
    for number in range(1, args.rounds + 1):
        wall, rate, longest = one(args.mode, args.factor, args.epochs, args.width)
        walls.append(wall)
        waits.append(longest)
        print(f"{number:>3}  {wall:6.1f} s  {rate:5.0f} samples/s  longest wait {longest:.2f} s", flush=True)
    stalls = sum(wait > args.limit for wait in waits)
    print(
        f"{stalls} of {args.rounds} runs stalled; training {statistics.median(walls):.1f} s ({min(walls):.1f} to "
        f"{max(walls):.1f}), longest wait {statistics.median(waits):.2f} s ({min(waits):.2f} to {max(waits):.2f})"
    )
    sys.exit(bool(stalls))


if __name__ == "__main__":
    main()
