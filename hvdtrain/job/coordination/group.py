"""The workers of a job as one of them sees them: small sums, barriers, and leaving together."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from hvdtrain.base.world.place import World

if TYPE_CHECKING:
    from torch import Tensor


class Group(ABC):
    """The workers as a group, which agrees on small values between steps.

    Gradients do not go through a group, nor do a ring's batch-norm statistics. Every worker calls
    `sum`, `any`, `all_gather`, `gather_to_first` and `barrier` in the same order.

    Attributes:
        worker: this worker's number.
        workers: the number of workers at the start.
        in_background: whether `all_gather_later` returns without waiting for the others.
        first: the worker that leads: the first of the workers that were there when they last
            gathered, so that all agree on it.
        statistics_bytes: bytes of batch norm's statistics that this worker has given to be
            averaged, and as many that it was given back.
    """

    in_background = False
    first = 0
    statistics_bytes = 0

    def __init__(self, world: World) -> None:
        self.worker = world.member
        self.workers = world.workers

    @property
    def leads(self) -> bool:
        """Whether this worker leads: it reports and saves."""
        return self.worker == self.first

    def retry_if_first_lost(self, act: "Callable[[], None]") -> None:
        """Calls `act` on all workers, of which the one that leads writes something down.

        If that worker is lost before it is through, all workers call `act` again.
        """
        act()

    @abstractmethod
    def sum_later(self, values: "Tensor") -> "Callable[[], Tensor]":
        """Begins a sum; see `sum`.

        Returns:
            A function that waits for the others and returns the sum. It is called before the next
            sum but one begins.
        """

    def sum(self, values: "Tensor") -> "Tensor":
        """Returns the elementwise sum over the workers of a small CPU tensor, on every worker.

        This is a barrier too.

        Raises:
            Failure: the workers gave values of different shapes.
        """
        return self.sum_later(values)()

    def mean(self, values: "Tensor") -> "Tensor":
        """Returns the elementwise mean over the workers that are there, on every worker.

        Args:
            values: [n], the same n on all workers.
        """
        import torch

        total = self.sum(torch.cat([values, torch.ones(1)]))
        return total[:-1] / total[-1]

    def barrier(self) -> None:
        """Blocks until every worker has called this."""
        import torch

        self.sum(torch.zeros(1))

    def any(self, mine: bool) -> bool:
        """Returns whether `mine` is true on any worker."""
        import torch

        return bool(self.sum(torch.tensor([float(mine)])).item())

    def sentence(self, mine: str) -> str:
        """Returns the sentence of the one worker that gives any, on every worker.

        Empty where no worker gives any. The sentence is cut at 400 bytes of UTF-8.
        """
        import torch

        row = torch.zeros(400)
        content = mine.encode()[: len(row)]
        row[: len(content)] = torch.tensor(list(content), dtype=row.dtype)
        total = self.sum(row).to(torch.uint8)
        return bytes(total.tolist()).rstrip(b"\0").decode(errors="ignore")

    def all_gather(self, row: Sequence[float]) -> tuple[list[int], "Tensor"]:
        """Returns the workers that are there and their rows, on every worker.

        This is for a few numbers that all workers need: N workers receive N rows each. What the
        leading worker alone needs goes through gather_to_first.

        Returns:
            The workers' numbers, and their rows, [workers that are there, len(row)] float64.
        """
        return self.all_gather_later(row)()

    @abstractmethod
    def all_gather_later(self, row: Sequence[float]) -> "Callable[[], tuple[list[int], Tensor]]":
        """Begins an all_gather.

        Returns:
            A function that waits for the others and returns the rows: see sum_later.
        """

    @abstractmethod
    def gather_to_first(self, value: Any) -> dict[int, Any]:
        """Returns each worker's value, by worker, on the one that leads; empty on the others.

        All workers call this together. Each value is sent once.

        Args:
            value: of plain types, as JSON holds them.
        """

    def close(self) -> None:  # noqa: B027  # nobody to leave, by default
        """Leaves the others in order. Called once, when all went well."""
