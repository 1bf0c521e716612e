"""A mode's work for one worker."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import nn

from hvdtrain.base.numerics.clock import Stretch
from hvdtrain.job.coordination.group import Group
from hvdtrain.job.wire.messages import PushStatus


class Rounds(NamedTuple):
    """The results of a worker's local steps (--local-steps) since it began.

    Attributes:
        number: how often the worker sent all of Δ; a fragment counts as its share of Δ.
        largest: the largest share of Δ that is sent at once.
        distances: ‖θ - θ_outer‖ / ‖θ_outer‖ (L2) just before each time that the worker took outer
            weights. With an outer step of η = 1, β = 0 this is the worker's distance from the mean
            of all workers.
    """

    number: float
    largest: float
    distances: Sequence[float]


class OwnState(NamedTuple):
    """A worker's own part of a snapshot, for a worker to go on with: see Synchroniser.own_parts.

    Attributes:
        tensors: flat vectors over the trained parameters, [parameters] float32, by name, and
            one-element counts.
        is_own: whether the tensors are this worker's. The job that was saved may not have had this
            worker; the tensors are another's then.
    """

    tensors: Mapping[str, torch.Tensor] = {}
    is_own: bool = True


NO_STATE = OwnState()


class RingBroken(Exception):
    """Raised on every worker when a worker is lost and the step has to be repeated: see regroup."""


class Synchroniser(ABC):
    """Keeps a worker's model in step with the others'.

    Methods that a mode does not need do nothing.

    Attributes:
        group: this worker and the others.
        backend: what carries the gradients, for the manifest: `none`, `horovod-mpi`, `gloo`, `rpc`
            …
        push_status: the state of this step's push, which may be answered later; None where nothing
            is pushed.
        waits: when this step waited for weights, from `begin` on, by the stopwatch of the worker's
            device.
        rounds: the figures of the local steps; None without --local-steps.
        ended_round: whether this step ended a round of local steps, of which all workers took the
            same number.
        digest: training.step.digest of this worker's share, set before the step. After the step,
            what this worker counts.
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
    def waits(self) -> Sequence[Stretch]:
        return ()

    @property
    def rounds(self) -> Rounds | None:
        return None

    @property
    def ended_round(self) -> bool:
        return False

    @abstractmethod
    def prepare(self, model: nn.Module) -> nn.Module:
        """Gives every worker the first worker's weights; returns the module to call forward on."""

    @abstractmethod
    def restore(
        self, step: int, state: Mapping[str, torch.Tensor], own: OwnState = NO_STATE
    ) -> None:
        """Goes on after this step of a snapshot. All workers call this, after prepare.

        Args:
            step: the last step of the snapshot.
            state: the optimizer's state that the snapshot holds.
            own: what the snapshot holds for this worker.
        """

    @abstractmethod
    def optimizer_parts(self) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
        """Yields the optimizer's state of all trained parameters, part by part.

        All workers call this while none trains, and go through the iterator, which may be what
        brings the parts together. Only the leading worker has to get any parts.

        Yields:
            Where in the flat vector a part begins, and numerics.optimizers.state_of of it.
        """

    def own_parts(self) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
        """Yields the state that this worker alone has and a snapshot needs, part by part.

        This waits for nobody.

        Yields:
            As optimizer_parts.
        """
        return iter(())

    def set_accumulating(self, accumulating: bool) -> None:  # noqa: B027
        """Sets, before forward, whether another pass of the same step follows.

        Nothing is sent after this pass then.
        """

    def skip_if_overtaken(self, step: int) -> bool:
        """Returns whether the others took this step without this worker, which leaves it out."""
        return False

    @abstractmethod
    def begin(self, step: int, lr: float) -> None:
        """Begins a step, before forward.

        Args:
            step: the number of the step, from 1.
            lr: the learning rate of the step.
        """

    def wait(self) -> None:  # noqa: B027
        """Blocks, after backward, until this worker may go on.

        This time is exposed communication, as the time that forward waits.

        Raises:
            RingBroken: an elastic ring has lost a worker.
        """

    def regroup(self) -> tuple[int, int]:
        """Forms a ring, after RingBroken, with the workers that are there.

        Returns:
            This worker's place in the ring, from 0, and the number of workers.
        """
        raise NotImplementedError

    def let_join(self, state: Callable[[], dict[str, Any]]) -> tuple[int, int] | None:
        """Lets waiting workers join an elastic ring. All workers call this before a round of steps.

        Args:
            state: returns the state that workers find who join.

        Returns:
            This worker's place in the new ring, from 0, and the number of workers. None where the
            ring has stayed the same.
        """
        return None

    def leave_alone(self) -> None:
        """Leaves alone, between two steps, while the others go on."""
        raise NotImplementedError

    def update(self) -> None:  # noqa: B027
        """Takes the optimizer's step, where it is taken once all gradients are there.

        So it is in `single`, in `ddp` and with local steps. Other rings take it bucket by bucket as
        averages come, and servers take it themselves.
        """

    def updates(self) -> Sequence[Stretch]:
        """Returns when the optimizer was at work outside of `update`, since the last call."""
        return ()

    def refresh(self) -> None:  # noqa: B027
        """Takes the newest weights, before an evaluation or a snapshot.

        All workers call this together.
        """

    def idle(self) -> None:  # noqa: B027
        """Tells the servers that this worker sends nothing before all workers have met."""

    def mean_over_workers(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the elementwise mean over the workers of a flat CPU tensor, on every worker.

        All workers call this together. The group averages, unless the mode can carry tensors from
        worker to worker.

        Args:
            values: [n], of floats; may be overwritten.
        """
        return self.group.mean(values)

    @abstractmethod
    def traffic(self, steps: int) -> tuple[int, int]:
        """Returns the payload bytes of tensors that this process has sent and received.

        Args:
            steps: how many steps the process has taken since it began.
        """

    def ask_servers(self, question: str) -> list[Any]:
        """Returns each server's answer to a call without arguments, such as `cost`.

        Args:
            question: one of ps.server.Server.calls.
        """
        return []


@runtime_checkable
class LeasesShares(Protocol):
    """What leases shares of global batches from the servers, for whichever worker is ready."""

    def begin_shares(self, begin: int, end: int) -> None:
        """Begins to lease shares from `begin` to `end`, the last one excluded.

        All workers call this together, with the same shares. From now on each backward pass
        requests the next share, so that the answer is there when the step is over.
        """

    def next_share(self) -> tuple[int | None, int]:
        """Returns the share to train on next, once it is leased.

        Called by the thread that makes the next batch, while the main thread trains on this one.

        Returns:
            The number of the share; None when all shares of the round are finished. Then the first
            share that was not leased comes with it.
        """

    def take_share(self, number: int, steps: int) -> None:
        """Lets the next step begin with this share, or the next round of so many local steps."""

    def open_for_joining(self, state: dict[str, Any]) -> None:
        """Lets workers join from now on, who find this state.

        The worker that leads calls this before begin_shares.
        """

    def pause_leases(self) -> None:
        """Ends the round of leases early, for all workers."""


def ring_traffic(ranks: int, payload: float) -> tuple[int, int]:
    """Returns the bytes that each rank of a ring all-reduce sends and receives, by formula.

    A ring of n ranks sends and receives 2(n-1)/n of the payload (Patarasuk and Yuan, 2009). The
    transport may use another algorithm; no all-reduce sends less at its busiest rank.

    Args:
        ranks: the number of ranks.
        payload: bytes that are all-reduced.
    """
    moved = round(2 * (ranks - 1) / ranks * payload)
    return moved, moved
