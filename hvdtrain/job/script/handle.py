"""What a training script calls: `hvdtrain.init()` returns a ScriptJob.

Without a starter or a command of hvdtrain around it, a script is one process, and nothing here
changes what it computes.
"""

import contextlib
import sys
from collections.abc import Iterator, Sized
from typing import Any, Protocol

import torch
from torch import nn

from hvdtrain.base.errors import Failure
from hvdtrain.base.world.place import read_world
from hvdtrain.job.script.optimizer import HandedIn
from hvdtrain.job.script.sampler import WorkerSampler, part_of


class Session(Protocol):
    """The rank that runs a script: see job.rank.script."""

    worker: int
    workers: int
    local_rank: int
    mode: str
    seed: int
    device: torch.device

    def connect(self, batch_size: int | None, early: bool) -> None:
        """Joins the other workers."""

    def prepare(self, models: list[nn.Module], handed_in: HandedIn) -> None:
        """Makes the models and their optimizer the job's."""

    def set_accumulating(self, accumulating: bool) -> None:
        """Sets whether another backward pass of the same step follows."""

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the sum over the workers of a flat float64 tensor."""

    def gather(self, value: Any) -> list[Any]:
        """Returns each worker's value on the first worker; empty on the others."""

    def average_buffers(self) -> None:
        """Gives all workers the mean of the models' buffers."""

    def refresh(self) -> None:
        """Gives all workers the newest weights."""

    def optimizer_state(self) -> dict[str, torch.Tensor]:
        """Returns the optimizer's state on the first worker; empty on the others."""

    def finish(self) -> None:
        """Ends training: nobody steps any more."""

    def note_sampler(self, sampler: WorkerSampler) -> None:
        """Counts this sampler's samples."""

    def report(self, figures: dict[str, float]) -> None:
        """Takes figures of quality, for the summary."""


_session: Session | None = None  # of the rank that runs a script
_job: "ScriptJob | None" = None


def open_session(session: Session) -> None:
    """Has `init` join this rank's job."""
    global _session, _job
    _session = session
    _job = None


def init(batch_size: int | None = None, early: bool = True) -> "ScriptJob":
    """Joins the job that this script was started in, and returns it: see hvdtrain.api.init."""
    global _job
    if _job:
        raise Failure("hvdtrain.init was called twice: keep the job that it returned")
    world = read_world()
    if not _session and world.size > 1:
        script = sys.argv[0] or "train.py"
        raise Failure(
            f"{world.starter} has started {world.size} ranks of {script} itself: have it start "
            f"`hvdtrain run --mode allreduce {script}`, which says what the ranks do"
        )
    if batch_size is not None and batch_size < 1:
        raise Failure(f"hvdtrain.init(batch_size={batch_size}): a batch has one sample or more")
    if _session:
        _session.connect(batch_size, early)
    _job = ScriptJob(_session)
    return _job


class ScriptJob:
    """The job as a training script sees it.

    Attributes:
        rank: this worker's number, from 0. Parameter servers run no script and have none.
        size: the number of workers.
        local_rank: this worker's number on its host.
        device: the device that this worker computes on.
        mode: the name of the mode, such as `allreduce`.
        seed: the seed of this repeat of a comparison, for torch.manual_seed.
        is_first: whether this is the worker that prints and saves.
    """

    def __init__(self, session: Session | None = None) -> None:
        self._session = session
        self.rank = session.worker if session else 0
        self.size = session.workers if session else 1
        self.local_rank = session.local_rank if session else 0
        self.mode = session.mode if session else "single"
        self.seed = session.seed if session else 0
        self.device = session.device if session else _device_alone()
        self.is_first = self.rank == 0
        self._models: list[nn.Module] = []
        self._handed_in: HandedIn | None = None
        self._loaded: dict[str, Any] | None = None

    def prepare(self, *models_and_optimizer: Any) -> tuple[Any, ...]:
        """Connects models and their optimizer to the job, and returns both, in the same order.

        All workers then have the first worker's weights and buffers. The returned objects are the
        ones that were passed. The optimizer's `step` now takes the step of all workers, and it has
        a new method `synchronize`.

        Args:
            models_and_optimizer: one or more models on `device`, then one optimizer of
                torch.optim: SGD, Adam or AdamW.

        Raises:
            Failure: `prepare` was called before, or the models or the optimizer cannot be trained
                here.
        """
        if self._handed_in:
            raise Failure("prepare was called twice: it takes several models and one optimizer")
        if len(models_and_optimizer) < 2:
            raise Failure("prepare takes one or more models, and then their optimizer")
        *models, optimizer = models_and_optimizer
        for model in models:
            if not isinstance(model, nn.Module):
                raise Failure(
                    f"prepare takes models, then their optimizer: {type(model).__name__} is no "
                    "nn.Module"
                )
        self._models = models
        self._handed_in = HandedIn(optimizer)
        if self._loaded:
            for model, weights in zip(models, self._loaded["models"], strict=True):
                model.load_state_dict(weights)
            self._handed_in.restore(self._loaded["settings"], self._loaded["optimizer"])
        if self._session:
            self._session.prepare(models, self._handed_in)
        else:
            optimizer.synchronize = lambda: None
        return (*models, optimizer)

    def sampler(self, dataset: Sized, shuffle: bool = True) -> WorkerSampler:
        """Returns a sampler of this worker's samples, for a DataLoader.

        Each batch is a part of a batch that one process would have with the same sampler. All
        workers have equally many samples. Up to `size` - 1 samples of an epoch are left out.

        Args:
            dataset: the data set. Only its length is used.
            shuffle: whether the order is random, by `seed` and the epoch; False: samples come in
                the data set's order.
        """
        sampler = WorkerSampler(dataset, self.rank, self.size, self.seed, shuffle)
        if self._session:
            self._session.note_sampler(sampler)
        return sampler

    def part(self, dataset: Sized) -> range:
        """Returns this worker's part of a data set, to evaluate each of its samples once."""
        return part_of(len(dataset), self.rank, self.size)

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        """Accumulates gradients: sends nothing after the forward and backward passes in the block.

        The gradients are added to the gradients of the next pass outside of the block.
        """
        if self._session:
            self._session.set_accumulating(True)
        try:
            yield
        finally:
            if self._session:
                self._session.set_accumulating(False)

    def sum(self, values: "torch.Tensor | float") -> torch.Tensor:
        """Returns the elementwise sum over the workers, on every worker.

        All workers call this together.

        Args:
            values: a small tensor, or a number.
        """
        tensor = torch.as_tensor(values).detach()
        if not self._session:
            return tensor
        flat = tensor.to("cpu", torch.float64).flatten()
        return self._session.sum(flat).view(tensor.shape).to(tensor.device, tensor.dtype)

    def mean(self, values: "torch.Tensor | float") -> torch.Tensor:
        """Returns the elementwise mean over the workers, on every worker: see `sum`."""
        tensor = torch.as_tensor(values).detach()
        if not tensor.is_floating_point():
            tensor = tensor.to(torch.float32)
        return self.sum(tensor) / self.size

    def gather(self, value: Any) -> list[Any]:
        """Returns each worker's value on the first worker, in order; an empty list on the others.

        All workers call this together.

        Args:
            value: of plain types, as JSON holds them.
        """
        return self._session.gather(value) if self._session else [value]

    def barrier(self) -> None:
        """Blocks until all workers have called this."""
        self.sum(0.0)

    def average_buffers(self) -> None:
        """Gives all workers the mean of the models' floating-point buffers, as of batch norm.

        All workers call this together.
        """
        if self._session:
            self._session.average_buffers()

    def refresh(self) -> None:
        """Gives all workers the newest weights, which differ in asynchronous modes.

        All workers call this together.
        """
        if self._session:
            self._session.refresh()

    def report(self, **figures: float) -> None:
        """Records the quality of the model now, for summary.json and comparisons.

        All workers call this, with the same figures. With --stop-at-target, as in a comparison by
        the time to the target, it blocks until all workers have called it. It ends the script if
        the first worker's figure reaches the target.

        Args:
            figures: `accuracy`, from 0 to 1 (more is better), or `loss` (less is better).

        Raises:
            Failure: a figure has another name, or is not within its bounds.
        """
        for name, value in figures.items():
            if name not in ("accuracy", "loss"):
                raise Failure(
                    f"report takes accuracy (more is better) or loss (less is): not {name}"
                )
            if name == "accuracy" and not 0 <= float(value) <= 1:
                raise Failure(f"report(accuracy={value}): an accuracy is from 0 to 1")
        if self._session and not self._handed_in:
            raise Failure("report comes after prepare")
        if self._session:
            self._session.report({name: float(value) for name, value in figures.items()})

    def save(self, path: str, **also: Any) -> None:
        """Saves models and optimizer for `load`, also where servers have the optimizer's state.

        All workers call this together; the first one writes.

        Args:
            path: the file.
            also: values that `load` returns: numbers, text, lists, dicts and tensors.

        Raises:
            Failure: nothing was prepared yet.
        """
        if not self._handed_in:
            raise Failure("save comes after prepare")
        self.refresh()
        state = self._session.optimizer_state() if self._session else self._handed_in.state()
        saved: dict[str, Any] = {
            "models": [model.state_dict() for model in self._models],
            "optimizer": state,
            "settings": [settings._asdict() for settings in self._handed_in.settings()],
            "also": also,
        }
        if self.is_first:
            torch.save(saved, path)
        self.barrier()

    def load(self, path: str) -> dict[str, Any]:
        """Loads what `save` saved; `prepare` then goes on from there.

        The mode and the number of workers may differ. All workers call this, before `prepare`.

        Returns:
            The values that `save` was given as `also`.

        Raises:
            Failure: `prepare` was called already.
        """
        if self._handed_in:
            raise Failure("load comes before prepare, which shares what it has loaded")
        self._loaded = torch.load(path, map_location="cpu", weights_only=True)
        return dict(self._loaded["also"])

    def finish(self) -> None:
        """Ends training: all workers get the newest weights, and no worker steps any more.

        All workers call this together. If a script does not, the end of the script calls it.

        Raises:
            Failure: in lockstep, workers have taken different numbers of steps.
        """
        if self._session:
            self._session.finish()


def _device_alone() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
