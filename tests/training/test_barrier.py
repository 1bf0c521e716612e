"""Workers in lockstep decide the same at the same step."""

import time
from types import SimpleNamespace

import pytest
from helpers.workers import on_each
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdtrain.config.run_config import RunConfig
from hvdtrain.training.barrier import StepBarrier


def ends(config, workers, steps_per_epoch, step_s, in_background):
    """Each worker's steps at which something was decided, trained until all are over."""

    def work(group, world):
        group.in_background = in_background
        barrier = StepBarrier(config, SimpleNamespace(group=group), config.steps or None, 0.0)
        step, began, decided = 0, time.perf_counter(), []
        while True:
            step += 1
            time.sleep(step_s)
            is_last = step % steps_per_epoch == 0
            decision = barrier.after(step, time.perf_counter() - began, is_last)
            if decision or is_last:
                group.barrier()  # as an evaluation or a snapshot begins: no other sum may be under way
            if decision:
                decided.append((step, decision))
            if decision.over:
                return decided

    return on_each(workers, work)


@pytest.mark.timeout(180)
@settings(max_examples=15)
@given(st.integers(1, 4), st.integers(3, 50), st.booleans())
def test_a_time_budget_ends_all_workers_at_the_same_step(workers, steps_per_epoch, in_background):
    config = RunConfig(mode="allreduce", time_budget=0.4, snapshot_every="0.15s")
    found = ends(config, workers, steps_per_epoch, 0.004, in_background)
    assert len({tuple(decided) for decided in found}) == 1
    *before, (_, decision) = found[0]
    assert decision.over and all(d.snapshot and not d.over for _, d in before)


def test_slow_steps_in_lockstep_end_within_a_step_of_the_budget():
    """Then workers come together at each step; where sums are done in the background, one step early."""
    for in_background in (False, True):
        found = ends(RunConfig(mode="ps-sync", servers=1, time_budget=0.25), 2, 50, 0.1, in_background)
        [(step, decision)] = found[0]
        assert decision.over and step <= 3 and found[1] == found[0]
