"""Local steps: a worker takes H steps with its own optimizer between two exchanges."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from hvdtrain.base.config.run_config import RunConfig
from hvdtrain.base.errors import Failure
from hvdtrain.base.numerics.flat import trained
from hvdtrain.base.numerics.optimizers import make_optimizer, restore_state, set_lr, state_of
from hvdtrain.job.buckets.partition import BucketRange, fragment_buckets
from hvdtrain.job.coordination.synchroniser import OwnState, Rounds

# The name of a worker's weights in its part of a snapshot, beside the inner optimizer's vectors.
LOCAL_WEIGHTS = "local.weights"
KEPT = 0.5  # the share of local weights that fragments keep: see LocalSteps


class LocalSteps:
    """A worker's end of DiLoCo (Douillard et al., 2023, arXiv:2311.08105, algorithm 1).

    Local SGD (Stich, 2019, arXiv:1805.09767) is the same with plain SGD as the outer optimizer and
    η = 1.

    After H inner steps, Δ = θ_outer - θ is sent as a gradient is otherwise. The inner optimizer
    keeps its state. Whatever carries Δ writes the new outer weights to `outer`; the outer optimizer
    runs there.

    With --fragments F > 1, one of F fragments is exchanged after every H/F steps, while the worker
    goes on. After τ = 1 more step, θ ← αθ + (1 - α)θ_outer of the fragment's weights, with α = 0.5
    (Streaming DiLoCo, Douillard et al., 2025, arXiv:2501.18512, algorithm 2). A fragment consists
    of buckets here, not of layers: one layer of a VGG has most of its weights.

    Args:
        config: the configuration of the run.
        model: the model.
        weights: [parameters] float32, the model's own memory.
        outer: [parameters] float32, the outer weights, on the device of the weights.
        buckets: the buckets in which Δ is sent.
        inner: the inner optimizer; by default the configuration's.

    Attributes:
        every: H.
        steps: the steps of this round: H, or fewer at an epoch's end where shares are leased.
        taken: how many steps of the round have been taken.
        fragments: the numbers of each fragment's buckets.
        due: the numbers of the buckets whose outer weights the next step begins with. They are
            awaited before that step.
        sent: how many elements of Δ were sent since this process began.
        distances: see Rounds.
    """

    def __init__(
        self,
        config: RunConfig,
        model: nn.Module,
        weights: torch.Tensor,
        outer: torch.Tensor,
        buckets: Sequence[BucketRange],
        inner: Any = None,
    ) -> None:
        self.every = config.local_steps
        self.steps = self.every
        self.taken = 0
        self.sent = 0
        self.parameters = trained(model)
        self.weights = weights
        self.outer = outer
        self.inner = inner or make_optimizer(config, self.parameters)
        self.buckets = buckets
        self.fragments = fragment_buckets(buckets, config.fragments)
        self.distances: list[float] = []
        self.due: Sequence[int] = ()
        self._due_later: Sequence[int] = ()  # due after one more step
        # The local weights, while the model has the outer weights.
        self._kept: torch.Tensor | None = None

    @property
    def is_streaming(self) -> bool:
        """Whether there are several fragments."""
        return len(self.fragments) > 1

    @property
    def is_over(self) -> bool:
        """Whether the last step ended a round whose outer weights are not taken yet."""
        return self.taken == self.steps

    def leaving(self, taken: int) -> Sequence[int]:
        """Returns the numbers of the buckets that are sent after so many steps of the round."""
        if taken == self.steps:
            return self.fragments[-1]
        number, rest = divmod(taken * len(self.fragments), self.every)
        return self.fragments[number - 1] if number and not rest else ()

    def begin_step(self) -> None:
        """Begins a step, before the buckets that are due are awaited."""
        if self.is_over:
            self.steps = self.every
            self.taken = 0

    def begin(self, lr: float) -> None:
        """Begins a step's forward, when the buckets that are due are there.

        Args:
            lr: the learning rate of the inner optimizer.
        """
        set_lr(self.inner, lr)
        if self._kept is not None:
            self.weights.copy_(self._kept)
            self._kept = None
        self._take(self.due)

    def begin_round(self) -> None:
        """Goes on from the outer weights of all buckets."""
        self.begin_step()
        self._take(self.due)
        self.weights.copy_(self.outer)
        self._kept = None

    def _take(self, numbers: Sequence[int]) -> None:
        """Goes on from the outer weights of these buckets."""
        kept = KEPT if self.is_streaming else 0.0
        distance = 0.0
        norm = 0.0
        for place in map(self.place, numbers):
            distance += (self.weights[place] - self.outer[place]).square_().sum().item()
            norm += self.outer[place].square().sum().item()
            self.weights[place].lerp_(self.outer[place], 1 - kept)
        if norm:
            self.distances.append(math.sqrt(distance / norm))
        self.due = ()

    @property
    def rounds(self) -> Rounds:
        largest = max(map(self._elements, self.fragments))
        return Rounds(self.sent / len(self.outer), largest / len(self.outer), self.distances)

    def _elements(self, numbers: Sequence[int]) -> int:
        """Returns how many elements these buckets have together."""
        return sum(self.buckets[number].elements for number in numbers)

    def place(self, number: int) -> slice:
        """Returns where a bucket lies in the weights."""
        return slice(self.buckets[number].start, self.buckets[number].stop)

    def step(self) -> Sequence[int]:
        """Takes the inner optimizer's step; returns the numbers of the buckets that are sent now."""
        self.inner.step()
        self.taken += 1
        leaving = self.leaving(self.taken)
        self.sent += self._elements(leaving)
        if self.is_streaming:
            self.due = self._due_later
            self._due_later = leaving
        else:
            self.due = leaving
        return leaving

    def difference(self, number: int) -> torch.Tensor:
        """Returns Δ of a bucket, [bucket] float32.

        Δ of a shorter round counts less: models are averaged by samples (McMahan et al., 2017,
        arXiv:1602.05629, algorithm 1). Otherwise a worker that has just begun would pull all others
        to where it is.
        """
        place = self.place(number)
        difference = self.outer[place] - self.weights[place]
        if self.steps != self.every:
            difference.mul_(self.steps / self.every)
        return difference

    def show_outer(self) -> None:
        """Shows the outer weights in the model until the next step, to evaluate or save them."""
        if self.is_over and not self.is_streaming:
            self.begin_round()
            return
        if self._kept is None:
            self._kept = self.weights.clone()
        self.weights.copy_(self.outer)

    def parts(self) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
        """Yields the state of this worker's round for a snapshot, parameter by parameter.

        Yields:
            See Synchroniser.own_parts.
        """
        local = self.weights if self._kept is None else self._kept
        start = 0
        for p in self.parameters:
            stop = start + p.numel()
            yield start, state_of(self.inner, [p]) | {LOCAL_WEIGHTS: local[start:stop].cpu()}
            start = stop

    def restore(self, step: int, own: OwnState) -> None:
        """Goes on after this step of a snapshot: amid a round, if the step is.

        A worker that the saved job did not have begins with the outer weights, and with another
        worker's inner optimizer.

        Raises:
            Failure: the snapshot has no local weights.
        """
        if LOCAL_WEIGHTS not in own.tensors:
            raise Failure(
                "the snapshot has no local weights, which --local-steps go on with: train anew elsewhere"
            )
        restore_state(self.inner, self.parameters, own.tensors)
        self.taken = step % self.every
        if self.is_streaming:
            self.due = self.leaving(self._step_of_round(step - 1))
            self._due_later = self.leaving(self._step_of_round(step))
        if own.is_own:
            self._kept = own.tensors[LOCAL_WEIGHTS].to(self.outer.device, copy=True)
        else:
            self._kept = self.outer.clone()

    def _step_of_round(self, step: int) -> int:
        """Returns which step of its round a step of the job is, from 1; 0 before the first."""
        return (step - 1) % self.every + 1 if step > 0 else 0
