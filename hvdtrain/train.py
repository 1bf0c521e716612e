"""The training loop. It reads the same in every mode; what differs is behind `sync`."""

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from hvdtrain.clock import Clock, Timer
from hvdtrain.config import RunConfig
from hvdtrain.data.loader import Loader
from hvdtrain.data.sampling import Plan, Share, part
from hvdtrain.evaluation import average_buffers, evaluate
from hvdtrain.feed import Normalise, feed
from hvdtrain.flat import trained
from hvdtrain.history import History, is_over
from hvdtrain.job import Job
from hvdtrain.meetings import Decision, Meetings
from hvdtrain.metrics import Recorder
from hvdtrain.modes import Sync
from hvdtrain.optim import lr_at
from hvdtrain.precision import LossScale, autocast
from hvdtrain.preempt import Terminated, sigterm_ends
from hvdtrain.progress import TrainingProgress
from hvdtrain.saver import Saver


@dataclass(frozen=True)
class Training:
    """All that one worker trains with, and what it has come to.

    Attributes:
        model: the model itself; `module` is what the mode wants called in its place.
        progress: told of every step and evaluation, to show them to a person.
        history: what there was before, where this is not the beginning; it is continued.
    """

    job: Job
    model: nn.Module
    module: nn.Module
    sync: Sync
    recorder: Recorder
    progress: TrainingProgress
    saver: Saver
    history: History


def train(training: Training, loader: Loader, validation: Loader) -> None:
    """Train until the epochs, steps or time are over; evaluate after every epoch and at the end.

    Raises:
        Terminated: after SIGTERM, when a snapshot has been saved.
    """
    job, sync, history = training.job, training.sync, training.history
    config, world = job.config, job.world
    plan = Plan(len(loader.samples), config.batch_size, config.seed, world.worker, world.workers)
    steps = config.total_steps(plan.samples)
    meetings = Meetings(config, sync, world, steps, history.wall_s)
    stepper = Stepper(job, training.model, sync, training.module, steps)
    stepper.loss_scale.restore(history.loss_scale)
    training.model.train()
    if config.compile:
        began = time.perf_counter()
        with sigterm_ends():
            stepper.compile({len(share.indices) for share in plan.epoch(1)}, loader.side)
        training.progress.say(f"compiled the model in {time.perf_counter() - began:.0f} s")
    # A warm start for nobody: the clock starts when every worker is ready.
    sync.sum(torch.zeros(1))
    timer = Timer(history.wall_s)
    decision = Decision(over=is_over(config, plan.samples, history.step, history.wall_s, history.evaluations))
    if decision.over and not history.is_evaluated():
        with timer.paused():
            epoch = -(-history.step // plan.steps_per_epoch)
            _evaluate(training, validation, epoch)
    while not decision.over:
        epoch = history.step // plan.steps_per_epoch + 1
        shares = plan.epoch(epoch)
        for share, batch in feed(loader.batches(shares[history.step % plan.steps_per_epoch :]), job.device):
            row, seconds = stepper.take(share, *batch)
            elapsed = timer.seconds()
            training.recorder.step(row | {"time": round(elapsed, 6)}, seconds, digest(share), sync.pushed)
            training.progress.step(row)
            history.step = share.step
            decision = meetings.after(share.step, elapsed, is_last=share is shares[-1])
            if decision.over:
                break
            if (decision.snapshot or decision.terminated) and share is not shares[-1]:
                history.wall_s = timer.seconds()
                with timer.paused():
                    sync.refresh()
                    average_buffers(training.model, sync)
                    _save(training, stepper.loss_scale, decision)
            stepper.clock.start()  # what was not training is nobody's wait for data
        sync.refresh()
        history.wall_s = timer.seconds()
        with timer.paused():
            reached = _evaluate(training, validation, epoch)
            if config.stop_at_target and reached:
                decision = Decision(over=True)
            if decision.terminated or decision.snapshot or config.snapshot_every == "epoch":
                _save(training, stepper.loss_scale, decision)
        stepper.clock.start()


def _evaluate(training: Training, validation: Loader, epoch: int) -> bool:
    """Evaluate, and write it down; whether the target accuracy is reached."""
    job, sync, recorder, history = training.job, training.sync, training.recorder, training.history
    recorder.flush()
    tally = recorder.tally
    samples, loss, correct = sync.sum(
        torch.tensor([tally.samples, tally.loss, tally.correct], dtype=torch.float64)
    ).tolist()
    recorder.counted()
    history.samples += int(samples)  # of a worker that was lost meanwhile, up to here
    val_loss, val_accuracy = evaluate(job, training.model, sync, validation)
    before = history.best
    row = {
        "step": history.step, "epoch": epoch, "samples": history.samples, "train_s": history.wall_s,
        "train_loss": loss / samples, "train_accuracy": correct / samples,
        "val_loss": val_loss, "val_accuracy": val_accuracy,
    }  # fmt: skip
    history.evaluations.append(row)
    if before is None or val_loss < before["val_loss"]:
        training.saver.best()
    recorder.evaluation(history.step, val_loss, val_accuracy, history.samples / history.wall_s)
    training.progress.evaluation(row)
    return val_accuracy >= job.config.target_accuracy


def _save(training: Training, loss_scale: LossScale, decision: Decision) -> None:
    """Save a snapshot of the model, which all workers have as one; they wait until it is there."""
    began, history = time.perf_counter(), training.history
    training.recorder.flush()
    history.loss_scale = loss_scale.state()
    training.saver.snapshot(history)
    training.sync.sum(torch.zeros(1))
    history.snapshots += 1
    history.snapshot_s += time.perf_counter() - began
    if decision.terminated:
        raise Terminated


class Stepper:
    """Takes one step after the other: forward, backward, and what the mode does with the gradients.

    Args:
        steps: how many there will be, for the learning rate, or None where nobody knows.
    """

    def __init__(self, job: Job, model: nn.Module, sync: Sync, module: nn.Module, steps: int | None) -> None:
        self.config, self.device, self.steps = job.config, job.device, steps
        self.model, self.sync, self.module = model, sync, module
        self.worker, self.alone = job.world.worker, job.world.size == 1
        self.normalise = Normalise(job.config, job.device)
        self.loss_scale = LossScale(job.config.precision, trained(model), job.device)
        self.clock = Clock(model, job.device)
        self.clock.start()

    def compile(self, sizes: Collection[int], side: int) -> None:
        """Go forward and backward once, for nothing, with each number of images that a step can have: torch compiles
        for shapes when they first come.
        """
        before = [buffer.clone() for buffer in self.model.buffers()]
        times = self.config.accumulate
        counts = {max(1, len(part(size, number, times))) for size in sizes for number in range(times)}
        self.sync.more_to_come(True)
        for count in sorted(counts):
            inputs = self.normalise(torch.zeros(count, 3, side, side, dtype=torch.uint8, device=self.device))
            with autocast(self.config.precision, self.device):
                scores = self.module(inputs)
            torch.autograd.grad(scores.float().sum(), trained(self.model))  # not backward(), which modes listen to
        for buffer, values in zip(self.model.buffers(), before, strict=True):
            buffer.copy_(values)

    def take(self, share: Share, images: torch.Tensor, labels: torch.Tensor) -> tuple[dict[str, Any], dict[str, float]]:
        """One step; what there is to say about it, and the seconds of each of PHASES."""
        clock, sync = self.clock, self.sync
        inputs = self.normalise(images)
        clock.mark("data")
        sync.begin(share.step, lr_at(self.config, share.step, share.epoch, self.steps))
        loss, correct = backward(
            self.config, self.worker, self.module, share, inputs, labels, self.loss_scale.scaled, sync.more_to_come,
            clock,
        )  # fmt: skip
        sync.wait()
        clock.mark("comm")
        sync.update(self.loss_scale)
        more = {"left_out": not self.loss_scale.acted} if self.loss_scale.enabled else {}
        self.model.zero_grad(set_to_none=True)
        clock.mark("optimizer")
        seconds = clock.lap()
        seconds |= {"forward": seconds["forward"] - sync.waited_s, "comm": seconds["comm"] + sync.waited_s}
        if self.alone:  # what comes after the last gradient is no wait for others
            seconds |= {"backward": seconds["backward"] + seconds["comm"], "comm": 0.0}
        row = {
            "step": share.step, "epoch": share.epoch, "samples": share.counted,
            "loss": loss.item() if share.counted else None,
            "accuracy": correct.item() / len(labels) if share.counted else None, **more,
        }  # fmt: skip
        return row, seconds


def backward(
    config: RunConfig, worker: int, module: nn.Module, share: Share, inputs: torch.Tensor, labels: torch.Tensor,
    scaled: Callable[[torch.Tensor], torch.Tensor], more_to_come: Callable[[bool], None], clock: Clock | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Forward and backward of a worker's share: the mean loss, and the number of correct answers.

    Gradients are those of the weighted loss of the share, in --accumulate passes.

    Args:
        scaled: the loss to call backward on.
        more_to_come: told before each pass whether another follows.
    """
    if config.dropout:
        torch.manual_seed(random_seed(config, worker, share.step))
    loss, correct = torch.zeros((), device=inputs.device), torch.zeros((), device=inputs.device)
    for number in range(config.accumulate):
        own = part(len(labels), number, config.accumulate)
        taken = slice(own.start, own.stop) if own else slice(1)  # of a short last batch: for nothing, but it is taken
        more_to_come(number < config.accumulate - 1)
        with autocast(config.precision, inputs.device):
            scores = module(inputs[taken])
        mean = F.cross_entropy(scores.float(), labels[taken])
        if clock:
            clock.mark("forward")
        counts = len(own) / len(labels)
        scaled(mean * (share.weight * counts)).backward()
        if clock:
            clock.mark_last_gradient("backward")
        loss += counts * mean.detach()
        if own:
            correct += (scores.argmax(1) == labels[taken]).sum()
    return loss, correct


def random_seed(config: RunConfig, worker: int, step: int) -> int:
    """The seed of a worker's random numbers at a step, 64 bits. They depend on nothing else: dropout differs between
    workers, and is the same after a restart.
    """
    words = np.random.SeedSequence([config.seed, worker, step]).generate_state(2, np.uint32).tolist()
    return words[0] << 32 | words[1]


def digest(share: Share) -> int:
    """A number for which samples were seen at which step, that adds up over the parts of a batch."""
    x = np.array(share.indices[: share.counted], dtype=np.uint64) + np.uint64(share.step << 32)
    # The finaliser of splitmix64 (Steele, Lea & Flood, 2014, doi:10.1145/2660193.2660195). A product alone would be
    # linear: sums would stay the same when samples change places.
    x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return int(((x ^ x >> np.uint64(31)) >> np.uint64(16)).sum()) % 2**48
