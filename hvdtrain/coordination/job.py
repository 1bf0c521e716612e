"""What every part of one rank's work may know about the job."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from hvdtrain.config.run_config import RunConfig
from hvdtrain.wire.rendezvous import open_store
from hvdtrain.world.place import World

if TYPE_CHECKING:
    from torch.distributed import Store


@dataclass(frozen=True)
class Job:
    """One rank's view of a job: what is asked, where this rank is, and where results go.

    Attributes:
        store: where all ranks have met already; see coordination.meeting.
        steps: how many a worker trains for; None where time decides.
    """

    config: RunConfig
    world: World
    folder: Path
    device: torch.device
    threads: int
    store: "Store | None" = None
    steps: int | None = None

    def meet(self) -> "Store":
        """The store that all ranks share."""
        return self.store or open_store(self.world, self.config.timeout)
