"""The report of a grid: what each comparison says, a table of all runs, and what all runs have in common."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from hvdtrain.report import fairness, style
from hvdtrain.report.comparisons import Comparison
from hvdtrain.report.content import Content, collect, machine, omitted_runs
from hvdtrain.report.formatting import summary_columns
from hvdtrain.report.pages import render_html, render_markdown
from hvdtrain.report.reference_tables import OVERVIEW, build_table
from hvdtrain.report.results import result_rows, scales_weakly
from hvdtrain.report.runs import Run
from hvdtrain.report.table import Table
from hvdtrain.report.verdict import DEFAULT, Margins

if TYPE_CHECKING:
    from hvdtrain.report.plots import Plot


class Section(NamedTuple):
    """A comparison, what it says, and the columns of its summary with their headings."""

    comparison: Comparison
    content: Content
    columns: dict[str, str]


@dataclass(frozen=True)
class Grid:
    """What a report of several comparisons says, without its plots.

    Attributes:
        varied: what the comparisons differ in, in words.
        sections: one for each comparison.
        overview: all runs in one table.
        equal: what was found equal in all runs.
        caveats: of all comparisons.
        omitted: runs that are not in the tables, and why, a line each.
        machine: hardware and versions by name.
    """

    varied: str
    sections: list[Section]
    overview: Table
    equal: list[fairness.EqualField]
    caveats: list[str]
    omitted: list[str]
    machine: dict[str, str]

    @property
    def verdicts(self) -> dict[str, Any]:
        """The content of verdict.json."""
        return {"comparisons": [{"comparison": s.comparison.title, **s.content.verdict.data} for s in self.sections]}


def collect_grid(comparisons: Sequence[Comparison], runs: Sequence[Run], margins: Margins = DEFAULT) -> Grid:
    """Collect what there is to say about a grid of at least two comparisons.

    Args:
        runs: all runs, unfinished ones too.

    Raises:
        UsageError: runs differ in what should be equal.
    """
    finished = [run for comparison in comparisons for run in comparison.runs]
    contents = [collect(comparison.runs, finished, margins) for comparison in comparisons]
    equal = fairness.check_grid(finished)
    rule = next(item.value for item in equal if item.field == "lr")
    words = {"model": "model", "global_batch": "global batch", "lr": f"learning rate ({rule})"}
    if scales_weakly(result_rows(finished)):
        words["global_batch"] += " (grows with the workers)"
    varied = [
        words[field]
        for field in fairness.GRID_FIELDS
        if len({fairness.field_value(run, field) for run in finished}) > 1
    ]
    sections = [
        Section(comparison, content, summary_columns(content.groups))
        for comparison, content in zip(comparisons, contents, strict=True)
    ]
    overview = build_table(OVERVIEW, finished)
    caveats = list(dict.fromkeys(line for content in contents for line in content.verdict.caveats))
    return Grid(" and ".join(varied), sections, overview, equal, caveats, omitted_runs(runs), machine(finished))


def html(grid: Grid, plots: Sequence["Plot"], tables: Sequence[Table]) -> str:
    """report.html of a grid: one file, with links to the reports of its comparisons.

    Args:
        tables: shown above the overview.
    """
    kinds = {group.kind for section in grid.sections for group in section.content.groups}
    colours = {kind: style.colour(kind) for kind in kinds}
    return render_html("grid.html.jinja", plots, grid=grid, tables=[*tables, grid.overview], colours=colours)


def markdown(grid: Grid, plots: Sequence["Plot"], tables: Sequence[Table]) -> str:
    """report.md of a grid."""
    return render_markdown("grid.md.jinja", plots, grid=grid, tables=[*tables, grid.overview])
