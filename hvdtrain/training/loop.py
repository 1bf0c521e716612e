"""The training loop, the same in every mode but for leased shares: gradients go through the synchroniser."""

import time
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from hvdtrain.coordination.job import Job
from hvdtrain.coordination.synchroniser import RingBroken, Synchroniser
from hvdtrain.data.loader import Batches
from hvdtrain.data.sampling import BatchSampler
from hvdtrain.numerics.clock import Timer
from hvdtrain.numerics.slowdown import Slowdown
from hvdtrain.runs.folder import hold
from hvdtrain.runs.metrics import Recorder
from hvdtrain.system import trace
from hvdtrain.system.preempt import Terminated, immediate_sigterm
from hvdtrain.training.barrier import GO_ON, Decision, StepBarrier
from hvdtrain.training.cost import ProcessorTime
from hvdtrain.training.evaluation import average_buffers, evaluate, statistics
from hvdtrain.training.feed import AHEAD, feed
from hvdtrain.training.history import History, is_over
from hvdtrain.training.progress import TrainingProgress
from hvdtrain.training.saver import Saver
from hvdtrain.training.shares import LeasedShares, Shares, make_shares
from hvdtrain.training.sprint import Sprint
from hvdtrain.training.step import Stepper, digest


@dataclass(frozen=True)
class Training:
    """All that one worker trains with, and what it has come to.

    Attributes:
        model: the model itself; `module` is what the mode wants called in its place.
        progress: shows steps and evaluations to a person.
        history: what there was before, where this is not the beginning; it is continued.
        age_s: of one that joins a running job, for how long the others have trained since they were last together.
    """

    job: Job
    model: nn.Module
    module: nn.Module
    sync: Synchroniser
    recorder: Recorder
    progress: TrainingProgress
    saver: Saver
    history: History
    slowdown: Slowdown
    age_s: float = 0.0


def train(training: Training, loader: Batches, validation: Batches) -> list[float]:
    """Train until epochs, steps or time are over, or the target is reached; evaluate after every epoch and at the end,
    but in a sprint.

    Returns:
        processor seconds: see ProcessorTime.

    Raises:
        Terminated: after SIGTERM, when a snapshot has been saved, or could not be.
        Departed: after SIGTERM to this worker, which has joined: the others go on.
    """
    sync, history, config, world = training.sync, training.history, training.job.config, training.job.world
    place = world.worker, world.workers, config.shuffle_block
    sampler = BatchSampler(len(loader.samples), config.batch_size, config.seed, *place)
    steps = training.job.steps
    shares = make_shares(config, sampler, sync, steps, loader.ahead + AHEAD)
    has_joined, age = world.joined is not None, training.age_s
    barrier = StepBarrier(config, sync, steps, history.wall_s, may_depart=has_joined)
    stepper = _stepper(training, sampler, loader.sample, steps)
    if not has_joined:
        sync.group.barrier()  # the clock starts when every worker is ready
    processor = ProcessorTime(sync)
    sprint = Sprint(config.sprint, barrier, training.recorder) if config.sprint else None
    decision = Decision(over=is_over(config, sampler.samples, history.step, history.wall_s, history.evaluations))
    if decision.over and (not history.last or history.last["step"] < history.step):
        _evaluate(training, validation, -(-history.step // sampler.steps_per_epoch), shares.trained(history))
    while not decision.over:
        epoch = history.step // sampler.steps_per_epoch + 1
        if sync.group.leads and isinstance(shares, LeasedShares):
            shares.open(partial(_state, training, sampler))
        timer, age = Timer(history.wall_s + age), 0.0
        decision = _take_round(training, loader, shares, barrier, stepper, timer)
        with processor.paused():  # what follows is not training: the clock stands still until all workers are through
            if sprint:
                decision = sprint.after_round(history, decision, epoch)
            else:
                decision = _after_round(training, validation, shares, decision, epoch)
        if sprint and history.step == history.warm_steps:
            processor = ProcessorTime(sync)
    return processor.seconds()


def _take_round(
    training: Training, loader: Batches, shares: Shares, barrier: StepBarrier, stepper: Stepper, timer: Timer
) -> Decision:
    """Train until the epoch is over, or all workers do something else; that is what they have decided."""
    sync, history, clock, decision = training.sync, training.history, stepper.clock, None
    clock.start()
    if ring := sync.let_join(partial(_state, training, shares.sampler)):
        barrier.next_step = 0  # who has joined knows of no step at which the others come together
    while decision is None:
        if ring:
            place, workers = ring
            shares.recut(place, workers)
            training.progress.workers = workers
            clock.mark("comm")
        try:
            decision = _take_steps(training, loader, shares, barrier, stepper, timer)
        except RingBroken:
            training.model.zero_grad(set_to_none=True)
            ring = sync.regroup()
    decision = shares.after_round(barrier, history, decision, timer.seconds())
    clock.mark(shares.last_part)
    if decision or not training.job.config.sprint:  # a sprint evaluates nothing
        sync.refresh()
    clock.mark("refresh")
    spent, elapsed = clock.lap(), timer.seconds()
    _, rows = sync.group.all_gather([elapsed])  # those before the last worker wait for it
    history.wall_s = rows.max().item()
    training.recorder.spend(spent | {"barrier": spent["barrier"] + history.wall_s - elapsed})
    return decision


def _take_steps(
    training: Training, loader: Batches, shares: Shares, barrier: StepBarrier, stepper: Stepper, timer: Timer
) -> Decision:
    """Take the steps of a round that are left."""
    sync, history, clock, decision = training.sync, training.history, stepper.clock, GO_ON
    asked = time.perf_counter()
    batches = loader.batches(shares.after(history.step), look_ahead=not shares.leased)
    for share, (images, labels) in feed(batches, training.job.device, shares.leased):
        trace.at_step(share.step)
        if sync.skip_if_overtaken(share.step):
            clock.mark("data")
        else:
            sync.digest = digest(share)
            row, seconds = stepper.take(share, images, labels, timer.seconds(), shares.waited_s(asked))
            shares.took(row["samples"], seconds["forward"] + seconds["backward"])
            row["time"] = round(timer.seconds(), 6)
            training.recorder.step(row, seconds, sync.digest, sync.push_status)
            training.progress.step(row)
            clock.mark("metrics")
        history.step = share.step
        decision = shares.after_step(barrier, share.step, timer.seconds())
        clock.mark("barrier")
        if decision:
            break
        asked = time.perf_counter()
    return decision


def _after_round(training: Training, validation: Batches, shares: Shares, decision: Decision, epoch: int) -> Decision:
    """Evaluate where the epoch or training is over, and save what is to be saved; the decision, or that it is over."""
    config, history = training.job.config, training.history
    if not decision.over and history.step % shares.sampler.steps_per_epoch:  # amid an epoch
        average_buffers(training.model, training.sync.group)
        with trace.spanning("snapshot"):
            training.recorder.reach(history.step, epoch)
            _save(training, decision)
        return decision
    with trace.spanning("evaluation"):
        reached = _evaluate(training, validation, epoch, shares.trained(history))
    if config.stop_at_target and reached:
        decision = Decision(over=True)
    if decision.terminated or decision.snapshot or config.snapshot_every == "epoch":
        with trace.spanning("snapshot"):
            _save(training, decision)
    return decision


def _state(training: Training, sampler: BatchSampler) -> dict[str, Any]:
    """What the workers have come to, for one that joins them before they are together again."""
    return {
        "history": asdict(training.history), "samples": sampler.samples, "batch_size": sampler.batch_size,
        "buffers": [buffer.cpu() for buffer in statistics(training.model)],
    }  # fmt: skip


def _stepper(training: Training, sampler: BatchSampler, sample: torch.Tensor, steps: int | None) -> Stepper:
    """What takes the steps, ready to: compiled, if that is asked for.

    Args:
        sample: one, as batches have it.
        steps: how many there will be, or None where nobody knows.
    """
    stepper = Stepper(training.job, training.model, training.sync, training.module, steps, training.slowdown)
    training.model.train()
    if training.job.config.compile:
        began = time.perf_counter()
        with immediate_sigterm():
            stepper.compile({len(share.indices) for share in sampler.epoch(1)}, sample)
        training.progress.print(f"compiled the model in {time.perf_counter() - began:.0f} s")
    return stepper


def _evaluate(training: Training, validation: Batches, epoch: int, trained: int | None) -> bool:
    """Evaluate, write it down, and save the model if it is the best so far; whether the target accuracy is reached.

    All workers call it together; none of it is training time.

    Args:
        trained: samples since the last evaluation, also by workers that were lost meanwhile. Where nobody knows, those
            count that the workers that are there have trained on: none, where all of these have come back since.
    """
    job, recorder, history = training.job, training.recorder, training.history
    recorder.reach(history.step, epoch)
    tally = recorder.tally
    own = torch.tensor([tally.samples, tally.loss, tally.correct], dtype=torch.float64)
    samples, loss, correct = training.sync.group.sum(own).tolist()
    recorder.counted()
    history.samples += int(samples) if trained is None else trained
    val_loss, val_accuracy, recorder.answers = evaluate(job, training.model, training.sync.group, validation)
    before = history.best
    row = {
        "step": history.step, "epoch": epoch, "samples": history.samples, "train_s": history.wall_s,
        "train_loss": loss / samples if samples else None, "train_accuracy": correct / samples if samples else None,
        "val_loss": val_loss, "val_accuracy": val_accuracy,
    }  # fmt: skip
    history.evaluations.append(row)
    if before is None or val_loss < before["val_loss"]:
        training.sync.group.retry_if_first_lost(training.saver.best)
    if training.sync.group.leads:
        recorder.lead()
        training.progress.lead()
        hold(job.folder)
    recorder.evaluation(history.step, val_loss, val_accuracy, history.samples / history.wall_s)
    training.progress.evaluation(row)
    training.sync.group.barrier()  # nobody trains, and waits, while the worker that leads writes
    return val_accuracy >= job.config.target_accuracy


def _save(training: Training, decision: Decision) -> None:
    """Save a snapshot of the model, which all workers have as one; they wait until it is there."""
    began, history = time.perf_counter(), training.history
    training.sync.group.retry_if_first_lost(partial(training.saver.snapshot, history))
    training.sync.group.barrier()
    history.snapshots += 1
    history.snapshot_s += time.perf_counter() - began
    if decision.terminated:
        raise Terminated
