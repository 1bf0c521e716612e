"""Parameter server, bulk-synchronous: each bucket waits for every worker's push, averages, updates
once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from hvdtrain.base.errors import Failure
from hvdtrain.base.modes import LOCAL_STEPS, SERVERS, Mode
from hvdtrain.job.ps.policy import Policy, PolicyDecision, Release, Update

if TYPE_CHECKING:
    import torch

    from hvdtrain.base.config.run_config import RunConfig
    from hvdtrain.job.coordination.job import Job
    from hvdtrain.job.coordination.synchroniser import Synchroniser
    from hvdtrain.job.wire.messages import Push

MODE = Mode(
    family=SERVERS,
    order=4,
    colour="#cb7811",
    marker="^",
    shares=("equal", "measured"),
    wait_for=("layer", "step"),
    options=(*LOCAL_STEPS, "fragments", "backup", "wire", "bucket_mb", "record"),
    compressions=("any",),
)


class Synchronous(Policy):
    """Adds a step's pushes up as they come, and updates once when there are enough.

    Without --backup, the pushes of all N workers make a step. They are added in the order of
    workers, so that the sum is the same to the bit each time. A push that comes early is held until
    the pushes before it have come. Workers bound how much is held: see buckets.send_queue.UNDER_WAY.

    With --backup B, the first N - B pushes make a step. Later pushes are dropped, and their workers
    go on with the new weights (Chen et al., 2016, arXiv:1604.00981, section 3). The pushes are
    added in the order of arrival, which the ledger has.

    Args:
        workers: the number of workers.
        config: the configuration of the run.
    """

    def __init__(self, workers: int, config: RunConfig) -> None:
        self.needed = workers - config.backup
        self.in_order = not config.backup
        self.step = 0  # the last step that is over
        self.added: list[Push] = []  # the pushes in the sum
        # The pushes that are held, and their gradients, by their places in the sum.
        self.early: dict[int, tuple[Push, torch.Tensor]] = {}

    def begin(self, step: int) -> None:
        self.step = step

    def accept(self, push: Push, gradient: torch.Tensor | None, version: int) -> PolicyDecision:
        assert gradient is not None
        if not self.in_order and push.step <= self.step:
            late = Release(push.worker, version - push.version_read, self.step)
            return PolicyDecision(released=[late], dropped=[push])
        place = push.worker if self.in_order else len(self.added)
        self.early[place] = push, gradient
        while len(self.added) in self.early:
            next_push, next_gradient = self.early.pop(len(self.added))
            self.sum = next_gradient if self.sum is None else self.sum.add_(next_gradient)
            self.added.append(next_push)
        if self.sum is None or len(self.added) < self.needed:
            return PolicyDecision()
        mean = self.sum.div_(self.needed)
        pushes = self.added
        self.sum = None
        self.added = []
        self.step = push.step
        update = Update(mean, pushes[0].lr, pushes)
        released = [Release(added.worker, version - added.version_read) for added in pushes]
        return PolicyDecision([update], released)

    def join(self, worker: int, step: int) -> None:
        raise Failure("ps-sync has as many workers as it began with")

    def lose(self, worker: int) -> PolicyDecision:
        raise Failure("every step of ps-sync needs a push from every worker")


def make_policy(workers: int, config: RunConfig) -> Synchronous:
    return Synchronous(workers, config)


def connect(job: Job) -> Synchroniser:
    from hvdtrain.job.buckets.local_rounds import with_local_steps
    from hvdtrain.job.ps.worker import PushPull

    sync = PushPull(job, in_step=True)
    return with_local_steps(sync, job, in_lockstep=sync.in_step)


def serve(job: Job, report: Callable[[str], None]) -> None:
    from hvdtrain.job.ps.serve import serve as serve_buckets

    serve_buckets(job, report, make_policy)
