"""One step of a worker: forward, backward, exchange, update."""

from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from hvdtrain.config.run_config import RunConfig
from hvdtrain.coordination.job import Job
from hvdtrain.coordination.synchroniser import Synchroniser
from hvdtrain.data.sampling import Share
from hvdtrain.numerics.clock import Clock, move
from hvdtrain.numerics.flat import trained
from hvdtrain.numerics.optimizers import lr_at
from hvdtrain.numerics.precision import autocast
from hvdtrain.numerics.slowdown import Slowdown
from hvdtrain.numerics.split import DIGESTS, even_range
from hvdtrain.training.evaluation import average_buffers
from hvdtrain.training.feed import Normalise


class Stepper:
    """Takes one step after the other: forward, backward, and what the mode does with the gradients.

    Args:
        steps: how many there will be, for the learning rate, or None where nobody knows.
        slowdown: what makes this worker slower than it is.
    """

    def __init__(
        self, job: Job, model: nn.Module, sync: Synchroniser, module: nn.Module, steps: int | None, slowdown: Slowdown
    ) -> None:
        self.config, self.device, self.steps, self.slowdown = job.config, job.device, steps, slowdown
        self.model, self.sync, self.module = model, sync, module
        self.alone = job.world.size == 1
        self.normalise = Normalise(job.config, job.device)
        self.began: Any = None  # when this step's forward did, or what came after it slept
        self.computed_s = 0.0  # since it last slept
        self.told = 0  # of Rounds.distances, those that are in the metrics
        self.clock = Clock(model, job.device)
        self.clock.start()

    def compile(self, sizes: Collection[int], sample: torch.Tensor) -> None:
        """Have torch compile for each number of images that a step can have, by going forward and backward with so
        many: it compiles for a shape when that first comes. Weights and statistics stay as they are.

        Args:
            sample: one, [1, …], as batches have it.
        """
        before = [buffer.clone() for buffer in self.model.buffers()]
        passes = self.config.accumulate
        counts = {max(1, len(even_range(size, number, passes))) for size in sizes for number in range(passes)}
        self.sync.set_accumulating(True)
        for count in sorted(counts):
            inputs = self.normalise(sample.repeat(count, *[1] * (sample.ndim - 1)).to(self.device))
            with autocast(self.config.precision, self.device):
                scores = self.module(inputs)
            torch.autograd.grad(scores.float().sum(), trained(self.model))  # not backward(), which modes listen to
        for buffer, values in zip(self.model.buffers(), before, strict=True):
            buffer.copy_(values)

    def take(
        self, share: Share, images: torch.Tensor, labels: torch.Tensor, elapsed_s: float, lease_s: float = 0.0
    ) -> tuple[dict[str, Any], dict[str, float]]:
        """Take one step.

        Args:
            elapsed_s: seconds of training so far.
            lease_s: how long this worker had to wait for the share, before its images could be read.

        Returns:
            Its row of metrics, and the seconds of each of PARTS since the step before.
        """
        clock, sync = self.clock, self.sync
        inputs = self.normalise(images)
        clock.mark("data")
        sync.begin(share.step, lr_at(self.config, share.step, share.epoch, self.steps))
        self.began = clock.watch.now() if self.slowdown.rules else None
        loss, correct = backward(
            self.config, self.module, share, inputs, labels, sync.set_accumulating, clock,
            lambda: self._slow_down(share.step, elapsed_s),
        )  # fmt: skip
        if self.slowdown.rules:
            self.computed_s += self._computed_s(clock.last_gradient)
        sync.wait()
        clock.mark("comm")
        sync.update()
        self.model.zero_grad(set_to_none=True)
        clock.mark("optimizer")
        if sync.ended_round:
            average_buffers(self.model, sync.group)
            clock.mark("comm")
        seconds = move(clock.lap(), "forward", "comm", sync.waited_s)
        seconds = move(seconds, "data", "lease", lease_s)
        if self.alone:  # what comes after the last gradient is no wait for others
            seconds = move(seconds, "comm", "backward", seconds["comm"])
        row = {
            "step": share.step, "epoch": share.epoch, "samples": share.counted,
            "loss": loss.item() if share.counted else None,
            "accuracy": correct.item() / len(labels) if share.counted else None,
        }  # fmt: skip
        distances = sync.rounds.distances if sync.rounds else ()
        if len(distances) > self.told:  # this step has begun with outer weights
            self.told, row["distance"] = len(distances), distances[-1]
        return row, seconds

    def _slow_down(self, step: int, elapsed_s: float) -> None:
        """Sleep as --slow asks for, between forward and backward: as part of backward, which then begins later.

        By what this forward and the backward before it took. Not after backward: its gradients would be on their way
        by then, and the sleep would hide what they cost.
        """
        if not self.slowdown.rules:
            return
        computed_s = self.computed_s + self._computed_s(self.clock.watch.now()) - self.sync.waited_s
        self.slowdown.slow(step, elapsed_s, computed_s)
        self.computed_s, self.began = 0.0, self.clock.watch.now()

    def _computed_s(self, until: Any) -> float:
        """Seconds since forward or, where it slept, backward began."""
        self.clock.watch.wait_for(until)
        return self.clock.watch.seconds(self.began, until)


def backward(
    config: RunConfig, module: nn.Module, share: Share, inputs: torch.Tensor, labels: torch.Tensor,
    set_accumulating: Callable[[bool], None],
    clock: Clock | None = None, between: Callable[[], None] = lambda: None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Forward and backward of a worker's share: the mean loss, and the number of correct answers.

    Gradients are those of the weighted loss of the share, in --accumulate passes.

    Args:
        set_accumulating: called before each pass with whether another follows.
        between: called once, after the first forward and before its backward.
    """
    # Of nothing else: dropout differs between the shares of a batch, and is the same after a restart, and whichever
    # worker trains on the share.
    words = np.random.SeedSequence([config.seed, share.slot, share.step]).generate_state(2, np.uint32).tolist()
    torch.manual_seed(words[0] << 32 | words[1])
    loss, correct = torch.zeros((), device=inputs.device), torch.zeros((), device=inputs.device)
    for number in range(config.accumulate):
        own = even_range(len(labels), number, config.accumulate)
        taken = slice(own.start, own.stop) if own else slice(1)  # a pass without a sample takes one that does not count
        set_accumulating(number < config.accumulate - 1)
        with autocast(config.precision, inputs.device):
            scores = module(inputs[taken])
        mean = F.cross_entropy(scores.float(), labels[taken])
        if clock:
            clock.mark("forward")
        if not number:
            between()
        counts = len(own) / len(labels)
        (mean * (share.weight * counts)).backward()
        if clock:
            clock.mark_last_gradient("backward")
        loss += counts * mean.detach()
        if own:
            correct += (scores.argmax(1) == labels[taken]).sum()
    return loss, correct


def digest(share: Share) -> int:
    """A number for which samples were seen at which step, that adds up over the parts of a batch."""
    x = np.array(share.indices[: share.counted], dtype=np.uint64) + np.uint64(share.step << 32)
    # The finaliser of splitmix64 (Steele, Lea & Flood, 2014, doi:10.1145/2660193.2660195). A product alone would be
    # linear: sums would stay the same when samples change places.
    x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return int(((x ^ x >> np.uint64(31)) >> np.uint64(16)).sum()) % DIGESTS
