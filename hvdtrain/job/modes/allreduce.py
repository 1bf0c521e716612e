"""Horovod averages gradients over a ring while backward goes on; every worker applies the same
update.
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
    order=1,
    colour="#0456c3",
    marker="s",
    elastic=True,
    joins_horovod=True,
    compressions=("none", "fp16"),  # what Horovod 0.28.1 can send
    options=(*LOCAL_STEPS, "fragments", "bucket_mb", "ring_transport"),
    shares=("equal", "measured"),
    wait_for=("step", "layer"),
)


def connect(job: Job, arrival: Arrival | None = None) -> Synchroniser:
    if job.world.elastic:
        from hvdtrain.job.rings.elastic_allreduce import connect_elastic

        return connect_elastic(job, arrival)
    from hvdtrain.job.buckets.local_rounds import with_local_steps
    from hvdtrain.job.rings.allreduce import AllReduceLane
    from hvdtrain.job.rings.ring import Ring, join

    group, backend = join(job)
    return with_local_steps(Ring(job, group, backend, AllReduceLane), job)
