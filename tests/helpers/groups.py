"""Workers that are threads of this process, as a group."""

from hvdtrain.coordination.group import Group
from hvdtrain.wire.requests import as_future


class Threads(Group):
    """Sums go through a server's own desk: a worker's waits for every other's, as between real ranks.

    Args:
        desk: see helpers.buckets.make_desk.
        store: see Group.gather_through_store; None where nothing is collected.

    Attributes:
        most: numbers that one sum had.
    """

    most = 0

    def __init__(self, world, desk, store=None):
        super().__init__(world)
        self.desk, self.store, self.sums = desk, store, 0

    def sum(self, values):
        self.sums += 1
        self.most = max(self.most, values.numel())
        return as_future(self.desk.sum(self.worker, self.sums, values)).wait()

    def gather_to_first(self, value):
        return self.gather_through_store(self.store, value)
