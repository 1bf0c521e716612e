"""Whether the faster contender learns as much as its opponent, by the accuracy of trainings."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from hvdtrain.reporting.contenders import Contenders
from hvdtrain.reporting.measures import only_trainings
from hvdtrain.reporting.rule import LOOKS, POWER, Differences, Lead, estimate_lead, last_look
from hvdtrain.runs.read import Kind, Run
from hvdtrain.runs.request import IN_STEP, mathematics

SAME = "the same mathematics"
AS_GOOD = "as good"
WORSE = "worse"
NOT_SHOWN = "not shown"
# A script reports nothing of what it learns: speed alone is compared.
UNTOLD = "not told"
# Of each contender: one training says nothing of how seeds differ.
LEAST_TRAININGS = 2
# Trainings whose accuracy is so far below the target were too short to compare what is learned.
FAR_BELOW = 0.05
# In a run's folder: a bit for each validation image, in order, 1 where the image was classified
# correctly.
ANSWERS = "answers.bin"


class Quality(NamedTuple):
    """How the accuracy of one kind compares with another's.

    Attributes:
        state: SAME, AS_GOOD, WORSE, NOT_SHOWN or UNTOLD.
        difference: in validation accuracy, with its interval; None if both were measured in no
            common repeat.
        paired_by: `images and seeds`, or `seeds` where not every image's answer was kept.
        trainings_needed: how many trainings of each would show that the kind is as good, or worse;
            None if no number would.
    """

    state: str
    difference: Lead | None = None
    paired_by: str = "seeds"
    trainings_needed: int | None = LEAST_TRAININGS


def compare(contenders: Contenders, kind: Kind, opponent: Kind, margin: float) -> Quality:
    """Returns whether one kind is as good as another.

    A kind is as good if the interval of the difference lies above -margin (non-inferiority). It is
    worse if the interval lies below -margin, in LEAST_TRAININGS trainings or more. Kinds that do
    the same mathematics need no test.
    """
    if same_mathematics(contenders.by_kind[kind], contenders.by_kind[opponent]):
        return Quality(SAME)
    runs = _measured_by_repeat(contenders, kind)
    opponent_runs = _measured_by_repeat(contenders, opponent)
    is_untold = not (runs or opponent_runs)
    if is_untold and contenders.by_kind[kind][0].manifest.script:
        return Quality(UNTOLD)
    common = sorted(runs.keys() & opponent_runs.keys())
    if not common:
        return Quality(NOT_SHOWN)
    pairs = [(runs[repeat], opponent_runs[repeat]) for repeat in common]
    by_image = _differences_by_image(pairs)
    if by_image is not None:
        difference = _by_images(by_image)
        paired_by = "images and seeds"
    else:
        better_by = [_better_by(one, other) for one, other in pairs]
        difference = estimate_lead(Differences(better_by))
        paired_by = "seeds"
    if difference.n < LEAST_TRAININGS:
        return Quality(NOT_SHOWN, difference, paired_by)
    if difference.high < -margin:
        return Quality(WORSE, difference, paired_by)
    if difference.low > -margin:
        return Quality(AS_GOOD, difference, paired_by)
    if by_image is not None:
        fixed, shrinking = _parts_of_variance(by_image)
    else:
        fixed = 0.0
        shrinking = float(difference.deviation) ** 2
    needed = _trainings_needed(difference, margin, fixed, shrinking)
    return Quality(NOT_SHOWN, difference, paired_by, needed)


def _measured_by_repeat(contenders: Contenders, kind: Kind) -> dict[int, Run]:
    """Returns the trainings of a kind whose quality was measured, by repeat."""
    runs = trained(contenders, kind)
    return {run.manifest.repeat: run for run in runs if _is_measured(run)}


def _is_measured(run: Run) -> bool:
    return run.summary.val_accuracy is not None or is_by_loss(run)


def is_by_loss(run: Run) -> bool:
    """Returns whether the run's script has reported a loss, and no accuracy."""
    summary = run.summary
    has_loss_alone = summary.val_accuracy is None and summary.val_loss is not None
    return has_loss_alone and bool(run.manifest.script)


def _better_by(one: Run, other: Run) -> float:
    """Returns by how much a training is better: in accuracy, or as a share of the other's loss."""
    if not (is_by_loss(one) and is_by_loss(other)):
        return (one.summary.val_accuracy or 0.0) - (other.summary.val_accuracy or 0.0)
    loss = one.summary.val_loss or 0.0
    other_loss = other.summary.val_loss or 0.0
    return (other_loss - loss) / (abs(other_loss) or 1.0)


def _differences_by_image(pairs: Sequence[tuple[Run, Run]]) -> list[Any] | None:
    """Returns 1, 0 or -1 for each image in each pair of trainings, [trainings] of [images].

    Returns None if some training did not keep its answers.
    """
    differences = []
    for one, other in pairs:
        answers = read_answers(one)
        other_answers = read_answers(other)
        if answers is None or other_answers is None:
            return None
        differences.append(answers - other_answers)
    return differences


def _parts_of_variance(differences: Sequence[Any]) -> tuple[float, float]:
    """Returns the two parts of the squared standard error of a mean difference.

    The first part stays as it is with more trainings: it comes from the choice of validation
    images, which differ in how much they favour one contender. A two-way layout without replication
    tells it from the noise of an image in a training (Searle, Casella and McCulloch, Variance
    Components, 1992, section 4.6). The second part is that of one training, and n trainings divide
    it by n.

    Args:
        differences: [trainings, images], two trainings at least.
    """
    import numpy as np

    values = np.asarray(differences, dtype=float)
    n, images = values.shape
    by_seed = values.mean(1)
    by_image = values.mean(0)
    residuals = values - by_seed[:, None] - by_image[None, :] + values.mean()
    noise = float((residuals**2).sum()) / max(1, (n - 1) * (images - 1))
    of_images = max(0.0, float(by_image.var(ddof=1)) - noise / n)
    return of_images / images, float(by_seed.var(ddof=1))


def _trainings_needed(
    difference: Lead, margin: float, fixed: float, shrinking: float
) -> int | None:
    """Returns at which look the interval would end on one side of -margin with a chance of POWER.

    The mean is taken to stay as it is. Returns None if no look would do.

    Args:
        difference: the difference so far.
        margin: see compare.
        fixed, shrinking: see _parts_of_variance.
    """
    from scipy.special import ndtri, stdtrit

    away = abs(float(difference.mean) + margin)
    for n in LOOKS:
        error = math.sqrt(fixed + shrinking / n)
        _, alpha = last_look(n)
        half = error * float(stdtrit(n - 1, 1 - alpha / 2))
        if n > difference.n and away >= half + error * float(ndtri(POWER)):
            return n
    return None


def _mathematics(run: Run) -> tuple[Any, ...]:
    """Returns what a run's steps compute, and from how many samples.

    One process may have another batch than workers have together.
    """
    steps = mathematics(run.kind.mode, run.kind.workers, run.manifest.options)
    return steps, run.manifest.global_batch


def same_mathematics(runs: Sequence[Run], others: Sequence[Run]) -> bool:
    """Returns whether two kinds compute the same steps from equal samples.

    Samples are compared among trainings of the same length. The samples of a sprint depend on how
    many steps its warm-up took.
    """
    digests_by_length: dict[Any, set[str | None]] = {}
    for run in only_trainings((*runs, *others)):
        length = (run.manifest.repeat, run.summary.steps, run.summary.samples)
        digests_by_length.setdefault(length, set()).add(run.summary.samples_digest)
    saw_equal_samples = all(len(digests) == 1 for digests in digests_by_length.values())
    one = _mathematics(runs[0])
    return one == _mathematics(others[0]) and (saw_equal_samples or one[0] != IN_STEP)


def trained(contenders: Contenders, kind: Kind) -> list[Run]:
    """Returns the trainings of a kind.

    If it has none, returns those of another kind that does the same mathematics.
    """
    runs = contenders.by_kind[kind]
    wanted = _mathematics(runs[0])
    others = [other for other in contenders.by_kind.values() if _mathematics(other[0]) == wanted]
    for candidates in (runs, *others):
        trainings = only_trainings(candidates)
        if trainings:
            return trainings
    return []


def read_answers(run: Run) -> Any:
    """Returns whether each validation image was classified correctly at the end: [images] int8.

    Returns None if that was not kept.
    """
    import numpy as np

    images = run.manifest.validation_samples or 0
    try:
        packed = np.fromfile(run.folder / ANSWERS, dtype=np.uint8)
    except OSError:
        return None
    expected_bytes = -(-images // 8)
    if not images or len(packed) != expected_bytes:
        return None
    return np.unpackbits(packed, count=images).astype(np.int8)


def _by_images(differences: Sequence[Any]) -> Lead:
    """Returns the mean difference with its interval.

    The error has a part of the choice of images and a part of the seeds. Its degrees of freedom are
    those of the two parts together (Satterthwaite).

    Args:
        differences: [repeats, images].
    """
    import numpy as np
    from scipy.special import stdtrit

    values = np.asarray(differences, dtype=float)
    n, images = values.shape
    variance_of_images = values.mean(0).var(ddof=1) / images if images > 1 else 0.0
    parts = [(variance_of_images, images - 1)]
    if n > 1:
        parts.append((values.mean(1).var(ddof=1) / n, n - 1))
    error = sum(part for part, _ in parts)
    freedom = error**2 / sum(part**2 / degrees for part, degrees in parts) if error else 1.0
    _, alpha = last_look(n)
    half = math.sqrt(error) * float(stdtrit(freedom, 1 - alpha / 2))
    mean = float(values.mean())
    return Lead(mean, mean - half, mean + half, math.sqrt(error * n), n)
