"""The wire between ranks of one process, whose messages come in an order of the caller's choice.

Each rank is a thread, and one thread runs at a time: a rank runs until it waits for something. Then
an Order chooses what happens next: which message comes, or which rank goes on. So what a job does
depends on the order alone, and is repeated by it.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, cast

import torch
from torch.distributed import Store
from torch.futures import Future

from hvdtrain.base.errors import Failure
from hvdtrain.base.world.place import World
from hvdtrain.job.wire.messages import CONNECTION_ENDED
from hvdtrain.job.wire.requests import Requests, as_future
from hvdtrain.job.wire.wire import Wire

# Called with why a rank that is watched has ended: see Wire.watch.
Ended = Callable[[str], None]


class StandsStill(Failure):
    """Every rank waits for something that does not come."""


class _Stopped(BaseException):
    """Raised in the thread of a rank that goes on no more, where it waits."""


@dataclass(eq=False)
class Delivery:
    """A message on its way to a rank.

    Attributes:
        sender: the rank that has sent it.
        receiver: the rank that it comes to.
        deliver: has the receiver take it.
        method: the method that is called, also in the answer; empty: the receiver learns that the
            sender has ended.
        arguments: the arguments of the call; empty of an answer.
        is_answer: whether it is the answer to a call.
    """

    sender: int
    receiver: int
    deliver: Callable[[], None]
    method: str = ""
    arguments: tuple[Any, ...] = ()
    is_answer: bool = False


@dataclass(eq=False)
class Turn:
    """A rank that can go on."""

    rank: int


# A message comes, a rank goes on, or what else is to happen, such as a kill.
Event = Delivery | Turn | Callable[[], None]
# Chooses what happens next, of the messages on their way, oldest first, and the ranks that can go
# on. None: nothing is to happen.
Order = Callable[[Sequence[Delivery], Sequence[Turn]], Event | None]


def _held_lock() -> threading.Lock:
    """Returns a lock on which a thread waits until another one releases it."""
    lock = threading.Lock()
    lock.acquire()
    return lock


@dataclass(eq=False)
class _Rank:
    """A rank's thread.

    Attributes:
        work: what the rank does.
        can_go_on: whether what it waits for has come.
        goes_on: released when the thread is to run.
        is_stopped: whether it is to end where it waits.
        has_ended: whether the thread is over.
        error: what `work` raised.
    """

    work: Callable[[], object]
    can_go_on: Callable[[], bool] = lambda: True
    goes_on: threading.Lock = field(default_factory=_held_lock)
    is_stopped: bool = False
    has_ended: bool = False
    error: BaseException | None = None


class LocalNetwork:
    """The ranks of a job in one process, and the messages between them.

    Args:
        order: chooses what happens next.
        gives_way: whether a rank that has made a call waits for its turn, so that others can come
            between any two calls.

    Attributes:
        store: the store that all ranks share.
        on_their_way: the messages that have not come yet.
    """

    def __init__(self, order: Order, gives_way: bool = False) -> None:
        self.order = order
        self.gives_way = gives_way
        self.store = LocalStore(self)
        self.on_their_way: list[Delivery] = []
        self._ranks: dict[int, _Rank] = {}
        self._requests: dict[int, Requests] = {}
        self._unanswered: list[Delivery] = []  # the calls whose answers have not come
        # For each rank that is watched: who watches it, and what is called when it ends.
        self._watches: dict[int, list[tuple[int, Ended]]] = {}
        self._why_ended: dict[int, str] = {}
        self._running: _Rank | None = None
        self._paused = _held_lock()  # released when the thread that runs waits

    def add(self, rank: int, work: Callable[[], object]) -> None:
        """Adds a rank that works. It begins when it has its turn."""
        self._ranks[rank] = _Rank(work)
        thread = threading.Thread(
            target=self._work, args=(self._ranks[rank],), daemon=True, name=f"rank {rank}"
        )
        thread.start()

    def serve(self, rank: int, requests: Requests) -> None:
        """Has these requests answer the calls of a rank, in place of former ones."""
        self._requests[rank] = requests

    def run(self) -> None:
        """Runs until the work of all ranks is over.

        Raises:
            StandsStill: nothing can happen any more, while a rank still waits.
            BaseException: what a rank has raised.
        """
        try:
            while working := [rank for rank in self._ranks if not self._ranks[rank].has_ended]:
                turns = [Turn(rank) for rank in working if self._ranks[rank].can_go_on()]
                event = self.order(self.on_their_way, turns)
                if event is None:
                    names = ", ".join(map(str, working))
                    raise StandsStill(f"ranks that wait for ever: {names}")
                self._happen(event)
        finally:
            for rank in self._ranks:
                self._stop(rank)

    def kill(self, rank: int, arrives: Callable[[Delivery], bool]) -> None:
        """Ends a rank where it is. Whoever watches it learns of that later.

        Args:
            rank: the rank.
            arrives: returns whether a call that the rank has made still arrives.
        """
        self._stop(rank)
        self.on_their_way = [
            message
            for message in self.on_their_way
            if message.receiver != rank and (message.sender != rank or arrives(message))
        ]
        self._unanswered = [call for call in self._unanswered if call.sender != rank]
        self.give_up(rank, CONNECTION_ENDED)

    def kill_to_return(self, rank: int, arrives: Callable[[Delivery], bool]) -> None:
        """Ends a rank that comes back: see Wire.returning.

        What it has not answered is sent again, and comes when `serve` is called for the rank.

        Args:
            rank: the rank.
            arrives: returns whether an answer that the rank has sent still arrives.
        """
        self._stop(rank)
        del self._ranks[rank]
        for watched, watches in self._watches.items():
            self._watches[watched] = [watch for watch in watches if watch[0] != rank]
        others = [message for message in self.on_their_way if message.receiver != rank]
        self.on_their_way = [
            message for message in others if message.sender != rank or arrives(message)
        ]
        self.on_their_way += [call for call in self._unanswered if call.receiver == rank]

    def give_up(self, rank: int, why: str) -> None:
        """Lets whoever watches a rank learn later that it has ended, even if it has not.

        Args:
            rank: the rank.
            why: why it is lost; "": it is not, its work is done.
        """
        if rank in self._why_ended:
            return
        self._why_ended[rank] = why
        for watcher, ended in self._watches.get(rank, ()):
            self._tell_end(rank, watcher, ended)

    def wait_until(self, is_over: Callable[[], bool]) -> None:
        """Lets others go on until `is_over` returns True."""
        if not is_over():
            self._pause(is_over)

    def give_way(self) -> None:
        """Lets others go on, if the network is made so, and a rank calls this."""
        if self.gives_way and self._running:
            self._pause(lambda: True)

    def call(self, sender: int, rank: int, method: str, arguments: Sequence[Any]) -> "Future[Any]":
        """Sends a call; returns its future."""
        if self._running and self._running.is_stopped:
            raise _Stopped
        future: Future[Any] = Future()
        call = Delivery(sender, rank, lambda: None, method, tuple(arguments))
        call.deliver = partial(self._handle, call, future)
        self.on_their_way.append(call)
        self._unanswered.append(call)
        self.give_way()
        return future

    def watch(self, watcher: int, rank: int, ended: Ended) -> None:
        """Has `ended` called, at the rank that watches, some time after the other has ended."""
        self._watches.setdefault(rank, []).append((watcher, ended))
        if rank in self._why_ended:
            self._tell_end(rank, watcher, ended)

    def _work(self, rank: _Rank) -> None:
        """Does a rank's work, in its thread."""
        rank.goes_on.acquire()
        try:
            if not rank.is_stopped:
                rank.work()
        except _Stopped:
            pass
        except BaseException as error:
            rank.error = error
        rank.has_ended = True
        self._paused.release()

    def _pause(self, can_go_on: Callable[[], bool]) -> None:
        """Lets others go on until this rank has its turn again, which it has not before it can."""
        rank = self._running
        if rank is None:
            raise RuntimeError("what answers calls must not block")
        if not rank.is_stopped:
            rank.can_go_on = can_go_on
            self._paused.release()
            rank.goes_on.acquire()
        if rank.is_stopped:
            raise _Stopped

    def _resume(self, rank: _Rank) -> None:
        """Has a rank go on until it waits or ends."""
        self._running = rank
        rank.goes_on.release()
        self._paused.acquire()
        self._running = None

    def _happen(self, event: Event) -> None:
        if isinstance(event, Delivery):
            self.on_their_way.remove(event)
            event.deliver()
            return
        if not isinstance(event, Turn):
            event()
            return
        rank = self._ranks[event.rank]
        self._resume(rank)
        if rank.error:
            raise rank.error
        if rank.has_ended:
            self.give_up(event.rank, "")

    def _stop(self, number: int) -> None:
        rank = self._ranks.get(number)
        if rank and not rank.has_ended:
            rank.is_stopped = True
            self._resume(rank)

    def _tell_end(self, rank: int, watcher: int, ended: Ended) -> None:
        tell = partial(ended, self._why_ended[rank])
        self.on_their_way.append(Delivery(rank, watcher, tell))

    def _handle(self, call: Delivery, future: "Future[Any]") -> None:
        """Handles a call that has come. The answer is sent when it is there."""
        try:
            method = self._requests[call.receiver].calls[call.method]
            answer = method(*copied(call.arguments))
        except Failure as error:
            answer = _failed(error)
        as_future(answer).add_done_callback(partial(self._answer, call, future))

    def _answer(self, call: Delivery, future: "Future[Any]", answer: "Future[Any]") -> None:
        settle = partial(self._settle, call, future, answer)
        self.on_their_way.append(
            Delivery(call.receiver, call.sender, settle, call.method, is_answer=True)
        )

    def _settle(self, call: Delivery, future: "Future[Any]", answer: "Future[Any]") -> None:
        """Takes an answer that has come to the rank that called."""
        if call not in self._unanswered:
            return  # the call was sent again, and answered before, or its rank has died
        self._unanswered.remove(call)
        try:
            future.set_result(copied(answer.value()))
        except Failure as error:
            future.set_exception(RuntimeError(str(error)))  # type: ignore[arg-type]  # see _failed


def copied(value: Any) -> Any:
    """Returns a message as it comes: with tensors of its own."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: copied(item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(copied, value))
    if isinstance(value, list | tuple):
        return type(value)(map(copied, value))
    return value


def _failed(error: Failure) -> "Future[Any]":
    future: Future[Any] = Future()
    future.set_exception(error)  # type: ignore[arg-type]  # torch's stub takes results alone
    return future


class LocalStore(Store):
    """The store that the ranks of a network share."""

    def __init__(self, network: LocalNetwork) -> None:
        super().__init__()
        self.network = network
        self._values: dict[str, str] = {}

    def set(self, key: str, value: str) -> None:
        self._values[key] = value

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._values[key].encode()

    def check(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Lets others go on until the keys are there. There is no limit."""
        self.network.wait_until(lambda: self.check(keys))


class LocalCondition(threading.Condition):
    """A condition that lets other ranks of a network go on while a rank waits for it."""

    def __init__(self, network: LocalNetwork) -> None:
        super().__init__()
        self._network = network
        self._notified = 0  # how often it was

    def wait(self, timeout: float | None = None) -> bool:
        """Lets others go on until the condition is notified. There is no limit."""
        before = self._notified
        self.release()
        try:
            self._network.wait_until(lambda: self._notified > before)
        finally:
            self.acquire()
        return True

    def notify_all(self) -> None:
        self._notified += 1


class LocalWire(Wire):
    """A rank's end of a network."""

    def __init__(self, network: LocalNetwork, rank: int, requests: Requests) -> None:
        super().__init__(requests)
        self.network = network
        self.rank = rank
        network.serve(rank, requests)

    def call(
        self, rank: int, method: str, *arguments: Any, timeout: float | None = None
    ) -> "Future[Any]":
        return self.network.call(self.rank, rank, method, arguments)

    def result(self, server: int, future: "Future[Any]", *arguments: Any, **named: Any) -> Any:
        self.network.wait_until(lambda: future.done() or server in self.lost)
        return super().result(server, future, *arguments, **named)

    def condition(self) -> LocalCondition:
        return LocalCondition(self.network)

    def watch(self, rank: int, timeout: float, ended: Ended) -> None:
        def has_ended(why: str) -> None:
            if why:
                self.lost[rank] = why
            ended(why)

        self.network.watch(self.rank, rank, has_ended)

    def end_when_silent(self, world: World, store: Store, timeout: float) -> None:
        """Does nothing: no rank of a network is silent."""

    def close(self) -> None:
        pass


def connect(world: World, store: Store, timeout: float, requests: Requests) -> LocalWire:
    """Joins a network.

    Args:
        world: where this rank is.
        store: the network's store.
        timeout: has no meaning here.
        requests: answers the peers.
    """
    network = cast(LocalStore, store).network
    return LocalWire(network, world.rank, requests)
