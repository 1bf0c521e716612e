"""What a killed worker costs: work that is done again, and time until the job is where it was.

    python tests/benchmarks/recovery.py --rounds 3
    python tests/benchmarks/recovery.py --respawn 20

For each mode, a job of two workers under `hvdtrain launch --retries 1`, a snapshot every two seconds of training; its
second worker is killed in the middle. In ps-async the other one goes on. With --respawn, `hvdtrain launch --respawn`
starts the second worker of a ps-async job again that often: how fast the first one is outside the second after a kill,
beside the time before the first kill.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import psutil

MODES = {"allreduce": 0, "ddp": 0, "ps-sync": 1, "ps-async": 1}
UNDISTURBED_S, BETWEEN_S = 20.0, 2.0


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
    words = [sys.executable, "-m", "hvdtrain", "launch", "-n", "2", "-s", str(servers), "--retries", "1"]
    words += ["--out", str(out)]
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


def survivor(kills: int, folder: Path) -> None:
    """Prints how long a step of the worker that is not killed takes, before the kills and between them."""
    out = folder / "run"
    words = [sys.executable, "-m", "hvdtrain", "launch", "-n", "2", "-s", "1", "--respawn", "--out", str(out), "--"]
    train = ["--mode", "ps-async", "--wire", "zmq", "--epochs", "1000", "--threads", "1", "--snapshot-every", "never"]
    job = subprocess.Popen([*words, *train], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    metrics = out / "metrics.rank1.jsonl"
    after_kills = set[int]()
    back = []
    try:
        while last_step(metrics) < 100:
            time.sleep(0.1)
        began = written(metrics)
        time.sleep(UNDISTURBED_S)
        first_kill = written(metrics)
        for _ in range(kills):
            life = life_of(out, 2)
            (psutil.Process(life["pid"]) if life["pid"] else victim(job.pid, 2)).kill()
            killed, before = time.perf_counter(), written(metrics)
            while life_of(out, 2)["member"] == life["member"]:
                time.sleep(0.01)
            back.append(time.perf_counter() - killed)
            time.sleep(max(0.0, 1 - back[-1]))
            after_kills |= set(range(before, written(metrics) + 2))
            time.sleep(BETWEEN_S)
        rows = [json.loads(line) for line in metrics.read_text().split("\n")[:-1]]
    finally:
        job.terminate()
        job.wait()
    steps = [later["time"] - earlier["time"] for earlier, later in pairwise(rows)]  # steps[n] is that of rows[n + 1]
    alone = steps[began : first_kill - 1]
    between = [step for n, step in enumerate(steps[first_kill:], first_kill + 1) if n not in after_kills]
    print(f"{kills} kills; another worker was there after {statistics.median(back):.1f} s (at most {max(back):.1f} s)")
    for name, found in (("before the kills", alone), ("between them", between)):
        print(
            f"{name}: {len(found)} steps of the other worker, {1e3 * statistics.fmean(found):.1f} ms each "
            f"(median {1e3 * statistics.median(found):.1f})"
        )
    print(f"speed between the kills over that before: {statistics.fmean(alone) / statistics.fmean(between):.3f}")


def written(metrics: Path) -> int:
    return metrics.read_text().count("\n")


def life_of(run: Path, rank: int) -> dict:
    """The last life of the worker at that rank."""
    rows = [json.loads(line) for line in (run / "membership.jsonl").read_text().split("\n")[:-1]]
    return [row for row in rows if row["rank"] == rank][-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--respawn", type=int, default=0, metavar="KILLS")
    args = parser.parse_args()
    if args.respawn:
        with tempfile.TemporaryDirectory() as folder:
            survivor(args.respawn, Path(folder))
        return
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
