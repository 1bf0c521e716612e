"""What a mode does for one worker, and what the modes share whose workers each apply the update themselves."""

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import nn

from hvdtrain.coordination.group import Group
from hvdtrain.coordination.job import Job
from hvdtrain.numerics.flat import trained
from hvdtrain.numerics.optimizers import make_optimizer, restore_state, set_lr, state_of
from hvdtrain.wire.messages import PushStatus


class Synchroniser(Protocol):
    """Keeps a worker's model in step with the others', from its gradients.

    Attributes:
        group: this worker and the others.
        backend: what carries the gradients, for the manifest: `none`, `horovod-mpi`, `gloo`, `rpc` …
        push_status: what is known of this step's push, now or later; None where nothing is pushed.
        waited_s: seconds that forward waited for weights in this step.
    """

    group: Group
    backend: str

    @property
    def push_status(self) -> PushStatus | None: ...

    @property
    def waited_s(self) -> float: ...

    def prepare(self, model: nn.Module) -> nn.Module:
        """Give every worker the first worker's weights, and return the module to call forward on."""

    def restore(self, step: int, state: Mapping[str, torch.Tensor]) -> None:
        """Go on after this step of a snapshot, with the optimizer's state that it holds. All workers call it, after
        prepare.
        """

    def optimizer_parts(self) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
        """The optimizer's state of all trained parameters, part by part, while no worker trains: where in their flat
        vector a part begins, and what numerics.optimizers.state_of gives for it. Nothing where only the first worker
        can ask for it, and this is another.
        """

    def set_accumulating(self, accumulating: bool) -> None:
        """Before forward: whether another pass of the same step follows, so that nothing is sent after this one's."""

    def skip_if_overtaken(self, step: int) -> bool:
        """Whether the others took this step without this worker, which leaves it out."""

    def begin(self, step: int, lr: float) -> None:
        """Before forward: the number of the step, from 1, and its learning rate."""

    def wait(self) -> None:
        """After backward: return when this worker may go on. Exposed communication, as forward's waiting is."""

    def update(self) -> None:
        """Apply the optimizer, where it runs on the worker."""

    def refresh(self) -> None:
        """Take the newest weights, before an evaluation or a snapshot. All workers call it together."""

    def idle(self) -> None:
        """Before workers that are not in lockstep wait for all others at a barrier: let no push wait for this one."""

    def traffic(self, steps: int) -> tuple[int, int]:
        """Payload bytes of tensors that this process has sent and received, in so many steps since it began."""

    def ask_servers(self, question: str) -> list[Any]:
        """What each server answers: the question is a call of ps.desk.Desk without arguments, such as `cost`."""


class LocalUpdate:
    """What modes share whose workers all apply the same update to their own weights.

    Such a mode adds `group` and `prepare`, which makes `optimizer`, and as far as gradients are not averaged in
    backward itself, `wait` and `update`.

    Attributes:
        message: payload bytes of a step's gradients, as they are averaged.
    """

    group: Group
    backend = "none"
    message = 0.0
    push_status = None
    waited_s = 0.0
    optimizer: torch.optim.Optimizer
    parameters: list[nn.Parameter]

    def __init__(self, job: Job, group: Group) -> None:
        self.config, self.world, self.group = job.config, job.world, group

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        self.parameters = trained(model)
        return make_optimizer(self.config, self.parameters)

    def restore(self, step: int, state: Mapping[str, torch.Tensor]) -> None:
        restore_state(self.optimizer, self.parameters, state)

    def optimizer_parts(self) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
        start = 0
        for p in self.parameters:
            yield start, state_of(self.optimizer, [p])
            start += p.numel()

    def set_accumulating(self, accumulating: bool) -> None:
        pass

    def skip_if_overtaken(self, step: int) -> bool:
        return False

    def begin(self, step: int, lr: float) -> None:
        set_lr(self.optimizer, lr)

    def wait(self) -> None:
        pass

    def update(self) -> None:
        self.optimizer.step()

    def refresh(self) -> None:
        pass

    def idle(self) -> None:
        pass

    def traffic(self, steps: int) -> tuple[int, int]:
        """By the formula: a ring of n sends and receives 2(n-1)/n of the message at each rank (Patarasuk and Yuan,
        2009). What carries it may take another way; no all-reduce sends less at its busiest rank.
        """
        n = self.world.size
        moved = round(steps * 2 * (n - 1) / n * self.message)
        return moved, moved

    def ask_servers(self, question: str) -> list[Any]:
        return []
