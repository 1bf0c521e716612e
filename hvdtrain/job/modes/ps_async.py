"""Parameter server, asynchronous: pushes are taken as they come, and nobody waits; staleness is
unbounded.

The policy is that of ps_ssp, without a limit on how far a worker may be ahead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from hvdtrain.base.modes import SERVERS, Mode
from hvdtrain.job.modes import ps_ssp

if TYPE_CHECKING:
    from hvdtrain.base.config.run_config import RunConfig
    from hvdtrain.job.coordination.job import Job
    from hvdtrain.job.ps.serve import KilledServer

MODE = Mode(
    family=SERVERS,
    order=6,
    colour="#893e88",
    marker="P",
    lockstep=False,
    survives_lost_worker=True,
    wait_for=("layer", "step"),
    options=ps_ssp.ASYNCHRONOUS,
    compressions=("any",),
    shares=("leased", "equal"),
    step_words=ps_ssp.softsync_words,
)


connect = ps_ssp.connect


def make_policy(workers: int, config: RunConfig) -> ps_ssp.StaleSynchronous:
    return ps_ssp.StaleSynchronous(workers, config, staleness=None)


def serve(job: Job, report: Callable[[str], None], killed: KilledServer | None = None) -> None:
    from hvdtrain.job.ps.serve import serve as serve_buckets

    serve_buckets(job, report, make_policy, lets_join=True, killed=killed)
