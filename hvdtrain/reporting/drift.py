"""Whether steps become slower or faster within sprints.

A processor that grows hot makes them slower, and so does the end of its turbo.
"""

import math
from collections.abc import Sequence
from statistics import fmean

from hvdtrain.reporting.rule import half_width_of_mean
from hvdtrain.runs.read import Run
from hvdtrain.runs.schema import each_share

# The smallest drift that matters: the last third of a sprint against the first.
LEAST = 0.03
# Steps that a worker has to have taken: four in a third.
LEAST_STEPS = 12
# How often chance alone may look like a drift of either sign.
ERROR = 0.01


def drift(runs: Sequence[Run]) -> float | None:
    """Returns how much longer the steps of sprints take in the last third than in the first.

    Each sprint has one figure, and Student's interval over the sprints has to exclude 0. So neither
    the spread of steps nor one odd sprint counts.

    Returns:
        The drift, where 0.05 is 5 % longer; None if it is less than LEAST, or if chance may explain
        it.
    """
    logs = [_log_drift(run) for run in runs if run.manifest.sprint]
    known = [log for log in logs if log is not None]
    if len(known) < 2:
        return None
    mean = fmean(known)
    half = half_width_of_mean(known, ERROR)
    is_shown = abs(mean) > half and abs(mean) >= math.log1p(LEAST)
    return math.expm1(mean) if is_shown else None


def _log_drift(run: Run) -> float | None:
    """Returns the logarithm of the drift of a sprint: the mean over its workers.

    A worker's drift is the median seconds of a step in the last third over that in the first.
    Returns None if no worker has taken LEAST_STEPS.
    """
    import numpy as np

    steps_by_rank, _ = run.read_steps()
    last = max((steps[-1].step for steps in steps_by_rank.values() if steps), default=0)
    warm_up = last - (run.summary.steps or 0)
    logs = []
    for steps in steps_by_rank.values():
        steady = each_share([step for step in steps if step.step > warm_up])
        seconds = _seconds_of_rounds([share.seconds for share in steady], run.local_steps)
        third = len(seconds) // 3
        if len(seconds) >= LEAST_STEPS and min(seconds) > 0:
            logs.append(math.log(np.median(seconds[-third:]) / np.median(seconds[:third])))
    return sum(logs) / len(logs) if logs else None


def _seconds_of_rounds(seconds: Sequence[float], local_steps: int) -> list[float]:
    """Returns the seconds of each round of local steps, of which only the last step sends.

    The steps of a round that has not ended are left out.
    """
    whole = len(seconds) // local_steps * local_steps
    return [sum(seconds[first : first + local_steps]) for first in range(0, whole, local_steps)]
