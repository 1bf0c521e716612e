"""What elastic rings share.

A step is taken by all workers that are there, or by none. It is repeated without the workers that
are lost.
"""

import threading
import traceback
from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import nn

from hvdtrain.base.errors import Failure
from hvdtrain.base.numerics.flat import trained
from hvdtrain.base.numerics.optimizers import put_together
from hvdtrain.base.numerics.split import DIGESTS
from hvdtrain.base.system.connections import OwnConnections
from hvdtrain.job.coordination.job import Job
from hvdtrain.job.coordination.joining import Arrival
from hvdtrain.job.coordination.synchroniser import RingBroken, Synchroniser, ring_traffic
from hvdtrain.job.rings.elastic_group import ElasticGroup

# How often workers try to form a ring, or to take a step, while nobody is lost.
TRIES = 3


class Elastic(Synchroniser):
    """A synchroniser whose workers may be lost, and may join.

    A mode adds `form`, `abandon`, and a `wait` that ends with `take_together`.

    Attributes:
        members: the workers of the ring.
        connections: the connections of the ring.
        model: this worker's model.
        each_has_all: whether each worker has all of the optimizer's state.
        problem: what went wrong in the ring.
    """

    group: ElasticGroup
    model: nn.Module
    each_has_all = True

    def meet(self, job: Job, arrival: Arrival | None) -> None:
        """Finds the other workers, and forms the first ring.

        A worker that joins forms a ring when it is ready: see let_join.
        """
        self.members: list[int] = []
        self.problem = ""
        # The tensors that forward changes, and copies from before the step.
        self._before: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._failures = 0  # of rings, since a step was taken
        self._moved = 0  # bytes that this worker has sent
        # What let_join is to return, of a ring that was formed between two rounds.
        self._untold: tuple[int, int] | None = None
        self._changing = threading.Lock()
        self.group = ElasticGroup(job, self._one_is_lost, lambda line: self.report(line), arrival)
        self.connections = OwnConnections(self.group.addresses)
        if not arrival:
            self.regroup()

    def _one_is_lost(self, lost: Collection[int]) -> None:
        # A ring that is being formed without the lost worker is left alone.
        with self._changing:
            if not set(lost).isdisjoint(self.members):
                self.abandon()

    @abstractmethod
    def form(self, place: int, given: Mapping[int, Any]) -> None:
        """Forms a ring. Its `connections` are the ones that are opened meanwhile.

        Args:
            place: this worker's place in the ring, from 0.
            given: what each worker of the ring has offered: see `offer`.
        """

    @abstractmethod
    def abandon(self) -> None:
        """Ends soon, with a failure, whatever waits for the ring. Any thread calls this, any time."""

    @abstractmethod
    def take_payload(self) -> int:
        """Returns the bytes that this worker has handed over to be averaged since the last call.

        They are counted as they are sent, also in a step that came to nothing.
        """

    def end_ring(self) -> None:
        """Blocks until nothing of an abandoned ring runs on this worker any more.

        The others wait meanwhile: no ring is formed before all have ended theirs.
        """

    def offer(self) -> Any:
        """Returns what this worker tells the others of a ring that is formed, of plain types."""

    def begin(self, step: int, lr: float) -> None:
        super().begin(step, lr)  # type: ignore[safe-super]  # the mode's
        self._before = [(buffer, buffer.clone()) for buffer in self.model.buffers()]

    def take_together(self, problem: str) -> None:
        """Blocks, at the end of a step's exchange, until all workers of the ring have all averages.

        No average has changed a weight yet. The first worker decides, in one place: a sum that it
        has done is the same on all workers.

        Args:
            problem: why this worker lacks averages; empty where it has all.

        Raises:
            RingBroken: some worker lacks averages, or is lost.
        """
        workers, rows = self.group.all_gather([not problem, self.digest])
        came, digests = rows.T
        if workers != self.members or not came.all():
            self.problem = problem or self.problem
            raise RingBroken
        self.digest = sum(map(int, digests.tolist())) % DIGESTS if self.group.leads else 0
        self._failures = 0
        self._moved += ring_traffic(len(self.members), self.take_payload())[0]

    def mean_over_workers(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the group's mean, over the workers that are there: the ring may break meanwhile."""
        return self.group.mean(values)

    def let_join(self, state: Callable[[], dict[str, Any]]) -> tuple[int, int] | None:
        if self.group.leads:
            self.group.open_for_joining(lambda: self._whole(state()))
        self.together(lambda: None)
        ring = self._untold
        self._untold = None
        return ring

    def together(self, act: Callable[[], Any]) -> Any:
        """Calls a function between two steps; returns its result when it has ended on all workers.

        All workers call this. Where one is lost meanwhile, the others form the ring anew, and call
        the function again.
        """
        self._before = []  # no step comes to nothing here
        while True:
            found = None
            came = True
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
        """Returns the state with what is the same on all workers, for a worker that joins."""
        optimizer: dict[str, torch.Tensor] = {}
        if self.each_has_all:  # otherwise the optimizer's state comes when the ring is formed
            elements = sum(p.numel() for p in trained(self.model))
            optimizer = put_together(self.optimizer_parts(), elements)
        step = state["history"]["step"]
        return state | {"step": step, "weights": self.model.state_dict(), "optimizer": optimizer}

    def leave_alone(self) -> None:
        self.group.wire.ask(0, "depart", self.group.worker, 0)
        self.group.wire.leave_now()

    def regroup(self) -> tuple[int, int]:
        """Forms a ring: see Synchroniser.regroup. All workers call this.

        Raises:
            Failure: the ring breaks again and again though nobody is lost.
        """
        for buffer, before in self._before:
            buffer.copy_(before)
        while not self.formed():
            pass
        return self.members.index(self.group.worker), len(self.members)

    def formed(self) -> bool:
        """Tries to form a ring; returns whether all workers that are there now are in it."""
        self.abandon()
        self.end_ring()
        given = self.group.gather(self.offer())
        self._failures = self._failures + 1 if list(given) == self.members else 0
        if self._failures > TRIES:
            raise Failure(
                f"the ring broke {TRIES} times in a step, and nobody is lost: {self.problem or 'elsewhere'}"
            )
        with self._changing:
            self.members = sorted(given)
        place = self.members.index(self.group.worker)
        problem = ""
        try:
            self.form(place, given)
        except Exception as error:
            traceback.print_exc()
            problem = str(error)
            self.problem = problem
        workers, rows = self.group.all_gather([not problem])
        return workers == self.members and bool(rows.all())

    def traffic(self, steps: int) -> tuple[int, int]:
        return self._moved, self._moved

    def ask_servers(self, question: str) -> list[Any]:
        """Returns the first worker's answer to `lives`: a ring has no servers."""
        return [self.group.lives()] if question == "lives" else []
