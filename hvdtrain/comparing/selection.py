"""Which contenders are repeated after the search, and which of them are trained as a whole."""

import dataclasses
from collections.abc import Collection, Hashable, Sequence

from hvdtrain.base import modes
from hvdtrain.comparing.comparison_state import ComparisonState
from hvdtrain.comparing.grid import Planned
from hvdtrain.runs.read import grouped
from hvdtrain.runs.request import mathematics, mode_options

# The part of one machine's samples/s below which nobody would train.
HALF = 0.5


def contenders_to_repeat(contenders: Sequence[Planned], state: ComparisonState) -> list[Planned]:
    """Returns the contenders that no search has left out, and of each side at least one."""
    repeated: list[Planned] = []
    for rivals in grouped(contenders, lambda run: run.side).values():
        staying = [run for run in rivals if not state.left_out(run)]
        repeated += staying or [max(rivals, key=state.speed)]
    return repeated


def contenders_to_train(
    contenders: Sequence[Planned], state: ComparisonState, done: Collection[str]
) -> list[Planned]:
    """Returns the first whole run of one contender of each mathematics.

    Contenders that compute the same steps learn the same, so the fastest is trained for all. A
    contender that does not reach half of one machine's speed is not trained.

    Args:
        contenders: the contenders that are repeated.
        state: knows how fast each contender is.
        done: names of finished runs. A contender that is trained already is chosen before others.
    """
    chosen = []
    for rivals in grouped(contenders, lambda run: run.where).values():
        machine_speeds = [state.speed(run) for run in rivals if run.family == modes.ONE_MACHINE]
        least_speed = HALF * max(machine_speeds, default=0.0)
        fast_enough = [run for run in rivals if state.speed(run) >= least_speed]
        whole_runs = [dataclasses.replace(run, after_sprints=True) for run in fast_enough]
        for alike in grouped(whole_runs, steps_of).values():
            trained = [run for run in alike if run.name in done]
            chosen.append(max(trained or alike, key=state.speed))
    return chosen


def steps_of(run: Planned) -> Hashable:
    """Returns what a run's steps compute, and from how many samples.

    The batch of one process may differ from the global batch of several workers.
    """
    computed = mathematics(run.config.mode, run.workers, mode_options(run.config))
    return computed, run.config.batch_size
