"""Both ends of a job with parameter servers: the worker's Sync, and what a server does with its life."""

from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import PrefixStore, Store

from hvdtrain.compression import Compressor
from hvdtrain.config import RunConfig
from hvdtrain.flat import flatten_weights
from hvdtrain.job import Job
from hvdtrain.modes import Pushed
from hvdtrain.optim import make_optimizer
from hvdtrain.ps import rpc
from hvdtrain.ps.exchange import Exchange
from hvdtrain.ps.ledger import Ledger
from hvdtrain.ps.plan import cut
from hvdtrain.ps.server import Bucket, Policy, nobody
from hvdtrain.rendezvous import open_store
from hvdtrain.world import World


class MakePolicy(Protocol):
    def __call__(self, workers: int, config: RunConfig) -> Policy: ...


def connect(job: Job, lockstep: bool) -> "Client":
    """A worker's Sync."""
    return Client(job, open_store(job.world, job.config.timeout), lockstep)


def serve(job: Job, make_policy: MakePolicy) -> None:
    """Be a server until every worker is done. It starts from the weights that the first worker installs."""
    config, world = job.config, job.world
    ledger = Ledger(job.folder, world.rank) if config.record else None

    def make_bucket(number: int, weights: torch.Tensor) -> Bucket:
        policy = make_policy(world.workers, config)
        told = ledger.of_bucket(number) if ledger else nobody
        return Bucket(weights, lambda p: make_optimizer(config, p), policy, told)

    rpc.serve(make_bucket, Compressor(config.compression).decode)
    store = open_store(world, config.timeout)
    rpc.start(world, store, config.timeout)
    rpc.serve_until_done(world, store, config.timeout)
    if ledger:
        ledger.close()
    rpc.stop(world, store, config.timeout)


def join_workers(world: World, store: Store, timeout: float) -> None:
    """The workers' process group. Evaluation sums counts over them alone; the servers have no part in it."""
    dist.init_process_group(
        "gloo", store=PrefixStore("workers", store), timeout=timedelta(seconds=timeout),
        rank=world.worker, world_size=world.workers,
    )  # fmt: skip


class Client:
    """Pushes gradients to the servers while backward goes on, and takes weights back until forward needs them."""

    backend = "rpc"

    def __init__(self, job: Job, store: Store, lockstep: bool) -> None:
        self.config, self.world, self.store, self.lockstep = job.config, job.world, store, lockstep
        self.timeout = job.config.timeout
        rpc.start(job.world, store, self.timeout)
        join_workers(job.world, store, self.timeout)

    def prepare(self, model: nn.Module) -> nn.Module:
        parameters = list(model.parameters())
        sizes = [p.numel() for p in parameters]
        pieces = cut(sizes, self.world.servers, self.config.bucket_elements)
        weights = flatten_weights(model)
        self.exchange = Exchange(self.world.worker, pieces, sizes, weights, self.config.compression, self.timeout)
        if self.world.is_chief:
            for piece in pieces:
                rpc.install(piece.server, piece.number, weights[piece.start : piece.stop].cpu())
            self.store.set("installed", "")
        self.store.wait(["installed"], timedelta(seconds=self.timeout))
        self.refresh()
        for index, parameter in enumerate(parameters):
            parameter.register_post_accumulate_grad_hook(lambda p, index=index: self._leave(index, p))
        numbers = {p: index for index, p in enumerate(parameters)}
        for module in model.modules():
            if own := [numbers[p] for p in module.parameters(recurse=False)]:
                module.register_forward_pre_hook(lambda module, inputs, own=own: self.exchange.wait_for(own))
        return model

    def _leave(self, index: int, parameter: nn.Parameter) -> None:
        """A gradient is complete, and the weights it belongs to are not needed any more in this backward pass."""
        assert parameter.grad is not None
        self.exchange.put(index, parameter.grad)
        parameter.grad = None

    def begin(self, step: int, lr: float) -> None:
        self.exchange.begin(step, lr)

    def wait(self) -> None:
        """Nothing, but on a GPU: forward waits for each layer's weights when it needs them."""
        if self.exchange.weights.is_cuda:
            torch.cuda.current_stream().synchronize()
            self.exchange.arrived()

    def update(self) -> None:
        """Nothing: the optimizer runs on the servers."""

    def refresh(self) -> None:
        for server in range(self.world.servers):
            rpc.rest(server, self.world.worker)  # nobody is to wait for a push that may not come
        self.exchange.wait_for_all()
        self.sum(torch.zeros(1))  # no worker pushes any more: all read the same weights
        self.exchange.read()

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
        total = values.clone()
        dist.all_reduce(total)
        return total

    def servers_rss_mb(self) -> float:
        return sum(rpc.rss_mb(server) for server in range(self.world.servers))

    def close(self) -> None:
        rpc.stop(self.world, self.store, self.timeout)
        dist.destroy_process_group()
