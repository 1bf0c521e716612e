"""One bucket of the weights on its server: who has pushed what (the gate), when that is applied (the mode's policy),
and the weights themselves (the shard). It is plain state: drive it with plain calls.
"""

from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from hvdtrain.errors import Failure
from hvdtrain.numerics.optimizers import restore_state, state_of
from hvdtrain.wire.messages import GIVEN_UP, Answer, Applied, Outcome, Push, at_once, refuse_if

# A worker finishes the lease of a step while it is in the backward pass of the next: so many of its last pushes belong
# to leases that are open.
UNCONFIRMED = 2
_STATE = "optimizer."  # before the names of the optimizer's tensors, where they are saved
MakeOptimizer = Callable[[list[torch.Tensor]], torch.optim.Optimizer]


class Step(NamedTuple):
    """A step to take with the optimizer."""

    gradient: torch.Tensor
    lr: float
    made_of: Sequence[Push]  # whose gradients are in it
    look_ahead: float = 0.0  # workers are sent the weights as they would be after so many more steps like this one


class GoesOn(NamedTuple):
    """A worker that may go on with the weights as they are then, or ahead of that: see Answer."""

    worker: int
    staleness: int
    dropped: int = 0


class Decision(NamedTuple):
    """What a policy makes of a message."""

    steps: Sequence[Step] = ()  # to take, in order
    go_on: Sequence[GoesOn] = ()  # workers that are answered after that
    dropped: Sequence[Push] = ()  # pushes that are left out


class Policy:
    """When a bucket's pushes are applied and workers go on: the difference between the parameter-server modes."""

    compensation = 0.0  # of gradients for their delay: see Shard.compensate
    sum: torch.Tensor | None = None  # of gradients that no step was made of yet

    def begin(self, step: int) -> None:
        """Every worker has taken this step, of a snapshot, and none has pushed here yet."""

    def accept(self, push: Push, gradient: torch.Tensor | None, version: int) -> Decision:
        """Take a push of a step not seen before, with the weights at this version, and with its gradient, which is its
        own; without one where its share counts already.
        """
        raise NotImplementedError

    def flush(self) -> Decision:
        """Take a step with the pushes that wait for others to make one, if there are any."""
        return Decision()

    def idle(self, worker: int, step: int, at_barrier: bool) -> Decision:
        """The worker evaluates, or is done, after this step: no other waits for it until it pushes again, or, if it is
        at a barrier, until all are. Its push of that step may come later than this, on another thread.
        """
        return Decision()

    def join(self, worker: int, step: int) -> None:
        """One more worker is there, as if it had pushed this step. Failure where there cannot be more."""

    def lose(self, worker: int) -> Decision:
        """The worker is gone for good: no other waits for it. Failure where the others cannot go on."""
        return Decision()

    def waits(self, worker: int) -> bool:
        """Whether a push of this worker will be answered later."""
        return False


class Shard:
    """Weights with their optimizer's state.

    Args:
        weights: [bucket] float32; kept, not copied.
        make_optimizer: given the one parameter, its optimizer.
        compensation: see compensate.
    """

    def __init__(self, weights: torch.Tensor, make_optimizer: MakeOptimizer, compensation: float = 0.0) -> None:
        self.weights = weights
        self.readable_weights = weights.detach()  # the same memory, for whoever is sent it: see step
        self.readers: set[int] = set()  # workers that were sent this memory, which may still be on its way
        self.optimizer = make_optimizer([weights])
        self.version = 0  # how many steps were taken
        self.changes = 0  # of the weights or the optimizer's state
        self.predicted: torch.Tensor | None = None  # sent in place of the weights: see Step.look_ahead
        self.compensation = compensation
        # Of each worker, the weights that it works with, where that is asked for; at first all have the same.
        self._weights_of: dict[int, torch.Tensor] = {}
        self._first = weights.clone() if compensation else weights

    def step(self, gradient: torch.Tensor, lr: float, look_ahead: float) -> None:
        """Take one: see Step."""
        before = self.weights.clone() if look_ahead else None
        if self.readers:
            self.move(self.weights.clone())  # and leave the memory that they were in to those who read it
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.weights.grad = gradient
        self.optimizer.step()
        self.weights.grad = None
        self.predicted = before.lerp_(self.weights, 1 + look_ahead) if before is not None else None
        self.version += 1
        self.changes += 1

    def move(self, weights: torch.Tensor) -> None:
        """Have the weights in this memory from now on."""
        self.weights.data = weights
        self.readable_weights, self.readers = self.weights.detach(), set()

    def answer(self, worker: int, staleness: int = 0, dropped: int = 0, current: bool = False) -> Answer:
        """What a worker is sent: the weights as predicted, if they are, or `current`. Nobody changes that before it
        pushes again.
        """
        if self.predicted is not None and not current:
            return Answer(self.version, staleness, self.predicted, dropped)
        self.readers.add(worker)
        if self.compensation:
            self._weights_of[worker] = self.readable_weights
        return Answer(self.version, staleness, self.readable_weights, dropped)

    def compensate(self, worker: int, gradient: torch.Tensor) -> None:
        """Delay compensation, DC-ASGD (Zheng et al., 2017, arXiv:1609.08326, eq. 10): the gradient g of weights that
        have moved by d since it was computed becomes g + λ g² d.
        """
        moved = self.weights - self._weights_of.get(worker, self._first)
        gradient.addcmul_(moved.mul_(gradient), gradient, value=self.compensation)

    def forget(self, worker: int) -> None:
        """The worker reads nothing any more."""
        self.readers.discard(worker)
        self._weights_of.pop(worker, None)


@dataclass
class Gate:
    """What was pushed to a bucket: each push counts at most once."""

    last: dict[int, int] = field(default_factory=dict)  # worker -> the step of its last push
    lost: set[int] = field(default_factory=set)  # workers
    shares: dict[int, deque[int]] = field(default_factory=dict)  # worker -> the leased shares of its last pushes
    # Those of workers that were lost before they knew that this bucket has them.
    counted_shares: set[int] = field(default_factory=set)
    sent: dict[int, int] = field(default_factory=dict)  # worker -> the version that answered its last push
    idled: dict[int, int] = field(default_factory=dict)  # worker -> the number of its last call of idle


class Bucket:
    """A contiguous range of the flat weights.

    Args:
        weights, make_optimizer: see Shard.
        policy: when pushes are applied.
        answers_again: who pushes a step again that was taken is answered again, unless it is to wait: the answer may
            have been lost with a server that was killed.
    """

    def __init__(
        self, weights: torch.Tensor, make_optimizer: MakeOptimizer, policy: Policy, answers_again: bool = False
    ) -> None:
        self.shard = Shard(weights, make_optimizer, policy.compensation)
        self.gate, self.policy, self.answers_again = Gate(), policy, answers_again

    def has(self, push: Push) -> bool:
        """Whether it was here before: its worker has not heard of that, or still waits."""
        return push.step <= self.gate.last.get(push.worker, 0)

    def push(self, push: Push, gradient: torch.Tensor | None) -> Outcome:
        """Take a push, which is kept without what was sent, and its gradient, [bucket] float32, its own to overwrite
        until the push is answered. Replies go to all workers that may go on now, its own among them or later. A push of
        a step that was pushed before is dropped: that one is applied, and answered.
        """
        worker, gate, left_out = push.worker, self.gate, []
        if worker in gate.lost:
            raise Failure(GIVEN_UP)
        if self.has(push):
            again = self.answers_again and not self.policy.waits(worker)
            return self._outcome(Decision(go_on=[GoesOn(worker, 0)] if again else ()), worker)
        gate.last[worker] = push.step
        gate.sent.pop(worker, None)
        if push.share in gate.counted_shares:
            left_out, gradient = [push], None
        elif push.share is not None:
            gate.shares.setdefault(worker, deque(maxlen=UNCONFIRMED)).append(push.share)
        if gradient is not None and self.shard.compensation:
            self.shard.compensate(worker, gradient)
        self.shard.readers.discard(worker)  # it has had its answer, or it could not have computed this
        return self._outcome(self.policy.accept(push, gradient, self.shard.version), worker, left_out)

    def _outcome(self, decision: Decision, asked: int | None = None, left_out: Sequence[Push] = ()) -> Outcome:
        """Do what the policy has decided; these pushes were left out before that."""
        shard, replies = self.shard, {}
        lines = [Applied(push.worker, push.step, push.version_read, None) for push in (*left_out, *decision.dropped)]
        for gradient, lr, made_of, look_ahead in decision.steps:
            shard.step(gradient, lr, look_ahead)
            for push in made_of:
                lines.append(Applied(push.worker, push.step, push.version_read, shard.version))
        for worker, staleness, dropped in decision.go_on:
            self.gate.sent[worker] = shard.version
            replies[worker] = shard.answer(worker, staleness, dropped)
        return Outcome(replies, lines, asked)

    def flush(self) -> Outcome:
        """Take a step with the pushes that wait for others, if there are any."""
        return self._outcome(self.policy.flush())

    def pull(self, worker: int) -> Outcome:
        """The weights as they are, for a worker that pushes nothing before it has them."""
        refuse_if(worker in self.gate.lost)
        self.gate.sent[worker] = self.shard.version
        return Outcome({worker: self.shard.answer(worker, current=True)}, asked=worker)

    def idle(self, worker: int, step: int, at_barrier: bool, number: int = 0) -> Outcome:
        """The worker pushes nothing for now, after this step; replies go to workers that waited for it. The number is
        that of this call among those of the worker, from 1: one that comes again changes nothing; 0: it does not.
        """
        refuse_if(worker in self.gate.lost)
        if 0 < number <= self.gate.idled.get(worker, 0):
            return Outcome()
        self.gate.idled[worker] = number
        return self._outcome(self.policy.idle(worker, step, at_barrier))

    def slowest(self, otherwise: int) -> Outcome:
        """The least step of the last pushes of those that are there; `otherwise` where none has pushed."""
        steps = (step for worker, step in self.gate.last.items() if worker not in self.gate.lost)
        return at_once(min(steps, default=otherwise))

    def join(self, worker: int, step: int) -> Outcome:
        """One more worker is there, whose next step comes after this one. Failure where it was lost meanwhile, or this
        mode lets nobody join.
        """
        refuse_if(worker in self.gate.lost)
        self.policy.join(worker, step)
        self.gate.last[worker] = step
        return Outcome()

    def lose(self, worker: int) -> Outcome:
        """The worker is gone for good; replies go to workers that waited for it. What it has pushed here counts: the
        shares that it had not finished are leased again, and whoever pushes one of these then is answered, and the push
        dropped. So each share counts once in each bucket, whichever of them a push had reached. Failure where the
        others cannot go on without it.
        """
        gate = self.gate
        if worker in gate.lost:
            return Outcome()
        decision, left_out = self.policy.lose(worker), []
        gate.lost.add(worker)
        self.shard.forget(worker)
        gate.counted_shares.update(gate.shares.pop(worker, ()))
        if (read := gate.sent.pop(worker, None)) is not None:  # other buckets may have its next push
            left_out.append(Push(worker, gate.last.get(worker, 0) + 1, read, 0.0, None))
        return self._outcome(decision, left_out=left_out)

    def resume(self, step: int, state: Mapping[str, torch.Tensor]) -> Outcome:
        """Go on as after this step of every worker, of a snapshot, with the optimizer's state that it has, as
        numerics.optimizers.state_of gives it.
        """
        restore_state(self.shard.optimizer, [self.shard.weights], state)
        self.shard.predicted = None
        self.shard.changes += 1
        self.policy.begin(step)
        return Outcome()

    def optimizer_state(self) -> Outcome:
        """The optimizer's state of this bucket, as resume takes it."""
        return at_once(state_of(self.shard.optimizer, [self.shard.weights]))

    def state(self) -> tuple[Any, dict[str, tuple[torch.Tensor | None, Hashable]]]:
        """See Part."""
        shard, policy = self.shard, vars(self.policy) | {"sum": None}
        tensors = {"weights": shard.weights.detach(), "predicted": shard.predicted}
        tensors |= {_STATE + name: value for name, value in shard.optimizer.state.get(shard.weights, {}).items()}
        stamped = {name: (tensor, shard.changes) for name, tensor in tensors.items()}
        return (vars(self.gate), policy, shard.version), stamped | {"sum": (self.policy.sum, object())}

    def restore(self, plain: Any, tensors: Mapping[str, torch.Tensor]) -> None:
        """See Part."""
        gate, policy, self.shard.version = plain
        vars(self.gate).update(gate)
        vars(self.policy).update(policy, sum=tensors.get("sum"))
        self.shard.move(tensors["weights"])
        if state := {n.removeprefix(_STATE): value for n, value in tensors.items() if n.startswith(_STATE)}:
            self.shard.optimizer.state[self.shard.weights] = state
        self.shard.predicted = tensors.get("predicted")
