"""Which worker the others waited for: how long, and since when."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from scipy.special import stdtr  # of Student's t; scipy.stats takes a quarter of a second to import

from hvdtrain.explaining.timeline import BLOCKS, COMPUTED, END, Timeline

LEAST_SHARE = 0.1  # of its steps, their waiting included, that others wait for a straggler, or that it takes longer
# Times as long as the others' that its steps are while it is slow: by their lower quartiles, for a worker that is
# interrupted now and then has quick steps too, and a slow one has not. Equal ranks on busy cores differ by up to 1.4:
# the first one's thread for messages coordinates the ring's, and the first worker writes the results.
LEAST_FACTOR = 1.5
QUICK = 0.25
LEAST_RATIO = 3.0  # of the time waited for it over that for the next one: among equals the slowest of a step changes
# Of a t-test over blocks of the run: how likely chance would make a straggler of one among equals. One that is slow for
# less than a fifth of the run is not found.
LARGEST_P = 0.01


@dataclass(frozen=True)
class Straggler:
    """The worker that was slower than the others.

    Attributes:
        factor: how many times as long as the others' steps its steps took, on average while it was slow.
        since_s, until_s: seconds of training between which it was slow.
    """

    rank: int
    factor: float
    since_s: float
    until_s: float


def waited_for(timeline: Timeline) -> np.ndarray:
    """[workers, columns] seconds that the second slowest waited for a worker that was the slowest of its step.

    Workers that are not in step do not wait for the slowest: what is counted then is by how much a worker's steps were
    longer than those of the second slowest.
    """
    if len(timeline.computed_s) < 2:
        return np.zeros_like(timeline.computed_s)
    order = np.sort(timeline.computed_s, axis=0)
    return np.where(timeline.computed_s == order[-1], order[-1] - order[-2], 0.0)


def find_straggler(timeline: Timeline) -> Straggler | None:
    """The straggler, if there is one: nobody else is waited for nearly as long, and chance does not explain it."""
    waits = waited_for(timeline)
    if len(waits) < 2:
        return None
    total = waits.sum(1)
    worker = int(total.argmax())
    if total[worker] < LEAST_RATIO * np.delete(total, worker).max():
        return None
    lead = waits[worker] - np.delete(waits, worker, 0).max(0)
    columns = np.array_split(np.arange(len(lead)), BLOCKS)
    blocks = np.array([np.median(lead[block]) for block in columns])  # medians: any process is held up now and then
    if blocks.mean() < LEAST_SHARE * (timeline.computed_s + timeline.waited_s)[worker].mean():
        return None
    error = blocks.std(ddof=1) / np.sqrt(len(blocks))  # of the mean; 0 where all blocks are alike
    if error and stdtr(len(blocks) - 1, -blocks.mean() / error) > LARGEST_P:
        return None
    # The stretch in which it was slow the most: by factors, which stay as they are where all are held up for a while.
    times = timeline.computed_s[worker] / np.median(np.delete(timeline.computed_s, worker, 0), axis=0)
    slow = np.cumsum([0, *(np.log(np.median(times[block]) / LEAST_FACTOR) for block in columns)])
    first, last = max(combinations(range(BLOCKS + 1), 2), key=lambda span: slow[span[1]] - slow[span[0]])
    begin = float(timeline.ends_s[columns[first][0] - 1]) if first else 0.0
    end = float(timeline.ends_s[columns[last - 1][-1]])
    held = [steps[(steps[:, END] > begin) & (steps[:, END] <= end), COMPUTED] for steps in timeline.each_step]
    if not all(map(len, held)):
        return None
    if _times_as_long([np.quantile(seconds, QUICK) for seconds in held], worker) < LEAST_FACTOR:
        return None
    factor = _times_as_long([seconds.mean() for seconds in held], worker)
    return Straggler(timeline.ranks[worker], factor, begin, end)


def _times_as_long(seconds: Sequence[float], worker: int) -> float:
    """How many times as long this worker's steps are as the others'."""
    return float(seconds[worker] / np.median(np.delete(seconds, worker)))
