"""Small run folders for the tests of the report: what a job writes, with figures that follow from a
speed.
"""

import json
import math
from importlib.metadata import version
from pathlib import Path

from hvdtrain import reporting
from hvdtrain.reporting import plots
from hvdtrain.reporting.content import collect
from hvdtrain.runs.read import Run, find_runs
from hvdtrain.runs.schema import Manifest, Summary, from_json

BATCH, PER_EPOCH, EPOCHS, IMAGES = 64, 5, 6, 400


def manifest(mode="single", workers=1, servers=0, repeat=1, **changed):
    backends = {"single": "none", "allreduce": "horovod-mpi", "ddp": "gloo"}
    return {
        "hvdtrain": version("hvdtrain"),
        "mode": mode,
        "workers": workers,
        "servers": servers,
        "processes": workers + servers,
        "threads_per_worker": 2 if mode == "single" else 1,
        "model": "vggf",
        "parameters": 250_000,
        "width": 0.25,
        "image_size": 32,
        "dropout": 0.0,
        "dataset": "digits",
        "dataset_hash": "5eed" * 8,
        "train_samples": BATCH * PER_EPOCH,
        "validation_samples": IMAGES,
        "classes": 10,
        "global_batch": BATCH,
        "lr": 0.001,
        "effective_lr": 0.001,
        "optimizer": "adam",
        "momentum": 0.9,
        "weight_decay": 0.0,
        "nesterov": False,
        "schedule": "constant",
        "seed": repeat,
        "repeat": repeat,
        "initial_weights": f"blake2b:{repeat}",
        "device": "cpu",
        "backend": backends.get(mode, "rpc"),
        "starter": "alone" if mode == "single" else "mpirun",
        "push_scale": "mean" if servers else "",
        "deterministic": False,
        "command": ["hvdtrain", "train", "--mode", mode],
        "started": f"2026-11-21T10:0{repeat}:00+00:00",
        "versions": {"python": "3.11.2", "torch": "2.15.0", "horovod": "0.28.1"},
        "hardware": {"cpu": "A CPU", "cores": 2, "memory_gb": 8.0, "hosts": ["one"], "gpus": []},
        "environment": {"OMP_NUM_THREADS": "1", "HOROVOD_CYCLE_TIME": "1"},
        "hosts": {"one": {"ranks": list(range(workers + servers)), "cores": 2, "cores_usable": 2}},
    } | changed


def summary(of, speed=100.0, accuracy=0.98, histogram=None, **changed):
    """What a run of EPOCHS epochs at `speed` samples/s writes; its accuracy grows evenly up to
    `accuracy`.
    """
    workers, servers = of["workers"], of["servers"]
    epoch_s = BATCH * PER_EPOCH / speed
    step_s = BATCH / speed
    evaluations = [
        {
            "step": PER_EPOCH * n,
            "epoch": n,
            "samples": BATCH * PER_EPOCH * n,
            "train_s": epoch_s * n,
            "val_loss": 2.3 * math.exp(-n),
            "val_accuracy": accuracy * n / EPOCHS,
        }
        for n in range(1, EPOCHS + 1)
    ]
    reached = [e["train_s"] for e in evaluations if e["val_accuracy"] >= 0.95]
    pushes = sum(histogram.values()) if histogram else 0
    comm = 0.0 if of["mode"] == "single" else 0.25
    return {
        "status": "done",
        "steps": PER_EPOCH * EPOCHS,
        "samples": BATCH * PER_EPOCH * EPOCHS,
        "wall_s": epoch_s * EPOCHS,
        "setup_s": 1.0,
        "samples_per_s": speed,
        "val_accuracy": accuracy,
        "best_val_loss": evaluations[-1]["val_loss"],
        "val_loss": evaluations[-1]["val_loss"],
        "target_accuracy": 0.95,
        "time_to_target_s": reached[0] if reached else None,
        "exposed_comm_fraction": comm,
        "bytes_sent_per_step": 8.0 * of["parameters"] * (workers if servers else workers - 1),
        "staleness_mean": sum(int(s) * n for s, n in histogram.items()) / pushes
        if histogram
        else None,
        "staleness_max": max(map(int, histogram)) if histogram else None,
        "staleness_histogram": histogram or {},
        "peak_rss_mb": 300.0 * (workers + servers),
        "samples_digest": f"digest {of['repeat']}",
        "step_seconds": {
            "data": 0.01 * step_s,
            "forward": 0.3 * step_s,
            "backward": (0.64 - comm) * step_s,
            "comm": comm * step_s,
            "optimizer": 0.05 * step_s,
        },
        "evaluations": evaluations,
        "processes": [
            {
                "rank": rank,
                "role": "server" if rank < servers else "worker",
                "host": "one",
                "samples": None if rank < servers else BATCH * PER_EPOCH * EPOCHS // workers,
                "cpu_s": epoch_s * EPOCHS,
                "peak_rss_mb": 300.0,
                "bytes_sent": 0,
                "bytes_received": 0,
            }
            for rank in range(servers + workers)
        ],
    } | changed


def steps(of, number, speed):
    share = BATCH // of["workers"]
    return [
        {
            "step": n,
            "epoch": 1 + (n - 1) // PER_EPOCH,
            "time": n * BATCH / speed,
            "samples": share,
            "loss": 2.3 * math.exp(-n / PER_EPOCH),
            "accuracy": 0.5,
            "data_s": 0.0,
            "forward_s": 0.1,
            "backward_s": 0.2,
            "comm_s": 0.1,
            "optimizer_s": 0.01,
        }
        for n in range(1, number + 1)
    ]


def write(
    root, mode="single", workers=1, servers=0, repeat=1, speed=100.0, change=None, **summarised
):
    """A run folder. `change` changes the manifest, other names the summary."""
    of = manifest(mode, workers, servers, repeat, **(change or {}))
    folder = root / f"{mode}-w{workers}-s{servers}-r{repeat}"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text(json.dumps(of))
    (folder / "summary.json").write_text(json.dumps(summary(of, speed, **summarised)))
    for rank in range(servers, servers + workers):
        lines = [json.dumps(step) + "\n" for step in steps(of, PER_EPOCH * EPOCHS, speed)]
        (folder / f"metrics.rank{rank}.jsonl").write_text("".join(lines))
    return folder


def run(mode="single", workers=1, servers=0, repeat=1, speed=100.0, change=None, **summarised):
    """The same without a folder's files."""
    of = manifest(mode, workers, servers, repeat, **(change or {}))
    folder = Path(f"{mode}-w{workers}-s{servers}-r{repeat}")
    return Run(
        folder, from_json(of, Manifest), from_json(summary(of, speed, **summarised), Summary)
    )


def write_comparison(root, repeats=(1, 2, 3)):
    for r in repeats:
        write(root / "runs", "single", repeat=r, speed=100.0 + r)
        write(root / "runs", "allreduce", 2, repeat=r, speed=180.0 + r)
        write(root / "runs", "ps-sync", 2, 1, repeat=r, speed=150.0 + r, histogram={"0": 60})
        write(
            root / "runs",
            "ps-async",
            2,
            1,
            repeat=r,
            speed=160.0 + r,
            histogram={"0": 20, "1": 30, "2": 10},
        )
    return root


def write_report(runs, out, reference=""):
    """The report of these folders' runs."""
    content = collect(find_runs(runs), reference=reference)
    reporting.write_report(content, *plots.draw(content.comparisons), out)
