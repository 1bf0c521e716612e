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
        wait_for: what waits for fresh weights, each `layer` or the `step`: as asked, or as the mode has it by default.
    """

    config: RunConfig
    world: World
    folder: Path
    device: torch.device
    threads: int
    store: "Store | None" = None
    steps: int | None = None
    wait_for: str = "step"

    @property
    def waits_for_layers(self) -> bool:
        """Whether each layer's forward waits for its weights; a compiled model has no layers to wait before."""
        return self.wait_for == "layer" and not self.config.compile

    def meet(self) -> "Store":
        """The store that all ranks share."""
        return self.store or open_store(self.world, self.config.timeout)
