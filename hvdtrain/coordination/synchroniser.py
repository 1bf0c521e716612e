"""What a mode does for one worker."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from hvdtrain.coordination.group import Group
from hvdtrain.wire.messages import PushStatus


class Rounds(NamedTuple):
    """What a worker's local steps came to since it began.

    Attributes:
        number: how often it sent all of Δ; a fragment counts as its share of that.
        largest: the share of Δ that is sent at once, at most.
        distances: each time that it took outer weights, ‖θ - θ_outer‖ / ‖θ_outer‖ (L2) of those weights just before.
            With an outer step of η = 1, β = 0 that is how far the worker was from the mean of all.
    """

    number: float
    largest: float
    distances: Sequence[float]


class RingBroken(Exception):
    """A step came to nothing on any worker, for one of them is lost: see Synchroniser.regroup."""


class Synchroniser(ABC):
    """Keeps a worker's model in step with the others', from its gradients. What a mode has no use for, does nothing.

    Attributes:
        group: this worker and the others.
        backend: what carries the gradients, for the manifest: `none`, `horovod-mpi`, `gloo`, `rpc` …
        push_status: what is known of this step's push, then or later; None where nothing is pushed.
        waited_s: seconds that forward waited for weights in this step.
        rounds: with --local-steps; else None.
        ended_round: whether this step was the last of some that workers took alone, all of them the same number.
        digest: training.step.digest of this worker's share, set before the step; after it, what this worker counts.
        report: shows the user a line.
    """

    group: Group
    backend: str = "none"
    digest: int = 0
    report: Callable[[str], None] = print

    @property
    def push_status(self) -> PushStatus | None:
        return None

    @property
    def waited_s(self) -> float:
        return 0.0

    @property
    def rounds(self) -> Rounds | None:
        return None

    @property
    def ended_round(self) -> bool:
        return False

    @abstractmethod
    def prepare(self, model: nn.Module) -> nn.Module:
        """Give every worker the first worker's weights, and return the module to call forward on."""

    @abstractmethod
    def restore(self, step: int, state: Mapping[str, torch.Tensor]) -> None:
        """Go on after this step of a snapshot, with the optimizer's state that it holds. All workers call it, after
        prepare.
        """

    @abstractmethod
    def optimizer_parts(self) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
        """The optimizer's state of all trained parameters, part by part, while no worker trains: where in their flat
        vector a part begins, and what numerics.optimizers.state_of gives for it. All workers call it and go through it,
        which may be what brings the parts together; only the one that leads needs to find any.
        """

    def set_accumulating(self, accumulating: bool) -> None:  # noqa: B027
        """Before forward: whether another pass of the same step follows, so that nothing is sent after this one's."""

    def skip_if_overtaken(self, step: int) -> bool:
        """Whether the others took this step without this worker, which leaves it out."""
        return False

    @abstractmethod
    def begin(self, step: int, lr: float) -> None:
        """Before forward: the number of the step, from 1, and its learning rate."""

    def wait(self) -> None:  # noqa: B027
        """After backward: return when this worker may go on. Exposed communication, as forward's waiting is.

        Raises:
            RingBroken: of an elastic ring.
        """

    def regroup(self) -> tuple[int, int]:
        """After RingBroken: form a ring with the workers that are there. This one's place, from 0, and their number."""
        raise NotImplementedError

    def let_join(self, state: Callable[[], dict[str, Any]]) -> tuple[int, int] | None:
        """Before an elastic ring's round of steps, all together: let those who wait join, who find this state. Where
        the ring is another one then, this worker's place in it, from 0, and their number.
        """
        return None

    def leave_alone(self) -> None:
        """Leave, between two steps, alone: the others go on."""
        raise NotImplementedError

    def update(self) -> None:  # noqa: B027
        """Apply the optimizer, where it runs on the worker."""

    def refresh(self) -> None:  # noqa: B027
        """Take the newest weights, before an evaluation or a snapshot. All workers call it together."""

    @abstractmethod
    def traffic(self, steps: int) -> tuple[int, int]:
        """Payload bytes of tensors that this process has sent and received, in so many steps since it began."""

    def ask_servers(self, question: str) -> list[Any]:
        """What each server answers: the question is a call of ps.desk.Desk without arguments, such as `cost`."""
        return []


def ring_traffic(ranks: int, payload: float) -> tuple[int, int]:
    """Bytes that each rank sends and receives where so many are all-reduced, by the formula: a ring of n sends and
    receives 2(n-1)/n of them (Patarasuk and Yuan, 2009). What carries them may take another way; no all-reduce sends
    less at its busiest rank.
    """
    moved = round(2 * (ranks - 1) / ranks * payload)
    return moved, moved
