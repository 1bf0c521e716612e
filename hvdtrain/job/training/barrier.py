"""Barriers between two steps, at which all workers decide the same."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from hvdtrain.base.config.run_config import RunConfig
from hvdtrain.base.system.preempt import all_are_to_leave, termination_requested
from hvdtrain.job.coordination.group import Group

LOCKSTEP_EVERY_S = 1.0  # how often the workers of a lockstep mode come together
# How often they look, amid a long round of local steps, whether one of them was sent SIGTERM.
LOOK_EVERY_S = 5.0


@dataclass(frozen=True)
class Decision:
    """The decision of all workers after a step, the same on each. It is true unless all go on.

    Attributes:
        over: training ends here.
        terminated: a worker was sent SIGTERM: all save a snapshot, and leave.
        snapshot: it is time for a snapshot.
    """

    over: bool = False
    terminated: bool = False
    snapshot: bool = False

    def __bool__(self) -> bool:
        return self.over or self.terminated or self.snapshot


GO_ON = Decision()
# Blocks until the rows of all workers are there: see Group.all_gather_later.
Rows = Callable[[], tuple[list[int], torch.Tensor]]


class Departed(Exception):
    """This worker leaves, and the job goes on."""


class StepBarrier:
    """Brings all workers to the same step when there is something to decide.

    In lockstep, workers meet about once a second, at steps that each computes from the same sums.
    A group that gathers in the background makes nobody wait: the decision is taken one step later.
    (The answer shares a connection with a step's weights, and may come as late as they do.)
    Workers with leased shares meet at the end of a round of shares. A worker that wants a decision
    ends the round early.

    With --local-steps, workers in lockstep meet where they exchange what a round came to, since
    they wait for each other there anyway. Within a round one worker's slow step may be made up by
    a fast one later. Decisions are taken at that meeting, one step later too, except for SIGTERM,
    after which a scheduler may leave 30 s. So in a long round workers look every LOOK_EVERY_S
    whether one is to leave: each says so in the background, and reads what all said at the look
    before, for which nobody has to wait. They also meet after their first step, to learn how long
    steps take.

    Args:
        group: the workers.
        steps: of the whole job, or None where time decides.
        elapsed: seconds of training before this process began, at the last snapshot.
        may_depart: SIGTERM lets this worker leave alone, because it has joined.

    Attributes:
        gathered: the step of the last barrier, and `more` of each worker as `after` was given it,
            [workers, more].
    """

    def __init__(
        self,
        config: RunConfig,
        group: Group,
        steps: int | None,
        elapsed: float,
        may_depart: bool = False,
    ) -> None:
        self.group = group
        self.steps = steps
        self.time_budget = config.time_budget
        self.snapshot_s = config.snapshot_s
        self.saved_at = elapsed
        self.may_depart = may_depart
        self.gathered: tuple[int, torch.Tensor] | None = None
        self.next_step = 0  # of the next barrier, in lockstep
        self.under_way: Rows | None = None  # of the last barrier, not yet there
        # The steps between two exchanges of what they came to.
        self.period = max(1, config.local_steps // config.fragments)
        self.look_every = self.period  # steps: see LOOK_EVERY_S
        # The last look within a round: its step, and rows.
        self.looked: tuple[int, Rows] | None = None
        # Whether this worker has ended the round of leased shares early.
        self.paused = False

    def after(
        self, step: int, elapsed: float, is_last: bool, more: Sequence[float] = ()
    ) -> Decision:
        """Returns what workers in lockstep do after this step.

        Args:
            elapsed: seconds of training up to here.
            is_last: whether the step is the last of an epoch.
            more: what all workers are told of this one: see `gathered`.

        Raises:
            Departed: this worker leaves, and the others go on.
        """
        self._depart_if_asked()
        at_end = self.steps is not None and step >= self.steps
        # Alone, a worker decides at each step, for next to nothing.
        if self.group.workers == 1 and not self.group.in_background:
            return self._decide_at(step, [[elapsed, *self._wants(elapsed)]], at_end)
        if self.under_way:
            gathered = self.under_way
            self.under_way = None
            decision = self._together(step - 1, gathered, at_end)
            if decision:
                return decision
        # At the end of an epoch or of training all meet anyway.
        is_end = is_last or at_end
        decision = self._look_within_round(step, elapsed, is_end, at_end)
        if decision:
            return decision
        if not at_end and step < self.next_step:
            return GO_ON
        if self.group.in_background and not is_end:
            decided_at = elapsed + elapsed / step  # one step later
            wants = self._wants(decided_at)
            self.under_way = self.group.all_gather_later([elapsed, *wants, *more])
            return GO_ON
        wants = self._wants(elapsed)
        return self._together(step, self.group.all_gather_later([elapsed, *wants, *more]), at_end)

    def _is_exchange(self, step: int) -> bool:
        """Returns whether workers exchange something after this step: always, without
        --local-steps.
        """
        return step % self.period == 0

    def _look_within_round(self, step: int, elapsed: float, is_end: bool, at_end: bool) -> Decision:
        """Tells the others if this worker is to leave; returns what the look before decided."""
        if not is_end and step % self.period % self.look_every:
            return GO_ON
        if self.looked:
            looked_at, gathered = self.looked
            self.looked = None
            _, rows = gathered()
            self._plan_looks(rows[:, 0].mean().item() / looked_at)
            if rows[:, 1].any():
                return Decision(over=at_end, terminated=True)
        if self.group.in_background and not is_end and not self._is_exchange(step):
            _, leaves, _ = self._wants(elapsed)
            self.looked = step, self.group.all_gather_later([elapsed, leaves])
        return GO_ON

    def _plan_looks(self, step_s: float) -> None:
        self.look_every = max(1, int(LOOK_EVERY_S / step_s))

    def ends_round(self, elapsed: float) -> bool:
        """Returns whether this worker ends the round of leased shares early, for a decision.

        Called after each step. It is true once a round.

        Raises:
            Departed: this worker leaves, and the others go on.
        """
        self._depart_if_asked()
        if self.paused or not any(self._wants(elapsed)):
            return False
        self.paused = True
        return True

    def after_round(self, step: int, elapsed: float) -> Decision:
        """Returns what to do after a round of leased shares, with the last step of the round."""
        self.paused = False
        _, rows = self.group.all_gather([elapsed, *self._wants(elapsed)])
        return self._decide(rows.tolist(), self.steps is not None and step >= self.steps)

    def _depart_if_asked(self) -> None:
        if self.may_depart and termination_requested() and not all_are_to_leave():
            raise Departed

    def _together(self, step: int, gathered: Rows, at_end: bool) -> Decision:
        """Returns the decision of what was gathered after this step, and plans the next barrier."""
        _, rows = gathered()
        self.gathered = step, rows[:, 4:]
        mean = rows[:, 0].mean().item()
        step_s = mean / step
        wait = LOCKSTEP_EVERY_S
        # Half of the time that is left: few barriers, and only the last step or round overruns.
        if self.time_budget:
            wait = min(wait, (self.time_budget - mean) / 2)
        soonest = step + max(1, int(wait / step_s))
        exchanges_before = -(-soonest // self.period)
        self.next_step = exchanges_before * self.period
        self._plan_looks(step_s)
        return self._decide_at(step, rows[:, :4].tolist(), at_end)

    def _wants(self, elapsed: float) -> tuple[bool, bool, bool]:
        """Returns whether this worker wants to end training, to leave, and to save a snapshot."""
        over = bool(self.time_budget) and elapsed >= self.time_budget
        is_due = bool(self.snapshot_s) and elapsed - self.saved_at >= self.snapshot_s
        snapshot = is_due and self.group.leads
        leaves = all_are_to_leave() if self.may_depart else termination_requested()
        return over, leaves, snapshot

    def _decide_at(self, step: int, rows: Sequence[Sequence[float]], at_end: bool) -> Decision:
        """Returns the decision in lockstep: within a round only SIGTERM and the last step count."""
        if self._is_exchange(step):
            return self._decide(rows, at_end)
        return Decision(over=at_end, terminated=any(leaves for _, _, leaves, _ in rows))

    def _decide(self, rows: Sequence[Sequence[float]], at_end: bool) -> Decision:
        """Returns what any worker wants, from rows of seconds elapsed and _wants."""
        elapsed, over, leaves, snapshot = zip(*rows, strict=True)
        if any(snapshot):
            self.saved_at = max(elapsed)
        return Decision(any(over) or at_end, any(leaves), any(snapshot))
