"""What hvdtrain makes of a GPU, beside a bare loop and beside the arithmetic.

    python tests/benchmarks/gpu.py step       images/s of --mode single, a plain PyTorch loop and bf16 matrices alone
    python tests/benchmarks/gpu.py servers    the share of a step that ps-async with a worker and a server exposes
    python tests/benchmarks/gpu.py decode     JPEGs that this host's cores decode in the time that a step takes
    python tests/benchmarks/gpu.py learn      accuracy on the GPU and on the CPU

VGG-16 at 224 pixels in bf16 unless options say otherwise. One GPU is enough, and Horovod is not needed. In each round
every contender runs once; printed are the median over the rounds and the range.
"""

import argparse
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from data import photograph

from hvdtrain import models
from hvdtrain.config.run_config import RunConfig
from hvdtrain.data.augment import Augment
from hvdtrain.data.find import find_dataset
from hvdtrain.data.loader import Loader
from hvdtrain.data.sampling import BatchSampler
from hvdtrain.launch.recipe import train_program
from hvdtrain.numerics.precision import autocast
from hvdtrain.runs.request import check
from hvdtrain.training.device import memory_format, set_up
from hvdtrain.training.feed import MEAN, feed

GFLOP = {("vgg16", 1.0, 224): 3 * 30.9}  # an image's training: forward (two per multiply-add), and twice that backward
WARM_UP = 10  # steps not counted: cuDNN tries its algorithms
PHOTOGRAPHS = 512


def configuration(args: argparse.Namespace, **others: object) -> RunConfig:
    given = {
        "model": args.model, "width": args.width, "image_size": args.image_size, "batch_size": args.batch_size,
        "steps": args.steps, "precision": args.precision, "device": args.device, "dataset": args.dataset,
        "optimizer": "sgd", "lr": 0.001, "schedule": "constant", "snapshot_every": "never",
    }  # fmt: skip
    return check(RunConfig(**(given | others)))


def ran(config: RunConfig, folder: Path, ranks: int = 1) -> Path:
    """Train, with torchrun where there are several ranks; the run folder."""
    program = train_program(config, folder / "run")
    if ranks > 1:
        torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "--module"]
        program = [sys.executable, "-m", *torchrun, *program[2:]]
    done = subprocess.run(program, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        sys.exit(done.stdout)
    return folder / "run"


def rows(run: Path) -> list[dict]:
    """The first worker's steps."""
    [file] = run.glob("metrics.rank*.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]


def median_step(times: list[float]) -> float:
    """Seconds, from when each step was over."""
    laps = [after - before for before, after in itertools.pairwise(times)]
    return statistics.median(laps[WARM_UP:])


def plain(args: argparse.Namespace) -> None:
    """The loop that people write for a GPU: same model, images and settings; prints when each step was over."""
    config, device = configuration(args), torch.device(args.device)
    set_up(config)
    data = find_dataset(args.dataset)
    loader = Loader(data.train, args.image_size, 1)
    assert loader.cache is not None
    model = models.make(args.model, len(data.classes), args.width).to(
        device, memory_format=memory_format(config, device)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=config.lr, momentum=config.momentum, fused=True)
    mean = torch.tensor(MEAN, device=device).view(1, 3, 1, 1) * 255
    times = []
    for step in range(args.steps):
        first = step * args.batch_size % (len(data.train) - args.batch_size)
        images = loader.cache[first : first + args.batch_size]
        labels = loader.labels[first : first + args.batch_size].to(device)
        images = images.pin_memory() if device.type == "cuda" else images
        inputs = images.to(device, non_blocking=True).to(torch.float32, memory_format=memory_format(config, device))
        optimizer.zero_grad()
        with autocast(config.precision, device):
            scores = model((inputs - mean) / 58)
        loss = F.cross_entropy(scores.float(), labels)
        loss.backward()
        optimizer.step()
        loss.item()
        times.append(time.perf_counter())
    print(json.dumps(times))


def matrices(device: str) -> float:
    """FLOP/s of large bf16 matrices: the most that this device gives to anybody."""
    side = 8192 if device == "cuda" else 512
    a, b = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    best = 0.0
    for _ in range(5):
        result = a @ b
        result[0, 0].item()
        began = time.perf_counter()
        for _ in range(10):
            result = a @ b
        result[0, 0].item()
        best = max(best, 10 * 2 * side**3 / (time.perf_counter() - began))
    return best


def step(args: argparse.Namespace) -> None:
    words = [f"--{name.replace('_', '-')}={value}" for name, value in vars(args).items() if name != "what"]
    loops, ours = [], []
    for _ in range(args.rounds):
        done = subprocess.run([sys.executable, __file__, "plain", *words], check=True, stdout=subprocess.PIPE)
        loops.append(args.batch_size / median_step(json.loads(done.stdout.splitlines()[-1])))
        with tempfile.TemporaryDirectory() as folder:
            run = ran(configuration(args, mode="single"), Path(folder))
            ours.append(args.batch_size / median_step([row["time"] for row in rows(run)]))
            seconds = json.loads((run / "summary.json").read_text())["step_seconds"]
    say("plain PyTorch loop", loops, "images/s")
    say("hvdtrain single", ours, "images/s")
    say("ratio", [rate / loop for rate, loop in zip(ours, loops, strict=True)], "")
    print("phases", ", ".join(f"{phase} {spent * 1e3:.1f} ms" for phase, spent in seconds.items()))
    flop = GFLOP.get((args.model, args.width, args.image_size))
    if flop:
        most = matrices(args.device)
        share = statistics.median(ours) * flop * 1e9 / most
        print(
            f"{most / 1e12:.0f} TFLOP/s of matrices alone: {most / 1e9 / flop:.0f} images/s; ours are {share:.2f} of it"
        )


def servers(args: argparse.Namespace) -> None:
    shares, rates = [], []
    for _ in range(args.rounds):
        with tempfile.TemporaryDirectory() as folder:
            run = ran(configuration(args, mode="ps-async", servers=1), Path(folder), ranks=2)
            lap = median_step([row["time"] for row in rows(run)])
            shares.append(statistics.median(row["comm_s"] for row in rows(run)[WARM_UP:]) / lap)
            rates.append(args.batch_size / lap)
    say("ps-async 1+1", rates, "images/s")
    say("exposed share of a step", shares, "")


def decode(args: argparse.Namespace) -> None:
    cores = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        rng, samples = random.Random(0), []
        for number in range(PHOTOGRAPHS):
            file = Path(folder) / f"{number}.jpg"
            photograph(rng, 500, 375).save(file, quality=90)
            samples.append((file, number % 10))
        loader = Loader(samples, args.image_size, cores, Augment("crop-flip", 0))
        plan = BatchSampler(len(samples), min(args.batch_size, len(samples)), 0, 0, 1)
        rates = []
        for epoch in range(1, args.rounds + 1):
            began = time.perf_counter()
            for _, (images, _) in feed(loader.batches(plan.epoch(epoch)), torch.device(args.device)):
                images[0, 0, 0, 0].item()
            rates.append(len(samples) / (time.perf_counter() - began))
    say(f"500 x 375 JPEGs on {cores} cores", rates, "images/s")


def learn(args: argparse.Namespace) -> None:
    for name in ("digits", "turntable"):
        for device in ("cpu", args.device):
            with tempfile.TemporaryDirectory() as folder:
                kind = "bf16" if device == "cuda" else "fp32"
                run = ran(RunConfig(dataset=name, device=device, precision=kind, epochs=10), Path(folder))
                summary = json.loads((run / "summary.json").read_text())
            print(f"{name:<10} {device:<5} {kind}  validation accuracy {summary['val_accuracy']:.3f}")


def say(what: str, rates: list[float], unit: str) -> None:
    digits = 0 if unit else 3
    print(
        f"{what:<28} {statistics.median(rates):.{digits}f} {unit} "
        f"({min(rates):.{digits}f} to {max(rates):.{digits}f}, n = {len(rates)})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    does = {"step": step, "servers": servers, "decode": decode, "learn": learn, "plain": plain}
    parser.add_argument("what", choices=does)
    parser.add_argument("--model", default="vgg16")
    parser.add_argument("--width", type=float, default=1.0)
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--dataset", default="turntable")
    parser.add_argument("--device", default="cuda", help="cpu tries this script out where there is no GPU")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("torch sees no GPU here: see `hvdtrain doctor`")
    does[args.what](args)


if __name__ == "__main__":
    main()
