"""What every part of one rank's work may know about the job."""

from dataclasses import dataclass
from pathlib import Path

import torch

from hvdtrain.config.run_config import RunConfig
from hvdtrain.world.place import World


@dataclass(frozen=True)
class Job:
    """One rank's view of a job: what is asked, where this rank is, and where results go."""

    config: RunConfig
    world: World
    folder: Path
    device: torch.device
    threads: int
