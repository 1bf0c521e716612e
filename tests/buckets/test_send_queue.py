"""The order in which buckets are sent."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.job.buckets.send_queue import BUCKETS_UNDER_WAY, UNDER_WAY, SendQueue, largest_push

MIB = 2**20


def test_the_bucket_that_forward_needs_first_is_sent_first_and_one_more_without_room():
    queue = SendQueue(room=2, size_of=lambda number: 1)
    for number in (5, 4, 3, 2):
        queue.add(number)
    for expected in (2, 3):
        assert queue.next_with_room() == expected
        queue.send(expected)
    assert queue.next_with_room() is None
    assert queue.next_over_limit() == 5  # which has waited longest
    queue.send(5)
    assert queue.next_over_limit() is None
    queue.answered(2)
    queue.answered(3)
    queue.add(5)  # of the next step
    assert queue.next_with_room() == 4


def test_buckets_come_and_go_in_any_order():
    """The first is the least of those that wait, whatever was sent before."""
    draw = random.Random(0)
    queue = SendQueue(room=3, size_of=lambda number: 1)
    under_way: list[int] = []
    for _ in range(2000):
        absent = [number for number in range(9) if number not in [*queue.waiting, *under_way]]
        if absent and draw.random() < 0.5:
            queue.add(draw.choice(absent))
        number = queue.next_with_room()
        if number is not None:
            assert number == min(queue.waiting)
        else:
            number = queue.next_over_limit()
        if number is not None:
            queue.send(number)
            under_way.append(number)
        if under_way and draw.random() < 0.4:
            queue.answered(under_way.pop(draw.randrange(len(under_way))))


@pytest.mark.parametrize(
    ("workers", "expected"), [(1, 4.0), (4, 4.0), (5, 3.2), (8, 2.0), (32, 0.5), (64, 0.5)]
)
def test_many_workers_have_smaller_buckets(workers, expected):
    assert largest_push(4 * MIB, workers) == pytest.approx(expected * MIB, abs=1)


@given(st.integers(2**16, 32 * MIB), st.integers(1, 32))
def test_each_of_up_to_32_workers_has_three_buckets_under_way_or_larger_ones_were_not_asked_for(
    bucket, workers
):
    most = largest_push(bucket, workers)
    assert most <= bucket
    assert BUCKETS_UNDER_WAY * most * workers <= UNDER_WAY
    assert most == bucket or BUCKETS_UNDER_WAY * (most + 1) * workers > UNDER_WAY
