"""Playback of a recorded run: its workers and servers once more, in one process.

They are the workers and servers of any job. Their messages come in the order that the ledgers have,
over the wire between ranks of one process. The ledgers tell besides when each worker got which
version, which in the run depended on messages that no ledger has.
"""

import dataclasses
import itertools
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from hvdtrain.base import modes
from hvdtrain.base.config.run_config import RunConfig
from hvdtrain.base.errors import Failure
from hvdtrain.base.numerics.slowdown import Slowdown
from hvdtrain.base.world.place import World
from hvdtrain.data.augment import Augment
from hvdtrain.data.find import find_dataset_of
from hvdtrain.data.folder import ImageFolder
from hvdtrain.data.loader import Batches, open_loader
from hvdtrain.data.sampling import BatchSampler, Share
from hvdtrain.job.buckets.local_rounds import LocalRounds
from hvdtrain.job.coordination.job import Job
from hvdtrain.job.coordination.synchroniser import Synchroniser
from hvdtrain.job.ps.bucket import Bucket
from hvdtrain.job.ps.journal import Journal
from hvdtrain.job.ps.policy import Policy, PolicyDecision, Release, Update
from hvdtrain.job.ps.serve import make_server
from hvdtrain.job.ps.server import Server
from hvdtrain.job.ps.server_metrics import ServerLoad
from hvdtrain.job.ps.worker import PushPull
from hvdtrain.job.training.device import set_up
from hvdtrain.job.training.model import image_side, initial_model, trial_inputs
from hvdtrain.job.training.shares import Shares
from hvdtrain.job.training.step import Stepper
from hvdtrain.job.wire.local import Delivery, Event, LocalNetwork, StandsStill, Turn
from hvdtrain.job.wire.messages import LedgerLine, Part, Push
from hvdtrain.job.wire.wire import LOCAL, start
from hvdtrain.models.pretrained import load_pretrained
from hvdtrain.tools.checks.ledger import Leases, Lines

NEVER = 10**9  # seconds: a replay waits as long as it computes


class Contradiction(Exception):
    """The run is repeated, and something is not as its ledgers have it."""


class Trainee(Protocol):
    """A worker's model, and how the worker takes a step.

    Attributes:
        model: the model.
    """

    model: nn.Module

    def prepare(self, sync: Synchroniser) -> None:
        """Takes what connects the worker to the others, before its first step."""

    def take(self, share: Share) -> None:
        """Takes a step with a share."""


class ImageTrainee:
    """A worker's model that is trained on images, as in any job.

    Args:
        job: the job.
        data: the data set.
        loader: reads the images of shares.
    """

    def __init__(self, job: Job, data: ImageFolder, loader: Batches) -> None:
        config = job.config
        self.job = job
        self.loader = loader
        self.model = initial_model(config, len(data.classes), trial_inputs(config, data))
        if config.pretrained:
            load_pretrained(self.model, config.model, config.pretrained)
        self.model.train()

    def prepare(self, sync: Synchroniser) -> None:
        torch.set_num_threads(self.job.threads)
        module = sync.prepare(self.model)
        slowdown = Slowdown("none", self.job.world.member, self.job.config.seed)
        self.stepper = Stepper(self.job, self.model, sync, module, self.job.steps, slowdown)

    def take(self, share: Share) -> None:
        [(_, (images, labels))] = self.loader.batches([share])
        self.stepper.take(share, images, labels, elapsed_s=0.0)


class RecordedBucket:
    """What the ledger has of one bucket, as far as it is still to come.

    Args:
        name: the ledger, in words.
        number: the bucket's number.
        lines: the lines of its ledger.
        last_steps: the last step of each worker that is repeated.

    Attributes:
        to_come: the pushes that an update is made of, as far as they have not come, in order.
        came: pushes of these that have come, and are part of no update yet.
        left_out: pushes that change nothing, by worker and step, each with the version that the
            bucket has when it comes. The ledger has them before pushes that wait for an update.
        reads: for each worker, the versions that its pushes to come have read.
        version: returns the version that the bucket has now.
    """

    def __init__(
        self, name: str, number: int, lines: Sequence[LedgerLine], last_steps: Mapping[int, int]
    ) -> None:
        self.name = name
        self.number = number
        made = Counter(line.version for line in lines if line.version is not None)
        # An update of fewer pushes than others was made when nobody was to push more.
        most = max(made.values(), default=0)
        self.flushed = {version for version, pushes in made.items() if pushes < most}
        self.to_come: deque[LedgerLine] = deque()
        self.came: deque[LedgerLine] = deque()
        self.left_out: dict[tuple[int, int], int] = {}
        self.reads: dict[int, deque[int]] = {worker: deque() for worker in last_steps}
        self.version: Callable[[], int] = lambda: 0
        version = 0
        for line in lines:
            if line.version is not None:
                version = line.version
                self.to_come.append(line)
            elif line.step <= last_steps.get(line.worker, 0):
                self.left_out[line.worker, line.step] = version
        for line in sorted(lines, key=lambda line: line.step):
            if line.step <= last_steps.get(line.worker, 0):
                self.reads[line.worker].append(line.version_read)

    def is_left_out(self, push: Push) -> bool:
        """Returns whether a push changes nothing."""
        return (push.worker, push.step) in self.left_out

    def is_due(self, push: Push) -> bool:
        """Returns whether a push comes next, of those that are on their way."""
        if self.is_left_out(push):
            return self.left_out[push.worker, push.step] == self.version()
        if not self.to_come or (push.worker, push.step) != _key(self.to_come[0]):
            return False
        return not (self.makes_update() and self._awaits_left_out())

    def makes_update(self) -> bool:
        """Returns whether an update is made when the next push comes."""
        is_last = len(self.to_come) == 1 or self._follows(self.to_come[1])
        return is_last and self.to_come[0].version not in self.flushed

    def comes(self, push: Push) -> None:
        """Takes note that a push comes now."""
        self.reads[push.worker].popleft()
        if not self.is_left_out(push):
            self.came.append(self.to_come.popleft())

    def is_to_flush(self) -> bool:
        """Returns whether an update is to be made of the pushes that have come, and was not."""
        if not self.came or self._awaits_left_out():
            return False
        return not self.to_come or self._follows(self.to_come[0])

    def _awaits_left_out(self) -> bool:
        """Returns whether pushes come before the next update that change nothing."""
        return self.version() in self.left_out.values()

    def next_read(self, worker: int) -> int | None:
        """Returns the version that a worker's next push has read; None if it has no other."""
        reads = self.reads.get(worker)
        return reads[0] if reads else None

    def check(self, lines: Sequence[LedgerLine]) -> None:
        """Checks that the bucket has done what the ledger has.

        Raises:
            Contradiction: it has not.
        """
        for done in lines:
            if done.version is None and _key(done) in self.left_out:
                del self.left_out[_key(done)]
                continue
            line = self.came.popleft() if self.came else None
            if done == line:
                continue
            if line is None or _key(line) != _key(done):
                raise Contradiction(
                    f"{self.name} has not push {done.step} of worker {done.worker} where bucket "
                    f"{self.number} took it"
                )
            raise Contradiction(
                f"{self.name} has push {line.step} of worker {line.worker} read version "
                f"{line.version_read} of bucket {self.number} and make {line.version}; it read "
                f"{done.version_read} and made {done.version}"
            )

    def _follows(self, line: LedgerLine) -> bool:
        """Returns whether a line is of a later update than the pushes that come before it."""
        before = self.came[0] if self.came else self.to_come[0]
        return line.version != before.version


class RecordedPolicy(Policy):
    """Applies pushes as the mode does, and lets workers go on when they did.

    Args:
        policy: the mode's policy.
        record: what the ledger has of the bucket.
    """

    def __init__(self, policy: Policy, record: RecordedBucket) -> None:
        self.policy = policy
        self.record = record
        self.compensation = policy.compensation
        self.waiting: dict[int, Release] = {}

    def accept(self, push: Push, gradient: torch.Tensor | None, version: int) -> PolicyDecision:
        updates = self.policy.accept(push, gradient, version).updates
        self.waiting[push.worker] = Release(push.worker, version - push.version_read)
        return self._decide(updates, version)

    def flush(self) -> PolicyDecision:
        return self._decide(self.policy.flush().updates, self.record.version())

    def _decide(self, updates: Sequence[Update], version: int) -> PolicyDecision:
        """Applies updates, and lets the workers go on that read what comes of them."""
        reached = version + len(updates)
        released = [
            worker for worker in self.waiting if self.record.next_read(worker) in (None, reached)
        ]
        return PolicyDecision(updates, [self.waiting.pop(worker) for worker in released])

    def idle(self, worker: int, step: int, at_barrier: bool) -> PolicyDecision:
        waiting = self.waiting.pop(worker, None)
        return PolicyDecision(released=[waiting] if waiting else [])


class RecordedJournal(Journal):
    """Compares what a server writes down with what the run has.

    Attributes:
        records: the record of each bucket.
    """

    def __init__(self) -> None:
        super().__init__()
        self.records: dict[Part, RecordedBucket] = {}

    def commit(self, part: Part, lines: Sequence[tuple[Any, ...]] = ()) -> None:
        if part in self.records:
            self.records[part].check([LedgerLine(*line) for line in lines])


class Playback:
    """A recorded run that is repeated in one process.

    Args:
        config: the configuration of the run.
        workers: the number of workers at the start.
        threads: how many threads each worker computes with.
        lines: the lines of all ledgers.
        leases: the leases; None in lockstep.
        samples: the number of training samples.
        make_trainee: makes a worker's model.

    Attributes:
        pushes: all pushes, as (worker, step).

    Raises:
        Failure: the ledgers contradict each other.
    """

    def __init__(
        self,
        config: RunConfig,
        workers: int,
        threads: int,
        lines: Lines,
        leases: Leases | None,
        samples: int,
        make_trainee: Callable[[Job], Trainee],
    ) -> None:
        self.config = dataclasses.replace(config, wire=LOCAL, record=False, timeout=NEVER)
        self.mode = modes.load(config.mode)
        self.workers = workers
        self.threads = threads
        self.leases = leases
        self.steps = config.total_steps(samples)
        self.make_trainee = make_trainee
        self.sampler = BatchSampler(
            samples, config.batch_size, config.seed, 0, workers, config.shuffle_block
        )
        if leases is not None:
            _check_counts(lines, leases)
        all_lines = list(itertools.chain.from_iterable(lines.values()))
        self.pushes = _pushes_of(all_lines, leases is not None)
        self.epochs = self._count_epochs(leases) if leases is not None else 0
        last_steps = dict(self.pushes)
        self.last_step = max(last_steps.values(), default=0)
        self.numbers = sorted({*range(workers), *(line.worker for line in all_lines)})
        self.records: dict[tuple[int, int], RecordedBucket] = {}
        # Workers that are lost: their last step has not come to every bucket.
        self.cut_off: set[int] = set()
        for (server, number), of_bucket in lines.items():
            name = f"the ledger of server {server}"
            record = RecordedBucket(name, number, of_bucket, last_steps)
            self.records[server, number] = record
            there = {_key(line) for line in of_bucket}
            self.cut_off.update(push[0] for push in last_steps.items() if push not in there)
        # For each worker that joins, the buckets whose weights it has not read yet.
        self.unread = {
            worker: set(self.records) for worker in self.numbers if worker >= self.workers
        }
        self.joining: set[int] = set()  # the workers that read these weights now
        self.pushed_last: tuple[int, int] | None = None  # the bucket that got the last push
        self.trainees: dict[int, Trainee] = {}
        self.network = LocalNetwork(self._choose)
        self.servers = [self._add_server(rank) for rank in range(config.servers)]
        roster = self.servers[0].roster
        for worker in self.numbers:
            self.network.add(config.servers + worker, partial(self._work, worker))
            self.servers[0].handle(roster, roster.admit, worker)

    def run(self) -> dict[str, torch.Tensor]:
        """Repeats the run; returns the final weights by name.

        Raises:
            Failure: the ledgers contradict each other.
        """
        try:
            self.network.run()
        except Contradiction as problem:
            raise Failure(str(problem)) from None
        except StandsStill:
            raise Failure(
                "the ledgers do not fit together: a push comes before the one that its worker "
                "waited for"
            ) from None
        for record in self.records.values():
            if record.to_come or record.came:
                raise Failure(
                    f"{record.name} has pushes of bucket {record.number} that no step was made of"
                )
        whole = next(worker for worker in self.numbers if worker not in self.cut_off)
        named = self.trainees[whole].model.named_parameters()
        return {name: tensor.detach() for name, tensor in named if tensor.requires_grad}

    # What happens next

    def _choose(self, deliveries: Sequence[Delivery], turns: Sequence[Turn]) -> Event | None:
        """Lets messages come as soon as they are due, before a worker goes on.

        A sum comes last: a barrier is behind all pushes that come before it.
        """
        place = self.pushed_last
        if place and self.records[place].is_to_flush() and not self._is_to_be_read(place):
            return partial(self._flush, *place)
        sums = None
        for message in deliveries:
            if message.method == "sum" and not message.is_answer:
                sums = sums or message
            elif message.is_answer or self._comes(message):
                return message
        return turns[0] if turns else sums

    def _flush(self, server: int, number: int) -> None:
        """Has a bucket make an update of the pushes that it has."""
        bucket = self.servers[server].buckets[number]
        self.servers[server].handle(bucket, bucket.flush)
        record = self.records[server, number]
        if record.came:
            raise Contradiction(
                f"{record.name} has too few pushes that make version {record.came[0].version} of "
                f"bucket {number}"
            )

    def _comes(self, call: Delivery) -> bool:
        """Returns whether a call is due, and takes note that it comes."""
        if call.method == "push":
            number, push = call.arguments
            record = self.records[call.receiver, number]
            if not record.is_due(push):
                return False
            makes_update = not record.is_left_out(push) and record.makes_update()
            if makes_update and self._is_to_be_read((call.receiver, number)):
                return False
            if self.leases is not None:
                gate = self.servers[call.receiver].buckets[number].gate
                gate.counted_shares = {push.share} if record.is_left_out(push) else set()
            record.comes(push)
            self.pushed_last = call.receiver, number
        elif call.method == "pull":
            number, worker = call.arguments
            place = call.receiver, number
            if worker in self.joining and place in self.unread[worker]:
                record = self.records[place]
                if record.next_read(worker) not in (None, record.version()):
                    return False
                self.unread[worker].remove(place)
        return True

    def _is_to_be_read(self, place: tuple[int, int]) -> bool:
        """Returns whether a worker that joins has yet to read the weights that a bucket has now."""
        record = self.records[place]
        for worker, places in self.unread.items():
            if place in places and record.next_read(worker) == record.version():
                return True
        return False

    # Servers

    def _add_server(self, rank: int) -> Server:
        world = self._world(rank)
        journal = RecordedJournal()
        server = make_server(self.config, world, self.mode.make_policy, ServerLoad(), journal)
        make_bucket = server.make_bucket

        def make_recorded_bucket(
            number: int, weights: torch.Tensor, optimizer: Mapping[str, Any] | None
        ) -> Bucket:
            if (rank, number) not in self.records:
                raise Contradiction(
                    "the ledgers are not of this model, or an older version has recorded them: "
                    "their buckets are others"
                )
            bucket = make_bucket(number, weights, optimizer)
            record = self.records[rank, number]
            record.version = lambda: bucket.weights.version
            if self.leases is not None:
                bucket.policy = RecordedPolicy(bucket.policy, record)
            journal.records[bucket] = record
            return bucket

        server.make_bucket = make_recorded_bucket
        start(world, self.network.store, NEVER, server, LOCAL)
        return server

    def _world(self, rank: int, joined: int | None = None) -> World:
        """Returns a rank's place, on a host of its own, so that no memory is shared."""
        servers = self.config.servers
        return World(rank=rank, size=servers + self.workers, servers=servers, joined=joined)

    # Workers

    def _work(self, worker: int) -> None:
        """Does what a worker did."""
        has_joined = worker >= self.workers
        world = self._world(self.config.servers + worker, worker if has_joined else None)
        device = torch.device("cpu")
        store = self.network.store
        job = Job(self.config, world, Path(), device, self.threads, store, self.steps)
        trainee = self.make_trainee(job)
        self.trainees[worker] = trainee
        sync = self.mode.connect(job)
        trainee.prepare(sync)
        sync.group.barrier()  # all have read the first weights
        if self.leases is None:
            self._take_all_steps(worker, sync, trainee)
        else:
            self._take_leased_steps(worker, sync, trainee)

    def _take_all_steps(self, worker: int, sync: Synchroniser, trainee: Trainee) -> None:
        """Takes the steps of a worker in lockstep."""
        shares = Shares(dataclasses.replace(self.sampler, worker=worker))
        pushed = {step for pusher, step in self.pushes if pusher == worker}
        done = 0
        while done < self.last_step:
            for share in shares.after(done):
                if share.step > self.last_step:
                    break
                if self.config.backup and share.step not in pushed:
                    self._leave_out(share.step, sync)
                else:
                    trainee.take(share)
                done = share.step
            _evaluate(sync)

    def _leave_out(self, step: int, sync: Synchroniser) -> None:
        """Leaves out a step that the others took before this worker came to it."""
        self.network.wait_until(lambda: not (sync.push_status and sync.push_status.pending))
        if not sync.skip_if_overtaken(step):
            raise Contradiction(f"the ledgers have no push of step {step}, which was not over")

    def _take_leased_steps(self, worker: int, sync: Any, trainee: Trainee) -> None:
        """Takes the steps of a worker that has leased its shares, up to where it was lost."""
        assert self.leases is not None
        to_come = deque(step for pusher, step in self.pushes if pusher == worker)
        has_read = worker < self.workers
        for epoch in range(1, self.epochs + 1):
            while to_come:
                number = self.leases[worker, to_come[0]]
                shares = self._shares(number)
                if shares[0].epoch != epoch:
                    break
                if not has_read:
                    self._join(worker, to_come[0], sync)
                    has_read = True
                to_come.popleft()
                sync.take_share(number, len(shares))
                for share in shares:
                    trainee.take(share)
            if worker in self.cut_off and not to_come:
                roster = self.servers[0].roster
                self.servers[0].handle(roster, roster.lose, worker)
                return
            _evaluate(sync)

    def _join(self, worker: int, step: int, sync: Synchroniser) -> None:
        """Reads the weights that a worker read as it joined, before this step."""
        carrier = sync.inner if isinstance(sync, LocalRounds) else sync
        assert isinstance(carrier, PushPull)
        carrier.step = step - 1
        self.joining.add(worker)
        carrier.exchange.pull()
        self.joining.remove(worker)

    def _count_epochs(self, leases: Leases) -> int:
        """Returns how many epochs the run had.

        Raises:
            Failure: a push has no lease, or an epoch has no push.
        """
        epochs = set()
        for worker, step in self.pushes:
            if (worker, step) not in leases:
                raise Failure(f"there is no lease of step {step} of worker {worker}")
            epochs.add(self._shares(leases[worker, step])[0].epoch)
        missing = next(epoch for epoch in itertools.count(1) if epoch not in epochs)
        if missing <= len(epochs):
            raise Failure(f"the ledgers have no push of epoch {missing}, but of later ones")
        return len(epochs)

    def _shares(self, number: int) -> list[Share]:
        """Returns the shares of a leased number: one, or those of a round of local steps."""
        if not self.config.local_steps:
            return [self.sampler.share(number)]
        round_number, slot = divmod(number, self.workers)
        steps = self.sampler.steps_of_round(round_number, self.config.local_steps, self.steps)
        return [self.sampler.share(done * self.workers + slot) for done in steps]


def open_playback(
    config: RunConfig, workers: int, threads: int, lines: Lines, leases: Leases | None
) -> Playback:
    """Returns the playback of a run that was trained on images.

    Args:
        config, workers, threads, lines, leases: see Playback.

    Raises:
        Failure: the ledgers contradict each other.
    """
    torch.set_num_threads(threads)
    set_up(config)
    data = find_dataset_of(config)
    augment = Augment(config.augment, config.seed)
    loader = open_loader(data.train, image_side(config, data), threads, augment, soon=())

    def make_trainee(job: Job) -> Trainee:
        return ImageTrainee(job, data, loader)

    return Playback(config, workers, threads, lines, leases, len(data.train), make_trainee)


def _evaluate(sync: Synchroniser) -> None:
    """Takes the newest weights, as before an evaluation, which all workers end together."""
    sync.refresh()
    sync.group.barrier()


def _key(line: LedgerLine) -> tuple[int, int]:
    return line.worker, line.step


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
