"""A recorded run repeated on one process: pushes are delivered to its buckets in the order that their ledgers have."""

from collections import Counter, defaultdict, deque
from collections.abc import Sequence

import torch

from hvdtrain import modes
from hvdtrain.buckets.local_steps import LocalSteps
from hvdtrain.buckets.partition import Piece, cut
from hvdtrain.checks.ledger import Leases, Lines
from hvdtrain.config.run_config import RunConfig
from hvdtrain.data.augment import Augment
from hvdtrain.data.find import find_dataset
from hvdtrain.data.folder import ImageFolder
from hvdtrain.data.loader import open_loader
from hvdtrain.data.sampling import BatchSampler, Share
from hvdtrain.errors import Failure
from hvdtrain.models.pretrained import load_pretrained
from hvdtrain.numerics.compression import Compressor
from hvdtrain.numerics.flat import flatten_weights, trained
from hvdtrain.numerics.optimizers import lr_at, make_exchange_optimizer
from hvdtrain.ps.bucket import Bucket
from hvdtrain.rank.work import image_side, initial_model, trial_inputs
from hvdtrain.training.device import set_up
from hvdtrain.training.feed import Normalise
from hvdtrain.training.step import backward
from hvdtrain.wire.messages import Answer, Applied, Outcome, Push


class Replica:
    """One worker of the run, as far as it has been replayed. If it joins, it has not begun: it reads each bucket as it
    is, at the version that its first push has.
    """

    def __init__(self, number: int, config: RunConfig, data: ImageFolder, joins: bool) -> None:
        self.number, self.joins = number, joins
        self.model = initial_model(config, len(data.classes), trial_inputs(config, data))
        if config.pretrained:
            load_pretrained(self.model, config.model, config.pretrained)
        self.model.train()
        self.weights = flatten_weights(self.model)
        self.pieces = cut([p.numel() for p in trained(self.model)], config.servers, config.bucket_elements)
        self.local = LocalSteps(config, self.model, self.weights, self.pieces) if config.local_steps else None
        self.read = self.local.outer if self.local else self.weights  # what answers are written to
        self.compressors: list[Compressor] = []  # of each bucket
        self.versions: list[int] = []
        # Still to be trained on, each with the worker's own step: the shares of a push.
        self.shares: deque[tuple[int, list[Share]]] = deque()
        self.step = 0  # whose gradient is encoded; 0 before the first
        self.share: Share | None = None  # the last of that
        self.encoded: list[list[torch.Tensor]] = []
        self.pushed: set[int] | None = None  # the buckets that have it; None where there is none to push
        self.answers: dict[int, Answer] = {}  # to these, as far as they have come


class Recorded:
    """One bucket of the run, as far as it has been replayed.

    Args:
        lines: of its ledger.
        in_lockstep: whether the mode waits for all pushes of a step.
    """

    def __init__(self, piece: Piece, bucket: Bucket, lines: Sequence[Applied], in_lockstep: bool) -> None:
        self.piece, self.bucket, self.in_lockstep = piece, bucket, in_lockstep
        # Pushes that it took and left out, since it had another's of the same share: they changed nothing, and are
        # written down before those that a step had yet to be made of.
        self.left_out = {(line.worker, line.step) for line in lines if line.version is None and not in_lockstep}
        # The others, those to come.
        self.order = deque(line for line in lines if (line.worker, line.step) not in self.left_out)
        self.given: deque[Applied] = deque()  # those that came, and of which no step was made yet
        self.reads: dict[int, deque[int]] = defaultdict(deque)  # of each worker, what its pushes to come read
        self.early: dict[int, set[int]] = defaultdict(set)  # of these, after a push that was left out
        self.kept: dict[tuple[int, int], Answer] = {}  # answers with these, by worker and version
        for worker, step, read, _ in sorted(lines, key=lambda line: line[:2]):
            self.reads[worker].append(read)
            if (worker, step - 1) in self.left_out:
                self.early[worker].add(read)

    def flush(self) -> None:
        """Take a step with fewer pushes than make one, where the ledger has no other push of it."""
        made = self.given[0].version if self.given and not self.in_lockstep else None
        if made is not None and (not self.order or self.order[0].version != made):
            self.check(self.bucket.flush())

    def answer(self, worker: Replica, is_waited_for: bool) -> Answer | None:
        """The answer with the version that the worker's next push is to have read, if that was there."""
        number, now, due = worker.number, self.bucket.shard.version, self.reads[worker.number]
        if now in self.early[number]:  # the bucket waits for no push that was left out
            self.early[number].discard(now)
            self.kept[number, now] = self.bucket.shard.answer(number)
        if not due or not is_waited_for:
            return None
        if due[0] == now:
            return self.bucket.shard.answer(number, current=worker.joins)
        return self.kept.pop((number, due[0]), None)

    def check(self, outcome: Outcome) -> None:
        """Failure where a push or a flush does not come to what the ledger has."""
        for applied in outcome.lines:
            line = self.given.popleft()
            if applied != line:
                raise Failure(
                    f"the ledger of server {self.piece.server} has push {line.step} of worker {line.worker} read "
                    f"version {line.version_read} of bucket {self.piece.number} and make {line.version}; it read "
                    f"{applied[2]} and made {applied[3]}"
                )


class Playback:
    """
    Args:
        workers, threads: how many there were at the start, and of each.
        lines, leases: what the ledgers have.

    Attributes:
        pushes: all of them, as worker and step.

    Raises:
        Failure: the ledgers do not fit together, or to the model.
    """

    def __init__(self, config: RunConfig, workers: int, threads: int, lines: Lines, leases: Leases | None) -> None:
        torch.set_num_threads(threads)
        set_up(config)
        data = find_dataset(config.dataset, config.skip_bad)
        augment = Augment(config.augment, config.seed)
        self.config, self.total = config, config.total_steps(len(data.train))
        self.outer_lr = config.taken_outer(workers)[0] if config.local_steps else None
        self.loader = open_loader(data.train, image_side(config, data), threads, augment, soon=())
        every = [line for of_bucket in lines.values() for line in of_bucket]
        numbers = sorted({*range(workers), *(line.worker for line in every)})
        self.replicas = {number: Replica(number, config, data, number >= workers) for number in numbers}
        first = self.replicas[0]
        pieces = first.pieces
        if set(lines) != {(piece.server, piece.number) for piece in pieces}:
            raise Failure("the ledgers are not of this model: their buckets are others")
        # Who waited for whom is in the ledgers, so that of the modes that apply each push at once any will do.
        self.in_lockstep = modes.declared(config.mode).lockstep
        make_policy = modes.load(config.mode if self.in_lockstep else "ps-async").make_policy
        self.buckets = []
        for p in pieces:
            weights = first.weights[p.start : p.stop].clone()
            bucket = Bucket(
                weights, lambda q: make_exchange_optimizer(config, q, workers), make_policy(workers, config)
            )
            self.buckets.append(Recorded(p, bucket, lines[p.server, p.number], self.in_lockstep))
        if leases is not None:
            _check_counts(lines, leases)
        # A worker's last push may have reached some buckets alone; and a lost worker's ledgers have what it had read
        # for a step that none of them may have.
        last = dict(sorted((line.worker, line.step) for line in every if line.version is not None or leases is None))
        self.pushes = sorted({(line.worker, line.step) for line in every if line.step <= last.get(line.worker, 0)})
        sampler = BatchSampler(len(data.train), config.batch_size, config.seed, 0, workers, config.shuffle_block)
        for n, step in self.pushes:
            number = leases[n, step] if leases is not None else (step - 1) * workers + n
            self.replicas[n].shares.append((step, self._shares(sampler, number)))
        for worker in self.replicas.values():
            worker.compressors = [Compressor(config.compression, piece.lengths) for piece in pieces]
            worker.versions = [0] * len(pieces)

    def _shares(self, sampler: BatchSampler, number: int) -> list[Share]:
        """Those that a push is of."""
        if not self.config.local_steps:
            return [sampler.share(number)]
        round_number, slot = divmod(number, sampler.workers)
        steps = sampler.steps_of_round(round_number, self.config.local_steps, self.total)
        return [sampler.share(done * sampler.workers + slot) for done in steps]

    def run(self) -> dict[str, torch.Tensor]:
        """The final weights by name."""
        epoch = 0
        while left := self._left():
            epoch += 1
            for worker in self.replicas.values():
                worker.pushed, worker.answers = (set(range(len(self.buckets))) if worker.joins else None), {}
            self._epoch(epoch)
            if self._left() == left:
                raise Failure(f"the ledgers have no push of epoch {epoch}, but of later ones")
            if any(bucket.given for bucket in self.buckets):
                raise Failure(f"the ledgers have pushes in epoch {epoch} that no step was made of")
            for worker in self.replicas.values():  # evaluation begins with everybody reading the newest weights
                newest = [bucket.bucket.shard.answer(worker.number, current=True) for bucket in self.buckets]
                self._take(worker, dict(enumerate(newest)))
        first = self.replicas[0]
        if first.local:
            first.local.begin_round()
        return {name: p.detach() for name, p in first.model.named_parameters() if p.requires_grad}

    def _left(self) -> int:
        return sum(len(bucket.order) for bucket in self.buckets)

    def _epoch(self, epoch: int) -> None:
        """Replay until every worker has no share left and every gradient is applied."""
        moved = True
        while moved:
            moved = False
            for number in range(len(self.buckets)):
                self._answer(number)
            for worker in self.replicas.values():
                has_weights = worker.pushed is None or len(worker.answers) == len(worker.versions)
                if has_weights and worker.shares and worker.shares[0][1][0].epoch == epoch:
                    self._compute(worker)
                    moved = True
            for number in range(len(self.buckets)):
                while self._deliver(number):
                    moved = True
        unread = any(worker.shares and worker.shares[0][1][0].epoch == epoch for worker in self.replicas.values())
        if unread or any(
            bucket.order and bucket.order[0].step <= self.replicas[bucket.order[0].worker].step
            for bucket in self.buckets
        ):
            raise Failure("the ledgers do not fit together: a push comes before the one that its worker waited for")

    def _deliver(self, number: int) -> bool:
        """Hand the bucket the next push of its ledger, if its worker has that."""
        bucket = self.buckets[number]
        if not bucket.order:
            return False
        line = bucket.order[0]
        worker = self.replicas[line.worker]
        if worker.step != line.step or worker.pushed is None or number in worker.pushed:
            return False
        assert worker.share is not None
        lr = self.outer_lr or self._lr(worker.share)
        gradient = worker.compressors[number].decode(worker.encoded[number])
        bucket.given.append(bucket.order.popleft())
        push = Push(line.worker, line.step, worker.versions[number], lr, None)
        bucket.check(bucket.bucket.push(push, gradient))
        worker.pushed.add(number)
        bucket.reads[line.worker].popleft()
        self._answer(number)  # before a step that came after the last of its pushes was answered
        bucket.flush()
        self._answer(number)
        return True

    def _answer(self, number: int) -> None:
        """Give each worker that waits for this bucket what its next push is to have read, if that is there."""
        for worker in self.replicas.values():
            is_waited_for = number in (worker.pushed or ()) and number not in worker.answers
            if answer := self.buckets[number].answer(worker, is_waited_for):
                worker.answers[number] = answer

    def _compute(self, worker: Replica) -> None:
        """The worker takes its answers, and computes and encodes its next gradient."""
        self._take(worker, worker.answers)
        worker.step, shares = worker.shares.popleft()
        worker.share = shares[-1]
        flat = self._local_steps(worker.local, worker, shares) if worker.local else self._gradient(worker, shares[0])
        worker.model.zero_grad(set_to_none=True)
        worker.encoded, worker.answers, worker.joins, worker.pushed = [], {}, False, set()
        for number, bucket in enumerate(self.buckets):
            gradient = flat[bucket.piece.start : bucket.piece.stop].clone()
            worker.encoded.append(worker.compressors[number].encode(gradient))
            if (worker.number, worker.step) in bucket.left_out:
                worker.pushed.add(number)
                bucket.reads[worker.number].popleft()

    def _gradient(self, worker: Replica, share: Share) -> torch.Tensor:
        """Of all trained parameters, flat, where they have it too."""
        [(_, (images, labels))] = self.loader.batches([share])
        inputs = Normalise(self.config, torch.device("cpu"))(images)
        backward(self.config, worker.model, share, inputs, labels, lambda more: None)
        return torch.cat([p.grad.flatten() for p in worker.model.parameters() if p.grad is not None])

    def _local_steps(self, local: LocalSteps, worker: Replica, shares: Sequence[Share]) -> torch.Tensor:
        """Δ of a round of these."""
        local.begin_round()
        local.steps = len(shares)
        for share in shares:
            local.begin(self._lr(share))
            self._gradient(worker, share)
            local.step()
            worker.model.zero_grad(set_to_none=True)
        return torch.cat([local.difference(number) for number in range(len(self.buckets))])

    def _lr(self, share: Share) -> float:
        return lr_at(self.config, share.step, share.epoch, self.total)

    def _take(self, worker: Replica, answers: dict[int, Answer]) -> None:
        for number, answer in answers.items():
            piece = self.buckets[number].piece
            worker.read[piece.start : piece.stop].copy_(answer.weights)
            worker.versions[number] = answer.version


def _check_counts(lines: Lines, leases: Leases) -> None:
    """Failure where a bucket did not have each share once."""
    every = set(leases.values())
    for (server, bucket), pushes in lines.items():
        counted = Counter(leases[line.worker, line.step] for line in pushes if line.version is not None)
        if wrong := sorted(share for share in every if counted[share] != 1):
            raise Failure(
                f"the ledger of server {server} has {counted[wrong[0]]} pushes of share {wrong[0]} in bucket "
                f"{bucket}, in place of one; so of {len(wrong)} of {len(every)} shares"
            )
