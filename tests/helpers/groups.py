"""Workers that are threads of this process, as a group."""

from hvdtrain.world.group import Group


class Threads(Group):
    """Sums go through a server's own membership: a worker's waits for every other's, as between real ranks.

    Args:
        store: see Group.gather_through_store; None where nothing is collected.

    Attributes:
        most: numbers that one sum had.
    """

    most = 0

    def __init__(self, world, membership, store=None):
        super().__init__(world)
        self.membership, self.store, self.sums = membership, store, 0

    def sum(self, values):
        self.sums += 1
        self.most = max(self.most, values.numel())
        return self.membership.add(self.worker, self.sums, values).wait()

    def gather_to_first(self, value):
        return self.gather_through_store(self.store, value)
