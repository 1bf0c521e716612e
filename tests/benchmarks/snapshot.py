"""How long a snapshot holds training up, beside writing as many bytes with `dd conv=fsync`, in turns; and reading it.

python tests/benchmarks/snapshot.py --model vgg16 --width 1 --optimizer sgd --dir .
"""

import argparse
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import torch

from hvdtrain.config.run_config import RunConfig
from hvdtrain.numerics.flat import trained
from hvdtrain.numerics.optimizers import make_optimizer, restore_state, state_of
from hvdtrain.rank.work import initial_model
from hvdtrain.runs.snapshot import latest, save


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="vgg16")
    parser.add_argument("--width", type=float, default=1.0)
    parser.add_argument("--optimizer", default="sgd")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", type=Path, default=Path("."))
    args = parser.parse_args()
    config = RunConfig(model=args.model, width=args.width, optimizer=args.optimizer)
    model = initial_model(config, 10)
    parameters = trained(model)
    elements = sum(p.numel() for p in parameters)
    optimizer = make_optimizer(config, parameters)
    for p in parameters:
        p.grad = torch.ones_like(p)
    optimizer.step()
    seconds: dict[str, list[float]] = {"save": [], "dd": [], "read": [], "restore": []}
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        run = Path(folder)
        (run / "snapshots").mkdir()
        for number in range(1, args.rounds + 1):
            began = time.perf_counter()
            save(run, number, model.state_dict(), [(0, state_of(optimizer, parameters))], elements, {}, 1)
            seconds["save"].append(time.perf_counter() - began)
            size = sum(file.stat().st_size for file in run.rglob("*.safetensors"))
            blocks = -(-size // 2**20)
            began = time.perf_counter()
            words = ["dd", "if=/dev/zero", f"of={run / 'dd'}", "bs=1M", f"count={blocks}", "conv=fsync"]
            subprocess.run(words, check=True, capture_output=True)
            seconds["dd"].append(time.perf_counter() - began)
            (run / "dd").unlink()
            began = time.perf_counter()
            snapshot = latest(run, print)
            seconds["read"].append(time.perf_counter() - began)
            assert snapshot
            began = time.perf_counter()
            model.load_state_dict(snapshot.weights)
            restore_state(optimizer, parameters, snapshot.optimizer)
            seconds["restore"].append(time.perf_counter() - began)
    print(f"{size / 1e6:,.0f} MB, {args.rounds} rounds")
    for name, found in seconds.items():
        print(f"{name:<8} {statistics.median(found):.2f} s ({min(found):.2f} to {max(found):.2f})")
    ratios = [ours / theirs for ours, theirs in zip(seconds["save"], seconds["dd"], strict=True)]
    print(f"save beside dd: {statistics.median(ratios):.2f}")


if __name__ == "__main__":
    main()
