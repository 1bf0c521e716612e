"""The workers of a job as one of them sees them: small sums, barriers, and leaving together."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from hvdtrain.world.place import World

if TYPE_CHECKING:
    from torch import Tensor


class Group(ABC):
    """What workers agree on between steps goes through here; gradients do not.

    Every worker calls `sum`, `any`, `all_gather`, `gather_to_first` and `barrier` in the same order.

    Attributes:
        in_background: `all_gather_later` does not wait for the others.
        first: the worker that leads: of those that were there when they last gathered, so that all agree on it.
    """

    in_background = False
    first = 0

    def __init__(self, world: World) -> None:
        self.worker, self.workers = world.member, world.workers

    @property
    def leads(self) -> bool:
        """Whether this worker is the first of those that are there, which reports and saves."""
        return self.worker == self.first

    def retry_if_first_lost(self, act: "Callable[[], None]") -> None:
        """Have all workers do this, of which the one that leads writes something down. If that one is lost before it is
        through, they do it again.
        """
        act()

    @abstractmethod
    def sum_later(self, values: "Tensor") -> "Callable[[], Tensor]":
        """As sum, in two steps: what is returned waits for the others, and is called before the next sum but one."""

    def sum(self, values: "Tensor") -> "Tensor":
        """The elementwise sum over the workers of a small CPU tensor, on every worker. It is a barrier too."""
        return self.sum_later(values)()

    def barrier(self) -> None:
        """Return when every worker has come here."""
        import torch

        self.sum(torch.zeros(1))

    def any(self, mine: bool) -> bool:
        """Whether it is so on any worker."""
        import torch

        return bool(self.sum(torch.tensor([float(mine)])).item())

    def sentence(self, mine: str) -> str:
        """The sentence of the one worker that gives any, on every worker; empty where none does. It is cut at 400 bytes
        of UTF-8."""
        import torch

        row = torch.zeros(400)
        if said := mine.encode()[: len(row)]:
            row[: len(said)] = torch.tensor(list(said), dtype=row.dtype)
        return bytes(self.sum(row).to(torch.uint8).tolist()).rstrip(b"\0").decode(errors="ignore")

    def all_gather(self, row: Sequence[float]) -> tuple[list[int], "Tensor"]:
        """The workers that are there, and their rows, [those workers, len(row)] float64, on every worker.

        For a few numbers that all need at once: N workers carry N rows each, of which each wrote one. What the one that
        leads alone needs goes through gather_to_first.
        """
        return self.all_gather_later(row)()

    @abstractmethod
    def all_gather_later(self, row: Sequence[float]) -> "Callable[[], tuple[list[int], Tensor]]":
        """As all_gather, in two steps; see sum_later."""

    @abstractmethod
    def gather_to_first(self, value: Any) -> dict[int, Any]:
        """What each worker that is there gives, by its number, on the one that leads; on the others nothing. All call
        it together. Each value is sent once.

        Args:
            value: of plain types, as JSON holds them.
        """

    def close(self) -> None:  # noqa: B027  # nobody to leave, by default
        """Leave the others in order. Called once, when all went well."""
