"""What bandwidth a job needs."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hvdtrain.planning.calibration import Calibration
from hvdtrain.planning.layout import COARSE
from hvdtrain.planning.scenario import Scenario
from hvdtrain.planning.simulate import simulate

LEAST_GBIT, MOST_GBIT = 1e-4, 1e3
HALVINGS = 10  # of that range, on a logarithmic scale: to 2 %
Z_SURE = 1.282  # nine in ten of a normal distribution are less


def needs(calibration: Calibration, jobs: Sequence[Scenario], efficiency: float, seed: int = 0) -> list[dict[str, Any]]:
    """The bandwidth in Gbit/s with which workers do a share of what as many would that never wait.

    `sure_gbit` is that with which they do so in nine of ten cases, as far as the model errs. Where no bandwidth is
    enough, since messages cost processors too, both are MOST_GBIT; `most` is the share that this leaves.
    """
    alone_s = simulate(calibration.scenario(Scenario("single")), seed=seed).step_s
    rows = []
    for job in jobs:

        def share(gbit: float, job: Scenario = job) -> float:
            asked = calibration.scenario(replace(job, bandwidth_gbit=gbit))
            return alone_s / simulate(asked, seed=seed, detail=COARSE).step_s

        def least(wanted: float, share: Any = share) -> float:
            low, high = LEAST_GBIT, MOST_GBIT
            for _ in range(HALVINGS):
                middle = math.sqrt(low * high)
                low, high = (low, middle) if share(middle) >= wanted else (middle, high)
            return high

        rows.append({
            "mode": job.mode, "workers": job.workers, "servers": job.servers, "local_steps": job.local_steps,
            "efficiency": efficiency, "bandwidth_gbit": least(efficiency), "most": share(MOST_GBIT),
            "sure_gbit": least(efficiency * math.exp(Z_SURE * calibration.model_error)),
        })  # fmt: skip
    return rows
