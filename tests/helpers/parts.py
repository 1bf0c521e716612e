"""Parts of a server, driven with plain calls: what a server does around them, without locks and
futures.
"""

from hvdtrain.job.coordination.leases import Leases
from hvdtrain.job.coordination.roster import Roster


class Waits:
    """Somebody who waits for an answer, like a future."""

    def __init__(self, answers, waiter):
        self.answers, self.waiter = answers, waiter

    def done(self):
        return self.waiter in self.answers

    def value(self):
        if isinstance(found := self.answers[self.waiter], Exception):
            raise found
        return found

    wait = value


class Driven:
    """A part whose answers are kept until their waiter calls again."""

    def __init__(self, part, journal=None):
        self.part, self.journal, self.answers = part, journal, {}
        if journal:
            journal.keep(part, type(part).__name__.lower())

    def handle(self, answers, waiter=None):
        """Take what the part has answered; the waiter has called."""
        lines = self.part.take_lines()
        if self.journal:
            self.journal.commit(self.part, lines)
        self.answers.pop(waiter, None)
        self.answers.update(answers or {})
        return Waits(self.answers, waiter)

    def lose(self, worker):
        self.handle(self.part.lose(worker))


class DrivenLeases(Driven):
    def __init__(self, workers=4, journal=None, fixed=False):
        super().__init__(Leases(workers, fixed), journal)

    def lease(self, worker, step, begin, end):
        return self.handle(self.part.lease(worker, step, begin, end), worker).value()

    def await_lease(self, worker, step):
        return self.handle(self.part.await_lease(worker, step), worker)

    def pause_leases(self):
        self.handle(self.part.pause_leases())

    def know_sizes(self, sizes):
        self.handle(self.part.know_sizes(sizes))

    def finished(self, worker, step):
        self.handle(self.part.finished(worker, step))


class DrivenRoster(Driven):
    def __init__(self, workers, journal=None):
        super().__init__(Roster(workers), journal)
        self.joined = 0

    def add(self, worker, number, values, as_rows=False):
        return self.handle(self.part.add(worker, number, values, as_rows), (number, worker))

    def missing(self, worker, number):
        return self.part.missing(worker, number)

    def join(self):
        self.joined += 1
        return self.handle(self.part.join("there", self.joined), (self.joined, "there"))

    def close(self, why):
        self.handle(self.part.close(why))

    def open_for_joining(self, sums, state):
        self.handle(self.part.open_for_joining(sums, state, 0.0))
