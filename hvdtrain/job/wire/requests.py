"""Answers to the peers' calls, whichever wire they come over."""

import threading
from collections.abc import Callable
from typing import Any, NoReturn, Protocol

from torch.futures import Future

from hvdtrain.base.errors import Failure

# How often a watch is answered. TensorPipe sometimes delivers a message only when the next one
# comes (seen over its shared memory, where a process is stopped again and again): a second at most
# passes until then.
HEARTBEAT_S = 0.25
# A call that every process answers with one of the next three: at once where it leaves, else after
# a while.
WATCH = "watch"
STAYS, LEAVES = "stays", "leaves"
ASKED_TO_LEAVE = "asked to leave"  # the process had a SIGTERM, and leaves when the job does


def as_future(answer: Any) -> "Future[Any]":
    """Returns a call's answer as a future, if it is none."""
    if isinstance(answer, Future):
        return answer
    done: Future[Any] = Future()
    done.set_result(answer)
    return done


class Calls(dict[str, Callable[..., Any]]):
    """The methods that peers can call, by name. Each returns at once, or returns a future.

    Raises:
        Failure: a peer calls anything else.
    """

    def __missing__(self, method: str) -> NoReturn:
        raise Failure(f"{method} is not for peers")


class Endpoint(Protocol):
    """Something that answers peers, such as a ps.server.Server.

    Attributes:
        calls: what peers can call.
        waited: told a call's method, and how many seconds the call waited for a thread.
    """

    calls: Calls
    waited: Callable[[str, float], None]


class Requests:
    """The calls of an endpoint, and watches.

    Args:
        endpoint: answers the calls; None: only watches are answered.
    """

    def __init__(self, endpoint: Endpoint | None = None) -> None:
        self.calls = endpoint.calls if endpoint else Calls()
        self.calls[WATCH] = self._watch
        self._endpoint = endpoint
        # Returns whether this process was asked to leave, and the job has to know.
        self.asked_to_leave: Callable[[], bool] = lambda: False
        self._leaving = threading.Event()
        self._problem: Failure | None = None  # why this process leaves, if not in order
        self._watches: list[Future[str]] = []  # open until this process leaves, or for a while
        self._lock = threading.Lock()
        self._answers = threading.Thread(
            target=self._answer_watches, daemon=True, name="answers watches"
        )

    def waited(self, method: str, seconds: float) -> None:
        """Tells the endpoint how long a call waited for a thread."""
        if self._endpoint:
            self._endpoint.waited(method, seconds)

    def leave(self, problem: Failure | None = None) -> None:
        """Tells whoever watches this process that it is about to leave.

        Args:
            problem: why it leaves; None: in order.
        """
        self._problem = problem
        self._leaving.set()

    def _watch(self) -> "Future[str]":
        future: Future[str] = Future()
        with self._lock:
            if self._leaving.is_set():
                self._answer(future, True)
                return future
            self._watches.append(future)
            if not self._answers.ident:  # this is the first watch
                self._answers.start()
        return future

    def _answer_watches(self) -> None:
        is_leaving = False
        while not is_leaving:
            is_leaving = self._leaving.wait(HEARTBEAT_S)
            with self._lock:
                open_watches = self._watches
                self._watches = []
            for future in open_watches:
                self._answer(future, is_leaving)

    def _answer(self, future: "Future[str]", is_leaving: bool) -> None:
        if self._problem:
            future.set_exception(self._problem)  # type: ignore[arg-type]  # torch's stub takes results alone
        elif is_leaving:
            future.set_result(LEAVES)
        else:
            future.set_result(ASKED_TO_LEAVE if self.asked_to_leave() else STAYS)
