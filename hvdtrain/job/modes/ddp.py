"""torch DistributedDataParallel over Gloo or NCCL: the all-reduce people would use without
Horovod.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hvdtrain.base.modes import LOCAL_STEPS, RING, Mode

if TYPE_CHECKING:
    from hvdtrain.job.coordination.job import Job
    from hvdtrain.job.coordination.joining import Arrival
    from hvdtrain.job.coordination.synchroniser import Synchroniser

MODE = Mode(
    family=RING,
    order=2,
    colour="#1c9edc",
    marker="D",
    options=(*LOCAL_STEPS, "fragments"),
    elastic=True,
    compressions=("none", "powersgd"),
    shares=("equal", "measured"),
    wait_for=("step",),  # torch's reducer ends backward with the last average
)


def connect(job: Job, arrival: Arrival | None = None) -> Synchroniser:
    if job.world.elastic:
        from hvdtrain.job.rings.elastic_ddp import connect_elastic

        return connect_elastic(job, arrival)
    from hvdtrain.job.buckets.local_rounds import with_local_steps
    from hvdtrain.job.rings.ddp import join

    return with_local_steps(join(job), job)
