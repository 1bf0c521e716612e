"""`hvdtrain replay`: a recorded parameter-server run again, on one process, push by push in the order it had."""

import csv
import dataclasses
import itertools
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hvdtrain import modes
from hvdtrain.config.file import read_config
from hvdtrain.config.run_config import RunConfig
from hvdtrain.config.untrusted import parse_json
from hvdtrain.errors import Failure, UsageError
from hvdtrain.formatting import with_noun
from hvdtrain.runs.folder import CONFIG
from hvdtrain.runs.request import config_of, shares_of

if TYPE_CHECKING:
    import torch

    from hvdtrain.buckets.partition import Piece
    from hvdtrain.data.loader import Loader
    from hvdtrain.data.sampling import Share
    from hvdtrain.models.layers import Network
    from hvdtrain.numerics.compression import Compressor
    from hvdtrain.ps.bucket import Bucket
    from hvdtrain.ps.messages import Answer, Applied


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
    from hvdtrain.rank.results import WEIGHTS

    if not (run / WEIGHTS).is_file():
        raise UsageError(f"{run} has no {WEIGHTS} to compare with: did it finish?")
    is_leased = shares_of(config) == "leased"
    most = _read_lives(run, workers) if is_leased else workers
    lines = _read_ledgers(run, config.servers, workers, most)
    leases = _read_leases(run, workers, most) if is_leased else None
    if leases is not None:
        for worker, step, _, made in itertools.chain(*lines.values()):
            if made is not None and (worker, step) not in leases:
                raise UsageError(f"{run} has no lease of step {step} of worker {worker}, whose push its ledgers have")
    weights, pushes = _replay(config, workers, threads, lines, leases)
    joined = len(_who_pushed(lines) - set(range(workers)))
    total = sum(tensor.numel() for tensor in weights.values())
    if different := _different(weights, run / WEIGHTS):
        raise Failure(f"{different:,} of {total:,} weights differ from those that {run} saved")
    more = f" and {joined} that joined" if joined else ""
    made_by = f"{pushes:,} pushes of {with_noun(workers, 'worker')}{more}"
    click.echo(f"{made_by} replayed: the same {total:,} weights, bit for bit")


def _read(run: Path) -> tuple[RunConfig, int, int]:
    """What was run, its number of workers, and threads of each."""
    config = config_of(run)
    if absent := sorted({field.name for field in dataclasses.fields(config)} - read_config(run / CONFIG).keys()):
        raise UsageError(f"{run} was recorded by another version: its {CONFIG} has no {absent[0]}")
    if not modes.declared(config.mode).has_servers or not config.record:
        raise UsageError(f"{run} is not a recorded run: train with a ps- mode and --record")
    try:
        manifest = parse_json((run / "manifest.json").read_text())
        if len(manifest.get("parts", [])) > 1:
            raise UsageError(f"{run} was resumed, and replay begins at the first step: record a run in one go")
        workers, threads = int(manifest["workers"]), int(manifest["threads_per_worker"])
        if not (0 < workers < 10_000 and 0 < threads < 10_000):
            raise ValueError(f"{workers} workers with {threads} threads")
        return config, workers, threads
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise UsageError(f"{run}: its summary.json or manifest.json cannot be read: {error}") from None


MOST_LIVES = 10_000  # of the workers of a run: each has a model here
Line = tuple[int, int, int, int | None]  # worker, step, version read, version made; None where it was dropped
Lines = dict[tuple[int, int], list[Line]]  # (server, bucket) -> its pushes, in order
Leases = dict[tuple[int, int], int]  # (worker, step) -> the number of its share


def _who_pushed(lines: Lines) -> set[int]:
    return {worker for worker, *_ in itertools.chain(*lines.values())}


def _read_ledgers(run: Path, servers: int, workers: int, most: int) -> Lines:
    """What the ledgers say. UsageError, with file and line, where one cannot be read or contradicts itself.

    Args:
        workers: how many there were at the start.
        most: how many lives of workers there may have been.
    """
    from hvdtrain.ps.ledger import DROPPED, ledger_file

    lines: Lines = {}
    seen = set()
    for server in range(servers):
        path = ledger_file(run, server)
        with _numbered_rows(path) as rows:
            for number, row in rows:
                bucket, worker, step = (int(row[name]) for name in ("bucket", "worker", "step"))
                read = int(row["version_read"])
                made = None if row["version"] == DROPPED else int(row["version"])
                if not (0 <= worker < most and step > 0 and 0 <= read and (made is None or read < made)):
                    raise UsageError(
                        f"{path}, line {number}: no push of {with_noun(workers, 'worker')} reads like this"
                    )
                if (server, bucket, worker, step) in seen:
                    raise UsageError(f"{path}, line {number}: step {step} of worker {worker} was applied before")
                seen.add((server, bucket, worker, step))
                lines.setdefault((server, bucket), []).append((worker, step, read, made))
    return lines


def _read_lives(run: Path, workers: int) -> int:
    """How many lives the run's workers had, those at the start included. UsageError where that cannot be read."""
    from hvdtrain.ps.membership_log import membership_file

    path = membership_file(run)
    try:
        members = [int(parse_json(line)["member"]) for line in path.read_text().splitlines()]
        if members and not 0 <= max(members) < MOST_LIVES:
            raise ValueError(f"a worker's number is {max(members)}")
        return max([workers, *(1 + member for member in members)])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from None


def _read_leases(run: Path, workers: int, most: int) -> Leases:
    """Which share each worker had at each of its steps. UsageError, with file and line, where that cannot be read."""
    from hvdtrain.ps.ledger import lease_file

    path, leases = lease_file(run), Leases()
    with _numbered_rows(path) as rows:
        for number, row in rows:
            worker, step, share = (int(row[name]) for name in ("worker", "step", "share"))
            if not (0 <= worker < most and step > 0 and share >= 0) or (worker, step) in leases:
                raise UsageError(f"{path}, line {number}: no lease of {with_noun(workers, 'worker')} reads like this")
            leases[worker, step] = share
    return leases


@contextmanager
def _numbered_rows(path: Path) -> Iterator[Iterator[tuple[int, dict[str, str]]]]:
    """The rows of a CSV file with their lines' numbers. UsageError where it, or a row in the block, cannot be read."""
    try:
        with path.open(newline="") as file:
            yield enumerate(csv.DictReader(file), 2)
    except (OSError, ValueError, KeyError, TypeError, csv.Error) as error:
        raise UsageError(f"{path} cannot be read: {error}") from None


def _different(weights: dict[str, "torch.Tensor"], saved: Path) -> int:
    """How many weights are not, bit for bit, those in the file."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        there = load_file(saved)
        return sum(int((there[name] != tensor).sum()) for name, tensor in weights.items())
    except (OSError, SafetensorError, KeyError, RuntimeError) as error:
        raise Failure(f"{saved} cannot be read as this model's weights: {error}") from None


@dataclasses.dataclass
class Replica:
    """One worker of the run, as far as it has been replayed.

    Attributes:
        weights: the flat vector that the model's parameters are views of.
        joins: it has not begun: it reads each bucket as it is, at the version that its first push has.
        early: for each piece, the versions that it read after a push that the bucket had left out.
        kept: those of them that the bucket has had, by piece and version.
        shares: of this epoch, still to be trained on, each with the worker's own step.
        share: the one that `encoded` is the gradient of.
        step: the step whose gradient `encoded` holds, for each piece; 0 before the first.
        pushed: the pieces that it has pushed of this step; None where it has no gradient to push.
        answers: to these, by piece, as far as they have come.
    """

    number: int
    model: "Network"
    weights: "torch.Tensor"
    shares: deque[tuple[int, "Share"]]
    compressors: list["Compressor"]
    versions: list[int]
    joins: bool = False
    early: list[set[int]] = dataclasses.field(default_factory=list)
    kept: dict[tuple[int, int], "Answer"] = dataclasses.field(default_factory=dict)
    step: int = 0
    share: "Share | None" = None
    encoded: list[list["torch.Tensor"]] = dataclasses.field(default_factory=list)
    pushed: set[int] | None = None
    answers: dict[int, "Answer"] = dataclasses.field(default_factory=dict)


def _replay(
    config: RunConfig, workers: int, threads: int, lines: Lines, leases: Leases | None
) -> tuple[dict[str, "torch.Tensor"], int]:
    """The final weights by name, and how many pushes there were."""
    import torch

    from hvdtrain.buckets.partition import cut
    from hvdtrain.data.augment import Augment
    from hvdtrain.data.find import find_dataset
    from hvdtrain.data.loader import Loader
    from hvdtrain.data.sampling import BatchSampler, Share
    from hvdtrain.models.pretrained import load_pretrained
    from hvdtrain.numerics.compression import Compressor
    from hvdtrain.numerics.flat import flatten_weights, trained
    from hvdtrain.numerics.optimizers import make_optimizer
    from hvdtrain.ps.bucket import Bucket
    from hvdtrain.rank.work import image_side, initial_model
    from hvdtrain.training.device import set_up

    torch.set_num_threads(threads)
    set_up(config)
    data = find_dataset(config.dataset)
    loader = Loader(data.train, image_side(config, data), threads, Augment(config.augment, config.seed), soon=())
    # Who waited for whom is in the ledgers, so that of the modes that apply each push at once any will do.
    in_lockstep = modes.declared(config.mode).lockstep
    make_policy = modes.load(config.mode if in_lockstep else "ps-async").make_policy
    replicas = []
    for number in range(max(workers, 1 + max(_who_pushed(lines), default=-1))):
        model = initial_model(config, len(data.classes))
        if config.pretrained:
            load_pretrained(model, config.model, config.pretrained)
        model.train()
        weights = flatten_weights(model)
        replicas.append(Replica(number, model, weights, deque(), [], [], joins=number >= workers))
    sizes = [p.numel() for p in trained(replicas[0].model)]
    pieces = cut(sizes, config.servers, config.bucket_elements)
    if set(lines) != {(piece.server, piece.number) for piece in pieces}:
        raise Failure("the ledgers are not of this model: their buckets are others")
    made: list[deque[Line]] = [deque() for _ in pieces]  # what each bucket's ledger has of the pushes that it was given
    buckets = [
        Bucket(
            replicas[0].weights[p.start : p.stop].clone(),
            lambda q: make_optimizer(config, q),
            make_policy(workers, config),
            partial(_compare, expected, p),
        )
        for p, expected in zip(pieces, made, strict=True)
    ]
    orders = [deque(lines[piece.server, piece.number]) for piece in pieces]
    reads: list[list[deque[int]]] = [[deque() for _ in replicas] for _ in orders]
    for of_bucket, order in zip(reads, orders, strict=True):
        left_out: set[int] = set()  # workers whose push before this one was
        for replica in replicas:
            replica.early.append(set())
        for who, _, read, version in sorted(order, key=lambda line: line[:2]):
            of_bucket[who].append(read)
            if who in left_out and not in_lockstep:
                replicas[who].early[-1].add(read)
            left_out = left_out | {who} if version is None else left_out - {who}
    total = config.total_steps(len(data.train))
    for worker in replicas:
        worker.compressors = [Compressor(config.compression, piece.lengths) for piece in pieces]
        worker.versions = [0] * len(pieces)
    sampler = BatchSampler(len(data.train), config.batch_size, config.seed, 0, workers, config.shuffle_block)
    shares: list[deque[tuple[int, Share]]] = [deque() for _ in replicas]
    # A worker's last push may have reached some buckets alone.
    taken = sorted({(n, step) for order in orders for n, step, _, _ in order})
    if leases is not None:  # a lost worker's ledgers have what it had read for a step that none of them may have
        last = dict(sorted((n, step) for order in orders for n, step, _, made in order if made is not None))
        taken = [(n, step) for n, step in taken if step <= last.get(n, 0)]
    for n, step in taken:
        number = leases[n, step] if leases is not None else (step - 1) * workers + n
        shares[n].append((step, sampler.share(number)))
    if leases is not None:
        _check_counts(orders, pieces, leases)
    pushes, epoch = len(taken), 0
    # Pushes that a bucket took and left out, since it had another's of the same share: they changed nothing, and are
    # written down before those that a step had yet to be made of.
    redone: list[set[tuple[int, int]]] = [set() for _ in orders]
    if not in_lockstep:
        redone = [{line[:2] for line in order if line[3] is None} for order in orders]
        orders = [deque(line for line in order if line[3] is not None) for order in orders]
    while left := sum(map(len, orders)):
        epoch += 1
        for worker in replicas:
            own = shares[worker.number]
            worker.shares = deque(own.popleft() for _ in range(sum(share.epoch == epoch for _, share in own)))
            worker.pushed, worker.answers = (set(range(len(pieces))) if worker.joins else None), {}
        _epoch(config, total, loader, pieces, buckets, orders, redone, made, reads, replicas)
        if sum(map(len, orders)) == left:
            raise Failure(f"the ledgers have no push of epoch {epoch}, but of later ones")
        for bucket in buckets if in_lockstep else ():
            for worker in replicas:
                bucket.idle(worker.number, worker.step, at_barrier=True)
        if any(made):
            raise Failure(f"the ledgers have pushes in epoch {epoch} that no step was made of")
        for worker in replicas:  # evaluation begins with everybody reading the newest weights
            for number, (piece, bucket) in enumerate(zip(pieces, buckets, strict=True)):
                worker.weights[piece.start : piece.stop].copy_(bucket.pull(worker.number).weights)
                worker.versions[number] = bucket.version
    return {name: p.detach() for name, p in replicas[0].model.named_parameters() if p.requires_grad}, pushes


def _epoch(
    config: RunConfig, total: int | None, loader: "Loader", pieces: list["Piece"], buckets: list["Bucket"],
    orders: list[deque[Line]], redone: list[set[tuple[int, int]]], made: list[deque[Line]],
    reads: list[list[deque[int]]], replicas: list[Replica],
) -> None:  # fmt: skip
    """Replay until every worker has no share left and every gradient is applied."""
    flushes = not modes.declared(config.mode).lockstep
    from hvdtrain.numerics.optimizers import lr_at
    from hvdtrain.ps.messages import Push

    while True:
        moved = False
        for number, bucket in enumerate(buckets):
            _answer(number, bucket, reads, replicas)
        for worker in replicas:
            if _may_compute(worker, pieces):
                _compute(config, worker, loader, pieces)
                worker.pushed = {number for number, lines in enumerate(redone) if (worker.number, worker.step) in lines}
                for number in worker.pushed:
                    reads[number][worker.number].popleft()
                moved = True
        for number, order in enumerate(orders):
            while order:
                who, step, _, _ = order[0]
                worker = replicas[who]
                if worker.step != step or worker.pushed is None or number in worker.pushed:
                    break
                made[number].append(order.popleft())
                worker.pushed.add(number)
                gradient = worker.compressors[number].decode(worker.encoded[number])
                assert worker.share is not None
                lr = lr_at(config, worker.share.step, worker.share.epoch, total)
                buckets[number].push(Push(who, step, worker.versions[number], lr, gradient))
                reads[number][who].popleft()
                _answer(number, buckets[number], reads, replicas)
                if flushes and made[number] and (not order or order[0][3] != made[number][0][3]):
                    # A step with fewer pushes than make one, which came after the last of them was answered.
                    buckets[number].policy.flush(buckets[number])
                    _answer(number, buckets[number], reads, replicas)
                moved = True
        if not moved:
            break
    steps = {worker.number: worker.step for worker in replicas}
    if any(worker.shares for worker in replicas) or any(
        order and order[0][1] <= steps[order[0][0]] for order in orders
    ):
        raise Failure("the ledgers do not fit together: a push comes before the one that its worker waited for")


def _answer(number: int, bucket: "Bucket", reads: list[list[deque[int]]], replicas: list[Replica]) -> None:
    """Give each worker that waits for this bucket the version that its next push is to have read, if it is that now."""
    for worker in replicas:
        due, now = reads[number][worker.number], bucket.version
        if now in worker.early[number]:  # the bucket goes on meanwhile: it waits for no push that was left out
            worker.early[number].discard(now)
            worker.kept[number, now] = bucket.answer(worker.number)
        if due and number in (worker.pushed or ()) and number not in worker.answers:
            if due[0] == now:
                worker.answers[number] = (bucket.pull if worker.joins else bucket.answer)(worker.number)
            elif kept := worker.kept.pop((number, due[0]), None):
                worker.answers[number] = kept


def _check_counts(orders: list[deque[Line]], pieces: list["Piece"], leases: Leases) -> None:
    """Failure where a bucket did not have each share once, or a push had two."""
    every = set(leases.values())
    for order, piece in zip(orders, pieces, strict=True):
        counted = Counter(leases[worker, step] for worker, step, _, made in order if made is not None)
        if wrong := sorted(share for share in every if counted[share] != 1):
            raise Failure(
                f"the ledger of server {piece.server} has {counted[wrong[0]]} pushes of share {wrong[0]} in bucket "
                f"{piece.number}, in place of one; so of {len(wrong)} of {len(every)} shares"
            )


def _compare(expected: deque[Line], piece: "Piece", applied: "Applied") -> None:
    """Failure where a push was not applied as its line of the ledger says."""
    who, step, read, made = line = expected.popleft()
    if applied != line:
        raise Failure(
            f"the ledger of server {piece.server} has push {step} of worker {who} read version {read} of bucket "
            f"{piece.number} and make {made}; it read {applied.version_read} and made {applied.version}"
        )


def _may_compute(worker: Replica, pieces: list["Piece"]) -> bool:
    if not worker.shares:
        return False
    return worker.pushed is None or len(worker.answers) == len(pieces)


def _compute(config: RunConfig, worker: Replica, loader: "Loader", pieces: list["Piece"]) -> None:
    """The worker takes its answers, and computes and encodes its next gradient."""
    import torch

    from hvdtrain.training.feed import Normalise
    from hvdtrain.training.step import backward

    for number, answer in worker.answers.items():
        worker.weights[pieces[number].start : pieces[number].stop].copy_(answer.weights)
        worker.versions[number] = answer.version
    step, share = worker.shares.popleft()
    [(_, (images, labels))] = loader.batches([share])
    inputs = Normalise(config, torch.device("cpu"))(images)
    backward(config, worker.model, share, inputs, labels, lambda more: None)
    flat = torch.cat([p.grad.flatten() for p in worker.model.parameters() if p.grad is not None])
    worker.model.zero_grad(set_to_none=True)
    worker.encoded = [
        compressor.encode(flat[piece.start : piece.stop].clone())
        for compressor, piece in zip(worker.compressors, pieces, strict=True)
    ]
    worker.step, worker.share, worker.answers, worker.joins = step, share, {}, False
