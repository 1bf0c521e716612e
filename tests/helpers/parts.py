"""Parts of a server, driven with plain calls: what a desk does around them, without locks and futures."""

from functools import partial

from hvdtrain.coordination.leases import Leases
from hvdtrain.coordination.roster import Roster


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
    """A part whose replies are kept until it is asked again; what it is called for is a method of the part's."""

    def __init__(self, part, journal=None):
        self.part, self.journal, self.replies = part, journal, {}
        if journal:
            journal.keep(part, type(part).__name__.lower())

    def __getattr__(self, name):
        return partial(self.ask, getattr(self.part, name))

    def ask(self, act, *message, **named):
        replies, lines, asked = act(*message, **named)
        if self.journal:
            self.journal.commit(self.part, lines)
        self.replies.pop(asked, None)
        self.replies.update(replies)
        return Waits(self.replies, asked)


class AskedLeases(Asked):
    def __init__(self, workers=4, journal=None, fixed=False):
        super().__init__(Leases(workers, fixed), journal)

    def lease(self, *message):
        return self.ask(self.part.lease, *message).value()


class AskedRoster(Asked):
    def __init__(self, workers, journal=None):
        super().__init__(Roster(workers), journal)
        self.joined = 0

    def missing(self, *message):
        return self.ask(self.part.missing, *message).value()

    def join(self):
        self.joined += 1
        return self.ask(self.part.join, "there", self.joined)

    def open_for_joining(self, sums, state):
        self.ask(self.part.open_for_joining, sums, state, 0.0)
