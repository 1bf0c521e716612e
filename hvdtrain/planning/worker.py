"""A simulated job, and what its workers do in a step, layer by layer.

The steps of a worker are the same whatever carries gradients away and brings fresh weights.
"""

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Sequence
from functools import partial
from statistics import NormalDist

from hvdtrain.planning.engine import EventLoop, Process, Processors, Then, Wait, go_on
from hvdtrain.planning.layout import Piece
from hvdtrain.planning.scenario import WARM_UP, Scenario, SimulatedStep

# So many steps and shares of a round are simulated. The rest of a longer round is taken to go on
# like them.
LEAST_ROUND = 4
ROUND_SHARES = 100
# Multiples of the golden ratio, less whole numbers, are spread evenly however many there are.
GOLDEN = (math.sqrt(5) - 1) / 2
# A worker takes at most so many steps, and ten times as many as all are to take. Beside a worker
# with more it no longer matters what the others do.
MOST_STEPS = 100


class SimulatedJob(ABC):
    """A job in which each worker takes some steps after a first one.

    With local steps a simulated step is a round of them. A subclass carries gradients away and brings fresh weights.

    Args:
        seed: of what is drawn.

    Attributes:
        steps: that each worker takes after the first; infinite where the job ends with a round.
        ready_at: of each layer, the numbers of the pieces of which it is the first layer. Backward
            comes to that layer last.
        workers: each of them a group of workers that do the same at the same time.
        unfinished: the number of workers that have not yet taken enough steps. Those that are
            faster go on.
        whole_round: simulated steps after which all workers of the job wait for the last one; 0:
            they never do.
        round_steps: those of them that are simulated.
        shares_left: shares that are left in the round.
        last_share_at: when the last share was taken.
        staleness_sum: the sum over `pushes`.
    """

    def __init__(self, scenario: Scenario, steps: int, seed: str, pieces: Sequence[Piece]) -> None:
        self.scenario = scenario
        self.pieces = pieces
        self.loop = EventLoop()
        self.draw = random.Random(seed)
        most_of_a_round = max(LEAST_ROUND, ROUND_SHARES // scenario.workers)
        self.whole_round = -(-scenario.round_steps // scenario.local_steps)
        self.round_steps = min(self.whole_round, most_of_a_round)
        self.steps = math.inf if self.round_steps else steps
        self.shares_left = self.round_steps * scenario.workers or math.inf
        self.last_share_at = 0.0
        self.staleness_sum = 0.0
        self.pushes = 0.0
        self.ready_at: list[list[int]] = [[] for _ in scenario.layers]
        for number, piece in enumerate(pieces):
            self.ready_at[min(piece.layers)].append(number)
        self.workers: list[Worker] = []
        self.unfinished = 0

    @abstractmethod
    def send(self, worker: "Worker", number: int) -> None:
        """Takes a piece with gradients, and calls `weights_arrived` when it has fresh weights."""

    def refresh_s(self) -> float:
        """Returns how long all workers take to pull the newest weights after a round."""
        return 0.0

    def takes_share(self, worker: "Worker") -> bool:
        """Returns whether there is another step for a worker, and counts it."""
        if self.shares_left <= 0:
            return False
        has_its_part = 0 < self.round_steps == worker.step
        if has_its_part and not self.scenario.is_leased:
            return False
        self.shares_left -= worker.times
        self.last_share_at = self.loop.now
        return True

    def step_ended(self, worker: "Worker") -> None:
        worker.ends.append(self.loop.now)
        if len(worker.ends) == WARM_UP + self.steps:
            self.unfinished -= 1
        elif len(worker.ends) == MOST_STEPS + 10 * self.steps:
            self.unfinished = 0
        if self.unfinished <= 0:
            self.loop.stop()

    def gradient_ready(self, worker: "Worker", layer: int) -> None:
        """Sends the pieces that are complete with a layer's gradient.

        The gradients of all later layers are ready already.
        """
        for number in self.ready_at[layer]:
            for stale_layer in self.pieces[number].layers:
                worker.stale_pieces[stale_layer] += 1
            self.send(worker, number)

    def weights_arrived(self, worker: "Worker", number: int) -> None:
        """Takes a piece's fresh weights, and lets the worker go on if it waits for nothing else."""
        for layer in self.pieces[number].layers:
            worker.stale_pieces[layer] -= 1
        if not worker.awaited:
            return
        awaited_layer, then = worker.awaited
        if not worker.stale_pieces[awaited_layer]:
            worker.awaited = None
            then()

    def run(self) -> SimulatedStep:
        """Simulates the job, and returns what a step of it takes."""
        self.unfinished = len(self.workers)
        for worker in self.workers:
            go_on(worker.steps())
        self.loop.run()
        assert self.round_steps or self.unfinished <= 0, "the simulated job stands still"
        return self._mean_step()

    def _mean_step(self) -> SimulatedStep:
        scenario = self.scenario
        all_workers = sum(worker.times for worker in self.workers)
        # steps a second of each worker
        rates = []
        # the part of the time that workers wait, the mean over them
        waiting = 0.0
        for worker in self.workers:
            began, ended = self._counted_time(worker)
            waits = worker.waits_after(began)
            rates.append(len(waits) / (ended - began))
            waiting += worker.times / all_workers * sum(waits) / (ended - began)
        rate = sum(worker.times * each for worker, each in zip(self.workers, rates, strict=True))
        step_s = all_workers / rate
        if self.round_steps > 1:
            # The rest of the round goes on as fast as shares were taken.
            further_s = self.last_share_at / (self.round_steps - 1)
            step_s += (1 - self.round_steps / self.whole_round) * (further_s - step_s)
        if self.whole_round:
            step_s += self.refresh_s() / self.whole_round
        sent = scenario.bytes * scenario.codec.wire_share
        server_bytes = 0.0
        if scenario.servers:
            server_bytes = scenario.bytes * all_workers / scenario.servers
        else:
            sent = scenario.ring_bytes(sent)
        steps = scenario.local_steps
        return SimulatedStep(
            step_s=step_s / steps,
            exposed_comm_s=waiting * step_s / steps,
            staleness_mean=self.staleness_sum / self.pushes if self.pushes else 0.0,
            bytes_sent=sent / steps,
            server_bytes_sent=server_bytes / steps,
            busiest_share=1 / scenario.workers if scenario.in_lockstep else max(rates) / rate,
        )

    def _counted_time(self, worker: "Worker") -> tuple[float, float]:
        """Returns when the steps of a worker that count began and ended."""
        is_short = self.round_steps or len(worker.ends) <= WARM_UP
        if is_short:
            return 0.0, self.loop.now
        return worker.ends[WARM_UP - 1], worker.ends[-1]


class Worker:
    """Some workers that do the same at the same time.

    Args:
        cores: that they compute on unless they have GPUs.

    Attributes:
        times: the number of these workers.
        factor: how many times as long they compute as others.
        slowest_of: how many workers wait for the slowest of them. This worker has its pace.
        step: the number of the step.
        pace: how many times as long as usual computing takes in this step.
        sleeps: whether this worker sleeps if it is slow.
        may_be_slow: whether --slow has this worker sleep in some steps.
        slower: the factor of --slow in this step: the worker sleeps (slower - 1) times as long as it
            computes.
        waited_in_forward: seconds of this forward in which the worker waited for weights.
        backward_s: how long the last backward took, or the rest of a round of local steps. It is
            measured if may_be_slow.
        slow_due: the steps that are due to be slow at random, in part of one.
        slow_steps: how many come due in a simulated step.
        quantile: of this step's jitter.
        stale_pieces: of each layer, how many of its pieces wait for fresh weights.
        awaited: the layer that this worker waits for, and what is called then.
        ends: of each step, when it ended.
        waited: of each step, how long it waited for weights, without the time of the optimizer.
        waits_since: since when it waits; None: it does not.
    """

    def __init__(
        self, job: SimulatedJob, cores: Processors, times: int, factor: float, slowest_of: int
    ) -> None:
        self.job = job
        self.scenario = job.scenario
        self.cores = cores
        self.times = times
        self.factor = factor
        self.slowest_of = slowest_of
        self.step = 0
        self.pace = 1.0
        # With measured shares a slow worker has fewer samples, and all take as long: see
        # Scenario.factors.
        self.sleeps = self.scenario.shares != "measured"
        self.may_be_slow = (self.sleeps and factor != 1) or self.scenario.slow.random_share > 0
        self.slower = 1.0
        self.waited_in_forward = 0.0
        forward_s = sum(layer.forward_s for layer in self.scenario.layers)
        self.backward_s = self.scenario.local_steps * self.scenario.layers_s - forward_s
        self.slow_due = job.draw.random()
        self.quantile = job.draw.random()
        self.slow_steps = expected_slow(
            self.scenario.slow.random_share, self.scenario.local_steps, slowest_of
        )
        self.stale_pieces = [0] * len(self.scenario.layers)
        self.awaited: tuple[int, Then] | None = None
        self.waits_since: float | None = None
        self.ends: list[float] = []
        self.waited: list[float] = []

    def steps(self) -> Process:
        """Takes steps as long as the job has shares for this worker."""
        scenario = self.scenario
        layers = range(len(scenario.layers))
        updates_alone = not scenario.servers and not scenario.shards_optimizer
        while self.job.takes_share(self):
            self._begin_step()
            if self.may_be_slow:
                yield from self._forward_and_sleep()
                computed_s = 0.0
            else:
                computed_s = yield from self._forward(scenario.fixed_s)
            if scenario.local_steps == 1:
                yield from self._backward(computed_s)
            else:
                yield from self._rest_of_local_steps(computed_s)
            if not scenario.waits_for_layers:
                yield from self._until_fresh(layers)
                if updates_alone:
                    self.pace = 1.0
                    yield self.compute(scenario.optimizer_s)
            self.job.step_ended(self)

    def _forward_and_sleep(self) -> Process:
        """Computes forward, and sleeps as --slow has the worker sleep before backward.

        As in training.step, how long depends on the time of this forward and the last backward,
        while other threads had the cores too.
        """
        loop = self.job.loop
        yield self.compute(self.scenario.fixed_s)
        began = loop.now
        self.waited_in_forward = 0.0
        computed_s = yield from self._forward(0.0)
        yield self.compute(computed_s)
        forward_s = loop.now - began - self.waited_in_forward
        yield partial(loop.after, (self.slower - 1) * (forward_s + self.backward_s))

    def _forward(self, seconds: float) -> Generator[Wait, None, float]:
        """Computes forward, and waits for each layer that has no fresh weights yet.

        Computing until the worker waits, or until a piece leaves, is one event, however many layers
        are computed in it.

        Args:
            seconds: of computing before forward that no event has yet.

        Returns:
            The seconds of computing since the last wait. They belong to the next event.
        """
        for number, layer in enumerate(self.scenario.layers):
            # No piece becomes stale before backward.
            if self.stale_pieces[number]:
                yield self.compute(seconds)
                yield from self._until_fresh([number])
                seconds = 0.0
            seconds += layer.forward_s
        return seconds

    def _backward(self, seconds: float) -> Process:
        """Computes backward, and sends pieces as they become ready.

        Args:
            seconds: of computing before backward that no event has yet.
        """
        began = self.job.loop.now
        layers = self.scenario.layers
        for number in reversed(range(len(layers))):
            seconds += layers[number].backward_s
            is_last = number == 0
            if self.job.ready_at[number] or is_last:
                yield self.compute(seconds)
                self.job.gradient_ready(self, number)
                seconds = 0.0
        self.backward_s = self.job.loop.now - began

    def _rest_of_local_steps(self, seconds: float) -> Process:
        """Computes a round from its first backward on, and sends all pieces after the last step.

        Args:
            seconds: of computing before backward that no event has yet.
        """
        began = self.job.loop.now
        scenario = self.scenario
        local_steps = scenario.local_steps
        for layer in reversed(scenario.layers):
            seconds += layer.backward_s
        further = local_steps - 1
        yield self.compute(seconds + further * scenario.layers_s)
        self.backward_s = self.job.loop.now - began
        yield self.compute(further * scenario.fixed_s + local_steps * scenario.optimizer_s)
        for number in reversed(range(len(scenario.layers))):
            self.job.gradient_ready(self, number)

    def compute(self, seconds: float) -> Wait:
        """Returns a wait for what takes so many seconds at the usual pace."""
        if self.scenario.on_processor:
            return partial(self.cores.work, seconds * self.pace, self.times * self.scenario.threads)
        return partial(self.job.loop.after, seconds * self.pace)

    def waits_after(self, began: float) -> list[float]:
        """Returns how long each step waited that ended after a time."""
        steps = zip(self.ends, self.waited, strict=False)
        return [waited for end, waited in steps if end > began]

    def _until_fresh(self, layers: Iterable[int]) -> Process:
        """Waits until all these layers have fresh weights."""
        began = self.job.loop.now
        self.waits_since = began
        for layer in layers:
            if self.stale_pieces[layer]:
                yield partial(self._await, layer)
        self.waits_since = None
        waited = self.job.loop.now - began
        self.waited[-1] += waited
        self.waited_in_forward += waited

    def _await(self, layer: int, then: Then) -> None:
        self.awaited = layer, then

    def _begin_step(self) -> None:
        """Sets the pace of the next step.

        Jitter is lognormal. The quantiles of jitter, and steps that are slow at random, come evenly
        from a drawn beginning on, so that a few steps have their share of both.
        """
        local_steps = self.scenario.local_steps
        slow = self.scenario.slow
        self.step += 1
        self.waited.append(0.0)
        self.quantile = (self.quantile + GOLDEN) % 1
        quantile_of_slowest = self.quantile ** (1 / self.slowest_of)
        normal = NormalDist().inv_cdf(min(max(quantile_of_slowest, 1e-9), 1 - 1e-9))
        jitter = math.exp(self.scenario.jitter / math.sqrt(local_steps) * normal)
        self.slow_due += self.slow_steps
        slow_steps = min(local_steps, math.floor(self.slow_due))
        self.slow_due -= slow_steps
        self.slower = 1 + (slow.random_factor - 1) * slow_steps / local_steps
        self.pace = jitter
        if self.sleeps:
            self.slower *= self.factor
        else:
            self.pace *= self.factor


def expected_slow(share: float, steps: int, workers: int) -> float:
    """Returns how many of some steps are slow for the worker with most slow steps.

    This is the expected largest of so many binomial numbers.

    Args:
        share: the probability that a step is slow.
    """
    if not share:
        return 0.0
    from scipy.special import bdtr

    return float(sum(1 - bdtr(range(steps), steps, share) ** workers))
