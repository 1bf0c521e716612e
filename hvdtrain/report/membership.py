"""Who was there in runs whose workers were lost, came back or joined: a table for the report."""

from collections.abc import Sequence

from hvdtrain.report.table import Table, words_table
from hvdtrain.runs.read import Run
from hvdtrain.runs.schema import Life


def membership_table(runs: Sequence[tuple[str, Run]]) -> Table | None:
    """A row for each life of a worker, of the runs, with their names, in which workers came or went."""
    rows = [
        [name, *_cells(life, began)]
        for name, run in runs
        if run.workers_changed
        for began in [min(life.joined for life in run.summary.membership)]
        for life in sorted(run.summary.membership, key=lambda life: (life.rank, life.incarnation))
    ]
    headings = ["run", "rank", "life", "joined after", "left after", "why", "samples"]
    return words_table("Who was there", headings, rows) if rows else None


def _cells(life: Life, began: float) -> list[str]:
    left = "" if life.left is None else f"{life.left - began:.1f} s"
    samples, why = "" if life.samples is None else f"{life.samples:,}", life.why or "until the end"
    return [str(life.rank), str(life.incarnation), f"{life.joined - began:.1f} s", left, why, samples]
