"""A job without servers, simulated: one process, Horovod's ring with fusion, or DDP's buckets.

Workers are in lockstep and alike, so that one of them, the slowest of a step, stands for all.
"""

import random
from statistics import fmean

from hvdtrain.plan.engine import Clock, Processors, Then, Thread
from hvdtrain.plan.pace import Pace
from hvdtrain.plan.scenario import MIB, Outcome, Scenario
from hvdtrain.plan.servers import WARM_UP

CYCLE_S = 1e-3  # Horovod looks so often for gradients that are ready: HOROVOD_CYCLE_TIME
FIRST_BUCKET, BUCKET = 1 * MIB, 25 * MIB  # of DDP: torch.nn.parallel.DistributedDataParallel, bucket_cap_mb


class RingJob:
    """Simulates `steps` steps after a first one.

    Args:
        seed: of the jitter of computing.
        trace: keep what was done in clock.spans.
    """

    def __init__(self, scenario: Scenario, steps: int = 3, seed: str = "", trace: bool = False) -> None:
        self.scenario, self.steps, self.clock = scenario, steps, Clock()
        self.paces = Pace(scenario, random.Random(seed), scenario.workers)
        if trace:
            self.clock.spans = []
        n, per_host = scenario.workers, min(scenario.workers, scenario.workers_per_host)
        # How many workers share the cores, and the number of those.
        self.times = n if scenario.one_machine else per_host
        self.cores = Processors(self.clock, scenario.free_cores(self.times, 1))
        self.background = Thread(self.cores, self.times)
        self.ready: list[int] = []  # gradients that wait to be reduced, in order, by layer
        self.left = 0  # layers whose gradients are not yet averaged
        self.reducing = False
        self.buckets: list[tuple[int, ...]] = _buckets(scenario) if scenario.mode == "ddp" else []
        self.backward_ended = 0.0
        self.ends: list[float] = []
        self.waited: list[float] = []
        self.pace = 1.0

    def run(self) -> Outcome:
        self._begin()
        self.clock.run(lambda: len(self.ends) >= WARM_UP + self.steps)
        seconds = (self.ends[-1] - self.ends[WARM_UP - 1]) / self.steps
        n, s = self.scenario.workers, self.scenario
        return Outcome(seconds, fmean(self.waited[WARM_UP:]), bytes_sent=2 * (n - 1) / n * s.bytes * s.wire_share)

    def _begin(self) -> None:
        self.pace = self.scenario.slowest * self.paces.next()
        self.left = len(self.scenario.layers) if self.scenario.workers > 1 else 0
        self._pending = [set(bucket) for bucket in self.buckets]
        self._compute("other", self.scenario.fixed_s, lambda: self._forward(0))

    def _compute(self, name: str, seconds: float, then: Then) -> None:
        seconds *= self.pace
        if self.clock.spans is not None and seconds:
            then = self.clock.traced("worker compute", name, self.clock.now, then)
        if self.scenario.on_processor:
            self.cores.work(seconds, self.times * self.scenario.threads, then)
        else:
            self.clock.at(self.clock.now + seconds, then)

    def _forward(self, layer: int) -> None:
        layers = self.scenario.layers
        if layer == len(layers):
            self._backward(layer - 1)
            return
        own = layers[layer]
        self._compute(f"forward {own.name}", own.forward_s, lambda: self._forward(layer + 1))

    def _backward(self, layer: int) -> None:
        if layer < 0:
            self.backward_ended = self.clock.now
            if self.scenario.overlap == "none":
                for number in range(len(self.scenario.layers) - 1, -1, -1):
                    self._gradient(number)
            if not self.left:
                self._update()
            return

        def done() -> None:
            if self.scenario.overlap != "none":
                self._gradient(layer)
            self._backward(layer - 1)

        own = self.scenario.layers[layer]
        self._compute(f"backward {own.name}", own.backward_s, done)

    def _gradient(self, layer: int) -> None:
        if self.scenario.workers == 1:
            return
        if not self.buckets:
            self.ready.append(layer)
        for bucket, pending in zip(self.buckets, self._pending, strict=True):
            if layer in pending:
                pending.discard(layer)
                if not pending:
                    self.ready.extend(bucket)
        if self.ready and not self.reducing:
            self.reducing = True
            delay = CYCLE_S if self.scenario.mode == "allreduce" else 0.0
            self.clock.at(self.clock.now + delay, self._reduce)

    def _reduce(self) -> None:
        """Reduce what is ready: as much as the fusion buffer holds, or one bucket of DDP's."""
        s, taken, size = self.scenario, 0, 0
        if self.buckets:
            taken = next(len(bucket) for bucket in self.buckets if self.ready[0] in bucket)
        while not self.buckets and taken < len(self.ready):
            own = 4 * s.layers[self.ready[taken]].parameters
            if taken and size + own > s.fusion_bytes:
                break
            size, taken = size + own, taken + 1
        layers, self.ready = self.ready[:taken], self.ready[taken:]
        gradients = sum(4 * s.layers[layer].parameters for layer in layers)
        n, transport = s.workers, s.transport
        moved = 2 * (n - 1) / n * gradients * s.wire_share  # each way (Patarasuk and Yuan, 2009)
        hops = 2 * (n - 1)
        cost = transport.operation_s + hops * transport.message_s
        cost += moved / 1e9 * (transport.send_s_per_gb + transport.receive_s_per_gb)
        cost += gradients / 1e6 * (s.encode_s_per_mb + s.decode_s_per_mb)
        hosts = -(-n // s.workers_per_host)
        wire = moved / (s.bandwidth * transport.efficiency) if hosts > 1 else 0.0
        began, parts = self.clock.now, [2]

        def part() -> None:
            parts[0] -= 1
            if not parts[0]:
                self.clock.span("worker all-reduce", f"{gradients / 1e6:.3g} MB", began)
                self._reduced(len(layers))

        self.background.do(cost, part)
        self.clock.at(self.clock.now + wire + (hops * s.latency_s if hosts > 1 else 0.0), part)

    def _reduced(self, layers: int) -> None:
        self.left -= layers
        if self.ready:
            self._reduce()
        else:
            self.reducing = False
        if not self.left and self.backward_ended:
            self._update()

    def _update(self) -> None:
        self.waited.append(self.clock.now - self.backward_ended)
        self.clock.span("worker compute", "wait", self.backward_ended)
        self.backward_ended = 0.0
        # Optimizers run on the device that computes.
        self._compute("optimizer", self.scenario.optimizer_s / self.pace, self._end)

    def _end(self) -> None:
        self.ends.append(self.clock.now)
        self._begin()


def _buckets(scenario: Scenario) -> list[tuple[int, ...]]:
    """DDP's buckets of layers: in the order of backward, a small one first."""
    found: list[tuple[int, ...]] = []
    own: list[int] = []
    size, limit = 0, FIRST_BUCKET
    for layer in range(len(scenario.layers) - 1, -1, -1):
        own.append(layer)
        size += 4 * scenario.layers[layer].parameters
        if size >= limit or not layer:
            found.append(tuple(own))
            own, size, limit = [], 0, BUCKET
    return found
