"""What this process answers its peers, whichever wire they ask over."""

import threading
from collections.abc import Callable
from typing import Any, NoReturn

from torch.futures import Future

from hvdtrain.errors import Failure

# How often a watch is answered. TensorPipe sometimes delivers a message only when the next one comes (seen over its
# shared memory, where a process is stopped again and again): a second at most passes until then.
HEARTBEAT_S = 0.25
WATCH = "watch"  # a request that every process answers: whether it is about to leave, as soon as it is or after a while


def as_future(answer: Any) -> "Future[Any]":
    """What a call returned as a future, if it is none."""
    if isinstance(answer, Future):
        return answer
    done: Future[Any] = Future()
    done.set_result(answer)
    return done


class Calls(dict[str, Callable[..., Any]]):
    """What peers can ask for, by name: it returns at once, or returns a future. Failure for anything else."""

    def __missing__(self, method: str) -> NoReturn:
        raise Failure(f"{method} is not for peers")


class Requests:
    """The calls of an endpoint, and watches.

    Args:
        endpoint: of a server, a ps.desk.Desk: its `calls`, and `waited`, which is told how long a call waited for a
            thread.
    """

    def __init__(self, endpoint: Any = None) -> None:
        self.calls: Calls = endpoint.calls if endpoint else Calls()
        self.calls[WATCH] = self._watch
        self.waited: Callable[[str, float], None] = endpoint.waited if endpoint else lambda method, seconds: None
        self._leaving = threading.Event()
        self._problem: Failure | None = None  # why this process leaves, where it does not do so in order
        self._watches: list[Future[bool]] = []  # open until this process leaves, or for a while
        self._lock = threading.Lock()
        threading.Thread(target=self._answer_watches, daemon=True, name="answers watches").start()

    def leave(self, problem: Failure | None = None) -> None:
        """This process is about to leave: whoever watches it learns so now, and of a problem, if that is why."""
        self._problem = problem
        self._leaving.set()

    def _watch(self) -> "Future[bool]":
        future: Future[bool] = Future()
        with self._lock:
            if self._leaving.is_set():
                self._answer(future, True)
            else:
                self._watches.append(future)
        return future

    def _answer_watches(self) -> None:
        is_leaving = False
        while not is_leaving:
            is_leaving = self._leaving.wait(HEARTBEAT_S)
            with self._lock:
                open_now, self._watches = self._watches, []
            for future in open_now:
                self._answer(future, is_leaving)

    def _answer(self, future: "Future[bool]", is_leaving: bool) -> None:
        if self._problem:
            future.set_exception(self._problem)  # type: ignore[arg-type]  # torch's stub takes results alone
        else:
            future.set_result(is_leaving)
