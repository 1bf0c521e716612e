"""What a killed worker costs: work that is done again, and time until the job is where it was.

    python tests/benchmarks/recovery.py --rounds 3

For each mode, a job of two workers under `hvdtrain launch --retries 1`, a snapshot every two seconds of training; its
second worker is killed in the middle. In ps-async the other one goes on.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

MODES = {"allreduce": 0, "ddp": 0, "ps-sync": 1, "ps-async": 1}


def last_step(metrics: Path) -> int:
    lines = metrics.read_text().splitlines() if metrics.is_file() else []
    whole = [line for line in lines if line.endswith("}")]
    return json.loads(whole[-1])["step"] if whole else 0


def victim(job: int, rank: int) -> psutil.Process:
    for child in psutil.Process(job).children(recursive=True):
        try:
            if child.environ().get("OMPI_COMM_WORLD_RANK") == str(rank):
                return child
        except psutil.Error:
            continue
    sys.exit(f"rank {rank} is not there")


def measure(mode: str, servers: int, folder: Path) -> tuple[int, float]:
    """Steps that are taken again, and seconds from the kill until as many steps are done as there were."""
    out = folder / "run"
    words = [
        sys.executable,
        "-m",
        "hvdtrain",
        "launch",
        "-n",
        "2",
        "-s",
        str(servers),
        "--retries",
        "1",
        "--out",
        str(out),
    ]
    train = ["--mode", mode, "--epochs", "12", "--threads", "1", "--snapshot-every", "2s"]
    job = subprocess.Popen([*words, "--", *train], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    metrics = out / f"metrics.rank{servers}.jsonl"
    try:
        while last_step(metrics) < 300 and job.poll() is None:
            time.sleep(0.02)
        victim(job.pid, servers + 1).kill()
        killed = time.perf_counter()
        reached, saved = last_step(metrics), 0
        while time.perf_counter() - killed < 120:
            now = last_step(metrics)
            if mode == "ps-async":
                if now > reached:
                    break
            elif now < reached:  # cut back to the snapshot
                saved = saved or now
            elif saved:
                break
            time.sleep(0.02)
        took = time.perf_counter() - killed
        return (reached - saved if saved else 0), took
    finally:
        job.terminate()
        job.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    found: dict[str, list[tuple[int, float]]] = {mode: [] for mode in MODES}
    for _ in range(args.rounds):
        for mode, servers in MODES.items():
            with tempfile.TemporaryDirectory() as folder:
                found[mode].append(measure(mode, servers, Path(folder)))
    for mode, rounds in found.items():
        steps, seconds = zip(*rounds, strict=True)
        print(
            f"{mode:<10} {statistics.median(steps):4.0f} steps again ({min(steps)} to {max(steps)}), "
            f"{statistics.median(seconds):5.1f} s ({min(seconds):.1f} to {max(seconds):.1f}) until where it was"
        )


if __name__ == "__main__":
    main()
