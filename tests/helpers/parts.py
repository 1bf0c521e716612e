"""Parts of a server, driven with plain calls: what a desk does around them, without locks and futures."""

from hvdtrain.ps.leases import Leases
from hvdtrain.ps.roster import Roster


class Waits:
    """Who waits for a reply, like a future."""

    def __init__(self, replies, key):
        self.replies, self.key = replies, key

    def done(self):
        return self.key in self.replies

    def value(self):
        if isinstance(found := self.replies[self.key], Exception):
            raise found
        return found

    wait = value


class Asked:
    """A part whose replies are kept until their keys ask again."""

    def __init__(self, part, journal=None):
        self.part, self.journal, self.replies = part, journal, {}
        if journal:
            journal.keep(part, type(part).__name__.lower())

    def ask(self, key, act, *message):
        self.replies.pop(key, None)
        self.tell(act, *message)
        return Waits(self.replies, key)

    def tell(self, act, *message):
        replies, lines = act(*message)
        if self.journal:
            self.journal.commit(self.part, lines)
        self.replies.update(replies)


class AskedLeases(Asked):
    def __init__(self, journal=None):
        super().__init__(Leases(), journal)

    def lease(self, worker, *message):
        return self.ask(worker, self.part.lease, worker, *message).value()

    def wait(self, worker, step):
        return self.ask(worker, self.part.wait, worker, step)

    def finished(self, worker, step):
        self.tell(self.part.finished, worker, step)

    def lose(self, worker):
        self.tell(self.part.lose, worker)

    def pause(self, workers):
        self.tell(self.part.pause, workers)


class AskedRoster(Asked):
    def __init__(self, workers, journal=None):
        super().__init__(Roster(workers), journal)
        self.missing, self.joined = self.part.missing, 0

    def add(self, worker, number, values, as_rows=False):
        return self.ask((number, worker), self.part.add, worker, number, values, as_rows)

    def join(self):
        self.joined += 1
        return self.ask((self.joined, "there"), self.part.join, "there", self.joined)

    def open_for_joining(self, sums, state):
        self.tell(self.part.open_for_joining, sums, state, 0.0)

    def lose(self, worker):
        self.tell(self.part.lose, worker)

    def close(self, why):
        self.tell(self.part.close, why)
