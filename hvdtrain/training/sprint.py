"""A sprint: a short run that measures how fast steady steps are, and nothing else."""

from hvdtrain.runs.live import WARM_UP, WARM_UP_S, warm_up_s
from hvdtrain.runs.metrics import Recorder
from hvdtrain.system.preempt import Terminated
from hvdtrain.training.barrier import GO_ON, Decision, StepBarrier
from hvdtrain.training.history import History


class Sprint:
    """Decides after each round where the warm-up ends and when the sprint is over. All workers decide alike.

    Args:
        seconds: how long it lasts after its warm-up.
        barrier: ends a round when the time that it is given is up.
        recorder: forgets what it has counted when the warm-up ends.
    """

    def __init__(self, seconds: float, barrier: StepBarrier, recorder: Recorder) -> None:
        self.seconds, self.barrier, self.recorder = seconds, barrier, recorder
        barrier.time_budget = warm_up_s(seconds)

    def after_round(self, history: History, decision: Decision, epoch: int) -> Decision:
        """What to do after the round that has come to the history's step.

        Raises:
            Terminated: a worker was sent SIGTERM.
        """
        self.recorder.reach(history.step, epoch)
        if decision.terminated:
            raise Terminated
        if not decision.over or history.warm_steps:
            return decision
        if history.step < WARM_UP:
            self.barrier.time_budget = history.wall_s + WARM_UP_S
            return GO_ON
        history.warm_steps, history.warm_s = history.step, history.wall_s
        self.barrier.time_budget = history.wall_s + self.seconds
        self.recorder.begin_again()
        return GO_ON
