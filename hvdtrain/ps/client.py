"""Both ends of a job with parameter servers: the worker's Sync, and what a server does with its life."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from typing import Protocol

import torch
from torch import nn
from torch.distributed import Store

from hvdtrain.compression import Compressor
from hvdtrain.config import RunConfig
from hvdtrain.errors import Failure
from hvdtrain.flat import flatten_weights, trained
from hvdtrain.job import Job
from hvdtrain.modes import Pushed
from hvdtrain.optim import COUNT, make_optimizer
from hvdtrain.precision import LossScale
from hvdtrain.preempt import sigterm_waits
from hvdtrain.ps import rpc
from hvdtrain.ps.exchange import Exchange
from hvdtrain.ps.ledger import Ledger
from hvdtrain.ps.plan import cut
from hvdtrain.ps.roll import Roll
from hvdtrain.ps.server import Bucket, Policy, nobody
from hvdtrain.rendezvous import excuse, open_store
from hvdtrain.world import World

INSTALLED = "installed"  # in the store, once every server has its weights
Say = Callable[[str], None]


class MakePolicy(Protocol):
    def __call__(self, workers: int, config: RunConfig) -> Policy: ...


def connect(job: Job, lockstep: bool) -> "Client":
    """A worker's Sync."""
    return Client(job, open_store(job.world, job.config.timeout), lockstep)


def serve(job: Job, say: Say, make_policy: MakePolicy) -> None:
    """Be a server until every worker is done or lost. It starts from the weights that the first worker installs.

    Args:
        say: tells the user a line.

    Raises:
        Failure: a worker was lost, and the others cannot go on: in ps-sync; before training; or it was the first one,
            which saves the results.
    """
    config, world = job.config, job.world
    ledger = Ledger(job.folder, world.rank) if config.record else None

    def make_bucket(number: int, weights: torch.Tensor) -> Bucket:
        policy = make_policy(world.workers, config)
        told = ledger.of_bucket(number) if ledger else nobody
        return Bucket(weights, lambda p: make_optimizer(config, p), policy, told)

    roll = Roll(world.workers)
    buckets = rpc.serve(make_bucket, Compressor(config.compression).decode, roll)
    store = open_store(world, config.timeout)
    rpc.start(world, store, config.timeout)
    ends: SimpleQueue[tuple[int, str]] = SimpleQueue()

    def ended(rank: int, why: str) -> None:
        ends.put((rank, why))

    for rank in range(world.servers, world.size):
        rpc.watch(rank, config.timeout, partial(ended, rank))
    with sigterm_waits():  # for the workers, which are told too, and need this server to save
        for _ in range(world.workers):
            rank, why = ends.get()
            if why:
                _lose(rank, why, world, store, roll, buckets)
                if world.rank == 0:
                    say(f"hvdtrain: rank {rank} is lost, and the others go on without it: {why}")
        if ledger:
            ledger.close()
        rpc.stop(world, store, config.timeout)


def _lose(rank: int, why: str, world: World, store: Store, roll: Roll, buckets: dict[int, Bucket]) -> None:
    """Go on without a worker."""
    worker = rank - world.servers
    if worker == 0:
        raise Failure(f"rank {rank}, the first worker, is lost: {why}")
    if not store.check([INSTALLED]):
        raise Failure(f"rank {rank} was lost before training began: {why}")
    try:
        for bucket in buckets.values():
            bucket.lose(worker)
    except Failure as reason:
        raise Failure(f"rank {rank} is lost, and {reason}: {why}") from None
    if world.rank == 0:
        excuse(rank, store)
    roll.lose(worker)


@contextmanager
def _store_of_rank_0() -> Iterator[None]:
    """What goes wrong with the store is the end of rank 0, which serves it."""
    try:
        yield
    except RuntimeError as error:
        raise Failure(f"parameter server rank 0 failed: {str(error).strip().splitlines()[0]}") from error


class Client:
    """Pushes gradients to the servers while backward goes on, and takes weights back until forward needs them."""

    backend = "rpc"

    def __init__(self, job: Job, store: Store, lockstep: bool) -> None:
        self.config, self.world, self.store, self.lockstep = job.config, job.world, store, lockstep
        self.timeout = job.config.timeout
        self._sums = 0
        self.more = False
        rpc.start(job.world, store, self.timeout)

    def prepare(self, model: nn.Module) -> nn.Module:
        self.parameters = parameters = trained(model)
        sizes = [p.numel() for p in parameters]
        pieces = cut(sizes, self.world.servers, self.config.bucket_elements)
        weights = flatten_weights(model)
        self.exchange = Exchange(
            self.world.worker,
            pieces,
            sizes,
            weights,
            self.config.compression,
            rpc.PATIENCE * self.timeout,
            staged=weights.is_cuda,
        )
        if self.world.is_chief:
            for piece in pieces:
                rpc.install(piece.server, piece.number, weights[piece.start : piece.stop].cpu())
            self.store.set(INSTALLED, "")
        self.store.wait([INSTALLED], timedelta(seconds=self.timeout))
        self.refresh()
        for index, parameter in enumerate(parameters):
            parameter.register_post_accumulate_grad_hook(lambda p, index=index: self._leave(index, p))
        numbers = {p: index for index, p in enumerate(parameters)}
        for module in model.modules() if not self.config.compile else ():
            if own := [numbers[p] for p in module.parameters(recurse=False) if p in numbers]:
                module.register_forward_pre_hook(lambda module, inputs, own=own: self.exchange.wait_for(own))
        return model

    def _leave(self, index: int, parameter: nn.Parameter) -> None:
        """A gradient is complete, and the weights it belongs to are not needed any more in this backward pass."""
        if self.more or self.config.precision == "fp16":  # of which it is not known yet whether it overflowed
            return
        assert parameter.grad is not None
        self.exchange.put(index, parameter.grad)
        parameter.grad = None

    def restore(self, step: int, state: Mapping[str, torch.Tensor]) -> None:
        self.exchange.step = step
        if self.world.is_chief:
            restored = []
            for piece in self.exchange.pieces:
                own = {name: v if name == COUNT else v[piece.start : piece.stop] for name, v in state.items()}
                restored.append((piece.server, rpc.restore(piece.server, piece.number, step, own)))
            for server, done in restored:
                rpc.result(server, done)
        self.sum(torch.zeros(1))  # nobody pushes before every server is ready

    def optimizer_state(self) -> dict[str, torch.Tensor]:
        if not self.world.is_chief:
            return {}
        answers = [(piece.server, rpc.state(piece.server, piece.number)) for piece in self.exchange.pieces]
        parts = [rpc.result(server, answer) for server, answer in answers]
        found = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        if COUNT in found:
            found[COUNT] = found[COUNT].max()[None]
        return found

    def more_to_come(self, more: bool) -> None:
        self.more = more

    def begin(self, step: int, lr: float) -> None:
        self.exchange.begin(step, lr)
        if self.config.compile:  # a compiled model has no layers to wait before
            self.exchange.wait_for_all()

    def wait(self) -> None:
        """Nothing: forward waits for each layer's weights when it needs them."""

    def update(self, loss_scale: LossScale) -> None:
        """Nothing, since the optimizer runs on the servers. With fp16: push all gradients, unless one overflowed."""
        if loss_scale.enabled:
            loss_scale.step(self._push_all)
            if not loss_scale.acted:
                self.exchange.skip()

    def _push_all(self) -> None:
        for index, parameter in enumerate(self.parameters):
            assert parameter.grad is not None
            self.exchange.put(index, parameter.grad)

    def refresh(self) -> None:
        self.rest()
        self.exchange.wait_for_all()
        self.sum(torch.zeros(1))  # no worker pushes any more: all read the same weights
        self.exchange.read()

    def rest(self) -> None:
        for server in range(self.world.servers):
            rpc.rest(server, self.world.worker, self.exchange.step)  # nobody is to wait for a push that may not come

    def call(self, meeting: int) -> None:
        with _store_of_rank_0():
            self.store.set(f"meeting/{meeting}", "")

    def is_called(self, meeting: int) -> bool:
        with _store_of_rank_0():
            return self.store.check([f"meeting/{meeting}"])

    @property
    def pushed(self) -> Pushed:
        return self.exchange.pushed

    @property
    def waited_s(self) -> float:
        return self.exchange.waited_s

    @property
    def bytes_per_step(self) -> float:
        return self.world.workers * self.exchange.bytes_moved / max(1, self.exchange.step)

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        self._sums += 1
        return rpc.sum_up(self.world, self._sums, values)

    def servers_rss_mb(self) -> float:
        return sum(rpc.rss_mb(server) for server in range(self.world.servers))

    def server_hosts(self) -> list[str]:
        return [rpc.host(server) for server in range(self.world.servers)]

    def close(self) -> None:
        rpc.stop(self.world, self.store, self.timeout)
