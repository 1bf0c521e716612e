"""A job without servers, simulated: one process, Horovod's ring with fusion, or DDP's buckets.

Workers are in lockstep and alike, so that one of them, the slowest of a step, stands for all.
"""

import random
from functools import partial
from statistics import fmean

from hvdtrain.plan.computing import Computing
from hvdtrain.plan.engine import Clock, Join, Process, Processors, Then, Thread, go_on
from hvdtrain.plan.scenario import MIB, WARM_UP, Outcome, Scenario

CYCLE_S = 1e-3  # Horovod looks so often for gradients that are ready: HOROVOD_CYCLE_TIME
FIRST_BUCKET, BUCKET = 1 * MIB, 25 * MIB  # of DDP: torch.nn.parallel.DistributedDataParallel, bucket_cap_mb


class RingJob:
    """Simulates `steps` steps after a first one.

    Args:
        seed: of the jitter of computing.
        trace: keep what was done in clock.spans.
    """

    def __init__(self, scenario: Scenario, steps: int, seed: str, trace: bool = False) -> None:
        self.scenario, self.steps, self.clock = scenario, steps, Clock(trace)
        times = min(scenario.workers, scenario.workers_per_host)  # that share the cores of a host
        cores = Processors(self.clock, scenario.free_cores(times, 1))
        draw = random.Random(seed)
        self.compute = Computing(scenario, self.clock, cores, times, "worker compute", draw, scenario.workers)
        self.background = Thread(cores, times)
        self.buckets = _buckets(scenario) if scenario.mode == "ddp" else []
        self.ready: list[int] = []  # gradients that wait to be reduced, in order, by layer
        self.left: set[int] = set()  # layers whose gradients are not yet there
        self.unreduced = 0  # layers whose gradients are not yet averaged
        self.reducing = False
        self.update: Then | None = None  # goes on when all gradients are averaged
        self.ends: list[float] = []
        self.waited: list[float] = []

    def run(self) -> Outcome:
        go_on(self._steps())
        self.clock.run(lambda: len(self.ends) >= WARM_UP + self.steps)
        seconds = (self.ends[-1] - self.ends[WARM_UP - 1]) / self.steps
        n, s = self.scenario.workers, self.scenario
        return Outcome(seconds, fmean(self.waited[WARM_UP:]), bytes_sent=2 * (n - 1) / n * s.bytes * s.wire_share)

    def _steps(self) -> Process:
        s, compute = self.scenario, self.compute
        numbers = range(len(s.layers))
        while True:
            compute.begin_step(s.slowest)
            self.left = set(numbers)
            self.unreduced = len(numbers) if s.workers > 1 else 0
            yield compute("other", s.fixed_s)
            for layer in s.layers:
                yield compute(f"forward {layer.name}", layer.forward_s)
            for number in reversed(numbers):
                yield compute(f"backward {s.layers[number].name}", s.layers[number].backward_s)
                if s.workers > 1:
                    self._gradient(number)
            began = self.clock.now
            if self.unreduced:
                yield self._until_averaged
            self.update = None
            self.waited.append(self.clock.now - began)
            self.clock.span("worker compute", "wait", began)
            compute.pace = 1.0  # optimizers run on the device that computes
            yield compute("optimizer", s.optimizer_s)
            self.ends.append(self.clock.now)

    def _until_averaged(self, then: Then) -> None:
        self.update = then

    def _gradient(self, layer: int) -> None:
        self.left.discard(layer)
        if not self.buckets:
            self.ready.append(layer)
        for bucket in self.buckets:
            if layer in bucket and not self.left & set(bucket):
                self.ready.extend(bucket)
        if self.ready and not self.reducing:
            self.reducing = True
            go_on(self._reductions())

    def _reductions(self) -> Process:
        """Reduce what is ready, until nothing is: a reduction takes the wire and the processors at once."""
        s, transport = self.scenario, self.scenario.transport
        hosts, hops = -(-s.workers // s.workers_per_host), 2 * (s.workers - 1)
        yield partial(self.clock.after, CYCLE_S if s.mode == "allreduce" else 0.0)
        while self.ready:
            layers = self._next()
            gradients = sum(4 * s.layers[layer].parameters for layer in layers)
            moved = hops / s.workers * gradients * s.wire_share  # each way (Patarasuk and Yuan, 2009)
            cost = transport.operation_s + hops * transport.message_s
            cost += moved / 1e9 * (transport.send_s_per_gb + transport.receive_s_per_gb)
            cost += gradients / 1e6 * (s.encode_s_per_mb + s.decode_s_per_mb)
            wire = moved / (s.bandwidth * transport.efficiency) + hops * s.latency_s if hosts > 1 else 0.0
            began = self.clock.now
            yield partial(self._both, cost, wire)
            self.clock.span("worker all-reduce", f"{gradients / 1e6:.3g} MB", began)
            self.unreduced -= len(layers)
        self.reducing = False
        if self.update and not self.unreduced:
            self.update()

    def _both(self, cost: float, wire: float, then: Then) -> None:
        both = Join(2, then)
        self.background.do(cost, both)
        self.clock.after(wire, both)

    def _next(self) -> list[int]:
        """What is reduced next: as much as the fusion buffer holds, or one bucket of DDP's."""
        taken = size = 0
        if self.buckets:
            taken = next(len(bucket) for bucket in self.buckets if self.ready[0] in bucket)
        while not self.buckets and taken < len(self.ready):
            size += 4 * self.scenario.layers[self.ready[taken]].parameters
            if taken and size > self.scenario.fusion_bytes:
                break
            taken += 1
        layers, self.ready = self.ready[:taken], self.ready[taken:]
        return layers


def _buckets(scenario: Scenario) -> list[list[int]]:
    """DDP's buckets of layers: in the order of backward, a small one first."""
    buckets: list[list[int]] = [[]]
    size, limit = 0, FIRST_BUCKET
    for layer in reversed(range(len(scenario.layers))):
        if size >= limit:
            buckets.append([])
            size, limit = 0, BUCKET
        buckets[-1].append(layer)
        size += 4 * scenario.layers[layer].parameters
    return buckets
