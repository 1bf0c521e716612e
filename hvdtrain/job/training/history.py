"""The results of training so far, and whether training is over."""

from dataclasses import dataclass, field
from typing import Any

from hvdtrain.base.config.run_config import RunConfig


@dataclass
class History:
    """The results of training so far, which are the same on every worker.

    Attributes:
        evaluations: a row of each evaluation: step, epoch, samples (of all workers), train_s,
            train_loss and train_accuracy (over the samples since the last evaluation), val_loss,
            val_accuracy.
        step: the last step taken.
        samples: samples that all workers have trained on, up to the last evaluation.
        wall_s: seconds of training, without evaluations and snapshots.
        reported: figures of quality that a script gave: see job.script.handle.ScriptJob.report.
        reports: a row of each such report that was measured by the target: step, samples (of all
            workers), train_s, val_loss and val_accuracy, one of which may be None.
        snapshots: how many snapshots were saved.
        snapshot_s: how many seconds training waited for snapshots.
        warm_steps: the steps of a sprint's warm-up, which its figures leave out.
        warm_s: the seconds of a sprint's warm-up.
    """

    evaluations: list[dict[str, Any]] = field(default_factory=list)
    step: int = 0
    samples: int = 0
    wall_s: float = 0.0
    reported: dict[str, float] = field(default_factory=dict)
    reports: list[dict[str, Any]] = field(default_factory=list)
    snapshots: int = 0
    snapshot_s: float = 0.0
    warm_steps: int = 0
    warm_s: float = 0.0

    @property
    def last(self) -> dict[str, Any] | None:
        """The last evaluation; None if there is none."""
        return self.evaluations[-1] if self.evaluations else None

    @property
    def best(self) -> dict[str, Any] | None:
        """The evaluation with the least validation loss, the first of equal ones; None if there is
        none.
        """
        return min(self.evaluations, key=lambda row: row["val_loss"], default=None)


def is_over(
    config: RunConfig, samples: int, step: int, wall_s: float, evaluations: list[dict[str, Any]]
) -> bool:
    """Returns whether training is over.

    Args:
        config: the configuration of the run.
        samples: the number of training images.
        step: the last step taken.
        wall_s: seconds of training so far.
        evaluations: see History.
    """
    accuracies = [row["val_accuracy"] for row in evaluations]
    if config.stop_at_target and any(value >= config.target_accuracy for value in accuracies):
        return True
    steps = config.total_steps(samples)
    if steps is not None:
        return step >= steps
    return wall_s >= (config.time_budget or config.sprint)
