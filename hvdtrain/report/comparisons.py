"""Splits runs into comparisons: what is compared with each other, and in what these differ."""

from collections.abc import Sequence
from dataclasses import dataclass

from hvdtrain.report.columns import Setting
from hvdtrain.runs.read import Kind, Run, finished_by_kind, grouped


@dataclass(frozen=True)
class Comparison:
    """Finished runs of one setting.

    Attributes:
        title: what distinguishes it from the other comparisons: `vgg16, global batch 64`; empty where there are none.
    """

    title: str
    runs: list[Run]

    @property
    def by_kind(self) -> dict[Kind, list[Run]]:
        return finished_by_kind(self.runs)

    def label(self, kind: Kind) -> str:
        """What tells its runs of this kind from all others."""
        return ", ".join(filter(None, [kind.label, self.title]))


def split_into_comparisons(runs: Sequence[Run]) -> list[Comparison]:
    """The finished runs by model, then by global batch, then by learning rate, then by who was made slow."""
    groups = grouped((run for run in runs if run.is_finished), Setting.of)
    varied = Setting.varied(groups)
    ordered = sorted(groups, key=lambda setting: setting.order)
    return [Comparison(", ".join(setting.words(name) for name in varied), groups[setting]) for setting in ordered]
