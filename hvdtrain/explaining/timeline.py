"""What each worker of a run did when: its recorded steps, side by side."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from hvdtrain import modes
from hvdtrain.errors import UsageError
from hvdtrain.runs.live import WARM_UP, metrics_file
from hvdtrain.runs.read import Run
from hvdtrain.runs.schema import Step, each_share, read_steps

BLOCKS = 20  # into which a run is divided, to see how steady something is, and since when
FEWEST_STEPS = WARM_UP + 2 * BLOCKS  # of the run: a worker that is not in step with the others may have taken few
FEWEST_SHARES = 5  # shares that warm-up leaves a worker that had no more
Stretch = tuple[float, float]
# Columns of Timeline.each_step.
END, COMPUTED, WAITED, SAMPLES, BETWEEN, FORWARD, BACKWARD = range(7)


@dataclass(frozen=True)
class Timeline:
    """A run's steps after warm-up, a row a worker.

    Attributes:
        ranks: of the workers.
        bound: how many steps a worker may be ahead of the slowest, where workers are not in step and that is limited.
        in_step: workers took the same steps, and column i is the same step of all. Otherwise each column is a stretch
            of the run's time, equal for all, with what a worker spent in it for each of its steps there.
        ends_s: [columns] seconds of training at the end of each column, of the last worker.
        computed_s: [workers, columns] seconds of a step that a worker computed: data, forward, backward, optimizer, and
            writing down what the step came to. Where no step of a worker ended, those of the step it was at.
        waited_s: [workers, columns] seconds of a step in which it waited: for messages, for others, for a share.
        each_step: of each worker, [steps, 7]: seconds of training at the end (END), seconds that it computed and that
            it waited; samples; of the waiting, what came between steps at the end of an epoch; seconds of forward and
            of backward.
        absent: by rank, seconds of training from when to when a worker was away, of those that were lost or left.
    """

    ranks: list[int]
    bound: int | None
    in_step: bool
    ends_s: np.ndarray
    computed_s: np.ndarray
    waited_s: np.ndarray
    each_step: list[np.ndarray]
    absent: dict[int, list[Stretch]]

    @cached_property
    def means(self) -> np.ndarray:
        """[workers, 7] the mean steps of each_step."""
        return np.stack([steps.mean(0) for steps in self.each_step])

    @property
    def rates(self) -> np.ndarray:
        """[workers] steps/s: by how many steps of each are in a mean over all that workers take in the same time."""
        return 1 / np.maximum(1e-9, self.means[:, COMPUTED] + self.means[:, WAITED])


def read_timeline(run: Run) -> Timeline:
    """The recorded steps of a run.

    Raises:
        UsageError: there are no steps of some worker, or too few to tell anything; it names the file.
    """
    kind = run.kind
    ranks = list(range(kind.servers, kind.servers + kind.workers))
    # Where the last pushes of a step are dropped, a slow worker takes fewer steps than the others.
    in_step = kind.mode in modes.names() and modes.declared(kind.mode).lockstep and not run.manifest.backup
    needed = 1 if not in_step and (run.summary.steps or 0) >= FEWEST_STEPS else FEWEST_STEPS
    rows = [_read(metrics_file(run.folder, rank), needed) for rank in ranks]
    per_worker = list(map(_after_warm_up, rows))
    absent: dict[int, list[Stretch]] = {}
    if in_step:
        table = np.stack([values[: min(map(len, per_worker))] for values in per_worker])  # [workers, steps, 7]
        ends_s, bound = table[:, :, END].max(0), None
    else:
        end = max(values[-1, END] for values in per_worker)
        edges = np.linspace(min(values[0, END] for values in per_worker), end, BLOCKS + 1)
        ends_s, bound = edges[1:], run.manifest.staleness_bound
        for rank, steps in zip(ranks, per_worker, strict=True):
            if stretches := _take_absences(run, rank, steps, edges):
                absent[rank] = stretches
            if not stretches or stretches[-1][1] < end:  # at the end it waited for the last shares of others
                steps[-1, [WAITED, BETWEEN]] += max(0.0, (run.summary.wall_s or 0.0) - steps[-1, END])
        table = np.stack([_means(steps, edges) for steps in per_worker])
    return Timeline(ranks, bound, in_step, ends_s, table[:, :, COMPUTED], table[:, :, WAITED], per_worker, absent)


def _take_absences(run: Run, rank: int, steps: np.ndarray, edges: np.ndarray) -> list[Stretch]:
    """When a worker was not there, which from then on does not count as waiting between its steps.

    Lives are recorded by the clock, which goes on while evaluations stop seconds of training. So a worker that came
    back was away in the longest pauses between its steps; where it was back sooner than a stretch of the run takes, as
    one that waits for others at the end of an epoch is too, that is not told.

    Args:
        steps: Timeline.each_step of the worker; changed.
        edges: between stretches of the run.
    """
    lives = [life for life in run.summary.membership if life.rank == rank]
    longest = 1 + np.argsort(-steps[1:, BETWEEN])[: max(0, len(lives) - 1)]
    back = sorted(n for n in longest.tolist() if steps[n, BETWEEN] > edges[1] - edges[0])
    absent = [(float(steps[n - 1, END]), float(steps[n - 1, END] + steps[n, BETWEEN])) for n in back]
    steps[back, WAITED] -= steps[back, BETWEEN]
    steps[back, BETWEEN] = 0
    is_gone = all(life.why for life in lives) if lives else rank in run.summary.lost_workers
    if is_gone and steps[-1, END] < edges[-1]:
        absent.append((float(steps[-1, END]), float(edges[-1])))
    return absent


def _read(file: Path, needed: int) -> list[Step]:
    """What a worker did, a share after the other. UsageError where that is less than so many of them."""
    if not file.is_file():
        raise UsageError(f"there is no {file}, which has what that worker did: without it nothing can be explained")
    steps, unreadable = read_steps(file)
    if len(shares := each_share(steps)) < needed:
        damage = f" and {unreadable} lines that are none" if unreadable > 1 else ""  # a kill may cut off the last one
        many = f"{len(shares)} recorded steps{damage}, too few to explain: train for {FEWEST_STEPS} or more"
        raise UsageError(f"{file} has {many}")
    return shares


def _after_warm_up(steps: Sequence[Step]) -> np.ndarray:
    """Timeline.each_step of one worker."""
    skipped = max(0, min(WARM_UP, len(steps) - FEWEST_SHARES))
    table = np.array([
        (
            step.time, step.data_s + step.forward_s + step.backward_s + step.optimizer_s + step.metrics_s,
            step.comm_s + step.barrier_s + step.lease_s, step.samples, step.forward_s, step.backward_s,
        )
        for step in steps[skipped:]
    ])  # fmt: skip
    before = steps[skipped - 1].time if skipped else steps[0].time - steps[0].seconds
    lasted = np.diff(table[:, END], prepend=before)
    between = np.maximum(0, lasted - table[:, COMPUTED] - table[:, WAITED])
    table[:, WAITED] += between
    return np.insert(table, BETWEEN, between, axis=1)


def _means(values: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """[steps, figures] of a worker as means over stretches of time, [stretches, figures]."""
    stretch = np.clip(np.searchsorted(edges, values[:, 0], side="left") - 1, 0, len(edges) - 2)
    count = np.bincount(stretch, minlength=len(edges) - 1)
    sums = [np.bincount(stretch, weights=column, minlength=len(edges) - 1) for column in values.T]
    with np.errstate(invalid="ignore"):
        means = np.stack(sums, 1) / count[:, None]
    ended = np.flatnonzero(count)
    at = np.minimum(np.searchsorted(ended, np.arange(len(means))), len(ended) - 1)  # the step that ended then, or next
    return means[ended[at]]
