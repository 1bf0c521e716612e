"""What workers do in a step, layer by layer, whatever carries their gradients away and brings fresh weights."""

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from functools import partial
from statistics import NormalDist

from hvdtrain.planning.engine import Clock, Process, Processors, Then, Wait, go_on
from hvdtrain.planning.layout import Piece
from hvdtrain.planning.scenario import WARM_UP, Outcome, Scenario

# Of a round, so many steps and shares are simulated: of a longer one the rest is taken to go on as they did.
LEAST_ROUND, ROUND_SHARES = 4, 100
GOLDEN = (math.sqrt(5) - 1) / 2  # multiples of it, less whole numbers, are spread evenly however many there are
MOST_STEPS = 100  # and ten times as many as all are to take: what others do no longer matters beside a worker's


class Exchange(ABC):
    """What carries the gradients of a job away and brings fresh weights, for so many steps of each worker after a first
    one; with local steps, rounds of them.

    Attributes:
        pieces_of: the numbers of the pieces that each layer lies in.
        ready_at: those of which it is the first layer: backward comes to that last.
        workers: in groups of those that do the same at the same time.
        left: groups of workers that have not yet taken enough steps; those that are faster take more.
        round: steps after which all wait for the last; 0: they never do.
        shares: that are left in the round; the last was taken at `leased_s`.
        staleness_sum: over so many `pushes`.
    """

    def __init__(self, scenario: Scenario, steps: int, seed: str, pieces: Sequence[Piece]) -> None:
        self.scenario, self.pieces = scenario, pieces
        self.clock, self.random = Clock(), random.Random(seed)
        self.round = min(scenario.round_steps, max(LEAST_ROUND, ROUND_SHARES // scenario.workers))
        self.steps = math.inf if self.round else steps
        self.shares, self.leased_s = self.round * scenario.workers or math.inf, 0.0
        self.staleness_sum = self.pushes = 0.0
        self.pieces_of: list[list[int]] = [[] for _ in scenario.layers]
        self.ready_at: list[list[int]] = [[] for _ in scenario.layers]
        for number, piece in enumerate(pieces):
            self.ready_at[min(piece.layers)].append(number)
            for layer in piece.layers:
                self.pieces_of[layer].append(number)
        self.workers: list[Worker] = []
        self.left = 0

    @abstractmethod
    def send(self, worker: "Worker", number: int) -> None:
        """All gradients of a piece are there; call `arrived` when its fresh weights are."""

    def takes_share(self, worker: "Worker") -> bool:
        """Whether there is another step for a group of workers."""
        if self.shares <= 0 or (not self.scenario.is_leased and 0 < self.round == worker.step):
            return False
        self.shares, self.leased_s = self.shares - worker.times, self.clock.now
        return True

    def step_ended(self, worker: "Worker") -> None:
        worker.ends.append(self.clock.now)
        if len(worker.ends) == WARM_UP + self.steps:
            self.left -= 1
        elif len(worker.ends) == MOST_STEPS + 10 * self.steps:
            self.left = 0

    def gradient(self, worker: "Worker", layer: int) -> None:
        """A layer's gradient is there, as those of all layers behind it are."""
        for number in self.ready_at[layer]:
            worker.stale.add(number)
            self.send(worker, number)

    def arrived(self, worker: "Worker", number: int) -> None:
        """A piece has fresh weights."""
        worker.stale.remove(number)
        if worker.awaited and not worker.is_stale(worker.awaited[0]):
            (_, then), worker.awaited = worker.awaited, None
            then()

    def run(self) -> Outcome:
        s, steps = self.scenario, self.scenario.local_steps
        self.left = len(self.workers)
        for worker in self.workers:
            go_on(worker.steps())
        self.clock.run(lambda: self.left <= 0)
        assert self.round or self.left <= 0, "the simulated job stands still"
        total = sum(worker.times for worker in self.workers)
        rates, waiting = [], 0.0
        for worker in self.workers:
            is_short = self.round or len(worker.ends) <= WARM_UP
            began, ended = (0.0, self.clock.now) if is_short else (worker.ends[WARM_UP - 1], worker.ends[-1])
            waits = [waited for end, waited in zip(worker.ends, worker.waited, strict=False) if end > began]
            rates.append(len(waits) / (ended - began))
            waiting += worker.times / total * sum(waits) / (ended - began)
        rate = sum(worker.times * each for worker, each in zip(self.workers, rates, strict=True))
        step_s = total / rate
        if self.round > 1:
            step_s += (1 - self.round / s.round_steps) * (self.leased_s / (self.round - 1) - step_s)
        sent = s.bytes * s.codec.wire_share
        return Outcome(
            step_s=step_s / steps, exposed_comm_s=waiting * step_s / steps,
            staleness_mean=self.staleness_sum / self.pushes if self.pushes else 0.0,
            bytes_sent=(sent if s.servers else s.around(sent)) / steps,
            server_bytes_sent=s.bytes * total / s.servers / steps if s.servers else 0.0,
            busiest_share=1 / s.workers if s.in_lockstep else max(rates) / rate,
        )  # fmt: skip


class Worker:
    """So many workers that do the same at the same time, on these cores unless that is on GPUs.

    Attributes:
        factor: of their computing; `pace` is that of a step.
        among: how many workers wait for the slowest of them, whose pace it is.
        stale: pieces whose fresh weights are under way.
        awaited: the layer that it waits for, and what goes on then.
        ends, waited: of each step, when it ended and how long it waited for weights.
    """

    def __init__(self, exchange: Exchange, cores: Processors, times: int, factor: float, among: int) -> None:
        self.exchange, self.scenario, self.cores = exchange, exchange.scenario, cores
        self.times, self.factor, self.among = times, factor, among
        self.step, self.pace = 0, 1.0
        self.due, self.quantile = exchange.random.random(), exchange.random.random()  # slow steps; of jitter
        self.slow_steps = expected_slow(self.scenario.slow.random_share, self.scenario.local_steps, among)
        self.stale: set[int] = set()
        self.awaited: tuple[int, Then] | None = None
        self.ends: list[float] = []
        self.waited: list[float] = []

    def steps(self) -> Process:
        exchange, scenario, layers = self.exchange, self.scenario, self.scenario.layers
        while exchange.takes_share(self):
            self._begin_step()
            seconds = scenario.fixed_s  # of computing until it waits, or a piece leaves: one event, however many layers
            for number, layer in enumerate(layers):
                if self.is_stale(number):  # no piece becomes stale before backward
                    yield self.compute(seconds)
                    yield from self._until_fresh([number])
                    seconds = 0.0
                seconds += layer.forward_s
            for number in reversed(range(len(layers))):
                seconds += layers[number].backward_s
                if scenario.local_steps == 1 and (exchange.ready_at[number] or not number):
                    yield self.compute(seconds)
                    exchange.gradient(self, number)
                    seconds = 0.0
            if (local := scenario.local_steps) > 1:  # what they came to leaves after the last
                yield self.compute(seconds + (local - 1) * scenario.computing_s + local * scenario.optimizer_s)
                for number in reversed(range(len(layers))):
                    exchange.gradient(self, number)
            if not scenario.waits_for_layers:
                yield from self._until_fresh(range(len(layers)))
            if not (scenario.servers or scenario.waits_for_layers or scenario.mode == "sharded"):
                self.pace = 1.0
                yield self.compute(scenario.optimizer_s)
            exchange.step_ended(self)

    def compute(self, seconds: float) -> Wait:
        """So many seconds at the usual pace."""
        if self.scenario.on_processor:
            return partial(self.cores.work, seconds * self.pace, self.times * self.scenario.threads)
        return partial(self.exchange.clock.after, seconds * self.pace)

    def is_stale(self, layer: int) -> bool:
        """Whether fresh weights of a layer are under way."""
        return not self.stale.isdisjoint(self.exchange.pieces_of[layer])

    def _until_fresh(self, layers: Iterable[int]) -> Process:
        began = self.exchange.clock.now
        for layer in layers:
            if self.is_stale(layer):
                yield partial(self._await, layer)
        self.waited[-1] += self.exchange.clock.now - began

    def _await(self, layer: int, then: Then) -> None:
        self.awaited = layer, then

    def _begin_step(self) -> None:
        """Take the next pace. Jitter is lognormal. Both that and steps that are slow at random come evenly from a drawn
        beginning on, so that a few steps have their share of each.
        """
        local, slow = self.scenario.local_steps, self.scenario.slow
        self.step += 1
        self.waited.append(0.0)
        self.quantile = (self.quantile + GOLDEN) % 1
        normal = NormalDist().inv_cdf(min(max(self.quantile ** (1 / self.among), 1e-9), 1 - 1e-9))
        self.due += self.slow_steps
        slow_steps = min(local, math.floor(self.due))
        self.due -= slow_steps
        slower = 1 + (slow.random_factor - 1) * slow_steps / local
        self.pace = self.factor * math.exp(self.scenario.jitter / math.sqrt(local) * normal) * slower


def expected_slow(share: float, steps: int, workers: int) -> float:
    """Of so many steps, those that are slow of the worker who has most of them: the mean of the largest of so many
    binomial numbers.
    """
    if not share:
        return 0.0
    from scipy.special import bdtr

    return float(sum(1 - bdtr(range(steps), steps, share) ** workers))
