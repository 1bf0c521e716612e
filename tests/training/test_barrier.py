"""Workers at different speeds come together at one step, whoever asks for it and whenever."""

import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import HashStore

from hvdtrain.config.run_config import RunConfig
from hvdtrain.coordination.store_group import StoreGroup
from hvdtrain.training.barrier import StepBarrier
from hvdtrain.world.place import World


class InOneProcess(StoreGroup):
    """They request barriers of each other in a set that all have."""

    def __init__(self, world, store, requested):
        super().__init__(world, store if world.workers > 1 else None, 30)
        self.requested, self.in_background = requested, False

    def request_barrier(self, number):
        self.requested.add(number)

    def is_barrier_requested(self, number):
        return number in self.requested


class InBackground(InOneProcess):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.in_background = True


class Sync:
    def __init__(self, group):
        self.group = group

    def idle(self):
        pass


def ends(config, workers, steps_per_epoch, seconds_a_step, group=InOneProcess):
    """Each worker's last step and the steps at which something was decided, trained until all are over."""
    store, requested = HashStore(), set()
    found = {}

    def work(worker):
        sync = Sync(group(World("mpirun", worker, workers, worker, workers), store, requested))
        barrier = StepBarrier(config, sync, config.steps or None, 0.0)
        step, began, decided = 0, time.perf_counter(), []
        while True:
            step += 1
            time.sleep(seconds_a_step[worker])
            is_last = step % steps_per_epoch == 0
            decision = barrier.after(step, time.perf_counter() - began, is_last)
            if decision or is_last:
                sync.group.barrier()  # as an evaluation or a snapshot begins: no other sum may be under way
            if decision:
                decided.append((step, decision))
            if decision.over:
                break
        found[worker] = decided

    threads = [threading.Thread(target=work, args=[worker]) for worker in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(found) == workers
    return found


@pytest.mark.timeout(180)
@settings(max_examples=15)
@given(
    st.lists(st.sampled_from([0.001, 0.004, 0.02]), min_size=1, max_size=4),
    st.integers(3, 50),
    st.sampled_from([("ps-async", InOneProcess), ("allreduce", InOneProcess), ("ps-sync", InBackground)]),
)
def test_a_time_budget_ends_all_workers_at_the_same_step(speeds, steps_per_epoch, kind):
    mode, group = kind
    config = RunConfig(mode=mode, servers=int(mode != "allreduce"), time_budget=0.4, snapshot_every="0.15s")
    if mode != "ps-async":
        speeds = [0.004] * len(speeds)
    found = ends(config, len(speeds), steps_per_epoch, speeds, group)
    assert len({tuple(decided) for decided in found.values()}) == 1
    *before, (_, decision) = found[0]
    assert decision.over and all(d.snapshot and not d.over for _, d in before)


def test_slow_steps_in_lockstep_end_within_a_step_of_the_budget():
    """Then workers come together at each step; where sums are done in the background, one step early."""
    for group in (InOneProcess, InBackground):
        found = ends(RunConfig(mode="ps-sync", servers=1, time_budget=0.25), 2, 50, [0.1, 0.1], group)
        [(step, decision)] = found[0]
        assert decision.over and step <= 3 and found[1] == found[0]
