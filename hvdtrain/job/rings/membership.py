"""Who is in an elastic ring, and what its workers do together.

A step is taken by all workers that are there, or by none. It is repeated without the workers that
are lost.
"""

import threading
import traceback
from collections.abc import Callable, Collection
from typing import Any

from hvdtrain.base.errors import Failure
from hvdtrain.base.numerics.split import DIGESTS
from hvdtrain.job.coordination.synchroniser import RingBroken
from hvdtrain.job.rings.elastic_group import ElasticGroup
from hvdtrain.job.rings.restartable import RestartableRing, StateLost

# How often workers try to form a ring, or to take a step, while nobody is lost.
TRIES = 3


class Membership:
    """The workers of a ring, as one of them sees them. It forms the ring anew when they change.

    Args:
        group: all workers that are there.
        ring: the ring that `form` starts.

    Attributes:
        members: the workers of the ring, in the order of the ring.
    """

    def __init__(self, group: ElasticGroup, ring: RestartableRing) -> None:
        self.group = group
        self.ring = ring
        self.members: list[int] = []
        self._lost: Collection[int] = ()
        self._changing = threading.Lock()  # guards the members of a ring that runs or starts
        self._problem = ""  # what went wrong in the ring, in words
        self._failures = 0  # of rings, since a step was taken
        # This worker's place in a ring that was formed between two rounds: see take_change.
        self._change: tuple[int, int] | None = None
        group.when_lost = self._one_is_lost

    @property
    def place(self) -> tuple[int, int]:
        """This worker's place in the ring, from 0, and the number of workers."""
        return self.members.index(self.group.worker), len(self.members)

    def form(self) -> None:
        """Forms a ring of the workers that are there. All workers call this.

        Raises:
            StateLost: no ring of these workers can go on.
            Failure: the ring breaks again and again though nobody is lost.
        """
        while not self._try_to_form():
            pass

    def _try_to_form(self) -> bool:
        """Tries to form a ring; returns whether all workers that are there now are in it."""
        former = self.members
        self._change_members([])  # who is lost from now on was in no ring
        self.ring.abandon()
        self.ring.end()
        offers = self.group.gather(self.ring.offer())
        members = sorted(offers)
        self._failures = self._failures + 1 if members == former else 0
        if self._failures > TRIES:
            where = self._problem or "elsewhere"
            raise Failure(
                f"the ring broke {TRIES} times in a step, although no worker was lost: {where}"
            )
        self._change_members(members)
        if not self._all_say(self._start(offers)):
            return False
        self.ring.settle()
        return True

    def _change_members(self, members: list[int]) -> None:
        with self._changing:
            self.members = members

    def _start(self, offers: dict[int, Any]) -> bool:
        """Starts the ring; returns whether it has started on this worker."""
        place, _ = self.place
        try:
            if self._one_is_missing():
                raise Failure("a worker is lost")
            self.ring.start(self.members, place, offers)
        except StateLost:
            raise
        except Exception as error:
            traceback.print_exc()
            self._problem = str(error)
            self.ring.abandon()  # so that the others do not wait for this worker
            return False
        return True

    def agree(self, problem: str, digest: int) -> int:
        """Blocks, at the end of a step's exchange, until all workers of the ring have all averages.

        No average has changed a weight yet. The first worker decides, in one place: a sum that it
        has done is the same on all workers.

        Args:
            problem: why this worker lacks averages; empty where it has all.
            digest: of this worker's samples: see Synchroniser.

        Returns:
            The digest of all workers' samples on the worker that leads, 0 on the others.

        Raises:
            RingBroken: some worker lacks averages, or is lost.
        """
        workers, rows = self.group.all_gather([not problem, digest])
        came, digests = rows.T
        if workers != self.members or not came.all():
            self._problem = problem or self._problem
            raise RingBroken
        self._failures = 0
        return sum(map(int, digests.tolist())) % DIGESTS if self.group.leads else 0

    def together(self, act: Callable[[], Any]) -> Any:
        """Calls a function between two steps; returns its result when it has ended on all workers.

        All workers call this. Where one is lost meanwhile, the others form the ring anew, and call
        the function again.
        """
        while True:
            found = None
            came = True
            try:
                found = act()
            except Failure:
                came = False
                self.ring.abandon()
            if self._all_say(came):
                return found
            self.form()
            self._change = self.place

    def take_change(self) -> tuple[int, int] | None:
        """Returns this worker's place in the ring that `together` has formed since the last call.

        None where the ring has stayed the same.
        """
        change = self._change
        self._change = None
        return change

    def _all_say(self, yes: bool) -> bool:
        """Returns whether all workers of the ring are there and say yes."""
        workers, rows = self.group.all_gather([yes])
        return workers == self.members and bool(rows.all())

    def _one_is_lost(self, lost: Collection[int]) -> None:
        """Abandons the ring, if a worker of it is lost."""
        with self._changing:
            self._lost = lost
            if self._one_is_missing():
                self.ring.abandon()

    def _one_is_missing(self) -> bool:
        return not set(self._lost).isdisjoint(self.members)
