"""Whole jobs with parameter servers in one process, under schedules that are drawn from a seed.

Workers and servers are the product's. Drawn are the job's options, the order in which messages come
and ranks go on, connections that are slow, the worker that is lost, and the servers that are killed
and come back.
"""

import dataclasses
import math
import os
import random
from functools import cached_property, partial
from itertools import chain

import torch
from torch import nn

from hvdtrain.base import modes
from hvdtrain.base.config.run_config import RunConfig
from hvdtrain.base.errors import Failure
from hvdtrain.base.numerics.optimizers import make_optimizer
from hvdtrain.base.world.place import World
from hvdtrain.data.sampling import BatchSampler
from hvdtrain.job.coordination.job import Job
from hvdtrain.job.ps.crash_memory import CrashMemory
from hvdtrain.job.ps.journal import Journal
from hvdtrain.job.ps.serve import make_server
from hvdtrain.job.ps.server_metrics import ServerLoad
from hvdtrain.job.ps.worker_monitor import WorkerMonitor
from hvdtrain.job.training.shares import make_shares
from hvdtrain.job.wire.local import Delivery, LocalNetwork
from hvdtrain.job.wire.messages import GIVEN_UP
from hvdtrain.job.wire.wire import LOCAL, start
from hvdtrain.tools.checks.ledger import read_leases, read_ledgers
from hvdtrain.tools.checks.playback import Playback

SAMPLES = 10  # the last batch of an epoch is shorter than the others
BATCH = 4
EPOCHS = 2
LR = 1 / 64
SLOW = 0.02  # how much less often a message comes over a connection that is slow
CPU = torch.device("cpu")


class Weighted(nn.Module):
    """A layer that returns the sum of its inputs by weight."""

    def __init__(self, weights):
        super().__init__()
        self.weights = nn.Parameter(torch.tensor(weights))

    def forward(self, inputs):
        return torch.dot(self.weights, inputs)


class TinyModel(nn.Module):
    """Two layers of a few weights. Each gradient depends on all weights."""

    def __init__(self):
        super().__init__()
        self.first = Weighted([0.5, -0.25, 1.0, 0.75, -1.0])
        self.second = Weighted([0.25, 0.5, -0.5])

    def forward(self, first, second):
        return self.first(first) * self.second(second) - 1


class TinyTrainee:
    """A model of a few weights, trained on numbers."""

    def __init__(self, job):
        self.model = TinyModel()

    def prepare(self, sync):
        self.sync = sync
        self.module = sync.prepare(self.model)

    def take(self, share):
        self.sync.begin(share.step, LR / share.step)
        backward(self.module, share)
        self.sync.wait()
        self.sync.update()
        self.model.zero_grad(set_to_none=True)


def backward(module, share):
    """Computes the gradient of a share."""
    number = sum(share.indices) + 0.5
    first = torch.tensor([math.sin(number * (1 + place)) for place in range(5)])
    second = torch.tensor([math.cos(number * (1 + place)) for place in range(3)])
    (module(first, second).square() * share.weight).backward()


def draw_config(rng):
    """Returns a job's options, and what waits for fresh weights."""
    mode = rng.choice(["ps-sync", "ps-async", "ps-ssp"])
    elements = rng.choice([2, 3, 8])  # of a bucket
    options = {
        "mode": mode,
        "servers": rng.choice([1, 2]),
        "batch_size": BATCH,
        "epochs": EPOCHS,
        "bucket_mb": elements * 4 / 2**20,
        "optimizer": rng.choice(["sgd", "adam"]),
        "compression": rng.choice(["none", "none", "int8", "topk:0.4"]),
        "local_steps": rng.choice([0, 0, 0, 2]),
        "shares": "equal",
        "record": True,
        "wire": LOCAL,
    }
    if mode == "ps-sync":
        options["backup"] = 0 if options["local_steps"] else rng.choice([0, 0, 1])
    else:
        options["shares"] = rng.choice(["leased", "leased", "equal"])
        options["push_scale"] = rng.choice(["softsync", "mean", "none"])
        options["staleness"] = rng.choice([0, 1, 2])
        options["staleness_lr"] = rng.random() < 0.2
        if not options["local_steps"]:
            options["delay_compensation"] = rng.choice([0.0, 0.0, 0.1])
    is_by_layer = not options["local_steps"] and rng.random() < 0.5
    return RunConfig(**options), "layer" if is_by_layer else "step"


class Schedule:
    """A job, and what happens in it.

    Args:
        seed: what everything is drawn from.
        folder: a folder for the job.

    Attributes:
        config: the options of the job.
        workers: the number of workers.
        lost: the worker that is lost; None: nobody is.
        weights: for each worker that comes to an epoch's end, by (epoch, worker), its weights.
    """

    def __init__(self, seed, folder):
        self.rng = random.Random(seed)
        self.folder = folder
        self.config, self.wait_for = draw_config(self.rng)
        self.mode = modes.load(self.config.mode)
        self.workers = self.rng.choice([1, 2, 2, 2, 3, 3, 4])
        if self.workers == 1:
            self.config = dataclasses.replace(self.config, backup=0)
        self.room = self.rng.choice([0, 12, 10**6])
        self.lost = None
        self._events = 0  # since all servers have workers that train
        self._lost_after = -1  # events
        survives = modes.declared(self.config.mode).survives_lost_worker
        if survives and self.workers > 1 and self.rng.random() < 0.5:
            self.lost = self.rng.randrange(self.workers)
            self._lost_after = self.rng.randrange(1, 40 * self.workers)
        # Before each kill of a server, how many events there are. A killed server comes back.
        self._kills = []
        self._memories = {}
        self._journals = []
        if survives and not self.config.delay_compensation and self.rng.random() < 0.3:
            self._kills = sorted(self.rng.sample(range(60 * self.workers), 2))
        self._slow = {}
        self.weights = {}
        self.network = LocalNetwork(self._choose, gives_way=self.rng.random() < 0.5)
        self.servers = {}
        for rank in range(self.config.servers):
            if self._kills:
                self._memories[rank] = CrashMemory()
            self._serve(rank)
        for worker in range(self.workers):
            self.network.add(self.config.servers + worker, partial(self._work, worker))

    def run(self):
        try:
            self.network.run()
        finally:
            for journal in self._journals:
                journal.close()
            for memory in self._memories.values():
                os.close(memory.file)

    # What happens next

    def _choose(self, deliveries, turns):
        if all(server.roster.began for server in self.servers.values()):
            self._events += 1
            if self._events == self._lost_after:
                return self._lose
            if self._kills and self._events > self._kills[0]:
                del self._kills[0]
                return self._kill_server
        events = [*deliveries, *turns]
        if not events:
            return None
        return self.rng.choices(events, [self._weight(event) for event in events])[0]

    def _weight(self, event):
        """Returns how often an event is chosen: some ranks and connections are slow."""
        place = (event.sender, event.receiver) if isinstance(event, Delivery) else event.rank
        if place not in self._slow:
            self._slow[place] = SLOW if self.rng.random() < 0.25 else 1.0
        return self._slow[place]

    def _lose(self):
        """Ends a worker: of what it has sent to a server, what came first may still arrive.

        Or it goes on, and is taken for lost.
        """
        rank = self.config.servers + self.lost
        if self.rng.random() < 0.3:
            self.network.give_up(rank, "no answer")
            return
        sent = [m for m in self.network.on_their_way if m.sender == rank and not m.is_answer]
        arriving = []
        for server in range(self.config.servers):
            to_server = [message for message in sent if message.receiver == server]
            arriving += to_server[: self.rng.randrange(len(to_server) + 1)]
        self.network.kill(rank, lambda message: message in arriving)

    def _kill_server(self):
        """Ends a server, and begins it again with its memory."""
        rank = self.rng.randrange(self.config.servers)
        self.network.kill_to_return(rank, lambda message: self.rng.random() < 0.5)
        self._memories[rank] = CrashMemory(self._memories[rank].file)
        self._serve(rank, recovered=True)
        server = self.servers[rank]
        returned = {"rank": rank, "lost_updates": 0}
        returned = [*server.roster.returned, returned]
        server.handle(server.roster, server.roster.know, {"returned": returned})

    # Ranks

    def _job(self, rank):
        servers = self.config.servers
        world = World(rank=rank, size=servers + self.workers, servers=servers)
        steps = self.config.total_steps(SAMPLES)
        store = self.network.store
        return Job(self.config, world, self.folder, CPU, 1, store, steps, self.wait_for)

    def _serve(self, rank, recovered=False):
        """Adds a server."""
        job = self._job(rank)
        journal = Journal(self._memories.get(rank), self.folder, rank)
        self._journals.append(journal)
        make_policy = self.mode.make_policy
        server = make_server(self.config, job.world, make_policy, ServerLoad(), journal)
        self.servers[rank] = server
        wire = start(job.world, job.store, self.config.timeout, server, LOCAL)
        report = str  # nobody reads it
        monitor = WorkerMonitor(job, wire, ("", 0), server, report, False, recovered)
        self.network.add(rank, partial(self._watch, monitor))

    def _watch(self, monitor):
        try:
            monitor.until_all_have_ended()
        finally:
            monitor.close()

    def _work(self, worker):
        try:
            self._train(worker)
        except Failure as problem:
            if worker != self.lost or GIVEN_UP not in str(problem):
                raise

    def _train(self, worker):
        """Trains as training.loop does, without evaluations."""
        job = self._job(self.config.servers + worker)
        trainee = TinyTrainee(job)
        sync = self.mode.connect(job)
        trainee.prepare(sync)
        sync.group.barrier()
        for queue in getattr(sync, "inner", sync).exchange.queues.values():
            queue.room = self.room
        sampler = BatchSampler(SAMPLES, BATCH, self.config.seed, worker, self.workers)
        shares = make_shares(self.config, sampler, sync, job.steps, first=0, ahead=0)
        step = 0
        while step < job.steps:
            if shares.leased and sync.group.leads:
                shares.open(dict)
            reached = step
            for share in shares.after(step):
                if not sync.skip_if_overtaken(share.step):
                    trainee.take(share)
                reached = share.step
            step = shares.reached if shares.leased else reached
            sync.refresh()
            weights = [p.detach().clone() for p in trainee.model.parameters()]
            self.weights[step, worker] = torch.cat([w.flatten() for w in weights])
            sync.group.all_gather([step])  # who leads now?

    # What has come of it

    @property
    def last_weights(self):
        """The weights that the job ends with, [parameters]."""
        return next(w for (step, _), w in reversed(self.weights.items()))

    @cached_property
    def ledgers(self):
        """The lines of all ledgers, and the leases."""
        is_leased = not modes.declared(self.config.mode).lockstep
        lines = read_ledgers(self.folder, self.config.servers, self.workers, is_leased)
        return lines, read_leases(self.folder, lines) if is_leased else None

    def staleness(self):
        """Returns the most updates that a gradient has missed."""
        lines, _ = self.ledgers
        applied = [line for line in chain(*lines.values()) if line.version is not None]
        return max(line.version - 1 - line.version_read for line in applied)

    def replayed(self):
        """Returns the weights that a replay of the ledgers ends with, [parameters]."""
        lines, leases = self.ledgers
        playback = Playback(self.config, self.workers, 1, lines, leases, SAMPLES, TinyTrainee)
        return torch.cat([w.flatten() for w in playback.run().values()])

    def in_one_process(self):
        """Returns the weights of SGD or Adam on whole batches in one process, [parameters]."""
        job = self._job(self.config.servers)
        model = TinyModel()
        parameters = list(model.parameters())
        optimizer = make_optimizer(self.config, parameters)
        sampler = BatchSampler(SAMPLES, BATCH, self.config.seed, 0, self.workers)
        for step in range(1, job.steps + 1):
            total = None
            for slot in range(self.workers):
                backward(model, sampler.share((step - 1) * self.workers + slot))
                gradients = [p.grad.clone() for p in parameters]
                model.zero_grad()
                total = (
                    gradients
                    if total is None
                    else [a + b for a, b in zip(total, gradients, strict=True)]
                )
            for p, gradient in zip(parameters, total, strict=True):
                p.grad = gradient / self.workers
            for group in optimizer.param_groups:
                group["lr"] = LR / step
            optimizer.step()
            model.zero_grad()
        return torch.cat([p.detach().flatten() for p in parameters])
