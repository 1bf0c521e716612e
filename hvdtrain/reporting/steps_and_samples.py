"""Why a contender reached the target sooner: by its steps, or by the samples that it needed.

The time to the target is the seconds that a sample takes times the samples that it takes. The first
is a matter of hardware and messages, the second of what the steps compute.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import geometric_mean
from typing import Any

from hvdtrain.base.formatting import with_noun
from hvdtrain.reporting.measures import reaches_by_repeat
from hvdtrain.reporting.target import Reach
from hvdtrain.runs.read import Run


@dataclass(frozen=True)
class StepsAndSamples:
    """The parts of the ratio of two contenders' times to the target, which is their product.

    Attributes:
        s_per_sample: the ratio of seconds a sample.
        samples: the ratio of samples to the target.
        n: the pairs of trainings, both of which reached the target.
    """

    s_per_sample: float
    samples: float
    n: int

    def cause(self, margin: float) -> str:
        """Returns which part made the difference.

        Args:
            margin: the smallest difference that matters, as a share.
        """
        steps = math.log(self.s_per_sample)
        samples = math.log(self.samples)
        least = math.log1p(margin)
        smaller, larger = sorted((abs(steps), abs(samples)))
        if abs(steps + samples) < least:
            if larger < least:
                return "neither steps nor samples made a difference"
            return "steps and samples made up for each other"
        have_same_sign = steps * samples > 0
        if have_same_sign and smaller > larger / 2:
            return "steps and samples made the difference"
        return f"{'steps' if larger == abs(steps) else 'samples'} made the difference"

    def words(self, label: str, other_label: str, margin: float) -> str:
        """Returns which part made the difference, with the figures."""
        if "," in label:
            label += ","
        pairs = with_noun(self.n, "pair")
        return (
            f"{self.cause(margin)}: {label} took {self.s_per_sample:.2f} times the seconds a "
            f"sample of {other_label}, and {self.samples:.2f} times the samples to the target "
            f"({pairs} of trainings)"
        )

    def data(self, label: str, other_label: str, margin: float) -> dict[str, Any]:
        """Returns the parts for verdict.json."""
        says = self.words(label, other_label, margin)
        return {"run": label, "beside": other_label, **asdict(self), "says": says}


def parts(runs: Sequence[Run], others: Sequence[Run]) -> StepsAndSamples | None:
    """Returns the parts of the ratio of two contenders' times to the target.

    They are geometric means over the repeats in which both reached it; None if there are none.
    """
    reached = _reached_by_repeat(runs)
    reached_by_others = _reached_by_repeat(others)
    common = sorted(reached.keys() & reached_by_others.keys())
    if not common:
        return None
    pairs = [(reached[repeat], reached_by_others[repeat]) for repeat in common]
    s_per_sample = [one.s_per_sample / other.s_per_sample for one, other in pairs]
    samples = [one.samples / other.samples for one, other in pairs]
    return StepsAndSamples(geometric_mean(s_per_sample), geometric_mean(samples), len(pairs))


def _reached_by_repeat(runs: Sequence[Run]) -> dict[int, Reach]:
    """Returns the trainings that reached the target, by repeat."""
    return {
        repeat: reach
        for repeat, reach in reaches_by_repeat(runs).items()
        if reach.is_reached and reach.seconds and reach.samples
    }
