"""A worker's time is split without a gap."""

import itertools

import torch
from torch import nn

from hvdtrain.numerics.clock import PARTS, Clock, move


def test_each_lap_begins_where_the_last_mark_was():
    """The moments are 0, 1, 3, 6, 10 …: each part's length tells which it is."""
    model = nn.Linear(1, 1)
    clock = Clock(model, torch.device("cpu"))
    moments = itertools.accumulate(itertools.count(0))
    clock.watch.now = lambda: next(moments)
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
        "metrics": 3, "barrier": 4, "data": 5, "backward": 6 + 7, "comm": 8,
    }  # fmt: skip


def test_seconds_move_from_one_part_to_another_and_none_are_made():
    assert move({"data": 3.0, "lease": 0.0}, "data", "lease", 1.0) == {"data": 2.0, "lease": 1.0}
    assert move({"data": 3.0, "lease": 1.0}, "data", "lease", 5.0) == {"data": 0.0, "lease": 4.0}
