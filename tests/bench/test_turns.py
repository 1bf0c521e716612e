"""Jobs that take turns: who has none is stopped, and nobody outlives `hvdtrain bench`."""

import contextlib
import os
import socket
import subprocess
import sys
import time
from contextlib import closing

import psutil
import pytest

from hvdtrain.tools.bench.turns import KEY, Gone, Turns

# A guard as it is; the rank beside it has no torch, and computes all the time.
PROGRAM = """
import json, os, sys, threading, types

def take_part(backend, words, turns):
    def spin():
        while True: pass
    threading.Thread(target=spin, daemon=True).start()
    turns.write(f"{words[0]}\\n"); turns.flush()
    for line in turns:
        if int(line) == 13: os._exit(7)
        turns.write(json.dumps({"size": int(line), "pid": os.getpid()}) + "\\n"); turns.flush()

sys.modules["hvdtrain.tools.bench.ranks"] = types.SimpleNamespace(take_part=take_part)
from hvdtrain.tools.bench import turns
turns.main()
"""


def start(turns, backend, role="worker"):
    words = [sys.executable, "-c", PROGRAM, turns.addresses, backend, role]
    return subprocess.Popen(words, env=os.environ | {KEY: turns.key})


def becomes(is_so):
    deadline = time.monotonic() + 20
    while not is_so() and time.monotonic() < deadline:
        time.sleep(0.02)
    return is_so()


@pytest.mark.timeout(60)
def test_ranks_measure_in_turn_and_are_stopped_otherwise_and_end_with_bench(tmp_path):
    with closing(Turns(tmp_path)) as turns:
        guards = [start(turns, "a"), start(turns, "b"), start(turns, "b", "server")]
        turns.meet(3, look=lambda: None)
        assert turns.measure("a", 8)["size"] == 8
        ranks = [psutil.Process(turns.measure(backend, 16)["pid"]) for backend in "ab"]
        assert all(
            becomes(lambda rank=rank: rank.status() == psutil.STATUS_STOPPED) for rank in ranks
        )
        assert turns.measure("a", 16) == {"size": 16, "pid": ranks[0].pid}
    assert [guard.wait(20) for guard in guards] == [0, 0, 0]
    assert not any(rank.is_running() for rank in ranks)


@pytest.mark.timeout(60)
def test_whoever_comes_without_the_key_is_sent_away(monkeypatch):
    """Over hosts anybody who reaches the port may come, and say nothing."""
    monkeypatch.setattr("hvdtrain.tools.bench.turns.CONNECT_S", 0.5)
    with closing(Turns(None)) as turns, contextlib.ExitStack() as stack:
        port = int(turns.addresses.rpartition(":")[2])
        said = [b"", b'"a"\n', b"x" * 1000, b"\xff\n", turns.key[:-1].encode() + b'\n"a"\n']
        strangers = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in said
        ]
        for stranger, what in zip(strangers, said, strict=True):
            stranger.sendall(what)
        guard = start(turns, "a")
        turns.meet(1, look=lambda: None)
        assert turns.measure("a", 8)["size"] == 8
        for stranger in strangers:
            stranger.settimeout(5)
            with contextlib.suppress(ConnectionResetError):
                assert stranger.recv(100) == b""
    assert guard.wait(20) == 0


@pytest.mark.timeout(60)
def test_a_rank_that_ends_is_told_of(tmp_path):
    with closing(Turns(tmp_path)) as turns:
        guard = start(turns, "a")
        turns.meet(1, look=lambda: None)
        with pytest.raises(Gone, match="^a$"):
            turns.measure("a", 13)
        assert guard.wait(20) == 1


@pytest.mark.timeout(60)
def test_nobody_waits_for_ranks_whose_job_has_ended(tmp_path):
    def look():
        raise RuntimeError("ended")

    with closing(Turns(tmp_path)) as turns, pytest.raises(RuntimeError, match="ended"):
        turns.meet(1, look)
