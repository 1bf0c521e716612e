"""Tensors by way of memory that two ends share: here of one process, which opens its own memory as
a peer's.
"""

import multiprocessing
import os
import resource

import pytest
import torch
from helpers.shared_memory import met

from hvdtrain.base.system.memory import peak_rss_mb
from hvdtrain.job.wire import shared
from hvdtrain.job.wire.shared import COLUMNS, RECEIVERS, Parcel, SharedMemory

pytestmark = pytest.mark.usefixtures("one_thread")


def taken(memory):
    return [
        slot
        for slot in range(len(memory._slots))
        if any(memory._flags[slot * COLUMNS : (slot + 1) * COLUMNS])
    ]


def test_what_may_be_sent_again_stays_until_it_is_answered_whoever_has_let_go_of_it():
    sender, receiver = met(0, 1)
    sent = torch.randn(9_000)
    parcel = sender.put(sent, 1, held=True)
    del_of_the_first = receiver.get(parcel)
    del del_of_the_first
    other = sender.put(sent + 1, 1, held=True)
    assert other.flag // COLUMNS == 1  # not in its place
    of_the_killed = receiver.get(other)  # which never says that it has let go
    sender.replace_receiver(1)
    assert receiver.get(parcel).equal(sent) and of_the_killed.equal(sent + 1)
    sender.release(parcel)
    third = sender.put(sent + 2, 1)
    # a flag of the receiver's that came in its place
    assert third.flag // COLUMNS == 0 and third.flag != parcel.flag
    sender.release(other)
    assert sender.put(sent + 3, 1).flag // COLUMNS == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.uint8])
def test_a_tensor_arrives_and_its_memory_is_used_again_when_the_receiver_has_let_go_of_it(dtype):
    sender, receiver = met(0, 1)
    sent = torch.randint(100, (30, 1001)).to(dtype)
    parcel = sender.put(sent, receiver=1)
    assert isinstance(parcel, Parcel)
    got = receiver.get(parcel)
    assert got.equal(sent) and got.dtype == dtype
    part = got[3]
    del got
    # a part of it is in use
    assert taken(sender) == [0] and sender.put(sent, 1).flag // COLUMNS == 1
    part.add_(1)  # its own to overwrite
    del part
    assert taken(sender) == [1] and sender.put(sent + 1, 1).flag // COLUMNS == 0
    assert receiver.get(parcel).equal(sent + 1)


def test_what_is_kept_is_sent_without_a_copy_and_is_read_until_the_last_has_let_go_of_it():
    sender, *receivers = met(0, 1, 2, size=3)
    kept = sender.keep(torch.ones(5000))
    assert not sender.is_read(kept)
    first, second = (sender.put(kept, number) for number in (1, 2))
    assert first.start == second.start
    again = sender.put(kept, 2)  # the receiver has not let go of the first: what it has may differ
    assert again.start != first.start
    got = [receivers[0].get(first), receivers[1].get(second)]
    kept.add_(1)
    assert got[0].equal(torch.full((5000,), 2.0)) and receivers[1].get(again).equal(
        torch.ones(5000)
    )
    del got[0]
    assert sender.is_read(kept)
    del got[0]
    assert not sender.is_read(kept) and sender.is_read(kept.clone())


def test_the_memory_of_what_was_kept_is_used_again_when_both_ends_have_let_go_of_it():
    sender, receiver = met(0, 1)
    kept = sender.keep(torch.ones(5000))
    address = kept.data_ptr()
    got = receiver.get(sender.put(kept, 1))
    del kept
    second = sender.keep(torch.zeros(5000))
    assert second.data_ptr() != address and got.equal(torch.ones(5000))
    del got
    assert sender.keep(torch.zeros(5000)).data_ptr() == address
    assert second.equal(torch.zeros(5000))


def test_what_is_kept_is_copied_into_a_message_where_no_flag_can_say_who_reads_it():
    sender, _ = met(0, 1)
    kept = sender.keep(torch.ones(5000))
    late = sender.put(kept, RECEIVERS + 1)
    assert torch.is_tensor(late) and late.data_ptr() != kept.data_ptr() and not sender.is_read(kept)
    is_off = SharedMemory()
    private = is_off.keep(kept)
    assert is_off.put(private, 1) is private and is_off.is_read(private)


def test_the_memory_of_another_process_counts_for_its_owner_alone():
    def send(pipe):
        sender, _ = met(0, 1)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        kept = sender.keep(torch.ones(25 * 2**18))
        more = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        pipe.send((sender.put(kept, 1), more / 1024))
        pipe.recv()

    own, its = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=send, args=(its,), daemon=True)
    process.start()
    before = peak_rss_mb()
    parcel, more_of_owner = own.recv()
    got = SharedMemory().get(parcel)
    assert got.sum() == 25 * 2**18
    assert more_of_owner > 24
    assert before <= peak_rss_mb() < before + 5
    process.kill()
    process.join(20)


def test_what_is_small_or_finds_no_room_is_passed_on_as_it_is(monkeypatch):
    sender, receiver = met(0, 1)
    small, large = torch.ones(4096), torch.ones(4097)
    assert sender.put(small, 1) is small and receiver.get(small) is small
    monkeypatch.setattr(shared, "MOST", 3 * 20 * 2**10)
    sent = [sender.put(large, 1) for _ in range(4)]
    assert [isinstance(one, Parcel) for one in sent] == [True, True, True, False]
    for other in (2, RECEIVERS + 1):  # the last came when many had, and gets all in messages
        sender.forget(other)
        assert sender.put(large, other) is large and len(taken(sender)) == 3
    sender.forget(1)  # it is dead, and reads nothing any more
    assert not taken(sender) and isinstance(sender.put(large, 2), Parcel)


@pytest.mark.parametrize(
    "change",
    [
        {"start": 2**40},
        {"start": 0},
        {"start": -4096},
        {"shape": [2**40]},
        {"shape": [-1]},
        {"dtype": "load"},
        {"flag": 2**20},
        {"flag": -1},
        {"pid": 2**31 - 1},
        {"file": "stdin"},
    ],
)
def test_what_is_no_tensor_of_a_peer_is_refused(change):
    sender, receiver = met(0, 1)
    with open(os.devnull) as stdin:
        parcel = sender.put(torch.ones(5000), 1)
        wrong = {
            name: stdin.fileno() if value == "stdin" else value for name, value in change.items()
        }
        with pytest.raises((OSError, ValueError)):
            receiver.get(parcel._replace(**wrong))
    assert receiver.get(parcel).sum() == 5000


def test_it_is_used_where_all_ranks_are_on_one_host_and_can_open_each_others(monkeypatch):
    assert all(memory.on for memory in met(0, 1, 2, size=3))
    assert not any(memory.on for memory in met(0, 1, size=2, local_size=1))
    opened, fails = SharedMemory._open, iter([True])

    def fails_once(memory, pid, file):
        if next(fails, False):
            raise PermissionError
        return opened(memory, pid, file)

    monkeypatch.setattr(SharedMemory, "_open", fails_once)
    assert not any(memory.on for memory in met(0, 1))
    monkeypatch.setenv("HVDTRAIN_OVER_TCP", "1")
    assert not any(memory.on for memory in met(0, 1))


def test_it_is_there_for_as_long_as_somebody_reads_and_leaves_nothing_behind():
    def send(pipe):
        sender, _ = met(0, 1)
        pipe.send(sender.put(torch.arange(5000), 1))
        pipe.recv()

    own, its = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=send, args=(its,), daemon=True)
    process.start()
    got = SharedMemory().get(own.recv())
    process.kill()
    process.join(20)
    assert got.equal(torch.arange(5000))
    assert not [name for name in os.listdir("/dev/shm") if "hvdtrain" in name]


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_slot_is_nobody_elses_while_a_tensor_is_copied_there_though_its_receiver_is_lost(moment):
    sender, _, receiver = met(0, 1, 2, size=3)
    ones, twos, got = torch.ones(5000), torch.full((5000,), 2.0), []

    def interrupt():
        sender.forget(1)
        got.append(receiver.get(sender.put(twos, 2)))
        got.append(receiver.get(sender.put(ones, 2)))

    class Interrupted(torch.Tensor):
        """Something else happens before or after its bytes are copied."""

        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            if function is torch.Tensor.copy_ and moment == "before":
                interrupt()
            found = super().__torch_function__(function, types, args, kwargs)
            if function is torch.Tensor.copy_ and moment == "after":
                interrupt()
            return found

    sender.put(ones.as_subclass(Interrupted), 1)
    assert got[0].equal(twos) and got[1].equal(ones)
    got.clear()
    assert receiver.get(sender.put(ones, 2)).equal(ones)
    sender.forget(1)  # where the receiver was lost before the flag was set
    assert not taken(sender)
