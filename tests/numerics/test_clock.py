"""A worker's time is split without a gap."""

import itertools

import torch
from torch import nn

from hvdtrain.base.numerics.clock import PARTS, Clock, Stretches, move


def clock_of_growing_parts(model):
    """Returns a clock whose moments are 0, 1, 3, 6, 10 …: each part's length tells which it is."""
    clock = Clock(model, torch.device("cpu"))
    moments = itertools.accumulate(itertools.count(0))
    clock.watch.now = lambda: next(moments)
    return clock


def test_each_lap_begins_where_the_last_mark_was():
    model = nn.Linear(1, 1)
    clock = clock_of_growing_parts(model)
    clock.start()
    clock.mark("data")
    clock.mark("forward")
    first = clock.lap()
    assert set(first) == set(PARTS)
    assert {part: spent for part, spent in first.items() if spent} == {"data": 1, "forward": 2}
    clock.mark("metrics")
    clock.mark("barrier")
    clock.mark("data")
    model(torch.ones(1)).sum().backward()  # each of its two gradients has a moment
    clock.mark_last_gradient("backward")
    clock.mark("comm")
    second = clock.lap()
    assert {part: spent for part, spent in second.items() if spent} == {
        "metrics": 3,
        "barrier": 4,
        "data": 5,
        "backward": 6 + 7,
        "comm": 8,
    }
    assert clock.lapped_s == sum(first.values()) + sum(second.values())


def test_a_lap_that_has_ended_is_divided_later_as_well():
    clock = clock_of_growing_parts(nn.Linear(1, 1))
    clock.start()
    clock.mark("data")
    clock.mark("comm")
    first = clock.end_lap()
    clock.mark("data")
    second = clock.end_lap()
    updates = [(2.0, 2.5)]  # within comm, from 1 to 3
    parts = clock.divide(first, waits=[], updates=updates)
    assert {part: spent for part, spent in parts.items() if spent} == {
        "data": 1,
        "comm": 1.5,
        "optimizer": 0.5,
    }
    parts = clock.divide(second, waits=[], updates=[])
    assert {part: spent for part, spent in parts.items() if spent} == {"data": 3}
    assert clock.lapped_s == 6


def test_processor_time_of_computing_leaves_out_what_is_not_computing():
    """The thread's processor time is 0, 1, 3, 6, 10 …, as the moments above.

    It is read at the end of `data`, at each gradient, and where there are no other processes at the
    end of `comm`.
    """
    for alone, of_comm in ((False, 0), (True, 4)):
        model = nn.Linear(1, 1)
        clock = Clock(model, torch.device("cpu"), alone=alone)
        times = itertools.accumulate(itertools.count(0))
        clock._cpu_now = lambda times=times: next(times)
        clock.start()
        clock.mark("data")
        clock.mark("forward")
        model(torch.ones(1)).sum().backward()  # each of its two gradients has a time
        clock.mark_last_gradient("backward")
        clock.mark("comm")
        clock.mark("optimizer")
        assert clock.computing_cpu_seconds == 0
        clock.lap()
        # What follows the last gradient is computing only where there are no other processes.
        assert clock.computing_cpu_seconds == (2 + 3) + of_comm
        clock.mark("metrics")
        clock.lap()
        assert clock.computing_cpu_seconds == 0


def test_processor_time_is_read_once_where_each_backward_has_as_many_gradients():
    model = nn.Linear(1, 1)
    clock = Clock(model, torch.device("cpu"))
    reads = []
    clock._cpu_now = lambda: reads.append(1) or 0.0
    clock.start()

    def reads_of_backward():
        reads.clear()
        model(torch.ones(1)).sum().backward()
        clock.mark_last_gradient("backward")
        return len(reads)

    assert reads_of_backward() == 2
    assert reads_of_backward() == 1
    model.weight.requires_grad_(False)
    assert reads_of_backward() == 1  # at the mark, as the second gradient did not come
    model.weight.requires_grad_(True)
    assert reads_of_backward() == 2  # at each that may be the last
    model.weight.requires_grad_(False)
    assert reads_of_backward() == 1  # at the gradient, and not at the mark again


def test_gradients_that_someone_else_notes_are_left_to_them():
    model = nn.Linear(1, 1)
    clock = Clock(model, torch.device("cpu"), noted=[model.weight])
    clock.start()
    model.bias.requires_grad_(False)
    model(torch.ones(1)).sum().backward()
    assert clock.last_gradient is None
    clock.note_gradient()
    assert clock.last_gradient >= clock.marks[0][1]


def test_seconds_move_from_one_part_to_another_and_none_are_made():
    assert move({"data": 3.0, "lease": 0.0}, "data", "lease", 1.0) == {"data": 2.0, "lease": 1.0}
    assert move({"data": 3.0, "lease": 1.0}, "data", "lease", 5.0) == {"data": 0.0, "lease": 4.0}


def test_the_optimizer_is_told_from_what_is_waited_for_in_whichever_part_that_is():
    """Of 2 s of forward in which 0.5 s are waited, and 3 s after the last gradient."""
    clock = Clock(nn.Linear(1, 1), torch.device("cpu"))
    clock.marks = [
        ("", 10.0),
        ("data", 11.0),
        ("forward", 13.0),
        ("backward", 17.0),
        ("comm", 20.0),
    ]
    clock.marks.append(("optimizer", 20.5))
    waits, updates = (
        [(12.0, 12.5), (18.0, 20.0)],
        [(9.0, 10.5), (12.25, 12.75), (16.0, 16.5), (16.75, 19.0)],
    )
    spent = clock.lap(waits, updates)
    assert {part: seconds for part, seconds in spent.items() if seconds} == {
        "data": 1.0,
        "forward": 1.5,
        "backward": 4.0,
        "comm": 0.25 + 1.0,
        "optimizer": 0.25 + 2.0 + 0.5,
    }
    assert sum(spent.values()) == 20.5 - 10.0
    # and what was before the first mark is of another lap
    assert clock.hidden_s == 0.5 + 0.25 + 0.5 + 0.25


def test_alone_nobody_is_waited_for():
    clock = Clock(nn.Linear(1, 1), torch.device("cpu"), alone=True)
    clock.marks = [("", 1.0), ("backward", 2.0), ("comm", 5.0)]
    spent = clock.lap()
    assert (spent["backward"], spent["comm"]) == (4.0, 0.0)


def test_stretches_are_those_since_they_were_last_taken():
    done = Stretches(torch.device("cpu"))
    with done.during():
        pass
    [(began, ended)] = done.take()
    assert began <= ended and done.take() == []
