"""hvdtrain's step time against bare loops over the same model and data, side by side, in turns.

    python tests/benchmarks/step_time.py WHAT

WHAT is one of:

    single      --mode single against a plain PyTorch loop
    allreduce   --mode allreduce against a bare Horovod script, and ddp
    servers     --mode ps-sync, ps-ssp and ps-async, two servers, against ddp
    precision   --precision bf16 against fp32, one process
    script      the Horovod script with hvdtrain.init and prepare in place of Horovod's optimizer,
                against that, and against --mode allreduce
    turns       the same two optimizers in one script, which takes a block of steps with one and
                then with the other: no start of a job differs between them

Each round runs every contender once, so that a machine that drifts drifts for all; printed are the
median and the range over the rounds of each contender's median step, the median of the ratios
within a round to the first one and to the last one, and, of hvdtrain's own, the exposed
communication: the mean over its workers of each one's median step.
"""

import argparse
import itertools
import json
import os
import shlex
import statistics
import sys
import tempfile
import time
from pathlib import Path

from hvdtrain.base.config.run_config import RunConfig
from hvdtrain.base.modes import declared
from hvdtrain.launch.job_log import failure_reason, log_lines
from hvdtrain.launch.processes import local_job
from hvdtrain.launch.recipe import train_program
from hvdtrain.runs.schema import each_share, read_steps

HOROVOD = ("horovod", "yielding")
WARM_UP = 3  # steps not counted: memory is touched for the first time


def options_of(args: argparse.Namespace) -> list[str]:
    """Returns the options by which a peer gets the same task."""
    given = {
        "--batch-size": args.batch_size,
        "--steps": args.steps,
        "--model": args.model,
        "--width": args.width,
        "--image-size": args.image_size,
    }
    return [str(word) for option in given.items() for word in option]


def contenders(kind: str, args: argparse.Namespace) -> dict[str, tuple[int, list[str] | RunConfig]]:
    """Name -> ranks and what each runs."""
    here = [sys.executable, __file__]
    peer = options_of(args)

    def ours(mode: str, precision: str = "fp32") -> RunConfig:
        return RunConfig(
            mode=mode,
            servers=2 if declared(mode).has_servers else 0,
            model=args.model,
            width=args.width,
            image_size=args.image_size,
            steps=args.steps,
            batch_size=args.batch_size,
            threads=1,
            schedule="constant",
            precision=precision,
            snapshot_every="never",
        )

    if kind == "single":
        return {
            "plain PyTorch loop": (1, [*here, "plain", *peer]),
            "hvdtrain single": (1, ours("single")),
        }
    if kind == "precision":
        return {name: (1, ours("single", name)) for name in ("fp32", "bf16")}
    if kind == "script":
        scripted = RunConfig(
            mode="allreduce",
            script=os.path.abspath(__file__),
            script_args=shlex.join(["scripted", *peer]),
            threads=1,
            snapshot_every="never",
        )
        return {
            "Horovod's optimizer": (2, [*here, "yielding", *peer]),
            "hvdtrain's script": (2, scripted),
            "hvdtrain allreduce": (2, ours("allreduce")),
        }
    if kind == "servers":
        served = {f"hvdtrain {mode}": (4, ours(mode)) for mode in ("ps-sync", "ps-ssp", "ps-async")}
        return {"hvdtrain ddp": (2, ours("ddp"))} | served
    return {
        "bare Horovod loop": (2, [*here, "horovod", *peer]),
        "the same, yielding": (2, [*here, "yielding", *peer]),
        "hvdtrain allreduce": (2, ours("allreduce")),
        "hvdtrain ddp": (2, ours("ddp")),
    }


def measure(ranks: int, what: list[str] | RunConfig, folder: Path) -> tuple[float, float | None]:
    """Seconds of the median step, and of those the exposed communication."""
    out, log = folder / "run", folder / "log"
    # What a rank of ours sets for itself, the peers are given.
    program = train_program(what, out) if isinstance(what, RunConfig) else what
    tuned = (
        {} if isinstance(what, RunConfig) else {"OMP_NUM_THREADS": "1", "THP_MEM_ALLOC_ENABLE": "1"}
    )
    with local_job(ranks, program, log, tuned) as job:
        code = job.wait()
    if code:
        sys.exit(failure_reason(log, code))
    exposed = None
    if isinstance(what, RunConfig):
        workers = [
            each_share(read_steps(file)[0]) for file in sorted(out.glob("metrics.rank*.jsonl"))
        ]
        times = [share.time for share in workers[0]]
        exposed = statistics.mean(
            statistics.median(share.comm_s for share in shares[WARM_UP:]) for shares in workers
        )
    else:
        times = json.loads(log_lines(log)[-1][1])
    laps = [after - before for before, after in itertools.pairwise(times)]
    return statistics.median(laps[WARM_UP:]), exposed


def turns(args: argparse.Namespace, peer: list[str]) -> str:
    """Takes blocks of steps with Horovod's optimizer and with hvdtrain's in turns, in one job.

    Returns:
        A line: the median ratio of a block's median step to that of the block beside it.
    """
    words = ["turns-here", *peer, "--rounds", str(args.rounds)]
    config = RunConfig(
        mode="allreduce",
        script=os.path.abspath(__file__),
        script_args=shlex.join(words),
        threads=1,
        snapshot_every="never",
    )
    with tempfile.TemporaryDirectory() as folder:
        out, log = Path(folder, "run"), Path(folder, "log")
        with local_job(2, train_program(config, out), log) as job:
            code = job.wait()
        if code:
            sys.exit(failure_reason(log, code))
        first = (out / "logs" / "rank.0.out").read_text(encoding="utf-8")
    theirs, ours = json.loads(first.splitlines()[-1])
    ratios = sorted(own / other for own, other in zip(ours, theirs, strict=True))
    quarter = len(ratios) // 4
    return (
        f"Horovod's optimizer {_told(theirs)}, hvdtrain's {_told(ours)}: ratio "
        f"{statistics.median(ratios):.3f}, half of them from {ratios[quarter]:.3f} to "
        f"{ratios[-1 - quarter]:.3f}"
    )


def take_turns(args: argparse.Namespace) -> None:
    """The script of `turns`: each round is a block of steps with one optimizer and the other."""
    import horovod.torch as hvd
    import torch
    import torch.nn.functional as F

    import hvdtrain as hv
    from hvdtrain import models

    job = hv.init(batch_size=args.batch_size)
    torch.set_num_threads(1)
    side = args.image_size
    share = args.batch_size // job.size
    images = torch.randn(share, 3, side, side)
    labels = torch.randint(0, 10, (share,))

    def make() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = models.make(args.model, 10, args.width)
        return model, torch.optim.Adam(model.parameters(), lr=3e-4, fused=True)

    def block(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> float:
        times = [time.perf_counter()]
        for _ in range(args.steps):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            loss.item()
            times.append(time.perf_counter())
        laps = [after - before for before, after in itertools.pairwise(times)]
        return statistics.median(laps[1:])

    theirs, optimizer = make()
    hvd.broadcast_parameters(theirs.state_dict(), root_rank=0)
    named = theirs.named_parameters()
    pairs = [
        (theirs, hvd.DistributedOptimizer(optimizer, named_parameters=named)),
        job.prepare(*make()),
    ]
    laps: list[list[float]] = [[], []]
    for number in range(-1, args.rounds):
        order = (0, 1) if number % 2 else (1, 0)
        for which in order:
            lap = block(*pairs[which])
            if number >= 0:
                laps[which].append(lap)
    if job.is_first:
        print(json.dumps(laps), flush=True)


def peer(kind: str, args: argparse.Namespace) -> None:
    """The bare loop that people write: the same model, images, loss and optimizer, and nothing
    else.
    """
    import torch
    import torch.nn.functional as F

    from hvdtrain import models
    from hvdtrain.data.find import find_dataset
    from hvdtrain.data.loader import Loader

    if kind == "scripted":
        import hvdtrain as hv

        job = hv.init(batch_size=args.batch_size)
        rank, ranks = job.rank, job.size
    else:
        rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
        ranks = int(os.environ["OMPI_COMM_WORLD_SIZE"])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    data = find_dataset("digits")
    loader = Loader(data.train, args.image_size, 1)
    mean = torch.tensor([0.485, 0.456, 0.406]).view(1, 3, 1, 1) * 255
    deviation = torch.tensor([0.229, 0.224, 0.225]).view(1, 3, 1, 1) * 255
    model = models.make(args.model, len(data.classes), args.width)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-4, fused=True)
    if kind in HOROVOD:
        os.environ["HOROVOD_CPU_OPERATIONS"] = "MPI"
        # what hvdtrain sets: Horovod's thread gives up the core while it waits in MPI
        if kind == "yielding":
            os.environ["OMPI_MCA_mpi_yield_when_idle"] = "1"
        import horovod.torch as hvd

        hvd.init()
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    if kind == "scripted":
        model, optimizer = job.prepare(model, optimizer)
    share = args.batch_size // ranks
    times = []
    for step in range(args.steps):
        first = (step * args.batch_size + rank * share) % (len(data.train) - share)
        images, labels = loader.cache[first : first + share], loader.labels[first : first + share]
        optimizer.zero_grad()
        loss = F.cross_entropy(model((images.float() - mean) / deviation), labels)
        loss.backward()
        optimizer.step()
        loss.item()
        times.append(time.perf_counter())
    if rank == 0 and kind != "scripted":
        print(json.dumps(times), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "kind",
        choices=[
            "single",
            "allreduce",
            "servers",
            "precision",
            "script",
            "turns",
            "plain",
            "scripted",
            "turns-here",
            *HOROVOD,
        ],
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--model", default="vgg16")
    parser.add_argument("--width", type=float, default=1.0)
    parser.add_argument("--image-size", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=16)
    args = parser.parse_args()
    if args.kind in ("plain", "scripted", *HOROVOD):
        return peer(args.kind, args)
    if args.kind == "turns-here":
        return take_turns(args)
    if args.kind == "turns":
        return print(turns(args, options_of(args)))
    seconds: dict[str, list[float]] = {}
    exposed: dict[str, list[float]] = {}
    for _ in range(args.rounds):
        for name, (ranks, what) in contenders(args.kind, args).items():
            with tempfile.TemporaryDirectory() as folder:
                step, comm = measure(ranks, what, Path(folder))
            seconds.setdefault(name, []).append(step)
            if comm is not None:
                exposed.setdefault(name, []).append(comm)
    first, *_, last = seconds.values()

    def ratio(laps: list[float], base: list[float]) -> float:
        return statistics.median(lap / other for lap, other in zip(laps, base, strict=True))

    for name, laps in seconds.items():
        line = (
            f"{name:<20} {_told(laps)} a step, ratio {ratio(laps, first):.3f} to the first, "
            f"{ratio(laps, last):.3f} to the last"
        )
        print(line + (f"; exposed {_told(exposed[name])}" if name in exposed else ""))


def _told(laps: list[float]) -> str:
    low, high = min(laps) * 1e3, max(laps) * 1e3
    return f"{statistics.median(laps) * 1e3:8.1f} ms ({low:.1f} to {high:.1f}, n={len(laps)})"


if __name__ == "__main__":
    main()
