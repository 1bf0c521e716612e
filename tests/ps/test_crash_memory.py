"""What outlives a server that is killed: parts that are saved whole or not at all, and what is
saved in them.
"""

import json
import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch
from helpers.buckets import make, push, softsync
from helpers.parts import DrivenLeases, DrivenRoster
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdtrain.base.config.run_config import RunConfig
from hvdtrain.job.coordination.leases import Leases
from hvdtrain.job.ps.crash_memory import CrashMemory, SavedState
from hvdtrain.job.ps.journal import Journal
from hvdtrain.job.ps.server_metrics import ServerLoad, ServerMetrics
from hvdtrain.job.wire.messages import LedgerLine
from hvdtrain.runs.join_info import MEMORY_NAME
from hvdtrain.runs.membership_log import MembershipLog

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def closed():
    """A server keeps its memory until it ends, and these tests have a thousand."""
    yield
    for file in Path("/proc/self/fd").iterdir():
        if file.is_symlink() and f"memfd:{MEMORY_NAME}" in os.readlink(file):
            os.close(int(file.name))


def again(memory):
    """The same memory, as another process has it."""
    return CrashMemory(os.dup(memory.file))


def numbered(saved, number):
    """Save something that says of each of its tensors when it was made."""
    tensors = {name: (torch.full((2000,), float(number)), number) for name in "ab"}
    saved.save(
        number,
        tensors
        | {"now and then": (torch.full((9,), float(number)) if number % 3 else None, number)},
    )


def test_a_part_is_found_again_as_it_was_saved_last():
    memory = CrashMemory()
    saved = memory.state_of("x")
    assert saved.plain is None
    for number in range(1, 6):
        numbered(saved, number)
        found = again(memory).state_of("x")
        assert found.plain == number
        assert {name: set(tensor.tolist()) for name, tensor in found.tensors().items()} == {
            name: {float(number)} for name in ("a", "b", *(["now and then"] if number % 3 else []))
        }
    saved.save(
        "another shape", {"a": (torch.ones(3, 2, dtype=torch.int64), 9), "b": (torch.zeros(0), 9)}
    )
    found = again(memory).state_of("x").tensors()
    assert found["a"].equal(torch.ones(3, 2, dtype=torch.int64)) and found["b"].numel() == 0
    assert list(again(memory).parts) == ["x"]


def test_a_process_that_is_killed_at_any_moment_leaves_a_whole_part_not_older_than_its_last_word():
    rng = random.Random(3)
    for _ in range(12):
        memory = CrashMemory()
        reading, writing = os.pipe()
        pid = os.fork()
        if not pid:
            saved = memory.state_of("x")
            for number in range(1, 10**9):
                numbered(saved, number)
                os.write(writing, number.to_bytes(8, "little"))
        os.close(writing)
        time.sleep(rng.uniform(0.005, 0.02))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        with os.fdopen(reading, "rb") as said:
            last = int.from_bytes(said.read()[-8:], "little")
        found = again(memory).state_of("x")
        assert found.plain in (last, last + 1) or (last == 0 and found.plain is None)
        assert all(
            set(tensor.tolist()) == {float(found.plain)} for tensor in found.tensors().values()
        )


CONFIGS = [
    (RunConfig(optimizer="adam"), {"look_ahead": 1.0}),
    (RunConfig(optimizer="sgd", momentum=0.9), {"staleness": 1}),
    (RunConfig(optimizer="adamw"), {"staleness": 0, "look_ahead": 1.0}),
]


@pytest.mark.parametrize(("config", "options"), CONFIGS)
@settings(max_examples=15, deadline=None)
@given(rng=st.randoms(use_true_random=False))
def test_a_bucket_whose_server_is_killed_again_and_again_does_what_one_does_that_is_not(
    config, options, rng
):
    """After a kill a worker pushes again what was not answered: also what the bucket had taken."""
    undisturbed = make(softsync(2, **options), [1.0, -2.0, 3.0], config)
    memory, lines = CrashMemory(), []

    def bucket():
        return make(softsync(2, **options), [7.0] * 3, config, Journal(again(memory)), lines.append)

    ours = make(softsync(2, **options), [1.0, -2.0, 3.0], config, Journal(memory), lines.append)
    step, read, waiting = {0: 0, 1: 0}, {0: 0, 1: 0}, {}

    def take(replies, others):
        assert [(w, a.version, a.weights.tolist()) for w, a in replies] == [
            (w, a.version, a.weights.tolist()) for w, a in others
        ]
        for worker, answer in replies:
            read[worker] = answer.version
            del waiting[worker]

    for _ in range(30):
        worker = rng.choice([w for w in step if w not in waiting])
        step[worker] += 1
        waiting[worker] = push(
            worker, step[worker], [rng.uniform(-1, 1) for _ in range(3)], read[worker]
        )
        fresh = [
            w._replace(gradient=w.gradient.clone()) for w in (waiting[worker], waiting[worker])
        ]
        replies, others = ours.push(fresh[0]), undisturbed.push(fresh[1])
        if rng.random() < 0.5:  # killed before the answers are out, or after some
            heard = [reply for reply in replies if rng.random() < 0.5]
            ours = bucket()
            unheard = [reply for reply in replies if reply[0] not in {w for w, _ in heard}]
            found = [reply for w, _ in unheard for reply in ours.push(waiting[w])]
            assert all(ours.push(waiting[w]) == [] for w in waiting if w not in dict(replies))
            replies = sorted(
                [*heard, *found], key=lambda reply: [w for w, _ in others].index(reply[0])
            )
        take(replies, others)
    for worker in step:
        take(
            ours.idle(worker, step[worker], False, 1), undisturbed.idle(worker, step[worker], False)
        )
    assert (
        not waiting
        and ours.version == undisturbed.version
        and ours.weights.equal(undisturbed.weights)
    )
    assert ours.journal.lines["bucket 0"] == len(lines)


def test_a_call_of_idle_that_comes_again_changes_nothing():
    memory = CrashMemory()
    bucket = make(softsync(2), journal=Journal(memory))
    bucket.push(push(0, 1, [4.0, 8.0]))
    bucket.push(push(1, 1, [4.0, 8.0]))
    for worker in (0, 1):
        bucket.idle(worker, 1, True, 1)
    came_back = make(softsync(2), journal=Journal(again(memory)))
    came_back.idle(0, 1, True, 1)
    assert came_back.policy.at_barrier == set() and came_back.policy.idle_after == {}
    came_back.idle(0, 1, True, 2)
    assert came_back.policy.at_barrier == {0}


def test_shares_go_on_where_they_were_and_who_asks_again_gets_the_same():
    memory = CrashMemory()
    leases = DrivenLeases(2, Journal(memory))
    leases.know_sizes({"samples": 8, "batch_size": 8})
    assert [leases.lease(0, 1, 0, 3), leases.lease(1, 1, 0, 3), leases.lease(0, 2, 0, 3)] == [
        0,
        1,
        2,
    ]
    leases.finished(0, 1)
    leases.lose(1)
    leases = DrivenLeases(2, Journal(again(memory)))
    assert (leases.part.samples, leases.journal.lines["leases"], leases.part.lost) == (
        {0: 4},
        3,
        {1},
    )
    assert leases.lease(0, 2, 0, 3) == 2 and leases.journal.lines["leases"] == 3
    leases.finished(0, 2)
    assert leases.await_lease(0, 3).value() == (1, 3)
    leases = DrivenLeases(2, Journal(again(memory)))
    assert leases.await_lease(0, 3).value() == (1, 3) and leases.journal.lines["leases"] == 4
    leases.finished(0, 3)
    assert leases.await_lease(0, 4).value() == (None, 3)


def test_sums_are_known_that_were_told_and_those_under_way():
    memory = CrashMemory()
    roster = DrivenRoster(2, Journal(memory))
    roster.open_for_joining(0, {"step": 7})
    roster.add(0, 1, torch.ones(2))
    roster.add(1, 1, torch.ones(2))
    roster.add(0, 2, torch.tensor([5.0]), as_rows=True)
    roster = DrivenRoster(2, Journal(again(memory)))
    assert roster.add(1, 1, torch.zeros(2)).value().tolist() == [2, 2]
    assert roster.missing(0, 2) == [1] and roster.part.point.state == {"step": 7}
    under_way = roster.add(0, 2, torch.tensor([5.0]), as_rows=True)
    roster.add(1, 2, torch.tensor([6.0]), as_rows=True)
    assert under_way.value().tolist() == [[5], [6]]


def test_ledgers_go_on_after_what_counts(tmp_path, monkeypatch):
    memory = CrashMemory()

    def started():
        journal = Journal(again(memory), tmp_path)
        parts = make(softsync(1)).bucket, make(softsync(1)).bucket, Leases(1)
        for part, name in zip(parts, (0, 1, "leases"), strict=True):
            journal.keep(part, name)
        return journal, *parts

    journal, first, second, leases = started()
    for step in (1, 2, 3):
        journal.commit(first, [LedgerLine(0, step, step - 1, step)])
        if step == 3:  # killed before that counts
            monkeypatch.setattr(SavedState, "save", lambda *saved: None)
        journal.commit(second, [LedgerLine(0, step, step - 1, step)])
        journal.commit(leases, [(0, step, step - 1)])
    with (tmp_path / "ledger.server0.csv").open("a") as file:
        file.write("1,0,4")  # as far as it got
    monkeypatch.undo()
    journal.close()
    journal, _, second, leases = started()
    journal.commit(second, [LedgerLine(1, 1, 2, None)])
    journal.commit(leases, [(1, 1, 2)])
    journal.close()
    lines = (tmp_path / "ledger.server0.csv").read_text().splitlines()[1:]
    assert [line for line in lines if line.startswith("0")] == [
        "0,0,1,0,1",
        "0,0,2,1,2",
        "0,0,3,2,3",
    ]
    assert [line for line in lines if line.startswith("1")] == [
        "1,0,1,0,1",
        "1,0,2,1,2",
        "1,1,1,2,dropped",
    ]
    assert (tmp_path / "leases.csv").read_text().splitlines()[1:] == ["0,1,0", "0,2,1", "1,1,2"]


def test_lives_are_those_that_are_written_down(tmp_path):
    lives = MembershipLog(tmp_path / "x", 1, 2)
    lives.end(0, "its connection ended")
    lives.begin(2, 77)
    lives._file.write('{"member": 3, "ra')  # as far as it got
    again = MembershipLog(tmp_path / "x", 1, 2, recovered=True)
    assert again.all() == lives.all()
    again.end(0, "it is lost once more")
    lives.close()
    again.close()
    assert len((tmp_path / "x").read_text().splitlines()) == 4


def test_metrics_go_on_after_the_last_line_that_is_whole(tmp_path):
    file = tmp_path / "metrics.server1.jsonl"
    file.write_text('{"time": 1.0}\n{"time": 2.0, "pus')
    ServerMetrics(tmp_path, 1, ServerLoad()).stop()
    first, *others = map(json.loads, file.read_text().splitlines())
    assert first == {"time": 1.0} and others and all("cpu_s" in row for row in others)
