"""Both ends of a job with parameter servers: the worker's Sync, and what a server does with its life."""

from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import PrefixStore, Store

from hvdtrain.data.sampling import part
from hvdtrain.flat import FlatGradients, flatten_weights, payload_bytes
from hvdtrain.job import Job
from hvdtrain.optim import make_optimizer
from hvdtrain.ps import rpc
from hvdtrain.ps.server import Policy, Shard
from hvdtrain.rendezvous import open_store


class MakePolicy(Protocol):
    def __call__(self, workers: int, scale: float) -> Policy: ...


def connect(job: Job, lockstep: bool) -> "Client":
    """A worker's Sync."""
    return Client(job, open_store(job.world, job.config.timeout), lockstep)


def serve(job: Job, policy: MakePolicy) -> None:
    """Be a server until every worker is done. It starts from the weights that the first worker installs."""
    config, world = job.config, job.world
    scale = 1 / world.workers if config.push_scale == "mean" else 1.0

    def make_shard(weights: torch.Tensor) -> Shard:
        return Shard(weights, lambda p: make_optimizer(config, p), policy(world.workers, scale))

    store = open_store(world, config.timeout)
    rpc.start(world, store, config.timeout, make_shard)
    rpc.serve_until_done(world, store, config.timeout)
    rpc.stop(world, store, config.timeout)


class Client:
    """Pushes gradients to the servers, each its contiguous range of the flat vector, and takes weights back."""

    backend = "rpc"
    version_read: int | None = None
    staleness: int | None = None

    def __init__(self, job: Job, store: Store, lockstep: bool) -> None:
        self.world, self.timeout, self.store, self.lockstep = job.world, job.config.timeout, store, lockstep
        rpc.start(job.world, store, self.timeout)
        # Evaluation sums counts over the workers alone; the servers have no part in it.
        dist.init_process_group(
            "gloo", store=PrefixStore("workers", store), timeout=timedelta(seconds=self.timeout),
            rank=job.world.worker, world_size=job.world.workers,
        )  # fmt: skip

    def prepare(self, model: nn.Module) -> nn.Module:
        self.bytes_per_step = 2.0 * self.world.workers * payload_bytes(model)  # every worker: gradient out, weights in
        self.weights = flatten_weights(model)
        self.gradients = FlatGradients(model)
        self.ranges = [part(len(self.weights), server, self.world.servers) for server in range(self.world.servers)]
        self.versions = [0] * self.world.servers
        if self.world.is_chief:
            for server, r in enumerate(self.ranges):
                rpc.install(server, self.weights[r.start : r.stop].cpu())
            self.store.set("installed", "")
        self.store.wait(["installed"], timedelta(seconds=self.timeout))
        self.refresh()
        return model

    def wait(self, step: int, lr: float) -> None:
        self.gradients.gather()
        answers = [
            rpc.push(server, self.world.worker, step, version, lr, self.gradients.flat[r.start : r.stop])
            for server, (r, version) in enumerate(zip(self.ranges, self.versions, strict=True))
        ]
        self.version_read = min(self.versions)
        stale = [self._take(server, *answer.wait()) for server, answer in enumerate(answers)]
        self.staleness = max(stale)

    def _take(self, server: int, version: int, staleness: int, weights: torch.Tensor) -> int:
        r = self.ranges[server]
        self.versions[server] = version
        with torch.no_grad():
            self.weights[r.start : r.stop].copy_(weights)
        return staleness

    def update(self) -> None:
        """Nothing: the optimizer runs on the servers."""

    def refresh(self) -> None:
        self.sum(torch.zeros(1))  # no worker pushes any more: all pull the same weights
        for server in range(self.world.servers):
            self._take(server, *rpc.pull(server))

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        total = values.clone()
        dist.all_reduce(total)
        return total

    def servers_rss_mb(self) -> float:
        return sum(rpc.rss_mb(server) for server in range(self.world.servers))

    def close(self) -> None:
        rpc.stop(self.world, self.store, self.timeout)
        dist.destroy_process_group()
