"""The training loop. It reads the same in every mode; what differs is behind `sync`."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from hvdtrain.config import RunConfig
from hvdtrain.data.loader import Loader
from hvdtrain.data.sampling import Plan, Share, part
from hvdtrain.errors import Failure
from hvdtrain.job import Job
from hvdtrain.metrics import PHASES, Recorder
from hvdtrain.modes import Sync
from hvdtrain.optim import lr_at

# The mean and deviation of ImageNet's pixels, which torchvision's weights expect.
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
EVALUATION_BATCH = 128


@dataclass
class History:
    """What training leaves behind, beside the weights.

    Attributes:
        evaluations: a row each of step, epoch, samples (of all workers), train_s, val_loss, val_accuracy.
        samples: trained on by all workers, up to the last evaluation.
        wall_s: training seconds, evaluation left out.
        digest: sum over this worker's samples of a hash of (step, index), modulo 2**48: equal sums over all
            workers mean equal samples at equal steps.
    """

    evaluations: list[dict[str, Any]] = field(default_factory=list)
    samples: int = 0
    wall_s: float = 0.0
    digest: int = 0


def train(
    job: Job, model: nn.Module, sync: Sync, module: nn.Module, loader: Loader, validation: Loader,
    recorder: Recorder, report: Any,
) -> History:  # fmt: skip
    """Train until the epochs, steps or time are over; evaluate after every epoch and at the end.

    Args:
        model: the model itself; `module` is what the mode wants called in its place.
        report: told of every step and evaluation, to show them to a person.
    """
    config, world = job.config, job.world
    plan = Plan(len(loader.samples), config.batch_size, config.seed, world.worker, world.workers)
    budget = Budget(config, sync, plan.samples, world.workers)
    clock = Clock(model, job.device)
    normalise = Normalise(job.device)
    history = History()
    model.train()
    # A warm start for nobody: the clock starts when every worker is ready.
    sync.sum(torch.zeros(1))
    started, evaluating, epoch, counted, over = time.perf_counter(), 0.0, 0, 0, False
    while not over:
        epoch += 1
        clock.start()
        for share, (images, labels) in loader.batches(plan.epoch(epoch)):
            inputs, labels = normalise(images), labels.to(job.device)
            clock.mark("data")
            sync.begin(share.step, lr_at(config, share.step, budget.steps))
            scores = module(inputs)
            loss = F.cross_entropy(scores, labels)
            clock.mark("forward")
            (loss * share.weight).backward()
            clock.mark_last_gradient("backward")
            sync.wait()
            clock.mark("comm")
            sync.update()
            model.zero_grad(set_to_none=True)
            clock.mark("optimizer")

            elapsed = time.perf_counter() - started - evaluating
            seconds = clock.lap()
            seconds |= {"forward": seconds["forward"] - sync.waited_s, "comm": seconds["comm"] + sync.waited_s}
            recorder.step(_row(share, elapsed, loss, scores, labels), seconds, sync.pushed)
            history.digest = (history.digest + digest(share)) % 2**48
            report.step(share.step)
            over = budget.is_over(share.step, elapsed)
            if over:
                break
            clock.start()  # writing metrics is nobody's wait for data
        sync.refresh()
        # A barrier: the first has waited for the last. Where steps are not common, one worker's end is everyone's.
        new = recorder.samples - counted
        counted = recorder.samples
        finished, samples = sync.sum(torch.tensor([over, new], dtype=torch.float64)).tolist()
        over = finished > 0
        history.samples += int(samples)  # of a worker that was lost meanwhile, up to here
        recorder.flush()
        began = time.perf_counter()
        history.wall_s = began - started - evaluating
        loss_mean, accuracy = evaluate(job, model, sync, validation, normalise)
        history.evaluations.append(
            {"step": share.step, "epoch": epoch, "samples": history.samples, "train_s": history.wall_s,
             "val_loss": loss_mean, "val_accuracy": accuracy}
        )  # fmt: skip
        recorder.evaluation(share.step, loss_mean, accuracy, history.samples / history.wall_s)
        report.evaluation(history.evaluations[-1])
        evaluating += time.perf_counter() - began
    return history


def _row(
    share: Share, elapsed: float, loss: torch.Tensor, scores: torch.Tensor, labels: torch.Tensor
) -> dict[str, Any]:
    correct = (scores.argmax(1) == labels).float().mean().item()
    return {
        "step": share.step, "epoch": share.epoch, "time": round(elapsed, 6), "samples": share.counted,
        "loss": loss.item() if share.counted else None, "accuracy": correct if share.counted else None,
    }  # fmt: skip


def digest(share: Share) -> int:
    """A number for which samples were seen at which step, that adds up over the parts of a batch."""
    x = np.array(share.indices[: share.counted], dtype=np.uint64) + np.uint64(share.step << 32)
    # The finaliser of splitmix64 (Steele, Lea & Flood, 2014, doi:10.1145/2660193.2660195). A product alone would be
    # linear: sums would stay the same when samples change places.
    x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return int(((x ^ x >> np.uint64(31)) >> np.uint64(16)).sum()) % 2**48


def evaluate(job: Job, model: nn.Module, sync: Sync, loader: Loader, normalise: "Normalise") -> tuple[float, float]:
    """Mean loss and accuracy over every sample once, the same on all workers.

    Each worker that is there takes a contiguous part. If one is lost meanwhile, the others begin again.

    Raises:
        Failure: the workers together did not count every sample once.
    """
    average_buffers(model, sync)
    model.eval()
    me = F.one_hot(torch.tensor(job.world.worker), job.world.workers).double()
    there, counted = torch.zeros(0), sync.sum(me)
    while not counted.equal(there):
        there = counted
        own = part(len(loader.samples), int(there[: job.world.worker].sum()), int(there.sum()))
        totals = sync.sum(torch.cat([_totals(job, model, loader, normalise, own), me]))
        counted = totals[3:]
    model.train()
    loss, correct, samples = totals[:3].tolist()
    if samples != len(loader.samples):
        raise Failure(f"evaluation counted {samples:.0f} of {len(loader.samples)} samples")
    return loss / samples, correct / samples


def _totals(job: Job, model: nn.Module, loader: Loader, normalise: "Normalise", own: Sequence[int]) -> torch.Tensor:
    """Sum of losses, number of correct answers and of samples over `own` samples: [3] float64."""
    batches = [own[i : i + EVALUATION_BATCH] for i in range(0, len(own), EVALUATION_BATCH)]
    totals = torch.zeros(3, dtype=torch.float64)
    with torch.inference_mode():
        for _, (images, labels) in loader.batches([Share(0, 0, list(batch), 1.0, len(batch)) for batch in batches]):
            scores, labels = model(normalise(images)), labels.to(job.device)
            loss = F.cross_entropy(scores, labels, reduction="sum")
            correct = (scores.argmax(1) == labels).sum()
            totals += torch.tensor([loss.item(), correct.item(), len(labels)], dtype=torch.float64)
    return totals


def average_buffers(model: nn.Module, sync: Sync) -> None:
    """Give every worker the mean of all workers' batch-norm statistics, so that one model is measured and saved."""
    buffers = [b for b in model.buffers() if b.is_floating_point()]
    if not buffers:
        return
    *sums, workers = sync.sum(torch.cat([*(b.flatten().cpu() for b in buffers), torch.ones(1)])).split(
        [*(b.numel() for b in buffers), 1]
    )
    for buffer, values in zip(buffers, sums, strict=True):
        buffer.copy_((values / workers).view_as(buffer))


class Normalise:
    """uint8 images to float32 on the device, with ImageNet's mean and deviation."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.shift = torch.tensor(MEAN, device=device).view(1, 3, 1, 1) * 255
        self.scale = 1 / (torch.tensor(DEVIATION, device=device).view(1, 3, 1, 1) * 255)

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        return images.to(self.device).float().sub_(self.shift).mul_(self.scale)


class Clock:
    """Splits a step into PHASES. On a GPU it records events, so that it measures the work and not its launch.

    Backward ends with the last gradient, before anything enters a collective: what comes after it, inside
    backward() or not, is time the step waits for others.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self.marks: list[tuple[str, Any]] = []
        self.last_gradient: Any = None
        for p in model.parameters():
            p.register_hook(self._stamp)

    def _now(self) -> Any:
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _stamp(self, gradient: torch.Tensor) -> None:
        self.last_gradient = self._now()

    def start(self) -> None:
        self.marks = [("", self._now())]

    def mark(self, phase: str) -> None:
        """The phase ends here."""
        self.marks.append((phase, self._now()))

    def mark_last_gradient(self, phase: str) -> None:
        """The phase ended when the last gradient was computed."""
        self.marks.append((phase, self.last_gradient))

    def lap(self) -> dict[str, float]:
        """Seconds of each phase since start."""
        if self.on_gpu:
            self.marks[-1][1].synchronize()
        spent = dict.fromkeys(PHASES, 0.0)
        for (_, before), (phase, after) in zip(self.marks, self.marks[1:], strict=False):
            spent[phase] += before.elapsed_time(after) / 1000 if self.on_gpu else after - before
        return spent


class Budget:
    """When training is over. All workers of a lockstep mode stop at the same step, time budget or not."""

    def __init__(self, config: RunConfig, sync: Sync, samples: int, workers: int) -> None:
        self.sync, self.workers, self.seconds = sync, workers, config.time_budget
        self.steps = config.total_steps(samples)
        self.next_look = 1

    def is_over(self, step: int, elapsed: float) -> bool:
        """Whether the step just taken, `elapsed` seconds of training after the start, was the last."""
        if self.steps is not None:
            return step >= self.steps
        if not self.sync.lockstep:
            return elapsed >= self.seconds
        if step < self.next_look:
            return False
        # All workers compute the next look from the same sums. Half the remaining way each time: few looks,
        # and none but the last step overruns the budget.
        mean = self.sync.sum(torch.tensor([elapsed], dtype=torch.float64)).item() / self.workers
        self.next_look = step + max(1, int((self.seconds - mean) / (mean / step) / 2))
        return mean >= self.seconds
