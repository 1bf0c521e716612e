"""The training loop, which is the same in every mode.

Gradients go through the synchroniser. What differs with leased shares is in `training.shares`.
"""

import time
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from hvdtrain.base.numerics.clock import Timer
from hvdtrain.base.numerics.slowdown import Slowdown
from hvdtrain.base.system import trace
from hvdtrain.base.system.preempt import Terminated, immediate_sigterm
from hvdtrain.data.loader import Batches
from hvdtrain.data.sampling import BatchSampler
from hvdtrain.job.coordination.job import Job
from hvdtrain.job.coordination.synchroniser import RingBroken, Synchroniser
from hvdtrain.job.recording.metrics import Recorder
from hvdtrain.job.training.barrier import GO_ON, Decision, StepBarrier
from hvdtrain.job.training.cost import ProcessorTime
from hvdtrain.job.training.evaluation import average_buffers, evaluate, statistics
from hvdtrain.job.training.feed import AHEAD, feed
from hvdtrain.job.training.history import History, is_over
from hvdtrain.job.training.progress import TrainingProgress
from hvdtrain.job.training.saver import Saver
from hvdtrain.job.training.shares import LeasedShares, Shares, make_shares
from hvdtrain.job.training.sprint import Sprint
from hvdtrain.job.training.step import Stepper, digest
from hvdtrain.runs.folder import hold


@dataclass(frozen=True)
class Training:
    """All that one worker trains with, and its results so far.

    Attributes:
        job: the job.
        model: the model.
        module: what forward is called on: the model, or what the mode has wrapped around it.
        sync: connects this worker to the others.
        recorder: writes the metrics.
        progress: shows steps and evaluations to a person.
        saver: saves snapshots and the best model.
        history: the results of training so far, which training continues.
        slowdown: makes this worker slower, if `--slow` asks for it.
        age_s: for how many seconds the others had trained since their last meeting when this worker
            joined them.
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
    """Trains until epochs, steps or time are over, or the target accuracy is reached.

    All workers evaluate after every epoch and at the end. A sprint has no evaluations.

    Args:
        training: all that this worker trains with.
        loader: the training images.
        validation: the validation images.

    Returns:
        Processor seconds: see ProcessorTime.

    Raises:
        Terminated: a worker was sent SIGTERM. A snapshot has been saved, or could not be.
        Departed: this worker has joined a running job, and was sent SIGTERM. The others go on.
    """
    sync = training.sync
    history = training.history
    config = training.job.config
    world = training.job.world
    sampler = _sampler(training, len(loader.samples))
    steps = training.job.steps
    shares = make_shares(config, sampler, sync, steps, history.step, loader.ahead + AHEAD)
    has_joined = world.joined is not None
    barrier = StepBarrier(config, sync.group, steps, history.wall_s, may_depart=has_joined)
    stepper = _stepper(training, sampler, loader.sample, steps)
    if not has_joined:
        sync.group.barrier()  # the clock starts when every worker is ready
    processor = ProcessorTime(sync)
    sprint = Sprint(config.sprint, barrier, training.recorder) if config.sprint else None
    over = is_over(config, sampler.samples, history.step, history.wall_s, history.evaluations)
    decision = Decision(over=over)
    is_evaluated = history.last is not None and history.last["step"] >= history.step
    if over and not is_evaluated:
        epoch = -(-history.step // sampler.steps_per_epoch)
        _evaluate(training, validation, epoch, shares.trained(history))
    age_s = training.age_s
    while not decision.over:
        epoch = history.step // sampler.steps_per_epoch + 1
        if sync.group.leads and isinstance(shares, LeasedShares):
            shares.open(partial(_state, training))
        timer = Timer(history.wall_s + age_s)
        age_s = 0.0  # after its first round, a worker that has joined has the others' time
        decision = _take_round(training, loader, shares, barrier, stepper, timer)
        # The rest is not training. The clock stops until all workers have come to its end.
        with processor.paused():
            if sprint:
                decision = sprint.after_round(history, decision, epoch)
            else:
                decision = _after_round(training, validation, shares, decision, epoch)
        if sprint and history.step == history.warm_steps:
            processor = ProcessorTime(sync)
    return processor.seconds()


def _sampler(training: Training, samples: int) -> BatchSampler:
    """Returns the order of training for this worker.

    Args:
        samples: the number of training images.
    """
    config = training.job.config
    world = training.job.world
    sampler = BatchSampler(
        samples, config.batch_size, config.seed, world.worker, world.workers, config.shuffle_block
    )
    if config.sprint:
        # With batches of several lengths a sprint's speed would depend on how many it had of each.
        return sampler.of_whole_batches()
    return sampler


def _take_round(
    training: Training,
    loader: Batches,
    shares: Shares,
    barrier: StepBarrier,
    stepper: Stepper,
    timer: Timer,
) -> Decision:
    """Takes steps until the epoch is over or the workers have something to decide.

    Returns:
        The decision of all workers.
    """
    sync = training.sync
    history = training.history
    clock = stepper.clock
    clock.start()
    ring = sync.let_join(partial(_state, training))
    if ring:
        # A worker that has just joined does not know at which step the others planned to meet.
        barrier.next_step = 0
    decision = None
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
    spent = clock.lap()
    elapsed = timer.before + clock.lapped_s  # so that the parts add up to it
    _, rows = sync.group.all_gather([elapsed])
    history.wall_s = rows.max().item()
    # This worker waits until the last one has come.
    spent["barrier"] += history.wall_s - elapsed
    training.recorder.spend(spent)
    return decision


def _take_steps(
    training: Training,
    loader: Batches,
    shares: Shares,
    barrier: StepBarrier,
    stepper: Stepper,
    timer: Timer,
) -> Decision:
    """Takes the rest of a round's steps.

    Returns:
        The decision of all workers.

    Raises:
        RingBroken: an elastic ring has lost a worker.
    """
    sync = training.sync
    history = training.history
    clock = stepper.clock
    decision = GO_ON
    asked_at = time.perf_counter()
    batches = loader.batches(shares.after(history.step), look_ahead=not shares.leased)
    for share, (images, labels) in feed(batches, training.job.device, shares.leased):
        trace.at_step(share.step)
        if sync.skip_if_overtaken(share.step):
            clock.mark("data")
        else:
            sync.digest = digest(share)
            row, seconds = stepper.take(
                share, images, labels, timer.seconds(), shares.waited_s(asked_at)
            )
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
        asked_at = time.perf_counter()
    return decision


def _after_round(
    training: Training, validation: Batches, shares: Shares, decision: Decision, epoch: int
) -> Decision:
    """Evaluates if the epoch or training is over, and saves a snapshot if it is time for one.

    Returns:
        The decision, or that training is over because the target accuracy is reached.

    Raises:
        Terminated: a worker was sent SIGTERM, and the snapshot has been saved, or could not be.
    """
    config = training.job.config
    history = training.history
    is_within_epoch = history.step % shares.sampler.steps_per_epoch != 0
    if is_within_epoch and not decision.over:
        average_buffers(training.model, training.sync)
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


def _state(training: Training) -> dict[str, Any]:
    """Returns the state of the workers, for a worker that joins before their next meeting."""
    return {
        "history": asdict(training.history),
        "buffers": [buffer.cpu() for buffer in statistics(training.model)],
    }


def _stepper(
    training: Training, sampler: BatchSampler, sample: torch.Tensor, steps: int | None
) -> Stepper:
    """Returns a stepper that is ready to take steps, with the model compiled if --compile is given.

    Args:
        training: all that this worker trains with.
        sampler: the order of training.
        sample: a batch of one sample, [1, …], as the loader makes it.
        steps: the number of steps of the job; None where time decides.
    """
    stepper = Stepper(
        training.job, training.model, training.sync, training.module, steps, training.slowdown
    )
    training.model.train()
    if training.job.config.compile:
        began = time.perf_counter()
        sizes = {len(share.indices) for share in sampler.epoch(1)}
        with immediate_sigterm():
            stepper.compile(sizes, sample)
        training.progress.print(f"compiled the model in {time.perf_counter() - began:.0f} s")
    return stepper


def _evaluate(training: Training, validation: Batches, epoch: int, trained: int | None) -> bool:
    """Evaluates, records the results, and saves the model if it is the best so far.

    All workers call this together. The time is not training time.

    Args:
        training: all that this worker trains with.
        validation: the validation images.
        epoch: the epoch that is recorded.
        trained: how many samples were trained on since the last evaluation, also by workers that
            were lost since. None where nobody knows: then the samples count that the present
            workers have trained on, which are none if all of them have joined since.

    Returns:
        Whether the target accuracy is reached.
    """
    job = training.job
    recorder = training.recorder
    history = training.history
    recorder.reach(history.step, epoch)
    tally = recorder.tally
    own = torch.tensor([tally.samples, tally.loss, tally.correct], dtype=torch.float64)
    samples, loss, correct = training.sync.group.sum(own).tolist()
    recorder.counted()
    history.samples += int(samples) if trained is None else trained
    val_loss, val_accuracy, recorder.answers = evaluate(
        job, training.model, training.sync, validation
    )
    best_before = history.best
    row = {
        "step": history.step,
        "epoch": epoch,
        "samples": history.samples,
        "train_s": history.wall_s,
        "train_loss": loss / samples if samples else None,
        "train_accuracy": correct / samples if samples else None,
        "val_loss": val_loss,
        "val_accuracy": val_accuracy,
    }
    history.evaluations.append(row)
    if best_before is None or val_loss < best_before["val_loss"]:
        training.sync.group.retry_if_first_lost(training.saver.best)
    if training.sync.group.leads:
        recorder.lead()
        training.progress.lead()
        hold(job.folder)
    recorder.evaluation(history.step, val_loss, val_accuracy, history.samples / history.wall_s)
    training.progress.evaluation(row)
    # Nobody trains while the worker that leads writes, and then waits for it within a step.
    training.sync.group.barrier()
    return job.config.reaches_target(val_accuracy, val_loss)


def _save(training: Training, decision: Decision) -> None:
    """Saves a snapshot. All workers call this together, and wait until it is there.

    Raises:
        Terminated: a worker was sent SIGTERM, after which training ends here.
    """
    began = time.perf_counter()
    history = training.history
    training.sync.group.retry_if_first_lost(partial(training.saver.snapshot, history))
    training.sync.group.barrier()
    history.snapshots += 1
    history.snapshot_s += time.perf_counter() - began
    if decision.terminated:
        raise Terminated
