"""One process, no communication: the baseline."""

from hvdtrain.coordination.job import Job
from hvdtrain.coordination.store_group import StoreGroup
from hvdtrain.modes._local_update import LocalUpdate

FAMILY = "one machine"
ORDER = 0
COLOUR = "#929498"
MARKER = "o"
OPTIONS = ("local_steps", "fragments", "outer", "outer_lr", "outer_momentum")
MAX_WORKERS = 1


def connect(job: Job) -> LocalUpdate:
    return LocalUpdate(job, StoreGroup(job.world))
