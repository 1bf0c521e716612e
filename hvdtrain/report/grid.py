"""The report of a grid: what each part says, a table across them, and what all have in common."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hvdtrain.report import cells, fairness, style
from hvdtrain.report.document import Content, collect, left_out, machine, page, text
from hvdtrain.report.parts import Part
from hvdtrain.report.references import OVERVIEW, build
from hvdtrain.report.runs import Run
from hvdtrain.report.table import Table
from hvdtrain.report.tables import results, scales_weakly

if TYPE_CHECKING:
    from hvdtrain.report.plots import Plot


@dataclass(frozen=True)
class Grid:
    """What a report of several parts says, but for its plots.

    Attributes:
        spanned: what the parts differ in, in words.
        parts: each with its content, and the columns of its summary.
        overview: all runs in one table.
        equal: what was found equal in all runs.
        omitted: runs that are not in the tables, one line each.
        machine: hardware and versions, name and value.
    """

    spanned: str
    parts: list[tuple[Part, Content, dict[str, str]]]
    overview: Table
    equal: list[fairness.Equal]
    omitted: list[str]
    machine: dict[str, str]


def collect_grid(parts: Sequence[Part], runs: Sequence[Run]) -> Grid:
    """All that there is to say about a grid of at least two parts. UsageError where runs may not be compared."""
    done = [run for part in parts for run in part.runs]
    contents = [collect(part.runs, done) for part in parts]
    equal = fairness.check_grid(done)
    rule = next(item.value for item in equal if item.field == "lr")
    words = {"model": "model", "global_batch": "global batch", "lr": f"learning rate ({rule})"}
    if scales_weakly(results(done)):
        words["global_batch"] += " (grows with the workers)"
    spanned = [words[f] for f in fairness.SPANNED if len({fairness.value(run, f) for run in done}) > 1]
    return Grid(
        " and ".join(spanned),
        [(p, c, cells.summary_columns(c.groups)) for p, c in zip(parts, contents, strict=True)],
        build(OVERVIEW, done), equal, left_out(runs), machine(done),
    )  # fmt: skip


def html(grid: Grid, plots: Sequence["Plot"], beside: Sequence[Table]) -> str:
    """report.html of a grid: one file; the reports of its parts are linked."""
    kinds = {group.kind for _, content, _ in grid.parts for group in content.groups}
    colours = {kind: style.colour(kind) for kind in kinds}
    return page("grid.html.jinja", plots, grid=grid, tables=[*beside, grid.overview], colours=colours)


def markdown(grid: Grid, plots: Sequence["Plot"], beside: Sequence[Table]) -> str:
    """report.md of a grid."""
    return text("grid.md.jinja", plots, grid=grid, tables=[*beside, grid.overview])
