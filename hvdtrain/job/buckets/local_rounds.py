"""Local steps in any mode.

LocalRounds wraps the mode's synchroniser, and has it carry Δ of each bucket at a round's end. The
mode's synchroniser, a BucketCarrier, knows nothing of local steps.
"""

from abc import abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from hvdtrain.base.config.run_config import RunConfig
from hvdtrain.base.numerics.clock import Stretch
from hvdtrain.base.numerics.flat import flatten_weights, trained
from hvdtrain.base.numerics.optimizers import StepSettings
from hvdtrain.job.buckets.local_steps import LocalSteps
from hvdtrain.job.buckets.partition import BucketRange
from hvdtrain.job.coordination.job import Job
from hvdtrain.job.coordination.synchroniser import (
    NO_STATE,
    LeasesShares,
    OwnState,
    Rounds,
    Synchroniser,
)
from hvdtrain.job.wire.messages import PushStatus


class BucketCarrier(Synchroniser):
    """A synchroniser that can also carry buckets that no backward pass fills: see LocalRounds.

    A mode that exchanges gradients calls `prepare`, `begin`, `wait` and `update`. In their place,
    LocalRounds calls `share_weights` and `carry`, `begin_carrying`, `wait_for`, and `send`.

    Attributes:
        config: the configuration, which decides the optimizer.
        borders: elements of the flat vector at which a bucket begins: see partition.cut.
    """

    config: RunConfig
    borders: Sequence[int] = ()

    def exchange_for(self, config: RunConfig, borders: Sequence[int]) -> None:
        """Takes an optimizer that was not known when the mode was connected, before `carry`.

        Args:
            config: has the optimizer's options.
            borders: see the attribute.
        """
        self.config = config
        self.borders = borders

    def share_weights(self, model: nn.Module) -> None:
        """Gives the model the first worker's weights, where `carry` does not."""

    @abstractmethod
    def carry(self, sizes: Sequence[int], weights: torch.Tensor) -> Sequence[BucketRange]:
        """Prepares to carry buckets of these weights.

        Gives the weights the first worker's values, where `share_weights` has not.

        Args:
            sizes: elements of each parameter.
            weights: [parameters] float32, which answers are written into.

        Returns:
            The buckets, in the order of the weights.
        """

    @abstractmethod
    def begin_carrying(self, lr: StepSettings, buckets: int, is_new_step: bool) -> None:
        """Begins a step, before forward. Waits for nothing.

        Args:
            lr: the learning rate of the optimizer that takes the buckets' values, or its settings
                for each group of parameters.
            buckets: how many buckets are sent after the step.
            is_new_step: whether servers count a new step of this worker from here on.
        """

    @abstractmethod
    def send(self, values: Mapping[int, torch.Tensor]) -> None:
        """Sends the values of buckets, [bucket] float32, by the buckets' numbers."""

    @abstractmethod
    def wait_for(self, numbers: Sequence[int]) -> None:
        """Blocks until these buckets have the weights that the values sent last lead to."""


class LeasingCarrier(BucketCarrier, LeasesShares):
    """A BucketCarrier whose worker leases its shares."""

    @abstractmethod
    def request_share(self) -> None:
        """Requests the next share, once in each step that sends buckets."""


class LocalRounds(Synchroniser):
    """A synchroniser that takes local steps, and has another one carry each round's Δ.

    Args:
        inner: carries Δ of each bucket, and writes the outer weights.
        job: the job as this rank knows it.
        in_lockstep: whether the rounds of all workers end at the same steps of the job.

    Attributes:
        local: the steps of the round.
        inner_optimizer: takes them, if it is set before `prepare`; None: the configuration's.
    """

    local: LocalSteps
    inner_optimizer: Any = None

    def __init__(self, inner: BucketCarrier, job: Job, in_lockstep: bool = True) -> None:
        self.inner = inner
        self.config = job.config
        self.group = inner.group
        self.backend = inner.backend
        self.in_lockstep = in_lockstep
        self.outer_lr = job.config.effective_outer(job.world.workers).lr

    def prepare(self, model: nn.Module) -> nn.Module:
        self.inner.share_weights(model)
        sizes = [p.numel() for p in trained(model)]
        weights = flatten_weights(model)
        outer = weights.clone()
        buckets = self.inner.carry(sizes, outer)
        self.local = LocalSteps(self.config, model, weights, outer, buckets, self.inner_optimizer)
        self.local.begin_round()
        return model

    def restore(
        self, step: int, state: Mapping[str, torch.Tensor], own: OwnState = NO_STATE
    ) -> None:
        self.local.restore(step if self.in_lockstep else 0, own)
        self.inner.restore(step, state, own)

    def optimizer_parts(self) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
        return self.inner.optimizer_parts()

    def own_parts(self) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
        yield from self.local.parts()
        yield from self.inner.own_parts()

    def begin(self, step: int, lr: float) -> None:
        local = self.local
        local.begin_step()
        if not local.taken:
            self._begin_round()
        leaving = local.leaving(local.taken + 1)
        self.inner.begin_carrying(self.outer_lr, len(leaving), self._is_new_step(leaving))
        if local.due:
            self.inner.wait_for(local.due)
        local.begin(lr)

    def _begin_round(self) -> None:
        """Called before a round's first step."""

    def _is_new_step(self, leaving: Sequence[int]) -> bool:
        """Returns whether servers count a new step when these buckets are sent."""
        return self.in_lockstep or not self.local.taken

    def update(self) -> None:
        leaving = self.local.step()
        if leaving:
            self.inner.send({number: self.local.difference(number) for number in leaving})

    def updates(self) -> Sequence[Stretch]:
        return self.inner.updates()

    def refresh(self) -> None:
        self.inner.refresh()
        self.local.show_outer()

    def idle(self) -> None:
        self.inner.idle()

    def skip_if_overtaken(self, step: int) -> bool:
        return self.inner.skip_if_overtaken(step)

    def leave_alone(self) -> None:
        self.inner.leave_alone()

    def mean_over_workers(self, values: torch.Tensor) -> torch.Tensor:
        return self.inner.mean_over_workers(values)

    def traffic(self, steps: int) -> tuple[int, int]:
        return self.inner.traffic(steps)

    def ask_servers(self, question: str) -> list[Any]:
        return self.inner.ask_servers(question)

    @property
    def push_status(self) -> PushStatus | None:
        return self.inner.push_status

    @property
    def waits(self) -> Sequence[Stretch]:
        return self.inner.waits

    @property
    def rounds(self) -> Rounds:
        return self.local.rounds

    @property
    def ended_round(self) -> bool:
        return self.in_lockstep and self.local.is_over


class LeasedRounds(LocalRounds):
    """Local rounds of leased shares: a worker leases the shares of a whole round at once.

    For the servers a round is one step of this worker, which begins with the round's last local
    step. In its last backward pass the worker requests the next round's shares.
    """

    inner: LeasingCarrier

    def __init__(self, inner: LeasingCarrier, job: Job) -> None:
        super().__init__(inner, job, in_lockstep=False)
        self._lengths: deque[int] = deque()  # steps of the leased rounds that were not begun yet

    def prepare(self, model: nn.Module) -> nn.Module:
        module = super().prepare(model)
        # The last parameter's gradient is one of the first that backward computes.
        last = trained(model)[-1]
        last.register_post_accumulate_grad_hook(lambda parameter: self.inner.request_share())
        return module

    def _begin_round(self) -> None:
        if self._lengths:
            self.local.steps = self._lengths.popleft()

    def _is_new_step(self, leaving: Sequence[int]) -> bool:
        return bool(leaving)

    def wait(self) -> None:
        self.inner.request_share()  # the last parameter may have had no part in this step

    def take_share(self, number: int, steps: int) -> None:
        self._lengths.append(steps)
        self.inner.take_share(number, steps)

    def begin_shares(self, begin: int, end: int) -> None:
        self.inner.begin_shares(begin, end)

    def next_share(self) -> tuple[int | None, int]:
        return self.inner.next_share()

    def open_for_joining(self, state: dict[str, Any]) -> None:
        self.inner.open_for_joining(state)

    def pause_leases(self) -> None:
        self.inner.pause_leases()


def with_local_steps(carrier: BucketCarrier, job: Job, in_lockstep: bool = True) -> Synchroniser:
    """Returns the carrier, within LocalRounds where the job has --local-steps."""
    return LocalRounds(carrier, job, in_lockstep) if job.config.local_steps else carrier


def with_leased_local_steps(carrier: LeasingCarrier, job: Job) -> Synchroniser:
    """Returns the carrier, within LeasedRounds where the job has --local-steps."""
    return LeasedRounds(carrier, job) if job.config.local_steps else carrier
