"""`hvdtrain replay`: a recorded parameter-server run again, on one process, push by push in the order it had."""

import csv
import json
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hvdtrain import modes
from hvdtrain.config import RunConfig, run_config
from hvdtrain.errors import Failure, UsageError

if TYPE_CHECKING:
    import torch

    from hvdtrain.compression import Compressor
    from hvdtrain.data.loader import Loader
    from hvdtrain.data.sampling import Share
    from hvdtrain.models.layers import Network
    from hvdtrain.ps.plan import Piece
    from hvdtrain.ps.server import Answer, Bucket


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
def replay(run: Path) -> None:
    """Repeat a recorded parameter-server run to the same bits, on one process.

    \b
    mpirun --bind-to none --oversubscribe -np 3 hvdtrain train --mode ps-async --servers 1 --record --out runs/ps
    hvdtrain replay runs/ps

    An asynchronous run depends on which push came first. With --record its servers write that down, and here every
    gradient is computed again on the weights that its worker had, and applied in the recorded order. Exit code 1
    where the final weights are not those that the run saved, bit for bit.
    """
    config, workers, threads = _read(run)
    from hvdtrain.work import WEIGHTS

    if not (run / WEIGHTS).is_file():
        raise UsageError(f"{run} has no {WEIGHTS} to compare with: did it finish?")
    lines = _read_ledgers(run, config.servers, workers)
    weights, pushes = _replay(config, workers, threads, lines)
    total = sum(tensor.numel() for tensor in weights.values())
    if different := _different(weights, run / WEIGHTS):
        raise Failure(f"{different:,} of {total:,} weights differ from those that {run} saved")
    click.echo(f"{pushes:,} pushes of {workers} worker(s) replayed: the same {total:,} weights, bit for bit")


def _read(run: Path) -> tuple[RunConfig, int, int]:
    """What was run, its number of workers, and threads of each."""
    config = run_config(run)
    if not modes.has_servers(config.mode) or not config.record:
        raise UsageError(f"{run} is not a recorded run: train with a ps- mode and --record")
    if config.time_budget and config.mode == "ps-ssp":
        raise UsageError(f"{run} ended by --time-budget: who ceased to wait when is not recorded in ps-ssp")
    try:
        if lost := json.loads((run / "summary.json").read_text())["lost_workers"]:
            raise UsageError(f"{run} lost ranks {lost} on its way: which of their last pushes counted is not recorded")
        manifest = json.loads((run / "manifest.json").read_text())
        workers, threads = int(manifest["workers"]), int(manifest["threads_per_worker"])
        if not (0 < workers < 10_000 and 0 < threads < 10_000):
            raise ValueError(f"{workers} workers with {threads} threads")
        return config, workers, threads
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{run}: its summary.json or manifest.json cannot be read: {error}") from None


Line = tuple[int, int, int, int]  # worker, step, version read, version made
Lines = dict[tuple[int, int], list[Line]]  # (server, bucket) -> its pushes, in order


def _read_ledgers(run: Path, servers: int, workers: int) -> Lines:
    """What the ledgers say. UsageError, with file and line, where one cannot be read or contradicts itself."""
    from hvdtrain.ps.ledger import ledger_file

    lines: Lines = {}
    seen = set()
    for server in range(servers):
        path = ledger_file(run, server)
        try:
            with path.open(newline="") as file:
                for number, row in enumerate(csv.DictReader(file), 2):
                    bucket, worker, step = (int(row[name]) for name in ("bucket", "worker", "step"))
                    read, made = int(row["version_read"]), int(row["version"])
                    if not (0 <= worker < workers and step > 0 and 0 <= read < made):
                        raise UsageError(f"{path}, line {number}: no push of {workers} worker(s) reads like this")
                    if (server, bucket, worker, step) in seen:
                        raise UsageError(f"{path}, line {number}: step {step} of worker {worker} was applied before")
                    seen.add((server, bucket, worker, step))
                    lines.setdefault((server, bucket), []).append((worker, step, read, made))
        except (OSError, ValueError, KeyError, TypeError, csv.Error) as error:
            raise UsageError(f"{path} cannot be read: {error}") from None
    return lines


def _different(weights: dict[str, "torch.Tensor"], saved: Path) -> int:
    """How many weights are not, bit for bit, those in the file."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        there = load_file(saved)
        return sum(int((there[name] != tensor).sum()) for name, tensor in weights.items())
    except (OSError, SafetensorError, KeyError, RuntimeError) as error:
        raise Failure(f"{saved} cannot be read as this model's weights: {error}") from None


@dataclass
class Worker:
    """One worker of the run, as far as it has been replayed.

    Attributes:
        weights: the flat vector that the model's parameters are views of.
        step: the step whose gradient `parts` holds, encoded for each piece; 0 before the first.
        answers: of this step, by piece; those not pushed yet are missing.
    """

    number: int
    model: "Network"
    weights: "torch.Tensor"
    shares: deque["Share"]
    compressors: list["Compressor"]
    versions: list[int]
    step: int = 0
    parts: list[list["torch.Tensor"]] | None = None
    answers: dict[int, "Future[Answer]"] | None = None


def _replay(config: RunConfig, workers: int, threads: int, lines: Lines) -> tuple[dict[str, "torch.Tensor"], int]:
    """The final weights by name, and how many pushes there were."""
    import torch

    from hvdtrain.compression import Compressor
    from hvdtrain.data.augment import Augment
    from hvdtrain.data.find import find
    from hvdtrain.data.loader import Loader
    from hvdtrain.data.sampling import Plan
    from hvdtrain.device import set_up
    from hvdtrain.flat import flatten_weights, trained
    from hvdtrain.models.pretrained import load_pretrained
    from hvdtrain.optim import make_optimizer
    from hvdtrain.ps.plan import cut
    from hvdtrain.ps.server import Bucket
    from hvdtrain.work import image_side, initial_model

    torch.set_num_threads(threads)
    set_up(config)
    data = find(config.dataset)
    loader = Loader(data.train, image_side(config, data), threads, Augment(config.augment, config.seed))
    policy = modes.load(config.mode).policy
    crew = []
    for number in range(workers):
        model = initial_model(config, len(data.classes))
        if config.pretrained:
            load_pretrained(model, config.model, config.pretrained)
        model.train()
        weights = flatten_weights(model)
        crew.append(Worker(number, model, weights, deque(), [], []))
    sizes = [p.numel() for p in trained(crew[0].model)]
    pieces = cut(sizes, config.servers, config.bucket_elements)
    if set(lines) != {(piece.server, piece.number) for piece in pieces}:
        raise Failure("the ledgers are not of this model: their buckets are others")
    buckets = [
        Bucket(crew[0].weights[p.start : p.stop].clone(), lambda q: make_optimizer(config, q), policy(workers, config))
        for p in pieces
    ]
    orders = [deque(lines[piece.server, piece.number]) for piece in pieces]
    total = config.total_steps(len(data.train))
    for worker in crew:
        worker.compressors = [Compressor(config.compression) for _ in pieces]
        worker.versions = [0] * len(pieces)
    plans = [Plan(len(data.train), config.batch_size, config.seed, n, workers) for n in range(workers)]
    pushes, epoch = len(orders[0]), 0
    while left := sum(map(len, orders)):
        epoch += 1
        last = epoch * plans[0].steps_per_epoch
        for worker, plan in zip(crew, plans, strict=True):
            mine = {step for n, step, _, _ in orders[0] if n == worker.number and step <= last}
            worker.shares = deque(share for share in plan.epoch(epoch) if share.step in mine)
            worker.answers = None
        _epoch(config, epoch, total, loader, pieces, buckets, orders, crew)
        if sum(map(len, orders)) == left:
            raise Failure(f"the ledgers have no push of epoch {epoch}, but of later ones")
        for bucket in buckets:
            for worker in crew:
                bucket.rest(worker.number, worker.step)
        for worker in crew:  # evaluation begins with everybody reading the newest weights
            for number, (piece, bucket) in enumerate(zip(pieces, buckets, strict=True)):
                worker.weights[piece.start : piece.stop].copy_(bucket.read(worker.number).weights)
                worker.versions[number] = bucket.version
    return {name: p.detach() for name, p in crew[0].model.named_parameters() if p.requires_grad}, pushes


def _epoch(
    config: RunConfig, epoch: int, total: int | None, loader: "Loader", pieces: list["Piece"], buckets: list["Bucket"],
    orders: list[deque[Line]], crew: list[Worker],
) -> None:  # fmt: skip
    """Replay until every worker has no share left and every gradient is applied."""
    from hvdtrain.optim import lr_at
    from hvdtrain.ps.server import Push

    while True:
        moved = False
        for worker in crew:
            if _may_compute(worker, pieces):
                _compute(config, worker, loader, pieces)
                moved = True
        for number, order in enumerate(orders):
            while order:
                who, step, read, made = order[0]
                worker = crew[who]
                if worker.step != step or worker.answers is None or number in worker.answers:
                    break
                order.popleft()
                assert worker.parts is not None
                gradient = worker.compressors[number].decode(worker.parts[number])
                worker.answers[number] = buckets[number].push(
                    Push(who, step, worker.versions[number], lr_at(config, step, epoch, total), gradient)
                )  # fmt: skip
                waits = (
                    config.mode == "ps-sync" and not worker.answers[number].done()
                )  # its version comes with the last
                if read != worker.versions[number] or (made != buckets[number].version and not waits):
                    raise Failure(
                        f"the ledger of server {pieces[number].server} has push {step} of worker {who} read version "
                        f"{read} of bucket {number} and make {made}; it read {worker.versions[number]} and made "
                        f"{buckets[number].version}"
                    )
                moved = True
        if not moved:
            break
    steps = {worker.number: worker.step for worker in crew}
    if any(worker.shares for worker in crew) or any(order and order[0][1] <= steps[order[0][0]] for order in orders):
        raise Failure("the ledgers do not fit together: a push comes before the one that its worker waited for")


def _may_compute(worker: Worker, pieces: list["Piece"]) -> bool:
    if not worker.shares:
        return False
    if worker.answers is None:
        return True
    return len(worker.answers) == len(pieces) and all(answer.done() for answer in worker.answers.values())


def _compute(config: RunConfig, worker: Worker, loader: "Loader", pieces: list["Piece"]) -> None:
    """The worker takes its answers, and computes and encodes its next gradient."""
    import torch

    from hvdtrain.feed import Normalise
    from hvdtrain.train import backward

    for number, answer in (worker.answers or {}).items():
        worker.weights[pieces[number].start : pieces[number].stop].copy_(answer.result().weights)
        worker.versions[number] = answer.result().version
    share = worker.shares.popleft()
    [(_, (images, labels))] = loader.batches([share])
    inputs = Normalise(config, torch.device("cpu"))(images)
    backward(config, worker.number, worker.model, share, inputs, labels, lambda loss: loss, lambda more: None)
    flat = torch.cat([p.grad.flatten() for p in worker.model.parameters() if p.grad is not None])
    worker.model.zero_grad(set_to_none=True)
    worker.parts = [
        compressor.encode(flat[piece.start : piece.stop].clone())
        for compressor, piece in zip(worker.compressors, pieces, strict=True)
    ]
    worker.step, worker.answers = share.step, {}
