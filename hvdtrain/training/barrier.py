"""When all workers come to the same step, between two steps, and what they decide there."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hvdtrain.config.run_config import RunConfig
from hvdtrain.system.preempt import all_are_to_leave, termination_requested

LOCKSTEP_EVERY_S = 1.0  # how often the workers of a lockstep mode come together


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


class Departed(Exception):
    """This worker leaves a job that goes on."""


class StepBarrier:
    """Brings all workers to the same step when there is something to decide. Called after every step.

    Workers in lockstep come together every second or so, at steps that all of them compute from the same sums. Where
    these can be done in the background, nobody waits for them: what they come to is decided one step later. (Behind a
    step's weights, which share the connection with it, an answer can be as late as they are.) Workers that lease their
    shares come together when the round of these is over; one that wants a decision ends the round early.

    Args:
        sync: a Synchroniser; where shares are leased a PushPull.
        steps: how many there are in all, or None where time decides.
        elapsed: seconds of training before this process began, at the last snapshot.
        may_depart: SIGTERM lets this worker leave alone, as one that has joined.

    Attributes:
        gathered: the step of the last barrier, and of each worker what `after` was told more, [workers, more].
    """

    def __init__(
        self, config: RunConfig, sync: Any, steps: int | None, elapsed: float, may_depart: bool = False
    ) -> None:
        self.sync, self.group, self.steps = sync, sync.group, steps
        self.time_budget, self.snapshot_s = config.time_budget, config.snapshot_s
        self.saved_at = elapsed
        self.may_depart = may_depart
        self.gathered: tuple[int, torch.Tensor] | None = None
        self.next_step = 0  # of the next barrier, in lockstep
        self.under_way: Callable[[], tuple[list[int], torch.Tensor]] | None = None  # rows of the last, not yet there
        self.paused = False  # this round of leased shares, by this worker

    def after(self, step: int, elapsed: float, is_last: bool, more: Sequence[float] = ()) -> Decision:
        """What workers in lockstep do after this step.

        Args:
            elapsed: seconds of training up to here.
            is_last: whether it is its epoch's last.
            more: what all are told of this worker: see `gathered`.

        Raises:
            Departed: this worker leaves, and the others go on.
        """
        self._depart_if_asked()
        at_end = self.steps is not None and step >= self.steps
        if self.group.workers == 1 and not self.group.in_background:  # nobody to ask: at each step, for next to nothing
            return self._decide([[elapsed, *self._wants(elapsed)]], at_end)
        if self.under_way:
            found, self.under_way = self.under_way, None
            if decision := self._together(step - 1, found, at_end):
                return decision
        if not at_end and step < self.next_step:
            return GO_ON
        later = self.group.in_background and not is_last and not at_end
        until = elapsed + (elapsed / step if later else 0)  # when there will be a decision
        found = self.group.all_gather_later([elapsed, *self._wants(until), *more])
        if not later:
            return self._together(step, found, at_end)
        self.under_way = found
        return GO_ON

    def in_round(self, elapsed: float) -> None:
        """After each step where shares are leased: end the round early if this worker wants a decision.

        Raises:
            Departed: this worker leaves, and the others go on.
        """
        self._depart_if_asked()
        if not self.paused and any(self._wants(elapsed)):
            self.paused = True
            self.sync.pause_leases()

    def after_round(self, step: int, elapsed: float) -> Decision:
        """What to do after a round of leased shares, whose last step this is."""
        self.paused = False
        _, rows = self.group.all_gather([elapsed, *self._wants(elapsed)])
        return self._decide(rows.tolist(), self.steps is not None and step >= self.steps)

    def _depart_if_asked(self) -> None:
        if self.may_depart and termination_requested() and not all_are_to_leave():
            raise Departed

    def _together(self, step: int, found: Callable[[], tuple[list[int], torch.Tensor]], at_end: bool) -> Decision:
        """The decision of what was gathered after this step."""
        _, rows = found()
        self.gathered = step, rows[:, 4:]
        mean = rows[:, 0].mean().item()
        wait = LOCKSTEP_EVERY_S
        if self.time_budget:  # half the remaining way: few barriers, and none but the last step overruns the budget
            wait = min(wait, (self.time_budget - mean) / 2)
        self.next_step = step + max(1, int(wait / (mean / step)))
        return self._decide(rows[:, :4].tolist(), at_end)

    def _wants(self, elapsed: float) -> tuple[bool, bool, bool]:
        over = bool(self.time_budget) and elapsed >= self.time_budget
        snapshot = bool(self.snapshot_s) and self.group.leads and elapsed - self.saved_at >= self.snapshot_s
        leaves = all_are_to_leave() if self.may_depart else termination_requested()
        return over, leaves, snapshot

    def _decide(self, rows: Sequence[Sequence[float]], at_end: bool) -> Decision:
        """What any worker wants, all do; rows of elapsed and _wants."""
        elapsed, over, stop, snapshot = zip(*rows, strict=True)
        if any(snapshot):
            self.saved_at = max(elapsed)
        return Decision(any(over) or at_end, any(stop), any(snapshot))
