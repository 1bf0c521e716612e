"""A job as one of its ranks knows it."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from hvdtrain.base.config.run_config import RunConfig
from hvdtrain.base.world.place import World
from hvdtrain.job.wire.rendezvous import open_store

if TYPE_CHECKING:
    from torch.distributed import Store


@dataclass(frozen=True)
class Job:
    """One rank's view of a job.

    Attributes:
        config: the configuration of the run.
        world: where this rank is.
        folder: the run folder, for results.
        device: the device that this rank computes on.
        threads: how many threads this rank computes with.
        store: the store that all ranks share, where they have met: see coordination.meeting.
        steps: how many steps a worker trains for; None where time decides.
        wait_for: what waits for fresh weights: each `layer` or the whole `step`.
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
        """Whether each layer's forward waits for the layer's weights.

        A compiled model has no layers to wait before.
        """
        return self.wait_for == "layer" and not self.config.compile

    def meet(self) -> "Store":
        """Returns the store that all ranks share."""
        return self.store or open_store(self.world, self.config.timeout)
