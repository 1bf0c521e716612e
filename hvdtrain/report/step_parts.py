"""Where the wall time of a step went: the parts that ranks recorded."""

from collections.abc import Mapping, Sequence
from statistics import geometric_mean

from hvdtrain.formatting import with_unit
from hvdtrain.plot_style import STEP_PARTS
from hvdtrain.report.columns import COLUMNS, STEP
from hvdtrain.report.results import Group, format_cell
from hvdtrain.report.table import Cell, Table
from hvdtrain.runs.read import Kind, Run

NOTE = (
    "Wall time over steps, each of one global batch, the geometric mean of the repeats, divided as workers spent it on "
    "average. Exposed communication is what a step waits for; in the parameter-server modes the optimizer runs on the "
    "servers and is part of that wait. Between steps, workers wait for each other to decide something together, and at "
    "the end of an epoch."
)


def step_parts(runs: Sequence[Run]) -> dict[str, float]:
    """Seconds of each of STEP_PARTS in a step: shares of all repeats' time, of the geometric mean of their steps.

    So the ratio of two such sums is that of the samples/s which the verdict compares. Empty where nothing was recorded.
    """
    timed = [parts for run in runs if (parts := _parts_of(run))]
    if not timed:
        return {}
    steps = [sum(parts.values()) for parts in timed]
    scale = geometric_mean(steps) / sum(steps)
    return {part: scale * sum(parts[part] for parts in timed) for part in STEP_PARTS}


def _parts_of(run: Run) -> dict[str, float]:
    recorded = run.summary.step_seconds
    return {part: recorded.get(part, 0.0) for part in STEP_PARTS} if any(recorded.values()) else {}


def parts_table(by_kind: dict[Kind, list[Run]], groups: Sequence[Group]) -> Table | None:
    """What the plot of a step's time shows, and percentiles of the time of a worker's own steps."""
    found = {kind: parts for kind, runs in by_kind.items() if (parts := step_parts(runs))}
    if not found:
        return None
    percentiles = [column for column in COLUMNS.values() if STEP in column.shown]
    own = {group.kind: [format_cell(group, column.name) for column in percentiles] for group in groups}
    shown = shown_parts(found)
    rows = []
    for kind, parts in found.items():
        total = sum(parts.values())
        cells = [_share(parts[part], total) for part in shown]
        rows.append((kind.label, [*cells, _ms(total), *own[kind]]))
    headings = [*(STEP_PARTS[part][0] for part in shown), "together", *(column.heading for column in percentiles)]
    return Table("step-parts", "The time of a step", [NOTE], "run", [("", h) for h in headings], rows)


def _share(seconds: float, total: float) -> Cell:
    """Empty where it is next to nothing."""
    return _ms(seconds, f"{seconds / total:.1%}") if seconds > 0.0005 * total else Cell()


def _ms(seconds: float, detail: str = "") -> Cell:
    return Cell(with_unit(seconds, "ms"), 1000 * seconds, detail)


def shown_parts(found: Mapping[Kind, Mapping[str, float]]) -> list[str]:
    """The parts that some kind of run has."""
    return [part for part in STEP_PARTS if any(parts[part] for parts in found.values())]
