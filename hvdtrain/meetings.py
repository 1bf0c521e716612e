"""When all workers come together between two steps, all at the same step, and what for."""

import time
from dataclasses import dataclass

import torch

from hvdtrain.config import RunConfig
from hvdtrain.modes import Sync
from hvdtrain.preempt import terminated
from hvdtrain.world import World

LOOK_EVERY_S = 1.0  # how often the workers of a lockstep mode ask each other
ASK_EVERY_S = 0.2  # how often a worker of the others looks whether it is called


@dataclass(frozen=True)
class Decision:
    """What all workers do after the step they have just taken, the same on each.

    Attributes:
        over: training ends here.
        terminated: a worker was sent SIGTERM: save a snapshot, and leave.
        snapshot: it is time for one.
    """

    over: bool = False
    terminated: bool = False
    snapshot: bool = False

    def __bool__(self) -> bool:
        return self.over or self.terminated or self.snapshot


GO_ON = Decision()


def gather(sync: Sync, world: World, row: list[float]) -> tuple[list[int], torch.Tensor]:
    """Which workers are there, and their rows, [those workers, len(row)] float64, on every worker."""
    rows = torch.zeros(world.workers, 1 + len(row), dtype=torch.float64)
    rows[world.worker] = torch.tensor([1.0, *row], dtype=torch.float64)
    rows = sync.sum(rows)
    there = rows[:, 0].nonzero().flatten().tolist()
    return there, rows[there, 1:]


class Meetings:
    """Asked after every step. Workers that take their steps together ask each other now and then, at steps that all
    of them compute from the same sums. The others call a meeting, and go on to the step of the one furthest ahead.

    Args:
        steps: how many there are in all, or None where time decides.
        elapsed: seconds of training before this process began, at the last snapshot.
    """

    def __init__(self, config: RunConfig, sync: Sync, world: World, steps: int | None, elapsed: float) -> None:
        self.sync, self.world, self.steps = sync, world, steps
        self.seconds, self.between = config.time_budget, config.snapshot_s
        self.saved_at = elapsed
        self.next_look = 0
        self.held = 0  # meetings so far
        self.target: int | None = None  # the step of the meeting that was called
        self.asked_at = time.monotonic()

    def after(self, step: int, elapsed: float, is_last: bool) -> Decision:
        """What to do after this step.

        Args:
            elapsed: seconds of training up to here.
            is_last: whether it is its epoch's last: then, in every mode, all workers are at it when this returns.
        """
        at_end = self.steps is not None and step >= self.steps
        if self.sync.lockstep:
            return self._look(step, elapsed, at_end)
        due = self._wishes(elapsed)
        if not (is_last or at_end or self.target == step or (self.target is None and (any(due) or self._is_called()))):
            return GO_ON
        if self.target is None and not (is_last or at_end):
            self.sync.call(self.held)
        while True:
            self.sync.rest()
            self.held += 1
            _, rows = gather(self.sync, self.world, [step, elapsed, *due])
            furthest = int(rows[:, 0].max())
            if rows[:, 0].eq(furthest).all():
                self.target = None
                return self._decide(rows[:, 1:], at_end)
            self.target = furthest
            if step < furthest:
                return GO_ON

    def _look(self, step: int, elapsed: float, at_end: bool) -> Decision:
        if not at_end and step < self.next_look:
            return GO_ON
        _, rows = gather(self.sync, self.world, [elapsed, *self._wishes(elapsed)])
        mean = rows[:, 0].mean().item()
        wait = LOOK_EVERY_S
        if self.seconds:  # half the remaining way: few looks, and none but the last step overruns the budget
            wait = min(wait, (self.seconds - mean) / 2)
        alone = self.world.workers == 1
        self.next_look = step + (1 if alone else max(1, int(wait / (mean / step))))
        return self._decide(rows, at_end)

    def _wishes(self, elapsed: float) -> tuple[bool, bool, bool]:
        over = bool(self.seconds) and elapsed >= self.seconds
        snapshot = bool(self.between) and self.world.is_chief and elapsed - self.saved_at >= self.between
        return over, terminated(), snapshot

    def _decide(self, rows: torch.Tensor, at_end: bool) -> Decision:
        """Any worker's wish is everybody's; rows of elapsed and _wishes."""
        over, stop, snapshot = rows[:, 1:].any(0).tolist()
        if snapshot:
            self.saved_at = rows[:, 0].max().item()
        return Decision(over or at_end, stop, snapshot)

    def _is_called(self) -> bool:
        now = time.monotonic()
        if now - self.asked_at < ASK_EVERY_S:
            return False
        self.asked_at = now
        return self.sync.is_called(self.held)
