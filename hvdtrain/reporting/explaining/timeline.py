"""What each worker of a run did when: its recorded steps, side by side."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from hvdtrain.base import modes
from hvdtrain.base.errors import UsageError
from hvdtrain.runs.live import WARM_UP, metrics_file
from hvdtrain.runs.read import Run
from hvdtrain.runs.schema import Step, each_share, read_steps

# A run is divided into so many stretches, to see how steady something is, and since when.
BLOCKS = 20
# Steps that a run needs. A worker that is not in step with the others may have taken fewer.
FEWEST_STEPS = WARM_UP + 2 * BLOCKS
# Shares that warm-up leaves a worker that had few.
FEWEST_SHARES = 5
# Seconds of training from when to when.
Interval = tuple[float, float]
# Columns of Timeline.each_step.
END = 0
COMPUTED = 1
WAITED = 2
SAMPLES = 3
BETWEEN = 4
FORWARD = 5
BACKWARD = 6
HIDDEN = 7


class TooFewSteps(UsageError):
    """A worker has recorded too few steps for a run to be explained."""


@dataclass(frozen=True)
class Timeline:
    """A run's steps after warm-up, a row for each worker.

    If workers are in step, column i of the tables is the same step of all workers, and there is a
    column for each step that all took. Otherwise each column is a stretch of the run's time, equal
    for all workers, and has a worker's mean step there.

    Attributes:
        ranks: the ranks of the workers.
        left_out: the ranks of workers that were lost or left and took too few steps to be
            explained, or too few that the others took too.
        bound: how many steps a worker may be ahead of the slowest, if workers are not in step and
            that is limited.
        in_step: whether workers took the same steps.
        ends_s: [columns] seconds of training at the end of each column, of the last worker.
        computed_s: [workers, columns] seconds of a step that a worker computed: data, forward,
            backward, optimizer, and writing metrics. If no step of a worker ended in a stretch,
            they are of the step that the worker was at.
        waited_s: [workers, columns] seconds of a step in which a worker waited: for messages, for
            others, for a share.
        each_step: for each worker [steps, 8]: END, seconds of training at the end of the step;
            COMPUTED and WAITED, as above; SAMPLES; BETWEEN, the part of WAITED that came between
            steps at the end of an epoch; seconds of FORWARD and of BACKWARD; HIDDEN, seconds of the
            optimizer beside these, which are in none of the others.
        absent: for the rank of each worker that was lost or left, when the worker was away.
    """

    ranks: list[int]
    left_out: list[int]
    bound: int | None
    in_step: bool
    ends_s: np.ndarray
    computed_s: np.ndarray
    waited_s: np.ndarray
    each_step: list[np.ndarray]
    absent: dict[int, list[Interval]]

    @cached_property
    def means(self) -> np.ndarray:
        """The mean step of each worker, [workers, 8]."""
        return np.stack([steps.mean(0) for steps in self.each_step])

    @property
    def rates(self) -> np.ndarray:
        """Steps/s of each worker, [workers].

        They weigh workers in a mean over all steps that workers take in the same time.
        """
        seconds = self.means[:, COMPUTED] + self.means[:, WAITED]
        return 1 / np.maximum(1e-9, seconds)


def read_timeline(run: Run) -> Timeline:
    """Returns the recorded steps of a run.

    Raises:
        UsageError: there are no steps of some worker, or too few to tell anything. The message
            names the file.
    """
    in_step = _is_in_step(run)
    workers = range(run.kind.servers, run.kind.servers + run.kind.workers)
    has_enough_together = (run.summary.steps or 0) >= FEWEST_STEPS
    needed = 1 if not in_step and has_enough_together else FEWEST_STEPS
    shares, left_out = _read_workers(run, workers, needed)
    if in_step:
        numbers, gone = _common_steps(run, shares)
        left_out = sorted([*left_out, *gone])
    ranks = sorted(set(workers).difference(left_out))
    each_step = [_after_warm_up(shares[rank]) for rank in ranks]
    absent: dict[int, list[Interval]] = {}
    bound = None
    if in_step:
        rows = [
            _steps_of(numbers, shares[rank], table)
            for rank, table in zip(ranks, each_step, strict=True)
        ]
        columns = np.stack(rows)
        ends_s = columns[:, :, END].max(0)
    else:
        bound = run.manifest.staleness_bound
        edges = _edges(each_step)
        ends_s = edges[1:]
        absent = _take_absences(run, ranks, each_step, edges)
        columns = np.stack([_means_of_stretches(table, edges) for table in each_step])
    return Timeline(
        ranks=ranks,
        left_out=left_out,
        bound=bound,
        in_step=in_step,
        ends_s=ends_s,
        computed_s=columns[:, :, COMPUTED],
        waited_s=columns[:, :, WAITED],
        each_step=each_step,
        absent=absent,
    )


def _is_in_step(run: Run) -> bool:
    """Returns whether all workers take the same steps."""
    mode = run.kind.mode
    is_lockstep = mode in modes.names() and modes.declared(mode).lockstep
    # With backup workers the last pushes of a step are dropped, and a slow worker takes fewer steps
    # than the others.
    return is_lockstep and not run.manifest.backup


def _edges(each_step: Sequence[np.ndarray]) -> np.ndarray:
    """Returns the seconds of training between which the stretches of a run lie, [BLOCKS + 1]."""
    begin = min(table[0, END] for table in each_step)
    end = max(table[-1, END] for table in each_step)
    return np.linspace(begin, end, BLOCKS + 1)


def _read_workers(
    run: Run, ranks: Sequence[int], needed: int
) -> tuple[dict[int, list[Step]], list[int]]:
    """Returns what each worker did, by rank, and the ranks that are left out.

    Workers that were lost or left are left out if they did too little.

    Args:
        run: the run.
        ranks: the ranks of all workers.
        needed: how many shares a worker has to have done.

    Raises:
        UsageError: another worker did too little, or all did.
    """
    shares: dict[int, list[Step]] = {}
    left_out: list[int] = []
    problem = None
    for rank in ranks:
        try:
            shares[rank] = _read(metrics_file(run.folder, rank), needed)
        except UsageError as error:
            if rank not in _went_away(run):
                raise
            left_out.append(rank)
            problem = error
    if problem and not shares:
        raise problem
    return shares, left_out


def _went_away(run: Run) -> set[int]:
    """Returns the ranks of workers that were lost or left, even if they came back."""
    ended = {life.rank for life in run.summary.membership if life.why}
    return ended.union(run.summary.lost_workers)


def _common_steps(run: Run, shares: Mapping[int, Sequence[Step]]) -> tuple[list[int], list[int]]:
    """Returns the steps after warm-up that workers in lockstep took together.

    Args:
        run: the run.
        shares: what each worker did, by rank.

    Returns:
        The numbers of the steps; and the ranks of workers that went away and took too few of the
        steps that the others took.

    Raises:
        UsageError: another worker took too few.
    """
    went_away = _went_away(run)
    common: set[int] = set()
    left_out = []
    for rank in sorted(shares, key=lambda rank: (rank in went_away, -len(shares[rank]))):
        numbers = {step.step for step in _counted(shares[rank])}
        together = common & numbers if common else numbers
        if len(together) >= FEWEST_STEPS - WARM_UP:
            common = together
        elif rank in went_away:
            left_out.append(rank)
        else:
            file = metrics_file(run.folder, rank)
            raise UsageError(
                f"{file} has {len(together)} steps that the other workers took too, "
                "too few to explain"
            )
    return sorted(common), left_out


def _steps_of(numbers: Sequence[int], shares: Sequence[Step], table: np.ndarray) -> np.ndarray:
    """Returns some steps of a worker, [steps, figures].

    Args:
        numbers: the numbers of the steps.
        shares: what the worker did.
        table: Timeline.each_step of the worker.
    """
    row_of_step = {step.step: row for row, step in enumerate(_counted(shares))}
    return table[[row_of_step[number] for number in numbers]]


def _take_absences(
    run: Run, ranks: Sequence[int], each_step: Sequence[np.ndarray], edges: np.ndarray
) -> dict[int, list[Interval]]:
    """Returns when workers that are not in step were away, by rank.

    The time away no longer counts as waiting between steps. A worker that was there at the end
    waited for the last shares of others, which is added to its last step.

    Args:
        run: the run.
        ranks: the ranks of the workers.
        each_step: Timeline.each_step; changed.
        edges: see _edges.
    """
    absent = {}
    for rank, table in zip(ranks, each_step, strict=True):
        intervals = _take_absences_of(run, rank, table, edges)
        if intervals:
            absent[rank] = intervals
            _, until = intervals[-1]
            if until >= edges[-1]:
                continue
        after_last_step = max(0.0, (run.summary.wall_s or 0.0) - table[-1, END])
        table[-1, [WAITED, BETWEEN]] += after_last_step
    return absent


def _take_absences_of(run: Run, rank: int, table: np.ndarray, edges: np.ndarray) -> list[Interval]:
    """Returns when a worker was away, and takes that from the time between its steps.

    Lives are recorded in clock time, which goes on while evaluations stop the seconds of training.
    So a worker that came back is taken to have been away in the longest pauses between its steps.
    A pause shorter than a stretch of the run is not told, since a worker that waits for others at
    the end of an epoch has such pauses too.

    Args:
        run: the run.
        rank: the rank of the worker.
        table: Timeline.each_step of the worker; changed.
        edges: see _edges.
    """
    lives = [life for life in run.summary.membership if life.rank == rank]
    returns = max(0, len(lives) - 1)
    longest_first = 1 + np.argsort(-table[1:, BETWEEN])
    stretch_s = edges[1] - edges[0]
    back = sorted(
        row for row in longest_first[:returns].tolist() if table[row, BETWEEN] > stretch_s
    )
    absent = []
    for row in back:
        left = table[row - 1, END]
        absent.append((float(left), float(left + table[row, BETWEEN])))
    table[back, WAITED] -= table[back, BETWEEN]
    table[back, BETWEEN] = 0
    is_gone = all(life.why for life in lives) if lives else rank in run.summary.lost_workers
    if is_gone and table[-1, END] < edges[-1]:
        absent.append((float(table[-1, END]), float(edges[-1])))
    return absent


def _read(file: Path, needed: int) -> list[Step]:
    """Returns what a worker did, a share after the other.

    Raises:
        UsageError: the worker did fewer shares than are needed.
    """
    if not file.is_file():
        raise UsageError(
            f"there is no {file}, which has what that worker did: "
            "without it nothing can be explained"
        )
    steps, unreadable = read_steps(file)
    shares = each_share(steps)
    if len(shares) < needed:
        # A kill may cut off the last line.
        damage = f" and {unreadable} lines that are none" if unreadable > 1 else ""
        raise TooFewSteps(
            f"{file} has {len(shares)} recorded steps{damage}, too few to explain: "
            f"train for {FEWEST_STEPS} or more"
        )
    return shares


def _after_warm_up(steps: Sequence[Step]) -> np.ndarray:
    """Returns Timeline.each_step of one worker."""
    counted = _counted(steps)
    skipped = len(steps) - len(counted)
    table = np.array([_figures(step) for step in counted])
    before = steps[skipped - 1].time if skipped else steps[0].time - steps[0].seconds
    lasted = np.diff(table[:, END], prepend=before)
    between = np.maximum(0, lasted - table[:, COMPUTED] - table[:, WAITED])
    table[:, WAITED] += between
    return np.insert(table, BETWEEN, between, axis=1)


def _figures(step: Step) -> tuple[float, ...]:
    """Returns the figures of a step in the order of Timeline.each_step, without BETWEEN."""
    computed = step.data_s + step.forward_s + step.backward_s + step.optimizer_s + step.metrics_s
    waited = step.comm_s + step.barrier_s + step.lease_s
    return (
        step.time,
        computed,
        waited,
        step.samples,
        step.forward_s,
        step.backward_s,
        step.hidden_optimizer_seconds,
    )


def _counted(steps: Sequence[Step]) -> Sequence[Step]:
    """Returns the steps after warm-up."""
    warm_up = min(WARM_UP, len(steps) - FEWEST_SHARES)
    return steps[max(0, warm_up) :]


def _means_of_stretches(table: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Returns the mean step of a worker in each stretch of time, [stretches, figures].

    If no step ended in a stretch, it is the mean of the next stretch in which one did, or else of
    the last.

    Args:
        table: [steps, figures].
        edges: see _edges.
    """
    stretches = len(edges) - 1
    stretch = np.searchsorted(edges, table[:, END], side="left") - 1
    stretch = np.clip(stretch, 0, stretches - 1)
    count = np.bincount(stretch, minlength=stretches)
    sums = [np.bincount(stretch, weights=column, minlength=stretches) for column in table.T]
    with np.errstate(invalid="ignore"):
        means = np.stack(sums, 1) / count[:, None]
    with_steps = np.flatnonzero(count)
    this_or_next = np.searchsorted(with_steps, np.arange(stretches))
    return means[with_steps[np.minimum(this_or_next, len(with_steps) - 1)]]
