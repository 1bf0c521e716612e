"""Each worker gets a shard of the averaged gradients from Horovod, updates its weights and sends
them to all (ZeRO-1).

The ring stands for a server beside every worker: reduce-scatter, the optimizer on each rank's
shard, all-gather (Rajbhandari et al., SC'20, arXiv:1910.02054, section 5.1). It sends as much as an
all-reduce, and each rank has a part of the optimizer's state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hvdtrain.base.modes import RING, Mode

if TYPE_CHECKING:
    from hvdtrain.job.coordination.job import Job
    from hvdtrain.job.coordination.joining import Arrival
    from hvdtrain.job.coordination.synchroniser import Synchroniser

MODE = Mode(
    family=RING,
    order=3,
    colour="#7f00ff",
    marker="P",
    elastic=True,
    joins_horovod=True,
    options=("bucket_mb", "ring_transport"),
    shares=("equal", "measured"),
    wait_for=("step", "layer"),
    shards_optimizer=True,
)


def connect(job: Job, arrival: Arrival | None = None) -> Synchroniser:
    if job.world.elastic:
        from hvdtrain.job.rings.elastic_sharded import connect_elastic

        return connect_elastic(job, arrival)
    from hvdtrain.job.rings.ring import join
    from hvdtrain.job.rings.sharded import Sharded, ShardedLane

    group, backend = join(job)
    return Sharded(job, group, backend, ShardedLane)
