"""When a training reached its target accuracy: after how many seconds, and how many samples."""

from typing import NamedTuple

from hvdtrain.runs.read import Run


class Reach(NamedTuple):
    """How long a training took to its target accuracy.

    Attributes:
        seconds: of training, without evaluations, until the target was reached, or until training
            ended without it.
        samples: that all workers trained on until then.
        is_reached: whether the target was reached. If not, it takes longer than `seconds`.
    """

    seconds: float
    samples: float
    is_reached: bool

    @property
    def s_per_sample(self) -> float:
        return self.seconds / self.samples if self.samples else 0.0


def reach_of(run: Run) -> Reach | None:
    """Returns when a training reached its target accuracy; None if it had none.

    Accuracy is measured at evaluations. Between the last one below the target and the first one
    that reaches it, accuracy is taken to grow evenly.
    """
    summary = run.summary
    target = summary.target_accuracy
    if target is None or run.manifest.sprint or not summary.wall_s:
        return None
    before = None
    for evaluation in summary.evaluations:
        if evaluation.val_accuracy < target:
            before = evaluation
            continue
        if before is None:
            return Reach(evaluation.train_s, evaluation.samples, True)
        gain = evaluation.val_accuracy - before.val_accuracy
        part = (target - before.val_accuracy) / gain
        seconds = before.train_s + part * (evaluation.train_s - before.train_s)
        samples = before.samples + part * (evaluation.samples - before.samples)
        return Reach(seconds, samples, True)
    return Reach(summary.wall_s, summary.samples or 0.0, False)


def seconds_to_target(run: Run) -> float | None:
    """Returns the seconds of training until the target was reached; None if it was not."""
    reach = reach_of(run)
    return reach.seconds if reach and reach.is_reached else None


def samples_to_target(run: Run) -> float | None:
    """Returns the samples trained on until the target was reached; None if it was not."""
    reach = reach_of(run)
    return reach.samples if reach and reach.is_reached else None
