"""Workers in lockstep decide the same at the same step."""

import threading
import time

import pytest
from helpers.workers import on_each
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdtrain.base.config.run_config import RunConfig
from hvdtrain.job.training import barrier
from hvdtrain.job.training.barrier import Decision, StepBarrier


def ends(config, workers, steps_per_epoch, step_s, in_background):
    """Each worker's steps at which something was decided, trained until all are over."""

    def work(group, world):
        group.in_background = in_background
        made = StepBarrier(config, group, config.steps or None, 0.0)
        step, began, decided = 0, time.perf_counter(), []
        while True:
            step += 1
            time.sleep(step_s)
            is_last = step % steps_per_epoch == 0
            decision = made.after(step, time.perf_counter() - began, is_last)
            if decision or is_last:
                group.barrier()  # as an evaluation or a snapshot begins: no other sum may be under way
            if decision:
                decided.append((step, decision))
            if decision.over:
                return decided

    return on_each(workers, work)


@pytest.mark.timeout(180)
@settings(max_examples=15)
@given(st.integers(1, 4), st.integers(3, 50), st.booleans(), st.sampled_from([0, 1, 6]))
def test_a_time_budget_ends_all_workers_at_the_same_step(
    workers, steps_per_epoch, in_background, local_steps
):
    """With local steps where a round has ended, or one step later, and so with snapshots."""
    config = RunConfig(
        mode="allreduce", time_budget=0.4, snapshot_every="0.15s", local_steps=local_steps
    )
    found = ends(config, workers, steps_per_epoch, 0.004, in_background)
    assert len({tuple(decided) for decided in found}) == 1
    *before, (_, decision) = found[0]
    assert decision.over and all(d.snapshot and not d.over for _, d in before)
    assert not local_steps or all(step % local_steps in (0, 1) for step, _ in found[0])


def test_slow_steps_in_lockstep_end_within_a_step_of_the_budget():
    """Then workers come together at each step; where sums are done in the background, one step
    early.
    """
    for in_background in (False, True):
        found = ends(
            RunConfig(mode="ps-sync", servers=1, time_budget=0.25), 2, 50, 0.1, in_background
        )
        [(step, decision)] = found[0]
        assert decision.over and step <= 3 and found[1] == found[0]


@pytest.mark.parametrize(
    ("fragments", "meets"), [(1, [1, 6, 12, 18]), (3, [1, 2, 4, 6, 8, 10, 12, 14, 16, 18])]
)
def test_local_steps_come_together_where_they_are_exchanged(fragments, meets, monkeypatch):
    """However often they would, and beside that after the first step."""
    monkeypatch.setattr(barrier, "LOCKSTEP_EVERY_S", 0.0)

    def work(group, world):
        config = RunConfig(mode="allreduce", local_steps=6, fragments=fragments)
        made, met = StepBarrier(config, group, 18, 0.0), []
        gather = group.all_gather_later
        for step in range(1, 19):
            group.all_gather_later = lambda row, step=step: met.append(step) or gather(row)
            made.after(step, step / 100, is_last=False)
        return met

    assert on_each(2, work) == [meets, meets]


def test_nobody_waits_for_a_slow_step_amid_a_round(monkeypatch):
    monkeypatch.setattr(barrier, "LOCKSTEP_EVERY_S", 0.0)
    is_ahead = threading.Event()

    def work(group, world):
        made = StepBarrier(RunConfig(mode="allreduce", local_steps=8), group, None, 0.0)
        for step in range(1, 17):
            if step == 11 and world.rank == 1:
                assert is_ahead.wait(20)
            made.after(step, step / 100, is_last=False)
            if step == 15 and world.rank == 0:
                is_ahead.set()

    on_each(2, work)


def test_a_long_round_is_left_soon_after_sigterm_by_all_at_the_same_step(monkeypatch):
    """One worker is told at its 30th step; all look every ten steps, and leave by the look after
    the next.
    """
    monkeypatch.setattr(barrier, "LOOK_EVERY_S", 0.1)
    this_worker = threading.local()
    monkeypatch.setattr(
        barrier, "termination_requested", lambda: getattr(this_worker, "is_told", False)
    )

    def work(group, world):
        config = RunConfig(
            mode="allreduce", local_steps=10_000, time_budget=0.2, snapshot_every="0.1s"
        )
        made = StepBarrier(config, group, None, 0.0)
        for step in range(1, 100):
            this_worker.is_told = step >= 30 and world.rank == 1
            time.sleep(0.001 * world.rank)
            if decision := made.after(step, step / 100, is_last=step == 25):
                return step, decision
        return None

    first, *others = on_each(3, work)
    assert first == (40, Decision(terminated=True)) and others == [first, first]
