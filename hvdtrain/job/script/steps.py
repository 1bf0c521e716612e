"""What is counted and decided after each step of a script: metrics, the end of a sprint."""

import os
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
from torch import nn

from hvdtrain.base import modes
from hvdtrain.base.errors import Failure
from hvdtrain.base.formatting import with_noun
from hvdtrain.base.numerics.clock import Clock, Lap, Stretch, Timer
from hvdtrain.base.numerics.slowdown import Slowdown
from hvdtrain.base.system import trace
from hvdtrain.job.coordination.job import Job
from hvdtrain.job.coordination.synchroniser import Synchroniser
from hvdtrain.job.recording.metrics import Recorder
from hvdtrain.job.script.gradients import Gradients, InBackward, InRounds
from hvdtrain.job.training.barrier import Decision, StepBarrier
from hvdtrain.job.training.cost import ProcessorTime
from hvdtrain.job.training.history import History
from hvdtrain.job.training.sprint import Sprint
from hvdtrain.job.wire.messages import PushStatus

# Where a worker waits, in messages.
IN_FUNCTION = "in a function of the job that all workers call together, such as job.mean"


class ScriptStopped(BaseException):
    """Ends a script between two steps, when its time or its steps are over, or it has its target.

    It is not an Exception, so `except Exception` in a script does not catch it.
    """


class Place(IntEnum):
    """Where a worker of an asynchronous mode waits for the others.

    Attributes:
        FUNCTION: in a function of the job that all workers call together.
        ROUND: at the end of its round: its time is up, or it has taken its steps.
        END: at the end of its training.
    """

    FUNCTION = 0
    ROUND = 1
    END = 2


@dataclass(frozen=True)
class StepTaken:
    """A step that is not recorded yet.

    Attributes:
        step: its number on this worker.
        samples: how many samples this worker trained on.
        time: seconds of training up to its end.
        lap: the step's time.
        waits, updates: see Clock.divide.
        push: see Recorder.step.
    """

    step: int
    samples: int
    time: float
    lap: Lap
    waits: Sequence[Stretch]
    updates: Sequence[Stretch]
    push: PushStatus | None


class Steps:
    """The steps of a script on one worker.

    Args:
        job: the job as this rank knows it.
        sync: the mode's, prepared.
        gradients: of the script.
        trained: has the parameters that are trained, and the layers that they are of.
        recorder: writes metrics.
        slowdown: what makes this worker slower than it is.
        count_samples: returns how many samples this worker has trained on since it was asked last.

    Attributes:
        taken: how many steps this worker has taken.
        history: what training has come to.
        is_stopped: whether the script was stopped, or ends where the others were.
    """

    def __init__(
        self,
        job: Job,
        sync: Synchroniser,
        gradients: Gradients,
        trained: nn.Module,
        recorder: Recorder,
        slowdown: Slowdown,
        count_samples: Callable[[], int],
    ) -> None:
        self.config = job.config
        self.sync = sync
        self.gradients = gradients
        self.recorder = recorder
        self.slowdown = slowdown
        self.count_samples = count_samples
        self.history = History()
        self.taken = 0
        self.is_over = False
        self.is_stopped = False
        self.in_lockstep = modes.declared(job.config.mode).lockstep
        alone = job.world.size == 1
        self.clock = Clock(trained, job.device, alone, noted=gradients.hooked)
        gradients.on_gradient = self.clock.note_gradient
        self.barrier = StepBarrier(job.config, sync.group, job.steps, 0.0)
        self.sprint = None
        if job.config.sprint:
            self.sprint = Sprint(job.config.sprint, self.barrier, recorder)
        self._has_gone_forward = False
        self._is_between_steps = True
        self._is_synchronized = False
        self._waits_in_forward = False
        self._unrecorded: deque[StepTaken] = deque()
        self._recording = threading.Lock()
        self._process = os.getpid()

    def begin(self) -> None:
        """Starts the clock, when every worker is ready."""
        self.sync.group.barrier()
        self.processor = ProcessorTime(self.sync)
        self.timer = Timer(0.0)
        trace.at_step(1)
        self.clock.start()

    def watch(self, model: nn.Module) -> None:
        """Times the model's forward passes."""
        model.register_forward_pre_hook(self._begin_forward)
        model.register_forward_hook(self._end_forward)

    def _begin_forward(self, module: nn.Module, inputs: Any) -> None:
        if not (module.training and torch.is_grad_enabled()):
            return
        self.clock.mark("backward" if self._has_gone_forward else "data")
        self._waits_in_forward = isinstance(self.gradients, InRounds)
        self.gradients.begin_forward()
        self._waits_in_forward = False

    def _end_forward(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        if not (module.training and torch.is_grad_enabled()):
            return
        self.clock.mark("forward")
        self._has_gone_forward = True
        if self.slowdown.rules:
            self._slow_down()

    def _slow_down(self) -> None:
        """Sleeps as --slow asks for, between forward and backward, and as part of the latter."""
        _, began = self.clock.marks[-2]
        ended = self.clock.marks[-1][1]
        self.clock.watch.wait_for(ended)
        # Backward takes about twice as long as forward.
        computed_s = 3 * self.clock.watch.seconds(began, ended)
        self.slowdown.slow(self.taken + 1, self.timer.seconds(), computed_s)

    @property
    def is_within_step(self) -> bool:
        """Whether this worker waits, or soon will, for what others do in the same step."""
        in_backward = isinstance(self.gradients, InBackward) and self.clock.last_gradient
        return bool(in_backward) or self._waits_in_forward or not self._is_between_steps

    @property
    def begun(self) -> int:
        """How many steps this worker has begun, as far as others wait for its part of them."""
        return self.taken + self.is_within_step

    def synchronize(self) -> None:
        """Brings the gradients together: see Gradients.synchronize."""
        self._mark_backward()
        self.gradients.synchronize()
        self.clock.mark("comm")
        self._is_synchronized = True

    def _mark_backward(self) -> None:
        if not self._is_between_steps:
            return
        self._is_between_steps = False
        if self.clock.last_gradient is None:
            self.clock.mark("backward")
        else:
            self.clock.mark_last_gradient("backward")

    def take(self) -> None:
        """Takes a step of the script's optimizer, and decides with the others what follows.

        Raises:
            ScriptStopped: the time that the script was given is up, or its steps.
        """
        if self.is_over:
            raise Failure("step was called after job.finish(), where training ends")
        self._mark_backward()
        if self._is_synchronized:  # what the script did to the gradients since
            self.clock.mark("optimizer")
        elif self.gradients.updates_here:
            self.synchronize()
        self.gradients.step()
        self.clock.mark("optimizer" if self.gradients.updates_here else "comm")
        # Before the step is counted: another thread asks for `begun`.
        self.clock.last_gradient = None
        self._is_between_steps = True
        self.taken += 1
        self.history.step = self.taken
        self._end_step()
        if self._decide():
            self._end_round(max(self._arrive(Place.ROUND)))

    def _end_step(self) -> None:
        """Notes the step, to be recorded later, and begins the next one."""
        self.clock.wait()  # a GPU's updates are known when they have ended
        step = StepTaken(
            self.taken,
            self.count_samples(),
            self.timer.seconds(),
            self.clock.end_lap(),
            tuple(self.sync.waits),
            self.sync.updates(),
            self.sync.push_status,
        )
        self._unrecorded.append(step)
        # Moments of a GPU are known only while it has not gone on. If writing has failed, this
        # thread raises the error.
        if self.clock.watch.on_gpu or self.recorder.lines.at_once:
            self.record()
        self.clock.mark("metrics")
        trace.at_step(self.taken + 1)
        self._has_gone_forward = False
        self._is_synchronized = False

    def record(self) -> None:
        """Records the steps that are not recorded yet, from any thread.

        Blocks while another thread does so. Many steps at once take less of the processor's time
        than each by itself. A process that was forked from this one records none.
        """
        if os.getpid() != self._process:  # asked before the lock, which may have been forked locked
            return
        with self._recording:
            while self._unrecorded:
                self._record(self._unrecorded.popleft())

    def _record(self, taken: StepTaken) -> None:
        seconds = self.clock.divide(taken.lap, taken.waits, taken.updates)
        row = {
            "step": taken.step,
            "epoch": 1,
            "samples": taken.samples,
            "loss": None,
            "accuracy": None,
            "time": round(taken.time, 6),
            "computing_cpu_seconds": round(taken.lap.computing_cpu_seconds, 6),
        }
        self.recorder.step(row, seconds, 0, taken.push)

    def _decide(self) -> Decision:
        """Returns what follows this step: all workers decide alike, or come to that later."""
        elapsed = self.timer.seconds()
        if self.in_lockstep:
            decision = self.barrier.after(self.history.step, elapsed, is_last=False)
            self.clock.mark("barrier")
            return decision
        budget = self.barrier.time_budget
        steps = self.barrier.steps
        is_time_up = bool(budget) and elapsed >= budget
        return Decision(over=is_time_up or bool(steps and self.taken >= steps))

    def _arrive(self, place: Place) -> set[Place]:
        """Blocks until all workers have arrived, in asynchronous modes.

        There a worker may come to the end of its round while another one is in a function of the
        job. So each says first where it is.

        Returns:
            The places at which workers are; in lockstep the place of this one.

        Raises:
            Failure: a worker has ended, and another one waits for it in a function of the job.
                (In a sprint nothing is raised: all workers end then.)
        """
        if self.in_lockstep:
            return {place}
        self.sync.idle()  # nobody waits for this worker's pushes
        workers, rows = self.sync.group.all_gather([place, self.taken])
        places = [Place(number) for number in rows[:, 0].tolist()]
        if Place.END in places and Place.FUNCTION in places and not self.sprint:
            ended = places.index(Place.END)
            waiting = workers[places.index(Place.FUNCTION)]
            steps = with_noun(int(rows[ended, 1]), "step")
            raise Failure(
                f"worker {workers[ended]} has ended after {steps}, and worker {waiting} waits for "
                f"it {IN_FUNCTION}"
            )
        return set(places)

    def wait_in_function(self) -> None:
        """Blocks until all workers have called a function of the job that they call together.

        If the round of another worker ends meanwhile, it ends here too. In lockstep the function
        itself waits.

        Raises:
            ScriptStopped: it was the last round.
            Failure: another worker has ended.
        """
        if self.in_lockstep:
            return
        self._mark_before_function()
        furthest = max(self._arrive(Place.FUNCTION))
        while furthest is not Place.FUNCTION:
            self._end_round(furthest)
            furthest = max(self._arrive(Place.FUNCTION))

    def _mark_before_function(self) -> None:
        """Marks what the script has done since the last mark, also amid a step."""
        if self.clock.last_gradient is not None:
            self.clock.mark_last_gradient("backward")
            self.clock.last_gradient = None
        self.clock.mark("data")

    def end(self) -> None:
        """Meets the other workers when training ends on this one.

        In asynchronous modes others may be stopped here. Then `is_stopped` is set on this one too.
        """
        if self.is_stopped:
            return
        places = self._arrive(Place.END)
        self.meet()
        self.is_stopped = Place.ROUND in places or Place.FUNCTION in places

    def stop_all(self) -> None:
        """Ends a sprint of an asynchronous mode on all workers.

        Raises:
            ScriptStopped: always.
        """
        self.end()
        self.is_stopped = True
        raise ScriptStopped

    def _end_round(self, furthest: Place) -> None:
        """Meets the other workers when a round ends, and ends the script or goes on.

        Args:
            furthest: where the furthest worker is. If one is at its end, it was the last round.

        Raises:
            ScriptStopped: it was that the script ends here.
        """
        self.meet()
        decision = Decision(over=True)
        if self.sprint and furthest is not Place.END:
            with self.processor.paused():
                decision = self.sprint.after_round(self.history, decision, 1)
        if decision.over:
            self.is_stopped = True
            raise ScriptStopped
        if self.history.step == self.history.warm_steps:
            self.processor = ProcessorTime(self.sync)
        self.timer = Timer(self.history.wall_s)
        self.clock.start()

    def may_stop_at(self, figures: Mapping[str, float]) -> bool:
        """Returns whether training ends if these figures reach the target."""
        config = self.config
        return config.stop_at_target and not config.sprint and config.target_of in figures

    def report(self, figures: Mapping[str, float]) -> None:
        """Takes figures of quality; with --stop-at-target, after so many seconds and samples.

        If training may stop at them, all workers call this together.

        Raises:
            ScriptStopped: the first worker's figure reaches the target.
        """
        self.history.reported.update(figures)
        if not self.may_stop_at(figures):
            return
        config = self.config
        accuracy = figures.get("accuracy")
        loss = figures.get("loss")
        if not self.is_over:
            self._mark_before_function()
            self.meet()
        own = [self.recorder.samples, float(config.reaches_target(accuracy, loss))]
        _, rows = self.sync.group.all_gather(own)
        self.history.reports.append(
            {
                "step": self.history.step,
                "samples": rows[:, 0].sum().item(),
                "train_s": self.history.wall_s,
                "val_loss": loss,
                "val_accuracy": accuracy,
            }
        )
        if self.is_over:  # after job.finish()
            return
        if rows[0, 1]:
            self.is_stopped = True
            raise ScriptStopped
        self.timer = Timer(self.history.wall_s)
        self.clock.start()

    def meet(self) -> None:
        """Waits for the other workers, and takes over how far all are together."""
        self.clock.mark("barrier")
        self.record()
        self.clock.mark("metrics")
        spent = self.clock.lap()
        elapsed = self.timer.before + self.clock.lapped_s  # so that the parts add up to it
        _, rows = self.sync.group.all_gather([elapsed, self.taken])
        self.history.wall_s = rows[:, 0].max().item()
        self.history.step = round(rows[:, 1].mean().item())
        # This worker has waited until the last one came.
        self.recorder.spend(spent | {"barrier": spent["barrier"] + self.history.wall_s - elapsed})
