"""Playback of a recorded run in one process.

Each bucket gets its pushes in the order of its ledger. A worker computes its next gradient as soon
as it has the weights that, by the ledgers, its next pushes have read.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from itertools import chain

import torch

from hvdtrain.base import modes
from hvdtrain.base.config.run_config import RunConfig
from hvdtrain.base.errors import Failure
from hvdtrain.base.numerics.compression import Compressor
from hvdtrain.base.numerics.flat import flatten_weights, trained
from hvdtrain.base.numerics.optimizers import lr_at, make_exchange_optimizer
from hvdtrain.data.augment import Augment
from hvdtrain.data.find import find_dataset_of
from hvdtrain.data.folder import ImageFolder
from hvdtrain.data.loader import open_loader
from hvdtrain.data.sampling import BatchSampler, Share
from hvdtrain.job.buckets.local_steps import LocalSteps
from hvdtrain.job.buckets.partition import BucketRange, cut
from hvdtrain.job.ps.bucket import Bucket
from hvdtrain.job.training.device import set_up
from hvdtrain.job.training.feed import Normalise
from hvdtrain.job.training.model import image_side, initial_model, trial_inputs
from hvdtrain.job.training.step import backward
from hvdtrain.job.wire.messages import FreshWeights, LedgerLine, Push
from hvdtrain.models.pretrained import load_pretrained
from hvdtrain.tools.checks.ledger import Leases, Lines


class Replica:
    """One worker of the run, as far as it has been replayed.

    Args:
        number: The number of the worker.
        config: The configuration of the run.
        data: The data set.
        joins: Whether the worker joined later. Then it first reads each bucket at the version that
            its first push has read.

    Attributes:
        bucket_ranges: The range of each bucket in the flat weights.
        local: The local steps of the worker, if the run has any.
        outer: The weights that answers are written to, [weights] float32.
        compressors: The codec of each bucket.
        versions: The version of each bucket that the worker has read.
        shares: For each push to come its step, as the worker counts, and the shares.
        step: The step of the gradient that is encoded; 0 before the first.
        share: The last share of that gradient.
        encoded: The gradient, encoded for each bucket.
        pushed: The buckets that have got the gradient; None if there is none to push.
        answers: The answers of these buckets, as far as they have come.
    """

    def __init__(self, number: int, config: RunConfig, data: ImageFolder, joins: bool) -> None:
        self.number = number
        self.joins = joins
        self.model = initial_model(config, len(data.classes), trial_inputs(config, data))
        if config.pretrained:
            load_pretrained(self.model, config.model, config.pretrained)
        self.model.train()
        self.weights = flatten_weights(self.model)
        sizes = [parameter.numel() for parameter in trained(self.model)]
        self.bucket_ranges = cut(sizes, config.servers, config.bucket_elements)
        self.local: LocalSteps | None = None
        self.outer = self.weights
        if config.local_steps:
            self.local = LocalSteps(
                config, self.model, self.weights, self.weights.clone(), self.bucket_ranges
            )
            self.outer = self.local.outer
        self.compressors = [
            Compressor(config.compression, bucket_range.lengths)
            for bucket_range in self.bucket_ranges
        ]
        self.versions = [0] * len(self.bucket_ranges)
        self.shares: deque[tuple[int, list[Share]]] = deque()
        self.step = 0
        self.share: Share | None = None
        self.encoded: list[list[torch.Tensor]] = []
        self.pushed: set[int] | None = None
        self.answers: dict[int, FreshWeights] = {}

    def trains_in(self, epoch: int) -> bool:
        """Returns whether the next push has shares of this epoch."""
        if not self.shares:
            return False
        _, shares = self.shares[0]
        return shares[0].epoch == epoch


class RecordedBucket:
    """One bucket of the run, as far as it has been replayed.

    Args:
        bucket_range: The range of the bucket in the flat weights.
        bucket: The bucket.
        lines: The lines of its ledger.
        in_lockstep: Whether the mode waits for all pushes of a step.

    Attributes:
        left_out: Worker and step of pushes that changed nothing, because the bucket had another
            worker's push of the same share. The ledger has them before pushes that still wait for a
            step.
        to_come: The other pushes that are still to come, in order.
        delivered: The pushes that have come and are not part of a step yet.
        reads: For each worker the versions that its pushes to come have read.
        read_early: For each worker the versions that it reads after a push that was left out.
        kept: Answers with such versions, by worker and version.
    """

    def __init__(
        self,
        bucket_range: BucketRange,
        bucket: Bucket,
        lines: Sequence[LedgerLine],
        in_lockstep: bool,
    ) -> None:
        self.bucket_range = bucket_range
        self.bucket = bucket
        self.in_lockstep = in_lockstep
        self.left_out: set[tuple[int, int]] = set()
        if not in_lockstep:
            self.left_out = {(line.worker, line.step) for line in lines if line.version is None}
        self.to_come: deque[LedgerLine] = deque()
        self.delivered: deque[LedgerLine] = deque()
        self.reads: dict[int, deque[int]] = defaultdict(deque)
        self.read_early: dict[int, set[int]] = defaultdict(set)
        self.kept: dict[tuple[int, int], FreshWeights] = {}
        for line in lines:
            if (line.worker, line.step) not in self.left_out:
                self.to_come.append(line)
        for line in sorted(lines, key=lambda line: (line.worker, line.step)):
            self.reads[line.worker].append(line.version_read)
            if (line.worker, line.step - 1) in self.left_out:
                self.read_early[line.worker].add(line.version_read)

    def flush(self) -> None:
        """Makes a step of fewer pushes than usual, if the ledger has no other push of the step."""
        if self.in_lockstep or not self.delivered:
            return
        version = self.delivered[0].version
        if version is None:
            return
        if not self.to_come or self.to_come[0].version != version:
            self.bucket.flush()
            self.check()

    def answer(self, worker: Replica, is_waited_for: bool) -> FreshWeights | None:
        """Returns the answer with the version that the worker's next push has read.

        Args:
            worker: The worker.
            is_waited_for: Whether the worker waits for this bucket.

        Returns:
            The answer; None if the bucket does not have that version yet, or the worker does not
            wait for it.
        """
        number = worker.number
        version = self.bucket.weights.version
        reads = self.reads[number]
        # A push that was left out is answered at once: the worker may read this version later.
        if version in self.read_early[number]:
            self.read_early[number].discard(version)
            self.kept[number, version] = self.bucket.weights.answer(number)
        if not reads or not is_waited_for:
            return None
        if reads[0] == version:
            return self.bucket.weights.answer(number, current=worker.joins)
        return self.kept.pop((number, reads[0]), None)

    def check(self) -> None:
        """Checks that the bucket did what the ledger has.

        Raises:
            Failure: A push or a flush gave other lines.
        """
        server = self.bucket_range.server
        bucket = self.bucket_range.number
        for applied in self.bucket.take_lines():
            line = self.delivered.popleft()
            if applied != line:
                raise Failure(
                    f"the ledger of server {server} has push {line.step} of worker "
                    f"{line.worker} read version {line.version_read} of bucket {bucket} "
                    f"and make {line.version}; it read {applied.version_read} and made "
                    f"{applied.version}"
                )


class Playback:
    """A recorded run that is repeated in one process.

    Args:
        config: The configuration of the run.
        workers: The number of workers at the start.
        threads: How many threads each worker computes with.
        lines: The lines of all ledgers.
        leases: The leases; None in lockstep.

    Attributes:
        pushes: All pushes, as (worker, step).

    Raises:
        Failure: The ledgers contradict each other, or do not fit the model.
    """

    def __init__(
        self, config: RunConfig, workers: int, threads: int, lines: Lines, leases: Leases | None
    ) -> None:
        torch.set_num_threads(threads)
        set_up(config)
        data = find_dataset_of(config)
        augment = Augment(config.augment, config.seed)
        self.config = config
        self.total = config.total_steps(len(data.train))
        self.outer_lr = config.effective_outer(workers)[0] if config.local_steps else None
        self.loader = open_loader(data.train, image_side(config, data), threads, augment, soon=())
        all_lines = list(chain.from_iterable(lines.values()))
        numbers = sorted({*range(workers), *(line.worker for line in all_lines)})
        self.replicas = {
            number: Replica(number, config, data, number >= workers) for number in numbers
        }
        self.in_lockstep = modes.declared(config.mode).lockstep
        self.buckets = self._make_buckets(workers, lines)
        if leases is not None:
            _check_counts(lines, leases)
        self.pushes = _pushes_of(all_lines, leases is not None)
        sampler = BatchSampler(
            len(data.train), config.batch_size, config.seed, 0, workers, config.shuffle_block
        )
        for worker, step in self.pushes:
            if leases is None:
                number = (step - 1) * workers + worker
            else:
                number = leases[worker, step]
            self.replicas[worker].shares.append((step, self._shares(sampler, number)))

    def _make_buckets(self, workers: int, lines: Lines) -> list[RecordedBucket]:
        """Returns all buckets with the initial weights."""
        config = self.config
        first = self.replicas[0]
        places = {(cut_range.server, cut_range.number) for cut_range in first.bucket_ranges}
        if set(lines) != places:
            raise Failure("the ledgers are not of this model: their buckets are others")
        # The ledgers tell which worker waited for which push. So the policy of any mode that
        # applies each push at once stands for the others.
        make_policy = modes.load(config.mode if self.in_lockstep else "ps-async").make_policy
        buckets = []
        for bucket_range in first.bucket_ranges:
            weights = first.weights[bucket_range.start : bucket_range.stop].clone()
            bucket = Bucket(
                weights,
                lambda parameter: make_exchange_optimizer(config, parameter, workers),
                make_policy(workers, config),
            )
            lines_of_bucket = lines[bucket_range.server, bucket_range.number]
            buckets.append(RecordedBucket(bucket_range, bucket, lines_of_bucket, self.in_lockstep))
        return buckets

    def _shares(self, sampler: BatchSampler, number: int) -> list[Share]:
        """Returns the shares of a push: one, or the shares of a round of local steps.

        Args:
            sampler: The order of training.
            number: The number of the share; with local steps, of the worker's part of the round.
        """
        if not self.config.local_steps:
            return [sampler.share(number)]
        round_number, slot = divmod(number, sampler.workers)
        steps = sampler.steps_of_round(round_number, self.config.local_steps, self.total)
        return [sampler.share(done * sampler.workers + slot) for done in steps]

    def run(self) -> dict[str, torch.Tensor]:
        """Replays all pushes; returns the final weights by name.

        Raises:
            Failure: The ledgers contradict each other.
        """
        epoch = 0
        while self._pushes_to_come():
            epoch += 1
            before = self._pushes_to_come()
            for worker in self.replicas.values():
                worker.pushed = set(range(len(self.buckets))) if worker.joins else None
                worker.answers = {}
            self._epoch(epoch)
            if self._pushes_to_come() == before:
                raise Failure(f"the ledgers have no push of epoch {epoch}, but of later ones")
            if any(bucket.delivered for bucket in self.buckets):
                raise Failure(f"the ledgers have pushes in epoch {epoch} that no step was made of")
            # Before an evaluation all workers read the newest weights.
            for worker in self.replicas.values():
                newest = {}
                for number, bucket in enumerate(self.buckets):
                    newest[number] = bucket.bucket.weights.answer(worker.number, current=True)
                self._take(worker, newest)
        first = self.replicas[0]
        if first.local:
            first.local.begin_round()
        weights = {}
        for name, parameter in first.model.named_parameters():
            if parameter.requires_grad:
                weights[name] = parameter.detach()
        return weights

    def _pushes_to_come(self) -> int:
        """Returns how many pushes are still to come, over all buckets."""
        return sum(len(bucket.to_come) for bucket in self.buckets)

    def _epoch(self, epoch: int) -> None:
        """Replays an epoch, until no worker has shares left and every gradient is applied.

        Raises:
            Failure: The ledgers contradict each other.
        """
        moved = True
        while moved:
            moved = False
            for number in range(len(self.buckets)):
                self._answer(number)
            for worker in self.replicas.values():
                has_weights = worker.pushed is None or len(worker.answers) == len(worker.versions)
                if has_weights and worker.trains_in(epoch):
                    self._compute(worker)
                    moved = True
            for number in range(len(self.buckets)):
                while self._deliver(number):
                    moved = True
        is_stuck = any(worker.trains_in(epoch) for worker in self.replicas.values())
        if is_stuck or any(self._is_overdue(bucket) for bucket in self.buckets):
            raise Failure(
                "the ledgers do not fit together: a push comes before the one that its worker "
                "waited for"
            )

    def _is_overdue(self, bucket: RecordedBucket) -> bool:
        """Returns whether a bucket lacks a push of a step that a worker has computed."""
        if not bucket.to_come:
            return False
        line = bucket.to_come[0]
        return line.step <= self.replicas[line.worker].step

    def _deliver(self, number: int) -> bool:
        """Delivers the next push of a bucket's ledger, if its worker has computed it.

        Returns:
            Whether a push was delivered.
        """
        bucket = self.buckets[number]
        if not bucket.to_come:
            return False
        line = bucket.to_come[0]
        worker = self.replicas[line.worker]
        if worker.step != line.step or worker.pushed is None or number in worker.pushed:
            return False
        assert worker.share is not None
        lr = self.outer_lr or self._lr(worker.share)
        gradient = worker.compressors[number].decode(worker.encoded[number])
        bucket.delivered.append(bucket.to_come.popleft())
        push = Push(line.worker, line.step, worker.versions[number], lr, None)
        bucket.bucket.push(push, gradient)
        bucket.check()
        worker.pushed.add(number)
        bucket.reads[line.worker].popleft()
        # The last push of a step may have been answered before a flush.
        self._answer(number)
        bucket.flush()
        self._answer(number)
        return True

    def _answer(self, number: int) -> None:
        """Answers the workers that wait for a bucket, if it has the version they have read."""
        for worker in self.replicas.values():
            is_waited_for = number in (worker.pushed or ()) and number not in worker.answers
            answer = self.buckets[number].answer(worker, is_waited_for)
            if answer:
                worker.answers[number] = answer

    def _compute(self, worker: Replica) -> None:
        """Gives a worker its answers, and computes and encodes its next gradient."""
        self._take(worker, worker.answers)
        worker.step, shares = worker.shares.popleft()
        worker.share = shares[-1]
        if worker.local:
            flat = self._local_steps(worker.local, worker, shares)
        else:
            flat = self._gradient(worker, shares[0])
        worker.model.zero_grad(set_to_none=True)
        worker.encoded = []
        worker.answers = {}
        worker.joins = False
        worker.pushed = set()
        for number, bucket in enumerate(self.buckets):
            bucket_range = bucket.bucket_range
            gradient = flat[bucket_range.start : bucket_range.stop].clone()
            worker.encoded.append(worker.compressors[number].encode(gradient))
            if (worker.number, worker.step) in bucket.left_out:
                worker.pushed.add(number)
                bucket.reads[worker.number].popleft()

    def _gradient(self, worker: Replica, share: Share) -> torch.Tensor:
        """Returns the gradient of a share, [weights] float32. The parameters have it too."""
        [(_, (images, labels))] = self.loader.batches([share])
        inputs = Normalise(self.config, torch.device("cpu"))(images)
        backward(self.config, worker.model, share, inputs, labels, lambda more: None)
        gradients = [parameter.grad for parameter in worker.model.parameters()]
        return torch.cat([gradient.flatten() for gradient in gradients if gradient is not None])

    def _local_steps(
        self, local: LocalSteps, worker: Replica, shares: Sequence[Share]
    ) -> torch.Tensor:
        """Returns the difference Δ of a round of local steps, [weights] float32."""
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

    def _take(self, worker: Replica, answers: dict[int, FreshWeights]) -> None:
        """Gives a worker the weights of answers."""
        for number, answer in answers.items():
            bucket_range = self.buckets[number].bucket_range
            worker.outer[bucket_range.start : bucket_range.stop].copy_(answer.weights)
            worker.versions[number] = answer.version


def _pushes_of(lines: Sequence[LedgerLine], is_leased: bool) -> list[tuple[int, int]]:
    """Returns all pushes as (worker, step), sorted.

    A worker's last push may have reached only some buckets. And a ledger may have what a lost
    worker had read for a step that no bucket has applied: such a step is left out.
    """
    last_step: dict[int, int] = {}
    for line in lines:
        if line.version is not None or not is_leased:
            last_step[line.worker] = max(line.step, last_step.get(line.worker, 0))
    pushes = {(line.worker, line.step) for line in lines}
    return sorted((worker, step) for worker, step in pushes if step <= last_step.get(worker, 0))


def _check_counts(lines: Lines, leases: Leases) -> None:
    """Checks that each bucket got exactly one push of each share.

    Raises:
        Failure: A bucket got none, or several.
    """
    shares = set(leases.values())
    for (server, bucket), pushes in lines.items():
        applied = [line for line in pushes if line.version is not None]
        counts = Counter(leases[line.worker, line.step] for line in applied)
        wrong = sorted(share for share in shares if counts[share] != 1)
        if wrong:
            raise Failure(
                f"the ledger of server {server} has {counts[wrong[0]]} pushes of share {wrong[0]} "
                f"in bucket {bucket}, in place of one; so of {len(wrong)} of {len(shares)} shares"
            )
