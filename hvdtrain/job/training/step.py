"""One step of a worker: forward, backward, exchange, update."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from hvdtrain.base.config.run_config import RunConfig
from hvdtrain.base.numerics.clock import Clock, Stretch, move
from hvdtrain.base.numerics.flat import trained
from hvdtrain.base.numerics.optimizers import lr_at
from hvdtrain.base.numerics.precision import autocast
from hvdtrain.base.numerics.slowdown import Slowdown
from hvdtrain.base.numerics.split import DIGESTS, even_range
from hvdtrain.data.sampling import Share
from hvdtrain.job.coordination.job import Job
from hvdtrain.job.coordination.synchroniser import Synchroniser
from hvdtrain.job.training.evaluation import average_buffers
from hvdtrain.job.training.feed import Normalise


class Stepper:
    """Takes steps: forward, backward, the mode's exchange of gradients, and the update.

    Args:
        job: the job.
        model: the model.
        sync: connects this worker to the others.
        module: what forward is called on: the model, or what the mode has wrapped around it.
        steps: the number of steps of the job, for the learning rate; None where time decides.
        slowdown: makes this worker slower, if `--slow` asks for it.
    """

    def __init__(
        self,
        job: Job,
        model: nn.Module,
        sync: Synchroniser,
        module: nn.Module,
        steps: int | None,
        slowdown: Slowdown,
    ) -> None:
        self.config = job.config
        self.device = job.device
        self.model = model
        self.sync = sync
        self.module = module
        self.steps = steps
        self.slowdown = slowdown
        self.normalise = Normalise(job.config, job.device)
        # When this step's forward began; after a sleep of --slow, when its backward began.
        self.began: Any = None
        self.computed_s = 0.0  # seconds of forward and backward since the last sleep
        self.distances_recorded = 0  # how many of Rounds.distances the metrics have
        self.clock = Clock(model, job.device, alone=job.world.size == 1)
        self.clock.start()

    def compile(self, sizes: Collection[int], sample: torch.Tensor) -> None:
        """Compiles the module for each number of images that a pass can have.

        Torch compiles for a shape when it first sees the shape, so this goes forward and backward
        once with each. Weights and batch-norm statistics stay as they are.

        Args:
            sizes: the numbers of images that a share can have.
            sample: a batch of one sample, [1, …], as the loader makes it.
        """
        before = [buffer.clone() for buffer in self.model.buffers()]
        passes = self.config.accumulate
        counts: set[int] = set()
        for size in sizes:
            counts |= {max(1, len(even_range(size, number, passes))) for number in range(passes)}
        once = [1] * (sample.ndim - 1)
        self.sync.set_accumulating(True)
        for count in sorted(counts):
            inputs = self.normalise(sample.repeat(count, *once).to(self.device))
            with autocast(self.config.precision, self.device):
                scores = self.module(inputs)
            # Not backward(), whose hooks send gradients.
            torch.autograd.grad(scores.float().sum(), trained(self.model))
        for buffer, values in zip(self.model.buffers(), before, strict=True):
            buffer.copy_(values)

    def take(
        self,
        share: Share,
        images: torch.Tensor,
        labels: torch.Tensor,
        elapsed_s: float,
        lease_s: float = 0.0,
    ) -> tuple[dict[str, Any], dict[str, float]]:
        """Takes one step.

        Args:
            share: this worker's share of the step's global batch.
            images: [len(share.indices), …], as the loader makes them, on the device.
            labels: [len(share.indices)] int64, on the device.
            elapsed_s: seconds of training so far.
            lease_s: how long this worker waited for the share before images could be read.

        Returns:
            The step's row of metrics, and the seconds of each of PARTS since the last step.
        """
        clock = self.clock
        sync = self.sync
        inputs = self.normalise(images)
        clock.mark("data")
        sync.begin(share.step, lr_at(self.config, share.step, share.epoch, self.steps))
        if self.config.local_steps:  # the outer step, or taking its result
            clock.mark("optimizer")
        waits_before = len(sync.waits)
        self.began = clock.watch.now() if self.slowdown.rules else None
        loss, correct = backward(
            self.config,
            self.module,
            share,
            inputs,
            labels,
            sync.set_accumulating,
            clock,
            lambda: self._slow_down(share.step, elapsed_s, sync.waits[waits_before:]),
        )
        if self.slowdown.rules:
            self.computed_s += self._computed_s(clock.last_gradient)
        sync.wait()
        clock.mark("comm")
        sync.update()
        self.model.zero_grad(set_to_none=True)
        clock.mark("optimizer")
        if sync.ended_round:
            average_buffers(self.model, sync)
            clock.mark("comm")
        clock.wait()  # a GPU's updates are known when they have ended
        updates = sync.updates()
        seconds = move(clock.lap(sync.waits, updates), "data", "lease", lease_s)
        row = {
            "step": share.step,
            "epoch": share.epoch,
            "samples": share.counted,
            "loss": loss.item() if share.counted else None,
            "accuracy": correct.item() / len(labels) if share.counted else None,
            "computing_cpu_seconds": round(clock.computing_cpu_seconds, 6),
        }
        if updates:
            row["hidden_optimizer_seconds"] = round(clock.hidden_s, 6)
        distances = sync.rounds.distances if sync.rounds else ()
        if len(distances) > self.distances_recorded:  # this step has begun with outer weights
            self.distances_recorded = len(distances)
            row["distance"] = distances[-1]
        return row, seconds

    def _slow_down(self, step: int, elapsed_s: float, waits: Sequence[Stretch]) -> None:
        """Sleeps between forward and backward, if --slow asks for it.

        How long depends on the time of this forward and the last backward. The sleep counts as
        backward. It is not after backward: gradients would be on their way by then, and the sleep
        would hide their time.

        Args:
            step: the number of the step.
            elapsed_s: seconds of training so far.
            waits: when this forward waited for weights.
        """
        if not self.slowdown.rules:
            return
        computed_s = self.computed_s + self._computed_s(self.clock.watch.now())
        computed_s -= sum(self.clock.watch.seconds(began, ended) for began, ended in waits)
        self.slowdown.slow(step, elapsed_s, computed_s)
        self.computed_s = 0.0
        self.began = self.clock.watch.now()

    def _computed_s(self, until: Any) -> float:
        """Returns the seconds from `began` until this moment of the stopwatch."""
        self.clock.watch.wait_for(until)
        return self.clock.watch.seconds(self.began, until)


def backward(
    config: RunConfig,
    module: nn.Module,
    share: Share,
    inputs: torch.Tensor,
    labels: torch.Tensor,
    set_accumulating: Callable[[bool], None],
    clock: Clock | None = None,
    between: Callable[[], None] = lambda: None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Goes forward and backward with a worker's share, in --accumulate passes.

    The gradients are of the share's mean loss times the share's weight.

    Args:
        config: the configuration of the run.
        module: what forward is called on.
        share: the share.
        inputs: the share's images, normalised.
        labels: the share's labels.
        set_accumulating: called before each pass with whether another pass follows.
        clock: times the passes, if given.
        between: called once, after the first forward and before its backward.

    Returns:
        The mean loss of the share, and the number of correct answers, on the device.
    """
    torch.manual_seed(_dropout_seed(config, share))
    loss = torch.zeros((), device=inputs.device)
    correct = torch.zeros((), device=inputs.device)
    for number in range(config.accumulate):
        own = even_range(len(labels), number, config.accumulate)
        # A pass without a sample takes one that does not count.
        in_pass = slice(own.start, own.stop) if own else slice(1)
        set_accumulating(number < config.accumulate - 1)
        with autocast(config.precision, inputs.device):
            scores = module(inputs[in_pass])
        mean = F.cross_entropy(scores.float(), labels[in_pass])
        if clock:
            clock.mark("forward")
        if number == 0:
            between()
        counts = len(own) / len(labels)
        (mean * (share.weight * counts)).backward()
        if clock:
            clock.mark_last_gradient("backward")
        loss += counts * mean.detach()
        if own:
            correct += (scores.argmax(1) == labels[in_pass]).sum()
    return loss, correct


def _dropout_seed(config: RunConfig, share: Share) -> int:
    """Returns the seed of a share's dropout, which depends on the job's seed and the share alone.

    So dropout differs between the shares of a batch. It is the same after a restart, and whichever
    worker trains on the share.
    """
    sequence = np.random.SeedSequence([config.seed, share.slot, share.step])
    high, low = sequence.generate_state(2, np.uint32).tolist()
    return high << 32 | low


def digest(share: Share) -> int:
    """Returns a number for the samples of a share and its step.

    The numbers of a batch's shares add up, modulo DIGESTS, to the same sum however the batch is
    cut.
    """
    x = np.array(share.indices[: share.counted], dtype=np.uint64) + np.uint64(share.step << 32)
    # The finaliser of splitmix64 (Steele, Lea & Flood, 2014, doi:10.1145/2660193.2660195). A
    # product alone would be linear: sums would stay the same if samples of two steps were swapped.
    x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return int(((x ^ x >> np.uint64(31)) >> np.uint64(16)).sum()) % DIGESTS
