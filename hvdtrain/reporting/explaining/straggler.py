"""Which worker the others waited for: how long, and since when."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

# Of Student's t. scipy.stats takes a quarter of a second to import.
from scipy.special import stdtr

from hvdtrain.reporting.explaining.timeline import BLOCKS, COMPUTED, END, Timeline

# The least that others wait for a straggler, as a share of its steps with their waiting. If workers
# are not in step, the least by which its steps are longer.
LEAST_SHARE = 0.1
# How many times as long as the others' steps its steps are while it is slow. Compared are the lower
# quartiles: a worker that is interrupted now and then has quick steps too, and a slow worker has
# not. Equal ranks on busy cores differ by up to 1.4, since the first one's thread for messages
# coordinates the ring's, and the first worker writes the results.
LEAST_FACTOR = 1.5
QUICK = 0.25
# How many times as long as for the next worker the others wait for it. Among equals the slowest
# worker changes from step to step.
LEAST_RATIO = 3.0
# The largest p of a t-test over blocks of the run: how likely chance makes a straggler of one among
# equals. A worker that is slow for less than a fifth of the run is not found.
LARGEST_P = 0.01


@dataclass(frozen=True)
class Straggler:
    """The worker that was slower than the others.

    Attributes:
        rank: the rank of the worker.
        factor: how many times as long as the others' steps its steps took, on average while it was
            slow.
        since_s, until_s: seconds of training between which it was slow.
    """

    rank: int
    factor: float
    since_s: float
    until_s: float


def waited_for(timeline: Timeline) -> np.ndarray:
    """Returns how long others waited for each worker, in seconds, [workers, columns].

    In each step that is how long the second slowest worker waited for the slowest. Workers that are
    not in step do not wait for the slowest. For them it is by how much a worker's step was longer
    than the step of the second slowest.
    """
    if len(timeline.computed_s) < 2:
        return np.zeros_like(timeline.computed_s)
    ordered = np.sort(timeline.computed_s, axis=0)
    slowest = ordered[-1]
    second_slowest = ordered[-2]
    return np.where(timeline.computed_s == slowest, slowest - second_slowest, 0.0)


def find_straggler(timeline: Timeline) -> Straggler | None:
    """Returns the straggler, or None.

    A worker is a straggler if nobody else is waited for nearly as long, and chance does not explain
    it.
    """
    waits = waited_for(timeline)
    if len(waits) < 2:
        return None
    total = waits.sum(1)
    worker = int(total.argmax())
    if total[worker] < LEAST_RATIO * np.delete(total, worker).max():
        return None
    blocks = np.array_split(np.arange(waits.shape[1]), BLOCKS)
    if not _is_waited_for(timeline, waits, worker, blocks):
        return None
    first, last = _slow_blocks(timeline, worker, blocks)
    begin = float(timeline.ends_s[blocks[first][0] - 1]) if first else 0.0
    end = float(timeline.ends_s[blocks[last - 1][-1]])
    computed_meanwhile = []
    for steps in timeline.each_step:
        is_meanwhile = (steps[:, END] > begin) & (steps[:, END] <= end)
        computed_meanwhile.append(steps[is_meanwhile, COMPUTED])
    if not all(len(seconds) for seconds in computed_meanwhile):
        return None
    quick_steps = [np.quantile(seconds, QUICK) for seconds in computed_meanwhile]
    if _times_as_long(quick_steps, worker) < LEAST_FACTOR:
        return None
    factor = _times_as_long([seconds.mean() for seconds in computed_meanwhile], worker)
    return Straggler(timeline.ranks[worker], factor, begin, end)


def _is_waited_for(
    timeline: Timeline, waits: np.ndarray, worker: int, blocks: Sequence[np.ndarray]
) -> bool:
    """Returns whether a worker is waited for long enough to matter and to exclude chance.

    Args:
        timeline: the steps of the run.
        waits: see waited_for.
        worker: the row of the worker.
        blocks: the columns of each block of the run.
    """
    lead = waits[worker] - np.delete(waits, worker, 0).max(0)
    # Medians, since any process is held up now and then.
    lead_of_blocks = np.array([np.median(lead[block]) for block in blocks])
    mean = lead_of_blocks.mean()
    step_s = (timeline.computed_s + timeline.waited_s)[worker].mean()
    if mean < LEAST_SHARE * step_s:
        return False
    # The error is 0 if all blocks are alike.
    error = lead_of_blocks.std(ddof=1) / np.sqrt(len(blocks))
    may_be_chance = error and stdtr(len(blocks) - 1, -mean / error) > LARGEST_P
    return not may_be_chance


def _slow_blocks(timeline: Timeline, worker: int, blocks: Sequence[np.ndarray]) -> tuple[int, int]:
    """Returns the first block in which a worker was slow, and the first after them.

    Blocks are judged by factors, which stay as they are where all workers are held up for a while.

    Args:
        timeline: the steps of the run.
        worker: the row of the worker.
        blocks: the columns of each block of the run.
    """
    others = np.delete(timeline.computed_s, worker, 0)
    factors = timeline.computed_s[worker] / np.median(others, axis=0)
    logs = [np.log(np.median(factors[block]) / LEAST_FACTOR) for block in blocks]
    # The sum of a range of blocks is the difference of two of these.
    sums = np.cumsum([0, *logs])
    ranges = combinations(range(len(blocks) + 1), 2)
    return max(ranges, key=lambda ends: sums[ends[1]] - sums[ends[0]])


def _times_as_long(seconds: Sequence[float], worker: int) -> float:
    """Returns how many times as long this worker's steps are as the others'."""
    return float(seconds[worker] / np.median(np.delete(seconds, worker)))
