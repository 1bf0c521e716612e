"""What elastic rings share: a step is taken by all workers that are there, or by none, and is repeated without those
that are lost.
"""

import threading
import traceback
from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import nn

from hvdtrain.coordination.job import Job
from hvdtrain.coordination.joining import Arrival
from hvdtrain.coordination.synchroniser import RingBroken, Synchroniser, ring_traffic
from hvdtrain.errors import Failure
from hvdtrain.modes._elastic_group import ElasticGroup
from hvdtrain.numerics.optimizers import COUNT
from hvdtrain.numerics.split import DIGESTS
from hvdtrain.system.connections import OwnConnections

TRIES = 3  # to form a ring, or to take a step, while nobody is lost


class Elastic(Synchroniser):
    """A mode adds `form`, `abandon`, and a `wait` that ends with `take_together`.

    Attributes:
        members: the workers of the ring.
        connections: those of the ring.
        model: this worker's.
        message: payload bytes of a step's gradients.
        each_has_all: of the optimizer's state.
        problem: what went wrong in the ring.
    """

    group: ElasticGroup
    message: float
    model: nn.Module
    each_has_all = True

    def meet(self, job: Job, arrival: Arrival | None) -> None:
        """Find the others, and form the first ring. One that joins does that when it is ready: see let_join."""
        self.members: list[int] = []
        self.problem = ""
        self._before: list[tuple[torch.Tensor, torch.Tensor]] = []  # what forward changes, and as it was
        self._failures = self._moved = 0
        self._untold: tuple[int, int] | None = None  # of a ring formed between two rounds: what let_join is to return
        self._changing = threading.Lock()
        self.group = ElasticGroup(job, self._one_is_lost, lambda line: self.report(line), arrival)
        self.connections = OwnConnections(self.group.addresses)
        if not arrival:
            self.regroup()

    def _one_is_lost(self, lost: Collection[int]) -> None:
        with self._changing:  # a ring without that one, which is being formed, is left alone
            if not set(lost).isdisjoint(self.members):
                self.abandon()

    @abstractmethod
    def form(self, place: int, given: Mapping[int, Any]) -> None:
        """Form a ring, whose `connections` are those that are opened meanwhile.

        Args:
            place: this worker's, from 0.
            given: what each of its workers gave: see `offer`.
        """

    @abstractmethod
    def abandon(self) -> None:
        """Have whatever waits for the ring end soon, as a failure. Any thread calls it, at any time."""

    def offer(self) -> Any:
        """What this worker tells the others with which it is to form a ring, of plain types."""

    def begin(self, step: int, lr: float) -> None:
        super().begin(step, lr)  # type: ignore[safe-super]  # the mode's
        self._before = [(buffer, buffer.clone()) for buffer in self.model.buffers()]

    def take_together(self, problem: str) -> None:
        """At the end of a step's exchange: return where all workers of the ring have all averages, of which none has
        changed a weight yet. The first worker decides, in one place: a sum that it has done is the same on all.

        Args:
            problem: why this worker has not all; empty where it has.

        Raises:
            RingBroken: some worker has not, or is lost.
        """
        workers, rows = self.group.all_gather([not problem, self.digest])
        came, digests = rows.T
        if workers != self.members or not came.all():
            self.problem = problem or self.problem
            raise RingBroken
        self.digest = sum(map(int, digests.tolist())) % DIGESTS if self.group.leads else 0
        self._failures = 0
        self._moved += ring_traffic(len(self.members), self.message)[0]

    def let_join(self, state: Callable[[], dict[str, Any]]) -> tuple[int, int] | None:
        if self.group.leads:
            self.group.open_for_joining(lambda: self._whole(state()))
        self.together(lambda: None)
        ring, self._untold = self._untold, None
        return ring

    def together(self, act: Callable[[], Any]) -> Any:
        """Call this between two steps, on all workers, and return what it gave when all are through it. Where one is
        lost meanwhile, the others form the ring anew, and call it again.
        """
        self._before = []  # it is no step that comes to nothing
        while True:
            found, came = None, True
            try:
                found = act()
            except Failure:
                came = False
                self.abandon()
            workers, rows = self.group.all_gather([came])
            if workers == self.members and rows.all():
                return found
            self._untold = self.regroup()

    def _whole(self, state: dict[str, Any]) -> dict[str, Any]:
        """With what all workers have alike, for one that joins."""
        optimizer: dict[str, torch.Tensor] = {}
        if self.each_has_all:  # else it comes when the ring is formed
            parts = [part for _, part in sorted(self.optimizer_parts(), key=lambda part: part[0])]
            optimizer = {n: parts[0][n] if n == COUNT else torch.cat([part[n] for part in parts]) for n in parts[0]}
        step = state["history"]["step"]
        return state | {"step": step, "weights": self.model.state_dict(), "optimizer": optimizer}

    def leave_alone(self) -> None:
        self.group.wire.ask(0, "depart", self.group.worker, 0)
        self.group.wire.leave_now()

    def regroup(self) -> tuple[int, int]:
        """As in Synchroniser; all workers call it.

        Raises:
            Failure: the ring breaks again and again though nobody is lost.
        """
        for buffer, before in self._before:
            buffer.copy_(before)
        while not self.formed():
            pass
        return self.members.index(self.group.worker), len(self.members)

    def formed(self) -> bool:
        """Whether all that are there now are in a ring."""
        self.abandon()
        given = self.group.gather(self.offer())
        self._failures = self._failures + 1 if list(given) == self.members else 0
        if self._failures > TRIES:
            raise Failure(f"the ring broke {TRIES} times in a step, and nobody is lost: {self.problem or 'elsewhere'}")
        with self._changing:
            self.members = sorted(given)
        place, problem = self.members.index(self.group.worker), ""
        try:
            self.form(place, given)
        except Exception as error:
            traceback.print_exc()
            self.problem = problem = str(error)
        workers, rows = self.group.all_gather([not problem])
        return workers == self.members and bool(rows.all())

    def traffic(self, steps: int) -> tuple[int, int]:
        return self._moved, self._moved

    def ask_servers(self, question: str) -> list[Any]:
        """A ring has none; the first worker knows what the first server does of who is there."""
        return [self.group.lives()] if question == "lives" else []
