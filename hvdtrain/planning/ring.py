"""A job without servers, simulated: one process, Horovod's ring with fusion, or DDP's buckets.

Workers are in lockstep and alike, so that one of them, the slowest of a step, stands for all.
"""

import random
from functools import partial
from statistics import fmean

from hvdtrain.planning.computing import Computing
from hvdtrain.planning.engine import Clock, Join, Process, Processors, Then, go_on
from hvdtrain.planning.scenario import MIB, WARM_UP, Outcome, Scenario

CYCLE_S = 1e-3  # Horovod looks so often for gradients that are ready: HOROVOD_CYCLE_TIME
FIRST_BUCKET, BUCKET = 1 * MIB, 25 * MIB  # of DDP: torch.nn.parallel.DistributedDataParallel, bucket_cap_mb


class RingJob:
    """Simulates `steps` steps after a first one.

    Args:
        seed: of the jitter of computing.
    """

    def __init__(self, scenario: Scenario, steps: int, seed: str) -> None:
        self.scenario, self.steps, self.clock = scenario, steps, Clock()
        self.times = min(scenario.workers, scenario.workers_per_host)  # workers that share the cores of a host
        self.cores = Processors(self.clock, scenario.free_cores(self.times, 1))
        draw = random.Random(seed)
        self.compute = Computing(scenario, self.clock, self.cores, self.times, draw, scenario.workers)
        self.buckets = _buckets(scenario)
        self.ready: list[int] = []  # bytes of the buckets that wait to be reduced, in order
        self.unreduced = 0  # buckets that are not yet averaged
        self.reducing = False
        self.update: Then | None = None  # called when all gradients are averaged
        self.ends: list[float] = []
        self.waited: list[float] = []

    def run(self) -> Outcome:
        go_on(self._steps())
        self.clock.run(lambda: len(self.ends) >= WARM_UP + self.steps)
        seconds = (self.ends[-1] - self.ends[WARM_UP - 1]) / self.steps
        n, s = self.scenario.workers, self.scenario
        return Outcome(seconds, fmean(self.waited[WARM_UP:]), bytes_sent=2 * (n - 1) / n * s.bytes * s.codec.wire_share)

    def _steps(self) -> Process:
        s, compute = self.scenario, self.compute
        while True:
            compute.begin_step(s.slowest)
            self.unreduced = len(self.buckets)
            yield compute(s.fixed_s)
            for layer in s.layers:
                yield compute(layer.forward_s)
            for number in reversed(range(len(s.layers))):
                yield compute(s.layers[number].backward_s)
                if number in self.buckets:
                    self.ready.append(self.buckets[number])
                    if not self.reducing:
                        self.reducing = True
                        go_on(self._reductions())
            began = self.clock.now
            if self.unreduced:
                yield self._until_averaged
            self.update = None
            self.waited.append(self.clock.now - began)
            compute.pace = 1.0  # optimizers run on the device that computes
            yield compute(s.optimizer_s)
            self.ends.append(self.clock.now)

    def _until_averaged(self, then: Then) -> None:
        self.update = then

    def _reductions(self) -> Process:
        """Reduce what is ready, until nothing is: as much at once as the fusion buffer holds, or one bucket of DDP's.
        A reduction takes the wire and the processors at once.
        """
        s, transport, is_horovod = self.scenario, self.scenario.transport, self.scenario.mode == "allreduce"
        hosts, hops = -(-s.workers // s.workers_per_host), 2 * (s.workers - 1)
        yield partial(self.clock.after, CYCLE_S if is_horovod else 0.0)
        while self.ready:
            gradients, buckets = self.ready.pop(0), 1
            while is_horovod and self.ready and gradients + self.ready[0] <= s.fusion_bytes:
                gradients += self.ready.pop(0)
                buckets += 1
            moved = hops / s.workers * gradients * s.codec.wire_share  # each way (Patarasuk and Yuan, 2009)
            cost = 1e-6 * (transport.operation_us + hops * transport.message_us)
            cost += moved / 1e9 * (transport.send_s_per_gb + transport.receive_s_per_gb)
            cost += gradients / 1e9 * (s.codec.encode_ms_per_mb + s.codec.decode_ms_per_mb)
            wire = moved / s.wire_rate + hops * s.latency_s if hosts > 1 else 0.0
            yield partial(self._both, cost, wire)
            self.unreduced -= buckets
        self.reducing = False
        if self.update and not self.unreduced:
            self.update()

    def _both(self, cost: float, wire: float, then: Then) -> None:
        both = Join(2, then)
        self.cores.work(cost, self.times, both)
        self.clock.after(wire, both)


def _buckets(scenario: Scenario) -> dict[int, int]:
    """The bytes of each bucket of gradients, by the layer that completes it in backward: of Horovod each layer is one,
    of DDP the first is small. None where a worker is alone.
    """
    buckets: dict[int, int] = {}
    size, limit = 0, FIRST_BUCKET
    for number in reversed(range(len(scenario.layers) if scenario.workers > 1 else 0)):
        size += 4 * scenario.layers[number].parameters
        if scenario.mode == "allreduce" or size >= limit or not number:
            buckets[number] = size
            size, limit = 0, BUCKET
    return buckets
