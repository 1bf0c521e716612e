"""Heartbeats of all ranks, through the store that they share.

A wait for a rank ends when the rank is silent for as long as `--timeout`, and not while it is slow.
"""

import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING

from hvdtrain.base.errors import Failure
from hvdtrain.base.formatting import in_minutes
from hvdtrain.base.system.deadline import end_process
from hvdtrain.base.system.terminal import tell
from hvdtrain.base.world.place import World

if TYPE_CHECKING:
    from torch.distributed import Store

# A rank is silent when so many looks in a row find no new beat. The looks take the timeout. Looks
# are counted, and not seconds, so that a job that was suspended as a whole goes on.
LOOKS = 8
BEATS = 2  # how many beats there are from one look to the next
# The user is told of a wait after so many timeouts, and again after as many. Silent ranks are lost
# by then.
TOLD_AFTER = 2
# The timeout for libraries that wait for other ranks and need one: silent ranks are found here.
UNLIMITED_S = 10**6
# A starter ends the job within so many seconds after a rank has said why it failed, and ended.
ENDS_S = 2.0

_has_left = threading.Event()  # set when this process has left its job


class Silence:
    """Finds the ranks that are silent."""

    def __init__(self) -> None:
        # Each rank's last beat, and how many looks have found it unchanged.
        self._seen: dict[int, tuple[bytes, int]] = {}

    def look(self, beats: Mapping[int, bytes]) -> list[int]:
        """Takes each rank's last beat; returns the ranks that are silent."""
        for rank, beat in beats.items():
            before, unchanged = self._seen.get(rank, (b"", 0))
            self._seen[rank] = (beat, unchanged + 1 if beat == before else 0)
        return [rank for rank in beats if self._seen[rank][1] >= LOOKS]


class StoreLost(Failure):
    """The first rank has ended, and with it the store of all ranks."""


@contextmanager
def while_served() -> Iterator[None]:
    """Turns the failure of a call in the block, because nobody serves the store any more, into
    StoreLost.

    The first rank first has ENDS_S to say why it has ended, and the starter to end this rank.

    Raises:
        StoreLost: the first rank has ended.
    """
    from torch.distributed import DistNetworkError

    try:
        yield
    except DistNetworkError:
        time.sleep(ENDS_S)
        raise StoreLost(
            "rank 0, which serves the store of all ranks, ended before the others"
        ) from None


def begin_beating(store: "Store", rank: int, timeout: float) -> None:
    """Lets a rank beat, from now until this process ends.

    Args:
        store: the store that all ranks share.
        rank: the rank that is alive.
        timeout: seconds after which a silent rank is lost.
    """
    # Calls of one store wait for each other, and other calls wait for ranks: hence a store apart.
    own = store.clone()
    own.set(_beat_of(rank), "0")
    threading.Thread(target=_beat, args=(own, rank, timeout), daemon=True, name="beats").start()


def _beat(store: "Store", rank: int, timeout: float) -> None:
    number = 0
    with suppress(RuntimeError):  # the process that serves the store has ended
        while True:
            time.sleep(timeout / LOOKS / BEATS)
            number += 1
            store.set(_beat_of(rank), str(number))


@while_served()
def wait_for_ranks(
    store: "Store", keys: Mapping[int, str], timeout: float, rank: int | None = None
) -> None:
    """Blocks until the store has each rank's key, as long as the missing ranks are alive.

    Args:
        store: the store that all ranks share.
        keys: a key by rank.
        timeout: seconds after which a silent rank is lost.
        rank: this rank, if it has a key too. The first of the ranks whose keys are there tells the
            user now and then which ranks they wait for.

    Raises:
        Failure: some ranks are silent.
        StoreLost: nobody serves the store any more.
    """
    silence = Silence()
    looks = 0
    while missing := _missing_ranks(store, keys, timeout / LOOKS):
        silent = silence.look(_beats(store, missing))
        if silent:
            raise Failure(lost(silent, timeout))
        looks += 1
        come = [other for other in keys if other not in missing]
        is_time_to_tell = looks % (TOLD_AFTER * LOOKS) == 0
        if is_time_to_tell and come[:1] == [rank]:
            waited = in_minutes(looks * timeout / LOOKS)
            tell(f"waiting for {named(missing)}, alive, for {waited}")


def end_when_silent(world: World, store: "Store", timeout: float) -> None:
    """Starts a thread that ends this process when a rank that it needs is silent.

    The process ends with a line on the terminal, whatever it waits for, be it in a library. The
    first rank needs all others, and they need the first.

    Args:
        world: where this rank is.
        store: the store that all ranks share, in which they beat.
        timeout: seconds after which a silent rank is lost.
    """
    needed = [0] if world.rank else [*range(1, world.size)]
    if not needed:
        return
    arguments = (world.rank, needed, store, timeout)
    threading.Thread(target=_watch, args=arguments, daemon=True, name="watches").start()


def stop_watching() -> None:
    """Ends the watch: the ranks have left each other, and this process goes on alone."""
    _has_left.set()


def _watch(rank: int, needed: Collection[int], store: "Store", timeout: float) -> None:
    own = store.clone()
    silence = Silence()
    beats = dict.fromkeys(needed, b"")
    # In another thread: where the first rank is silent, its store is too, and a call never returns.
    with ThreadPoolExecutor(1) as pool:
        call: Future[dict[int, bytes]] | None = None
        while not _has_left.is_set():
            call = call or pool.submit(_beats, own, needed)
            _has_left.wait(timeout / LOOKS)
            if call.done():
                with suppress(RuntimeError):  # nobody serves the store: the first rank is silent
                    beats = call.result()
                call = None
            silent = silence.look(beats)
            if silent and not _has_left.is_set():
                end_process(f"rank {rank} failed: {lost(silent, timeout)}")


def lost(ranks: Collection[int], timeout: float) -> str:
    """Returns what the user is told of silent ranks."""
    are_lost = "is lost" if len(ranks) == 1 else "are lost"
    return f"{named(ranks)} {are_lost}: no sign of life within {timeout:g} s (see --timeout)"


def named(ranks: Collection[int]) -> str:
    """Returns `rank 3`, or `ranks 1, 2`."""
    numbers = ", ".join(map(str, ranks))
    return f"rank {numbers}" if len(ranks) == 1 else f"ranks {numbers}"


def _beat_of(rank: int) -> str:
    return f"alive/{rank}"


def _beats(store: "Store", ranks: Iterable[int]) -> dict[int, bytes]:
    """Returns each rank's last beat; b"" where it never came."""
    beats = {}
    for rank in ranks:
        key = _beat_of(rank)
        beats[rank] = store.get(key) if store.check([key]) else b""
    return beats


def _missing_ranks(store: "Store", keys: Mapping[int, str], seconds: float) -> list[int]:
    """Returns the ranks whose keys the store still lacks after so many seconds."""
    try:
        store.wait(list(keys.values()), timedelta(seconds=seconds))
    except RuntimeError:
        return [rank for rank, key in keys.items() if not store.check([key])]
    return []
