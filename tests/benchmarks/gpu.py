"""What hvdtrain makes of a GPU, beside a bare loop and beside the arithmetic.

    python tests/benchmarks/gpu.py WHAT

WHAT is one of:

    step       images/s of --mode single, a plain PyTorch loop and bf16 matrices alone
    servers    a worker and a server on the processor, ps-async and ps-sync: the share of a step
               that communication takes and shows
    shared     two workers that share the GPU: allreduce, ddp and ps-sync
    verify     the weights of these three beside those of one process
    horovod    Horovod's operations on the GPU, of one rank, and what it fuses
    learn      accuracy on the GPU and on the CPU
    predict    `hvdtrain plan` calibrated by runs on the GPU, and two that it foretells
    decode     JPEGs that this host's cores decode, alone and beside steps

VGG-16 at 224 pixels in bf16 unless options say otherwise. One GPU is enough. `shared`, `verify` and
`horovod` need Horovod, others do not. In each round every contender runs once; printed are the
median over the rounds and the range. With --json each figure is a line of JSON, as soon as it is
there. gpu_day.py does all of it on a machine that has PyTorch, a GPU and no network.
"""

import argparse
import dataclasses
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from data import photograph

from hvdtrain import models
from hvdtrain.base.config.run_config import RunConfig
from hvdtrain.base.errors import Failure, UsageError
from hvdtrain.base.formatting import with_noun
from hvdtrain.base.numerics.precision import autocast
from hvdtrain.base.world.place import World
from hvdtrain.data.augment import Augment
from hvdtrain.data.find import find_dataset
from hvdtrain.data.loader import Loader
from hvdtrain.data.sampling import BatchSampler
from hvdtrain.job.training.device import memory_format, set_up
from hvdtrain.job.training.feed import MEAN, feed
from hvdtrain.job.wire.horovod import join
from hvdtrain.launch.recipe import train_program
from hvdtrain.planning.calibration import load
from hvdtrain.planning.check import finished
from hvdtrain.planning.from_runs import scenario_of
from hvdtrain.planning.predict import simulate
from hvdtrain.runs.request import check
from hvdtrain.tools.checks.agreement import TOLERANCE
from hvdtrain.tools.checks.verify import CHECKED, compare_with_single

# an image's training: forward (two per multiply-add), and twice that backward
GFLOP = {("vgg16", 1.0, 224): 3 * 30.9}
WARM_UP = 10  # steps not counted: cuDNN tries its algorithms
PHOTOGRAPHS = 512
SHARING = ("allreduce", "ddp", "ps-sync")
MIB = 2**20
CALIBRATED_BATCH = (
    4  # what a processor computes in some seconds; runs say what the GPU makes of larger ones
)


def configuration(args: argparse.Namespace, **others: object) -> RunConfig:
    given = {
        "model": args.model,
        "width": args.width,
        "image_size": args.image_size,
        "batch_size": args.batch_size,
        "steps": args.steps,
        "precision": args.precision,
        "device": args.device,
        "dataset": args.dataset,
        "optimizer": "sgd",
        "lr": 0.001,
        "schedule": "constant",
        "snapshot_every": "never",
        "timeout": 45.0,
    }
    return check(RunConfig(**(given | others)))


def ran(config: RunConfig, folder: Path, ranks: int = 1) -> Path:
    """Train, with torchrun where there are several ranks; the run folder."""
    program = train_program(config, folder / "run")
    if ranks > 1:
        torchrun = [
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(ranks),
            "--module",
        ]
        program = [sys.executable, "-m", *torchrun, *program[2:]]
    done = subprocess.run(program, stdout=sys.stderr)
    if done.returncode:
        raise Failure(f"{config.mode}, {with_noun(ranks, 'rank')}: exit code {done.returncode}")
    return folder / "run"


def rows(run: Path) -> list[dict]:
    """The first worker's steps."""
    file, *_ = sorted(run.glob("metrics.rank*.jsonl"))
    return [json.loads(line) for line in file.read_text().splitlines()]


def median_step(times: Sequence[float]) -> float:
    """Seconds, from when each step was over."""
    laps = [after - before for before, after in itertools.pairwise(times)]
    return statistics.median(laps[WARM_UP:])


def plain(args: argparse.Namespace) -> None:
    """The loop that people write for a GPU: same model, images and settings; prints when each step
    was over.
    """
    config, device = configuration(args), torch.device(args.device)
    set_up(config)
    data = find_dataset(args.dataset)
    cores = len(os.sched_getaffinity(0))
    loader = Loader(data.train, args.image_size, cores)
    assert loader.cache is not None
    model = models.make(args.model, len(data.classes), args.width).to(
        device, memory_format=memory_format(config, device)
    )
    optimizer = torch.optim.SGD(
        model.parameters(), lr=config.lr, momentum=config.momentum, fused=True
    )
    mean = torch.tensor(MEAN, device=device).view(1, 3, 1, 1) * 255
    times = []
    for step in range(args.steps):
        first = step * args.batch_size % (len(data.train) - args.batch_size)
        images = loader.cache[first : first + args.batch_size]
        labels = loader.labels[first : first + args.batch_size].to(device)
        images = images.pin_memory() if device.type == "cuda" else images
        inputs = images.to(device, non_blocking=True).to(
            torch.float32, memory_format=memory_format(config, device)
        )
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
    words = [
        f"--{name.replace('_', '-')}={value}"
        for name, value in vars(args).items()
        if name not in ("what", "json")
    ]
    most = matrices(args.device)
    say(args, "bf16 matrices alone", [most / 1e12], "TFLOP/s")
    loops, ours = [], []
    for _ in range(args.rounds):
        done = subprocess.run(
            [sys.executable, __file__, "plain", *words], check=True, stdout=subprocess.PIPE
        )
        loops.append(args.batch_size / median_step(json.loads(done.stdout.splitlines()[-1])))
        with tempfile.TemporaryDirectory() as folder:
            steps = rows(ran(configuration(args, mode="single"), Path(folder)))
            ours.append(args.batch_size / median_step([row["time"] for row in steps]))
    say(args, "plain PyTorch loop", loops, "images/s")
    say(args, "hvdtrain single", ours, "images/s")
    say(
        args,
        "hvdtrain over the loop",
        [rate / loop for rate, loop in zip(ours, loops, strict=True)],
    )
    for phase in (name for name in steps[0] if name.endswith("_s")):
        spent = [row[phase] * 1e3 for row in steps[WARM_UP:]]
        say(args, f"single: {phase.removesuffix('_s')}", spent, "ms")
    flop = GFLOP.get((args.model, args.width, args.image_size))
    if flop:
        say(args, "what matrices alone allow", [most / 1e9 / flop], "images/s")
        say(args, "of it hvdtrain reaches", [rate * flop * 1e9 / most for rate in ours])


@dataclasses.dataclass(frozen=True)
class Job:
    """The first worker's steps of a job that ran."""

    batch: int
    steps: list[dict]

    @property
    def lap(self) -> float:
        return median_step([row["time"] for row in self.steps])

    @property
    def rate(self) -> float:
        """Images/s of all workers, which are in step."""
        return self.batch / self.lap

    def share(self, part: str) -> float:
        """Of a step, what this part takes."""
        return statistics.median(row[part] for row in self.steps[WARM_UP:]) / self.lap


def job(args: argparse.Namespace, ranks: int, **others: object) -> Job:
    with tempfile.TemporaryDirectory() as folder:
        return Job(args.batch_size, rows(ran(configuration(args, **others), Path(folder), ranks)))


def say_jobs(args: argparse.Namespace, what: str, jobs: Sequence[Job]) -> None:
    say(args, what, [job.rate for job in jobs], "images/s")
    say(args, f"{what}: exposed share of a step", [job.share("comm_s") for job in jobs])


def servers(args: argparse.Namespace) -> None:
    for mode in ("ps-async", "ps-sync"):
        jobs = [job(args, 2, mode=mode, servers=1) for _ in range(args.rounds)]
        say_jobs(args, f"{mode}, one worker, one server", jobs)


def shared(args: argparse.Namespace) -> None:
    for mode in SHARING:
        served = {"servers": 1} if mode == "ps-sync" else {}
        ranks = 3 if served else 2
        jobs = [job(args, ranks, mode=mode, **sharing(args), **served) for _ in range(args.rounds)]
        say_jobs(args, f"{mode}, two workers", jobs)


def sharing(args: argparse.Namespace) -> dict[str, bool]:
    return {"share_gpu": True} if args.device == "cuda" else {}


def verify(args: argparse.Namespace) -> None:
    checked, wrong = dataclasses.replace(CHECKED, device=args.device, timeout=45.0), []
    with tempfile.TemporaryDirectory() as folder:
        results = compare_with_single(
            list(SHARING), [2], Path(folder), sharing(args), optimizers=["sgd"], checked=checked
        )
        for result in results:
            say(
                args,
                f"{result.config.mode}: distance from one process, at most {TOLERANCE:.0e}",
                [result.distance],
            )
            if not result.same:
                wrong.append(
                    f"{result.config.mode} by {result.distance:.1e}{'' if result.samples else ', other samples'}"
                )
    if wrong:
        raise Failure(f"not the weights of one process: {'; '.join(wrong)}")


def horovod(args: argparse.Namespace) -> None:
    """Times Horovod's operations on one rank, whose results are known, and training over them."""
    environment = dict(os.environ)
    with tempfile.TemporaryDirectory() as folder:
        timeline = Path(folder) / "timeline.json"
        _operations(args, timeline)
        text = timeline.read_text() if timeline.exists() else ""
    # The jobs below have neither the timeline nor the cycle time of the operations.
    os.environ.clear()
    os.environ.update(environment)
    for name in (
        "NCCL_ALLREDUCE",
        "NCCL_REDUCESCATTER",
        "NCCL_ALLGATHER",
        "NCCL_BCAST",
        "MEMCPY_IN_FUSION_BUFFER",
    ):
        say(args, f"timeline: {name}", [text.count(f'"{name}"')])
    for mode in ("allreduce", "sharded"):
        say_jobs(args, f"{mode}, one rank", [job(args, 1, mode=mode) for _ in range(args.rounds)])


def _operations(args: argparse.Namespace, timeline: Path) -> None:
    os.environ.update(HOROVOD_TIMELINE=str(timeline), HOROVOD_CYCLE_TIME="5")
    join(World("alone", 0, 1, 0, 1))
    import horovod.torch as hvd

    say(args, "Horovod's NCCL", [hvd.nccl_built()])
    device, parts = torch.device(args.device), 64
    for kind in (torch.float32, torch.float16):
        values = torch.randn(1000, 3, device=device).to(kind)
        made = {
            "allreduce": hvd.allreduce(values, name=f"a{kind}"),
            "allgather": hvd.allgather(values, name=f"g{kind}"),
            "broadcast": hvd.broadcast(values, 0, name=f"b{kind}"),
            "reducescatter": hvd.reducescatter(values, name=f"r{kind}"),
        }
        if wrong := [name for name, result in made.items() if not torch.equal(result, values)]:
            raise Failure(
                f"Horovod: {', '.join(wrong)} of one rank and {kind} change what they are given"
            )
    tensors = [torch.randn(MIB // 4, device=device) for _ in range(parts)]
    whole = torch.cat(tensors)

    def fused() -> None:
        for handle in [hvd.allreduce_async_(t, name=f"part {n}") for n, t in enumerate(tensors)]:
            hvd.synchronize(handle)

    say(
        args,
        f"all-reduce of {parts} MiB",
        timed(lambda: hvd.allreduce_(whole, name="whole"), device),
        "ms",
    )
    say(args, f"the same in {parts} tensors", timed(fused, device), "ms")
    hvd.shutdown()


def timed(act: Callable[[], object], device: torch.device, repeats: int = 10) -> list[float]:
    """Milliseconds of each repeat, after two that do not count."""
    seconds = []
    for _ in range(2 + repeats):
        began = time.perf_counter()
        act()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return [second * 1e3 for second in seconds[2:]]


def learn(args: argparse.Namespace) -> None:
    for name in ("digits", "turntable"):
        for device in dict.fromkeys(("cpu", args.device)):
            with tempfile.TemporaryDirectory() as folder:
                kind = "bf16" if device == "cuda" else "fp32"
                run = ran(
                    RunConfig(dataset=name, device=device, precision=kind, epochs=args.epochs),
                    Path(folder),
                )
                summary = json.loads((run / "summary.json").read_text())
            say(args, f"{name} on {device}, {kind}: accuracy", [summary["val_accuracy"]])


def predict(args: argparse.Namespace) -> None:
    """Calibrate by one process and by one worker with a server in lockstep; foretell half of the
    batch, and a worker that does not wait, which then run.
    """
    sizes = {"batch_size": max(1, args.batch_size // 2)}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        alone = ran(configuration(args, mode="single"), out / "alone")
        served = ran(configuration(args, mode="ps-sync", servers=1), out / "served", 2)
        calibration, named = out / "calibration.json", ("model", "width", "image_size", "dataset")
        options = [f"--{name.replace('_', '-')}={getattr(args, name)}" for name in named]
        options += [
            f"--batch-size={CALIBRATED_BATCH}",
            f"--from={alone}",
            f"--from={served}",
            f"--out={calibration}",
        ]
        calibrate = [sys.executable, "-Pm", "hvdtrain", "plan", "calibrate", *options]
        subprocess.run(calibrate, check=True, stdout=sys.stderr)
        made = dataclasses.replace(load(calibration), device=args.device)
        half = ran(configuration(args, mode="single", **sizes), out / "half")
        free = ran(configuration(args, mode="ps-async", servers=1), out / "free", 2)
        for what, folder_of_run in (("half of the batch", half), ("ps-async", free)):
            foretold = simulate(scenario_of(made, finished(folder_of_run))).step_s
            # the first steps try algorithms
            measured = median_step([row["time"] for row in rows(folder_of_run)])
            say(args, f"{what}: a step, measured", [measured * 1e3], "ms")
            say(args, f"{what}: a step, predicted", [foretold * 1e3], "ms")


def decode(args: argparse.Namespace) -> None:
    cores = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        rng, samples = random.Random(0), []
        for number in range(PHOTOGRAPHS):
            part = "val" if number % 8 == 0 else "train"
            file = Path(folder) / part / f"class{number % 3}" / f"{number}.jpg"
            file.parent.mkdir(parents=True, exist_ok=True)
            photograph(rng, 500, 375).save(file, quality=90)
            samples.append((file, number % 3))
        loader = Loader(samples, args.image_size, cores, Augment("crop-flip", 0))
        plan = BatchSampler(len(samples), min(args.batch_size, len(samples)), 0, 0, 1)
        rates = []
        for epoch in range(1, args.rounds + 1):
            began = time.perf_counter()
            for _, (images, _) in feed(
                loader.batches(plan.epoch(epoch)), torch.device(args.device)
            ):
                images[0, 0, 0, 0].item()
            rates.append(len(samples) / (time.perf_counter() - began))
        say(args, f"500 x 375 JPEGs on {cores} cores", rates, "images/s")
        for augment in ("none", "crop-flip"):  # crops are decoded at each step, whole images once
            beside = job(args, 1, mode="single", dataset=folder, augment=augment)
            say(args, f"single on these, --augment {augment}", [beside.rate], "images/s")
            say(
                args,
                f"--augment {augment}: share of a step that waits for data",
                [beside.share("data_s")],
            )


def say(args: argparse.Namespace, what: str, values: Sequence[float], unit: str = "") -> None:
    """Print a figure: the median, the range and how many there were."""
    middle, low, high, n = statistics.median(values), min(values), max(values), len(values)
    if args.json:
        row = {"what": what, "value": middle, "unit": unit, "low": low, "high": high, "n": n}
        print(json.dumps(row), flush=True)
    else:
        print(f"{what:<44} {middle:,.4g} {unit} ({low:,.4g} to {high:,.4g}, n = {n})", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    does = {
        "step": step,
        "servers": servers,
        "shared": shared,
        "verify": verify,
        "horovod": horovod,
        "learn": learn,
        "predict": predict,
        "decode": decode,
        "plain": plain,
    }
    parser.add_argument("what", choices=does)
    parser.add_argument("--model", default="vgg16")
    parser.add_argument("--width", type=float, default=1.0)
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--dataset", default="turntable")
    parser.add_argument(
        "--device", default="cuda", help="cpu tries this script out where there is no GPU"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="Print each figure as a line of JSON.")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("torch sees no GPU here: see `hvdtrain doctor`")
    try:
        does[args.what](args)
    except (Failure, UsageError) as error:
        sys.exit(f"gpu.py {args.what}: {error}")


if __name__ == "__main__":
    main()
