"""One process, no communication: the baseline."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hvdtrain.base.modes import LOCAL_STEPS, ONE_MACHINE, Mode

if TYPE_CHECKING:
    from hvdtrain.job.coordination.job import Job
    from hvdtrain.job.coordination.synchroniser import Synchroniser

MODE = Mode(
    family=ONE_MACHINE,
    order=0,
    colour="#929498",
    marker="o",
    options=(*LOCAL_STEPS, "fragments"),
    max_workers=1,
)


def connect(job: Job) -> Synchroniser:
    from hvdtrain.job.buckets.local_rounds import with_local_steps
    from hvdtrain.job.coordination.store_group import StoreGroup
    from hvdtrain.job.rings.local_update import LocalUpdate

    return with_local_steps(LocalUpdate(job, StoreGroup(job.world)), job)
