"""Simulated jobs without servers: one process, Horovod's ring with fusion, its sharded form, or DDP
with its buckets.

Workers are in lockstep and alike. So one of them, the slowest of each step, stands for all.
"""

import math
from collections import Counter
from functools import partial
from statistics import NormalDist

from hvdtrain.base import modes
from hvdtrain.planning.engine import Join, Process, Processors, Then, go_on
from hvdtrain.planning.layout import Detail, HostGroup, cut
from hvdtrain.planning.scenario import BUCKET_BYTES, MIB, Scenario
from hvdtrain.planning.worker import SimulatedJob, Worker

# How often Horovod looks for gradients that are ready: HOROVOD_CYCLE_TIME.
CYCLE_S = 1e-3
# The most bytes that Horovod reduces at once: HOROVOD_FUSION_THRESHOLD.
FUSION = 128 * MIB
# The bytes of a DDP bucket: torch.nn.parallel.DistributedDataParallel, bucket_cap_mb.
BUCKET = 25 * MIB
# The share that a collective reaches of the wire that an all-reduce reaches, by how many times it
# goes around the ring: README.md.
FILLS = {
    1: 0.75,
    2: 1.0,
}
# The buckets that Horovod has at once where layers wait: BUCKETS_AHEAD of job.rings.ring.
AHEAD = 2
# The averages of a step of Horovod where no layer waits: of what is ready at the end of the first
# cycle, and of the rest.
FUSED = 2
# The portions in which the processors' work of an all-reduce is simulated.
PORTIONS = 8


def averages_of_exchange(scenario: Scenario) -> int:
    """Returns in how many averages all gradients of an exchange are made."""
    if not modes.declared(scenario.mode).joins_horovod:
        return buckets_of_reducer(scenario)
    if scenario.waits_for_layers:
        return max(1, -(-scenario.bytes // (AHEAD * BUCKET_BYTES)))
    return FUSED


def buckets_of_reducer(scenario: Scenario) -> int:
    """Returns in how many buckets DDP's reducer averages the gradients."""
    return max(1, -(-scenario.bytes // BUCKET))


def _slowest_group(scenario: Scenario) -> tuple[float, int]:
    """Returns the factor, and the number, of the workers of which one is the slowest of a step.

    If steps are slow at random, any worker may be.
    """
    factors = scenario.factors
    if scenario.slow.random_share:
        return max(factors), len(factors)

    def slowest(group: tuple[float, int]) -> float:
        """Returns the median time of the slowest worker of a group."""
        factor, workers = group
        quantile = 0.5 ** (1 / workers)
        return factor * math.exp(scenario.jitter * NormalDist().inv_cdf(quantile))

    return max(Counter(factors).items(), key=slowest)


class SimulatedRing(SimulatedJob):
    """A job that averages gradients in a ring of workers.

    Attributes:
        cores: of a host.
        ready: the numbers of the pieces that wait to be reduced.
    """

    def __init__(self, scenario: Scenario, steps: int, seed: str, detail: Detail) -> None:
        self.is_horovod = modes.declared(scenario.mode).joins_horovod
        pieces = []
        if scenario.workers > 1:
            most_pieces = detail.pieces if self.is_horovod else buckets_of_reducer(scenario)
            pieces = cut(scenario, [HostGroup(1, 1, ())], most_pieces)
        super().__init__(scenario, steps, seed, pieces)
        workers_on_a_host = min(scenario.workers, scenario.workers_per_host)
        self.cores = Processors(self.loop, scenario.free_cores(workers_on_a_host, 1))
        factor, slowest_of = _slowest_group(scenario)
        self.worker = Worker(self, self.cores, workers_on_a_host, factor, slowest_of)
        self.workers = [self.worker]
        self.ready: list[int] = []
        self.is_reducing = False

    def send(self, worker: Worker, number: int) -> None:
        self.ready.append(number)
        if not self.is_reducing:
            self.is_reducing = True
            go_on(self._reduce_all())

    def _reduce_all(self) -> Process:
        """Reduces what is ready, until nothing is."""
        yield partial(self.loop.after, CYCLE_S if self.is_horovod else 0.0)
        while self.ready:
            numbers = self._take_next()
            gradients = sum(self.pieces[number].bytes for number in numbers)
            yield from self._reduce(gradients)
            for number in numbers:
                self.weights_arrived(self.worker, number)
        self.is_reducing = False

    def _reduce(self, gradients: float) -> Process:
        """Averages so many bytes of gradients, and updates their weights unless the worker updates
        all at the end of the step.

        A sharded ring has the optimizer between two collectives. Where layers wait, the optimizer
        takes its steps bucket by bucket.
        """
        scenario = self.scenario
        optimizer_s = scenario.optimizer_s_per_mb * gradients / 1e6
        if scenario.shards_optimizer:
            yield partial(self._collective, gradients, 1)
            yield from self._update(optimizer_s / scenario.workers)
            yield partial(self._collective, gradients, 1)
            return
        yield partial(self._collective, gradients, 2)
        if scenario.waits_for_layers:
            yield from self._update(optimizer_s)

    def _update(self, seconds: float) -> Process:
        """Takes the optimizer's step, which is no communication though the worker may wait for
        it.
        """
        began = self.loop.now
        yield partial(self.cores.work, seconds, self.worker.times)
        if self.worker.waits_since is not None:
            self.worker.waited[-1] -= self.loop.now - max(began, self.worker.waits_since)

    def _take_next(self) -> list[int]:
        """Takes the pieces that are reduced together next: what forward needs first where layers
        wait, else Horovod's fusion buffer or DDP's bucket.
        """
        if self.scenario.waits_for_layers:
            taken = sorted(self.ready)[:AHEAD]
        elif self.is_horovod:
            taken = self._fusion_buffer()
        else:
            taken = self.ready[:1]
        self.ready = [number for number in self.ready if number not in taken]
        return taken

    def _fusion_buffer(self) -> list[int]:
        """Returns the first pieces that are ready, as many as Horovod fuses."""
        fused: list[int] = []
        size = 0
        for number in self.ready:
            size += self.pieces[number].bytes
            if fused and size > FUSION:
                break
            fused.append(number)
        return fused

    def _collective(self, gradients: float, times_around: int, then: Then) -> None:
        """Carries out a reduce-scatter or an all-gather, once around the ring, or an all-reduce,
        twice (Patarasuk and Yuan, 2009).

        In an all-reduce neither the wire nor the processors hide the other wholly. The others use
        the wire, and then the processors: Gloo adds up what has come whole.
        """
        scenario = self.scenario
        transport = scenario.transport
        codec = scenario.codec
        hops = times_around * (scenario.workers - 1)
        # each way
        moved = scenario.ring_bytes(gradients, times_around) * codec.wire_share
        codec_s_per_gb = codec.encode_ms_per_mb + codec.decode_ms_per_mb
        processor_s = 1e-6 * (transport.operation_us + hops * transport.message_us)
        processor_s += moved / 1e9 * (transport.send_s_per_gb + transport.receive_s_per_gb)
        processor_s += times_around / 2 * gradients / 1e9 * codec_s_per_gb
        wire_s = 0.0
        waits_s = transport.local_waits * processor_s
        if scenario.hosts_with_workers > 1:
            waits_s = 0.0
            members = scenario.members_between_hosts
            crossing = scenario.ring_bytes(gradients, times_around, members) * codec.wire_share
            wire_s = crossing / scenario.wire_rate / FILLS[times_around]
            wire_s += times_around * (members - 1) * scenario.latency_s
        if times_around == 1:
            go_on(self._one_after_the_other(wire_s, processor_s, waits_s, then))
            return
        # with no other work on the cores
        alone_s = processor_s / min(1.0, self.cores.cores / self.worker.times)
        further_s = math.hypot(wire_s, alone_s) - max(wire_s, alone_s) + waits_s
        both = Join(2, partial(self.loop.after, further_s, then))
        go_on(self._process(processor_s, alone_s, wire_s, both))
        self.loop.after(wire_s, both)

    def _one_after_the_other(
        self, wire_s: float, processor_s: float, waits_s: float, then: Then
    ) -> Process:
        yield partial(self.loop.after, wire_s)
        yield partial(self.cores.work, processor_s, self.worker.times)
        yield partial(self.loop.after, waits_s)
        then()

    def _process(self, processor_s: float, alone_s: float, wire_s: float, then: Then) -> Process:
        """Has the processors do their part of an all-reduce, as bytes come over the wire.

        If nothing else has the cores, it takes max(wire_s, alone_s).

        Args:
            processor_s: processor seconds of a worker.
            alone_s: seconds that these take with no other work on the cores.
            wire_s: seconds of the wire.
        """
        began = self.loop.now
        last_begins_s = max(0.0, wire_s - alone_s / PORTIONS)
        for number in range(PORTIONS):
            due = began + last_begins_s * number / (PORTIONS - 1)
            if due > self.loop.now:
                yield partial(self.loop.after, due - self.loop.now)
            yield partial(self.cores.work, processor_s / PORTIONS, self.worker.times)
        then()
