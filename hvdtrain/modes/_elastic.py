"""What elastic rings share: a step is taken by all workers that are there, or by none, and is repeated without those
that are lost.
"""

import threading
import traceback
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch

from hvdtrain.coordination.job import Job
from hvdtrain.coordination.synchroniser import RingBroken, Synchroniser, ring_traffic
from hvdtrain.errors import Failure
from hvdtrain.modes._elastic_group import ElasticGroup
from hvdtrain.numerics.split import DIGESTS
from hvdtrain.system.connections import OwnConnections

TRIES = 3  # to form a ring, or to take a step, while nobody is lost


class Elastic(Synchroniser):
    """A mode adds `form`, `abandon`, and a `wait` that ends with `take_together`.

    Attributes:
        members: the workers of the ring.
        connections: those of the ring.
        buffers: the model's, which forward changes.
        message: payload bytes of a step's gradients.
        problem: what went wrong in the ring.
    """

    group: ElasticGroup
    message: float
    buffers: list[torch.Tensor]

    def meet(self, job: Job) -> None:
        """Find the others, and form the first ring."""
        self.connections = OwnConnections()
        self.members: list[int] = []
        self.problem = ""
        self._before: list[torch.Tensor] = []
        self._failures = self._moved = 0
        self._workers, self._changing = job.world.workers, threading.Lock()
        self.group = ElasticGroup(job, self._one_is_lost, lambda line: self.report(line))
        self.regroup()

    def _one_is_lost(self, lost: int) -> None:
        with self._changing:  # a ring without that one, which is being formed, is left alone
            if lost > self._workers - len(self.members):
                self.abandon()

    @abstractmethod
    def form(self, place: int, given: Mapping[int, Any]) -> None:
        """Form a ring.

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
        self._before = [buffer.clone() for buffer in self.buffers]

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

    def regroup(self) -> tuple[int, int]:
        """As in Synchroniser; all workers call it.

        Raises:
            Failure: the ring breaks again and again though nobody is lost.
        """
        for buffer, before in zip(self.buffers, self._before, strict=False):
            buffer.copy_(before)
        while not self._formed():
            pass
        return self.members.index(self.group.worker), len(self.members)

    def _formed(self) -> bool:
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
            with self.connections.opening():
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
