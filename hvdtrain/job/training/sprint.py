"""Sprints: short runs that measure the speed of steady steps, and nothing else."""

from hvdtrain.base.system.preempt import Terminated
from hvdtrain.job.recording.metrics import Recorder
from hvdtrain.job.training.barrier import GO_ON, Decision, StepBarrier
from hvdtrain.job.training.history import History
from hvdtrain.runs.live import WARM_UP, WARM_UP_S, warm_up_s

# The least number of steps that a sprint measures, however long they take. One or two would say
# nothing of how fast steps are.
LEAST_STEPS = 5


class Sprint:
    """Decides after each round whether the warm-up or the sprint is over, the same on all workers.

    Args:
        seconds: how long the sprint lasts after its warm-up.
        barrier: ends a round when its time budget is spent.
        recorder: forgets what it has counted when the warm-up ends.
    """

    def __init__(self, seconds: float, barrier: StepBarrier, recorder: Recorder) -> None:
        self.seconds = seconds
        self.barrier = barrier
        self.recorder = recorder
        barrier.time_budget = warm_up_s(seconds)

    def after_round(self, history: History, decision: Decision, epoch: int) -> Decision:
        """Returns what to do after a round.

        Args:
            history: the results of training, whose step is the last one of the round.
            decision: the decision that ended the round.
            epoch: the epoch.

        Raises:
            Terminated: a worker was sent SIGTERM.
        """
        self.recorder.reach(history.step, epoch)
        if decision.terminated:
            raise Terminated
        if not decision.over:
            return decision
        if history.warm_steps:
            return self._after_measuring(history, decision)
        if history.step < WARM_UP:
            self.barrier.time_budget = history.wall_s + WARM_UP_S
            return GO_ON
        history.warm_steps = history.step
        history.warm_s = history.wall_s
        self.barrier.time_budget = history.wall_s + self.seconds
        self.recorder.begin_again()
        return GO_ON

    def _after_measuring(self, history: History, decision: Decision) -> Decision:
        if history.step - history.warm_steps >= LEAST_STEPS:
            return decision
        self.barrier.time_budget = history.wall_s + self.seconds
        return GO_ON
