"""Whether what is faster learns as much: accuracy of trainings, against the opponent, by images and by seeds."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from hvdtrain.report.contenders import Field, whole
from hvdtrain.report.rule import Lead, at_look, look_at
from hvdtrain.runs.read import Kind, Run
from hvdtrain.runs.request import IN_STEP, mathematics

SAME, AS_GOOD, WORSE, NOT_SHOWN = "the same mathematics", "as good", "worse", "not shown"
ANSWERS = "answers.bin"  # in a run's folder: of each validation image, in order, a bit: whether it was told rightly


class Quality(NamedTuple):
    """How one kind's accuracy stands to another's.

    Attributes:
        difference: in validation accuracy, with its interval; None where no repeat of both was measured.
        by: what was paired: `images and seeds`, or `seeds` where not every image's answer was kept.
    """

    state: str
    difference: Lead | None = None
    by: str = "seeds"


def compare(field: Field, kind: Kind, opponent: Kind, margin: float) -> Quality:
    """Whether one kind is as good as another.

    They are where the interval of the difference is above -margin (non-inferiority), worse where it is below, and need
    no test where they do the same mathematics.
    """
    if same_mathematics(field.by_kind[kind], field.by_kind[opponent]):
        return Quality(SAME)
    first, second = (
        {run.manifest.repeat: run for run in trained(field, side) if run.summary.val_accuracy is not None}
        for side in (kind, opponent)
    )
    pairs = [(first[repeat], second[repeat]) for repeat in sorted(first.keys() & second.keys())]
    if not pairs:
        return Quality(NOT_SHOWN)
    kept = [(answers(one), answers(other)) for one, other in pairs]
    if all(bits is not None for pair in kept for bits in pair):
        difference, by = _by_images([one - other for one, other in kept]), "images and seeds"
    else:
        each = [[run.summary.val_accuracy or 0.0 for run in pair] for pair in pairs]
        difference, by = at_look([one - other for one, other in each]), "seeds"
    state = WORSE if difference.high < -margin else NOT_SHOWN
    if difference.low > -margin and difference.n > 1:
        state = AS_GOOD
    return Quality(state, difference, by)


def _mathematics(run: Run) -> tuple[Any, ...]:
    return mathematics(run.kind.mode, run.kind.workers, run.manifest.options)


def same_mathematics(runs: Sequence[Run], others: Sequence[Run]) -> bool:
    """Whether they compute the same steps, and saw equal samples where trainings did equally many. What a sprint saw
    depends on how many steps its warm-up took.
    """
    seen: dict[Any, set[str | None]] = {}
    for run in whole((*runs, *others)):
        key = run.manifest.repeat, run.summary.steps, run.summary.samples
        seen.setdefault(key, set()).add(run.summary.samples_digest)
    is_equal = all(len(digests) == 1 for digests in seen.values())
    one, other = _mathematics(runs[0]), _mathematics(others[0])
    return one == other and (is_equal or one != IN_STEP)


def trained(field: Field, kind: Kind) -> list[Run]:
    """The trainings of a kind, or where it has none, those of one that does the same mathematics."""
    same = _mathematics(field.by_kind[kind][0])
    others = (runs for runs in field.by_kind.values() if _mathematics(runs[0]) == same)
    return next((trainings for runs in (field.by_kind[kind], *others) if (trainings := whole(runs))), [])


def answers(run: Run) -> Any:
    """1 for each validation image that a training told rightly at its end, else 0; None where that was not kept."""
    import numpy as np

    images = run.manifest.validation_samples or 0
    try:
        packed = np.fromfile(run.folder / ANSWERS, dtype=np.uint8)
    except OSError:
        return None
    return np.unpackbits(packed, count=images).astype(np.int8) if images and len(packed) == -(-images // 8) else None


def _by_images(differences: Sequence[Any]) -> Lead:
    """The mean of [repeats, images], whose error has a part of the choice of images and one of the seeds.

    Its degrees of freedom are those of the two parts together (Satterthwaite).
    """
    import numpy as np
    from scipy.special import stdtrit

    of = np.asarray(differences, dtype=float)
    n, images = of.shape
    parts = [(of.mean(0).var(ddof=1) / images if images > 1 else 0.0, images - 1)]
    parts += [(of.mean(1).var(ddof=1) / n, n - 1)] if n > 1 else []
    error = sum(part for part, _ in parts)
    freedom = error**2 / sum(part**2 / degrees for part, degrees in parts) if error else 1.0
    half = math.sqrt(error) * float(stdtrit(freedom, 1 - look_at(n)[1] / 2))
    mean = float(of.mean())
    return Lead(mean, mean - half, mean + half, math.sqrt(error * n), n)
