"""What training has come to, and whether that is all that was asked."""

from dataclasses import dataclass, field
from typing import Any

from hvdtrain.config.run_config import RunConfig


@dataclass
class History:
    """What training has come to, on every worker the same.

    Attributes:
        evaluations: a row each of step, epoch, samples (of all workers), train_s, train_loss, train_accuracy (over the
            samples since the one before), val_loss, val_accuracy.
        step: the last one taken.
        samples: trained on by all workers, up to the last evaluation.
        wall_s: training seconds; evaluation and snapshots left out.
        snapshots, snapshot_s: how many were saved, and how long training waited for them.
    warm_steps, warm_s: the steps and seconds of a sprint's warm-up, which its figures leave out.
    """

    evaluations: list[dict[str, Any]] = field(default_factory=list)
    step: int = 0
    samples: int = 0
    wall_s: float = 0.0
    snapshots: int = 0
    snapshot_s: float = 0.0
    warm_steps: int = 0
    warm_s: float = 0.0

    @property
    def last(self) -> dict[str, Any] | None:
        """The last evaluation, None where there is none."""
        return self.evaluations[-1] if self.evaluations else None

    @property
    def best(self) -> dict[str, Any] | None:
        """The evaluation with the least validation loss, the first of equals; None where there is none."""
        return min(self.evaluations, key=lambda row: row["val_loss"], default=None)


def is_over(config: RunConfig, samples: int, step: int, wall_s: float, evaluations: list[dict[str, Any]]) -> bool:
    """Whether there is nothing left to train on so many samples, after so many steps and seconds."""
    if config.stop_at_target and any(e["val_accuracy"] >= config.target_accuracy for e in evaluations):
        return True
    steps = config.total_steps(samples)
    return step >= steps if steps is not None else wall_s >= (config.time_budget or config.sprint)
