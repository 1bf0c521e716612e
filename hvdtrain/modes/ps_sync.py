"""Parameter server, bulk-synchronous: each shard waits for every worker's push, averages, updates once."""

from functools import partial

import torch

from hvdtrain.config.run_config import RunConfig
from hvdtrain.errors import Failure
from hvdtrain.ps.bucket import Decision, GoesOn, Policy, Step
from hvdtrain.ps.serve import serve as serve_with
from hvdtrain.ps.worker import PushPull
from hvdtrain.wire.messages import Push

FAMILY = "servers"
ORDER = 4
COLOUR = "#cb7811"
MARKER = "^"
SHARES = ("equal", "measured")
WAIT_FOR = ("layer", "step")
OPTIONS = ("local_steps", "fragments", "outer", "outer_lr", "outer_momentum", "backup", "wire", "bucket_mb", "record")
COMPRESSIONS = ("any",)


class Synchronous(Policy):
    """Adds a step's pushes up as they come, and updates once when there are enough.

    All workers' make a step, added in the order of workers, so that the sum repeats to the bit: a push that comes
    before its predecessors is held until they have come. Workers bound what is held: see exchange.UNDER_WAY.

    With --backup B the first N - B to come make a step, those that come later are dropped, and their workers go on with
    the new weights (Chen et al., 2016, arXiv:1604.00981, section 3). The sum is in the order of arrival then, which the
    ledger has.

    Args:
        workers: how many push.
    """

    def __init__(self, workers: int, config: RunConfig) -> None:
        self.needed, self.in_order = workers - config.backup, not config.backup
        self.step = 0  # the last that is over
        self.added: list[Push] = []
        self.early: dict[int, tuple[Push, torch.Tensor]] = {}  # the place that its turn is at -> a push

    def begin(self, step: int) -> None:
        self.step = step

    def accept(self, push: Push, gradient: torch.Tensor | None, version: int) -> Decision:
        assert gradient is not None
        if not self.in_order and push.step <= self.step:
            return Decision((), [GoesOn(push.worker, version - push.version_read, self.step)], [push])
        self.early[push.worker if self.in_order else len(self.added)] = push, gradient
        while following := self.early.pop(len(self.added), None):
            next_push, its_gradient = following
            self.sum = its_gradient if self.sum is None else self.sum.add_(its_gradient)
            self.added.append(next_push)
        if self.sum is None or len(self.added) < self.needed:
            return Decision()
        total, pushes, self.sum, self.added = self.sum, self.added, None, []
        self.step = push.step
        go_on = [GoesOn(p.worker, version - p.version_read) for p in pushes]
        return Decision([Step(total.div_(self.needed), pushes[0].lr, pushes)], go_on)

    def join(self, worker: int, step: int) -> None:
        raise Failure("ps-sync has as many workers as it began with")

    def lose(self, worker: int) -> Decision:
        raise Failure("every step of ps-sync needs a push from every worker")


connect = partial(PushPull, in_step=True)
make_policy = Synchronous
serve = partial(serve_with, make_policy=make_policy)
