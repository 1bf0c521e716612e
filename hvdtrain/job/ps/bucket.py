"""One bucket of the weights on its server.

A bucket knows which pushes it has had (the gate), when pushes are applied (the mode's policy), and
the weights. It is plain state: tests drive it with plain calls.
"""

from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from hvdtrain.base.numerics.optimizers import Settings, restore_state, state_of, use_settings
from hvdtrain.job.ps.policy import Policy, PolicyDecision, Update
from hvdtrain.job.wire.messages import FreshWeights, LedgerLine, Push, refuse_if

# A worker finishes the lease of a step while it is in the backward pass of the next one: so many
# of its last pushes belong to leases that are open.
UNCONFIRMED = 2
_OPTIMIZER = "optimizer."  # before the names of the optimizer's tensors, where they are saved
MakeOptimizer = Callable[[list[torch.Tensor]], torch.optim.Optimizer]
Answers = dict[int, FreshWeights]  # by worker


class WeightsMemory(Protocol):
    """The memory that a bucket's weights are in while workers are sent them."""

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a copy of a tensor, in this memory."""

    def is_read(self, tensor: torch.Tensor) -> bool:
        """Returns whether a worker that was sent this tensor may still read it.

        True where nobody knows.
        """


class OwnMemory:
    """Memory of this process: nobody knows whether a message was sent whole."""

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    def is_read(self, tensor: torch.Tensor) -> bool:
        return True


class BucketWeights:
    """A bucket's weights with their optimizer.

    Workers are sent the weights' memory itself. Where one may still read it, the next update leaves
    that memory to the workers, and goes on in a copy.

    Args:
        tensor: [bucket] float32; kept, not copied.
        make_optimizer: makes the optimizer of a list with this one parameter.
        compensation: see compensate.
        memory: the memory that copies are in.

    Attributes:
        readers: the workers that were sent the present memory, and have not pushed since, without
            those that are lost.
        version: the number of updates.
        changes: how often the weights or the optimizer's state were changed.
        predicted: [bucket] float32, what workers are sent in place of the weights, if anything:
            see Update.look_ahead.
    """

    def __init__(
        self,
        tensor: torch.Tensor,
        make_optimizer: MakeOptimizer,
        compensation: float = 0.0,
        memory: WeightsMemory | None = None,
    ) -> None:
        self.tensor = tensor
        self.memory = memory or OwnMemory()
        self.optimizer = make_optimizer([tensor])
        self.version = 0
        self.changes = 0
        self.predicted: torch.Tensor | None = None
        self.compensation = compensation
        self.readers: set[int] = set()
        self._readable = tensor.detach()  # the same memory, for whoever is sent it
        # With compensation, the weights that each worker computes with; the initial ones at first.
        self._initial = tensor.clone() if compensation else tensor
        self._read_by: dict[int, torch.Tensor] = {}

    def apply(self, update: Update) -> None:
        """Takes a step of the optimizer."""
        before = self.memory.keep(self.tensor) if update.look_ahead else None
        if self._are_read():
            self.move_to(self.memory.keep(self.tensor))
        others = update.pushes[-1].settings if update.pushes else {}
        use_settings(self.optimizer, Settings(update.lr, others))
        self.tensor.grad = update.gradient
        self.optimizer.step()
        self.tensor.grad = None
        self.predicted = None
        if before is not None:
            self.predicted = before.lerp_(self.tensor, 1 + update.look_ahead)
        self.version += 1
        self.changes += 1

    def _are_read(self) -> bool:
        """Returns whether a worker may still read the present memory, or is compensated by it."""
        if not self.readers:
            return False
        return bool(self.compensation) or self.memory.is_read(self.tensor)

    def move_to(self, memory: torch.Tensor) -> None:
        """Goes on with the weights in this memory, which no worker has been sent."""
        self.tensor.data = memory
        self._readable = self.tensor.detach()
        self.readers = set()

    def answer(
        self, worker: int, staleness: int = 0, dropped: int = 0, current: bool = False
    ) -> FreshWeights:
        """Returns the weights for a worker, which nobody changes while it may read them.

        Args:
            worker: the worker's number.
            staleness, dropped: see FreshWeights.
            current: the weights as they are, where others are predicted.
        """
        if self.predicted is not None and not current:
            return FreshWeights(self.version, staleness, self.predicted, dropped)
        self.readers.add(worker)
        if self.compensation:
            self._read_by[worker] = self._readable
        return FreshWeights(self.version, staleness, self._readable, dropped)

    def compensate(self, worker: int, gradient: torch.Tensor) -> None:
        """Compensates a gradient for its delay, in place.

        A gradient g of weights that have moved by d since they were read becomes g + λ g² d:
        DC-ASGD (Zheng et al., 2017, arXiv:1609.08326, eq. 10).
        """
        moved = self.tensor - self._read_by.get(worker, self._initial)
        gradient.addcmul_(moved.mul_(gradient), gradient, value=self.compensation)

    def forget(self, worker: int) -> None:
        """Forgets a worker, which reads nothing any more."""
        self.readers.discard(worker)
        self._read_by.pop(worker, None)


@dataclass
class Gate:
    """Which pushes a bucket has had, so that each counts at most once.

    Attributes:
        last: the step of each worker's last push.
        lost: the workers that are lost.
        shares: the leased shares of each worker's last pushes.
        counted_shares: of these, shares of workers that were lost before they knew that this
            bucket has them.
        sent: the version that answered each worker's last push.
        idled: the number of each worker's last call of idle.
    """

    last: dict[int, int] = field(default_factory=dict)
    lost: set[int] = field(default_factory=set)
    shares: dict[int, deque[int]] = field(default_factory=dict)
    counted_shares: set[int] = field(default_factory=set)
    sent: dict[int, int] = field(default_factory=dict)
    idled: dict[int, int] = field(default_factory=dict)


class Bucket:
    """A contiguous range of the flat weights.

    Args:
        tensor, make_optimizer, memory: see BucketWeights.
        policy: decides when pushes are applied.
        answers_again: a worker that pushes the same step again is answered again, unless its push
            is held. The first answer may have been lost with a server that was killed.
    """

    def __init__(
        self,
        tensor: torch.Tensor,
        make_optimizer: MakeOptimizer,
        policy: Policy,
        answers_again: bool = False,
        memory: WeightsMemory | None = None,
    ) -> None:
        self.weights = BucketWeights(tensor, make_optimizer, policy.compensation, memory)
        self.gate = Gate()
        self.policy = policy
        self.answers_again = answers_again
        self._lines: list[LedgerLine] = []

    def has_had(self, push: Push) -> bool:
        """Returns whether this push was taken before. It comes again where its answer was lost."""
        return push.step <= self.gate.last.get(push.worker, 0)

    def push(self, push: Push, gradient: torch.Tensor | None) -> Answers:
        """Takes a push: the policy decides what is applied now, and who goes on.

        Args:
            push: the push, without the tensors that were sent.
            gradient: [bucket] float32, which may be overwritten until the push is answered. None
                where the bucket has had this push.

        Returns:
            The answers to all workers that go on now. The push's own worker may be among them, or
            is answered later.

        Raises:
            Failure: the worker is lost.
        """
        worker = push.worker
        refuse_if(worker in self.gate.lost)
        if self.has_had(push):
            return self._answer_again(worker)
        self.gate.last[worker] = push.step
        self.gate.sent.pop(worker, None)
        if push.share in self.gate.counted_shares:
            self._record(push, None)
            gradient = None
        elif push.share is not None:
            confirmed_later = self.gate.shares.setdefault(worker, deque(maxlen=UNCONFIRMED))
            confirmed_later.append(push.share)
        if gradient is not None and self.weights.compensation:
            self.weights.compensate(worker, gradient)
        # The worker has read its last answer, or it could not have computed this gradient.
        self.weights.readers.discard(worker)
        decision = self.policy.accept(push, gradient, self.weights.version)
        return self._carry_out(decision)

    def _answer_again(self, worker: int) -> Answers:
        if not self.answers_again or self.policy.waits(worker):
            return {}
        return {worker: self._answer(worker)}

    def _carry_out(self, decision: PolicyDecision) -> Answers:
        """Applies the updates; returns the answers to the workers that go on."""
        for push in decision.dropped:
            self._record(push, None)
        for update in decision.updates:
            self.weights.apply(update)
            for push in update.pushes:
                self._record(push, self.weights.version)
        return {
            worker: self._answer(worker, staleness, dropped)
            for worker, staleness, dropped in decision.released
        }

    def _answer(self, worker: int, staleness: int = 0, dropped: int = 0) -> FreshWeights:
        self.gate.sent[worker] = self.weights.version
        return self.weights.answer(worker, staleness, dropped)

    def _record(self, push: Push, version: int | None) -> None:
        self._lines.append(LedgerLine(push.worker, push.step, push.version_read, version))

    def take_lines(self) -> Sequence[LedgerLine]:
        """See Part."""
        lines = self._lines
        self._lines = []
        return lines

    def flush(self) -> Answers:
        """Makes an update of the pushes that wait for others, if there are any."""
        return self._carry_out(self.policy.flush())

    def pull(self, worker: int) -> FreshWeights:
        """Returns the weights as they are, for a worker that pushes nothing before it has them.

        Raises:
            Failure: the worker is lost.
        """
        refuse_if(worker in self.gate.lost)
        self.gate.sent[worker] = self.weights.version
        return self.weights.answer(worker, current=True)

    def idle(self, worker: int, step: int, at_barrier: bool, call: int = 0) -> Answers:
        """Takes note that a worker pushes nothing for now, after this step.

        Args:
            worker, step, at_barrier: see Policy.idle.
            call: counts the worker's calls of this method, from 1, so that a call that comes again
                changes nothing. 0: this call never comes again.

        Returns:
            The answers to workers that waited for this one.

        Raises:
            Failure: the worker is lost.
        """
        refuse_if(worker in self.gate.lost)
        if 0 < call <= self.gate.idled.get(worker, 0):
            return {}
        self.gate.idled[worker] = call
        return self._carry_out(self.policy.idle(worker, step, at_barrier))

    def slowest(self, default: int) -> int:
        """Returns the least step of the present workers' last pushes."""
        present = [step for worker, step in self.gate.last.items() if worker not in self.gate.lost]
        return min(present, default=default)

    def join(self, worker: int, step: int) -> None:
        """Counts a new worker in, as if it had pushed this step.

        Raises:
            Failure: the worker is lost already, or the mode lets nobody join.
        """
        refuse_if(worker in self.gate.lost)
        self.policy.join(worker, step)
        self.gate.last[worker] = step

    def lose(self, worker: int) -> Answers:
        """Goes on without a worker. What it has pushed here counts.

        Shares that the worker had not finished are leased again. A push of such a share is
        answered here, and left out: so each share counts once in each bucket, wherever the lost
        worker's pushes had arrived.

        Returns:
            The answers to workers that waited for this one.

        Raises:
            Failure: the mode needs all of its workers.
        """
        gate = self.gate
        if worker in gate.lost:
            return {}
        decision = self.policy.lose(worker)
        gate.lost.add(worker)
        self.weights.forget(worker)
        gate.counted_shares.update(gate.shares.pop(worker, ()))
        version_read = gate.sent.pop(worker, None)
        if version_read is not None:  # other buckets may have the worker's next push
            next_step = gate.last.get(worker, 0) + 1
            self._record(Push(worker, next_step, version_read, 0.0, None), None)
        return self._carry_out(decision)

    def resume(self, step: int, state: Mapping[str, torch.Tensor]) -> None:
        """Goes on after this step of a snapshot.

        Args:
            step: the last step of every worker.
            state: the optimizer's state, as numerics.optimizers.state_of returns it.
        """
        weights = self.weights
        restore_state(weights.optimizer, [weights.tensor], state)
        weights.predicted = None
        weights.changes += 1
        self.policy.begin(step)

    def optimizer_state(self) -> dict[str, torch.Tensor]:
        """Returns the state of this bucket's optimizer, as resume takes it."""
        return state_of(self.weights.optimizer, [self.weights.tensor])

    def state(self) -> tuple[Any, dict[str, tuple[torch.Tensor | None, Hashable]]]:
        """See Part."""
        weights = self.weights
        tensors = {"weights": weights.tensor.detach(), "predicted": weights.predicted}
        for name, value in weights.optimizer.state.get(weights.tensor, {}).items():
            tensors[_OPTIMIZER + name] = value
        stamped: dict[str, tuple[torch.Tensor | None, Hashable]] = {
            name: (tensor, weights.changes) for name, tensor in tensors.items()
        }
        stamped["sum"] = (self.policy.sum, object())  # a new stamp: it may change at any push
        policy = vars(self.policy) | {"sum": None}
        return (vars(self.gate), policy, weights.version), stamped

    def restore(self, plain: Any, tensors: Mapping[str, torch.Tensor]) -> None:
        """See Part."""
        gate, policy, version = plain
        vars(self.gate).update(gate)
        vars(self.policy).update(policy, sum=tensors.get("sum"))
        weights = self.weights
        weights.version = version
        weights.move_to(weights.memory.keep(tensors["weights"]))
        optimizer_state = {
            name.removeprefix(_OPTIMIZER): tensor
            for name, tensor in tensors.items()
            if name.startswith(_OPTIMIZER)
        }
        if optimizer_state:
            weights.optimizer.state[weights.tensor] = optimizer_state
        weights.predicted = tensors.get("predicted")
