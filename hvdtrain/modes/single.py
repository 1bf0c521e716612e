"""One process, no communication: the baseline."""

from torch import nn

from hvdtrain.coordination.job import Job
from hvdtrain.coordination.store_group import StoreGroup
from hvdtrain.modes._local_update import LocalUpdate

FAMILY = "one machine"
ORDER = 0
COLOUR = "#929498"
MARKER = "o"
OPTIONS = ("local_steps", "fragments", "outer", "outer_lr", "outer_momentum")
MAX_WORKERS = 1


class Single(LocalUpdate):
    def prepare(self, model: nn.Module) -> nn.Module:
        self.begin_with(model)
        return model


def connect(job: Job) -> Single:
    return Single(job, StoreGroup(job.world))
