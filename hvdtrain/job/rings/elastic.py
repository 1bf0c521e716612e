"""Elastic rings in any mode.

Elastic wraps a plain ring, and has a membership: all workers that are there take a step, or none.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from hvdtrain.base.numerics.clock import Stretch
from hvdtrain.base.numerics.flat import trained
from hvdtrain.base.numerics.optimizers import put_together
from hvdtrain.job.coordination.synchroniser import NO_STATE, OwnState, Synchroniser
from hvdtrain.job.rings.elastic_group import ElasticGroup
from hvdtrain.job.rings.membership import Membership
from hvdtrain.job.rings.restartable import RestartableRing


class Elastic(Synchroniser):
    """A synchroniser whose workers may be lost, and may join.

    Args:
        group: the workers that are there.
        ring: averages gradients, and is started again when workers change.
        joins: whether this worker joins a job that runs. It comes into a ring when it is ready:
            see let_join.
    """

    group: ElasticGroup
    model: nn.Module

    def __init__(self, group: ElasticGroup, ring: RestartableRing, joins: bool) -> None:
        self.group = group
        self.ring = ring
        self.inner = ring.inner
        self.membership = Membership(group, ring)
        self.joins = joins
        self.backend = self.inner.backend
        # The tensors that forward changes, and copies from before the step.
        self._before: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._sent = 0  # bytes
        group.report = lambda line: self.report(line)

    def prepare(self, model: nn.Module) -> nn.Module:
        """Prepares the model, and forms the first ring.

        All workers have the same weights, by the seed or a snapshot.
        """
        self.model = model
        module = self.ring.prepare(model)
        if not self.joins:
            self.membership.form()
        return module

    def begin(self, step: int, lr: float) -> None:
        self.inner.begin(step, lr)
        self._before = [(buffer, buffer.clone()) for buffer in self.model.buffers()]

    def wait(self) -> None:
        """Blocks until all workers have all averages, and takes the step where `update` does not.

        Raises:
            RingBroken: some worker lacks averages, or is lost.
        """
        problem = self.ring.wait()
        self.digest = self.membership.agree(problem, self.digest)
        self.ring.apply()
        self._sent += self.ring.take_sent()

    def update(self) -> None:
        self.inner.update()

    def regroup(self) -> tuple[int, int]:
        for buffer, before in self._before:
            buffer.copy_(before)
        self.membership.form()
        return self.membership.place

    def let_join(self, state: Callable[[], dict[str, Any]]) -> tuple[int, int] | None:
        if self.group.leads:
            self.group.open_for_joining(lambda: self._whole(state()))
        self.membership.together(lambda: None)
        place = self.membership.take_change()
        if place:
            self.ring.take_in()
        return place

    def _whole(self, state: dict[str, Any]) -> dict[str, Any]:
        """Returns the state with what is the same on all workers, for a worker that joins."""
        optimizer: dict[str, torch.Tensor] = {}
        if self.ring.each_has_all:  # otherwise the optimizer's state comes when the ring starts
            elements = sum(p.numel() for p in trained(self.model))
            optimizer = put_together(self.inner.optimizer_parts(), elements)
        step = state["history"]["step"]
        return state | {"step": step, "weights": self.model.state_dict(), "optimizer": optimizer}

    def leave_alone(self) -> None:
        self.group.leave_alone()

    def refresh(self) -> None:
        self.membership.together(self.inner.refresh)

    def restore(
        self, step: int, state: Mapping[str, torch.Tensor], own: OwnState = NO_STATE
    ) -> None:
        self.inner.restore(step, state, own)

    def optimizer_parts(self) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
        return self.ring.optimizer_parts(self.membership.together)

    def own_parts(self) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
        return self.inner.own_parts()

    def set_accumulating(self, accumulating: bool) -> None:
        self.inner.set_accumulating(accumulating)

    def updates(self) -> Sequence[Stretch]:
        return self.inner.updates()

    @property
    def waits(self) -> Sequence[Stretch]:
        return self.inner.waits

    def traffic(self, steps: int) -> tuple[int, int]:
        return self._sent, self._sent

    def ask_servers(self, question: str) -> list[Any]:
        """Returns the first worker's answer to `lives`: a ring has no servers."""
        return [self.group.lives()] if question == "lives" else []
