"""Averages without servers, simulated: one process, Horovod's ring with fusion, its sharded form, or DDP's buckets.

Workers are in lockstep and alike, so that one of them, the slowest of a step, stands for all.
"""

import math
from functools import partial

from hvdtrain import modes
from hvdtrain.planning.engine import Join, Process, Processors, Then, go_on
from hvdtrain.planning.layout import Detail, HostGroup, cut
from hvdtrain.planning.scenario import MIB, Scenario
from hvdtrain.planning.worker import Exchange, Worker

CYCLE_S = 1e-3  # Horovod looks so often for gradients that are ready: HOROVOD_CYCLE_TIME
FUSION = 128 * MIB  # Horovod reduces at most so much at once: HOROVOD_FUSION_THRESHOLD
BUCKET = 25 * MIB  # of DDP: torch.nn.parallel.DistributedDataParallel, bucket_cap_mb
FILLS = {1: 0.75, 2: 1.0}  # share of the wire, once around and twice, of what an all-reduce reaches: README.md
AHEAD = 2  # buckets that Horovod has at once where layers wait: see modes._ring


class Ring(Exchange):
    def __init__(self, scenario: Scenario, steps: int, seed: str, detail: Detail) -> None:
        self.is_horovod = modes.declared(scenario.mode).joins_horovod
        most = detail.pieces if self.is_horovod else max(1, -(-scenario.bytes // BUCKET))
        pieces = cut(scenario, [HostGroup(1, 1, ())], most) if scenario.workers > 1 else []
        super().__init__(scenario, steps, seed, pieces)
        times = min(scenario.workers, scenario.workers_per_host)  # workers that share the cores of a host
        self.cores = Processors(self.clock, scenario.free_cores(times, 1))
        self.worker = Worker(self, self.cores, times, max(scenario.factors), scenario.workers)
        self.workers = [self.worker]
        self.ready: list[int] = []  # pieces that wait to be reduced
        self.is_reducing = False

    def send(self, worker: Worker, number: int) -> None:
        self.ready.append(number)
        if not self.is_reducing:
            self.is_reducing = True
            go_on(self._reductions())

    def _reductions(self) -> Process:
        """Reduce what is ready, until nothing is. A sharded ring has the optimizer between two operations; where layers
        wait, it takes its steps bucket by bucket.
        """
        s = self.scenario
        yield partial(self.clock.after, CYCLE_S if self.is_horovod else 0.0)
        while self.ready:
            numbers = self._next()
            gradients = sum(self.pieces[number].bytes for number in numbers)
            optimizer_s = s.optimizer_s_per_mb * gradients / 1e6
            if s.mode == "sharded":
                yield partial(self._operation, gradients, 1)
                yield partial(self.cores.work, optimizer_s / s.workers, self.worker.times)
                yield partial(self._operation, gradients, 1)
            else:
                yield partial(self._operation, gradients, 2)
                if s.waits_for_layers:
                    yield partial(self.cores.work, optimizer_s, self.worker.times)
            for number in numbers:
                self.arrived(self.worker, number)
        self.is_reducing = False

    def _next(self) -> list[int]:
        """Take what is reduced together: a fusion buffer; where layers wait, what forward needs first; DDP's bucket."""
        if self.scenario.waits_for_layers:
            taken = sorted(self.ready)[:AHEAD]
        else:
            taken, size = [], 0
            for number in self.ready if self.is_horovod else self.ready[:1]:
                size += self.pieces[number].bytes
                if taken and size > FUSION:
                    break
                taken.append(number)
        self.ready = [number for number in self.ready if number not in taken]
        return taken

    def _operation(self, gradients: float, times_around: int, then: Then) -> None:
        """Once around the ring is a reduce-scatter or an all-gather, twice an all-reduce (Patarasuk and Yuan, 2009). Of
        that neither the wire nor the processors hide the other wholly; the former add up what has come whole.
        """
        s, transport, codec = self.scenario, self.scenario.transport, self.scenario.codec
        hosts, hops = -(-s.workers // s.workers_per_host), times_around * (s.workers - 1)
        moved = s.around(gradients, times_around) * codec.wire_share  # each way
        cost = 1e-6 * (transport.operation_us + hops * transport.message_us)
        cost += moved / 1e9 * (transport.send_s_per_gb + transport.receive_s_per_gb)
        cost += times_around / 2 * gradients / 1e9 * (codec.encode_ms_per_mb + codec.decode_ms_per_mb)
        wire_s = moved / s.wire_rate / FILLS[times_around] + hops * s.latency_s if hosts > 1 else 0.0
        alone_s = cost / min(1.0, self.cores.cores / self.worker.times)
        together_s = wire_s + alone_s if times_around == 1 else math.hypot(wire_s, alone_s)
        both = Join(2, partial(self.clock.after, together_s - max(wire_s, alone_s), then))
        self.cores.work(cost, self.worker.times, both)
        self.clock.after(wire_s, both)
