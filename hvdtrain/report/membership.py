"""Who was there in runs whose workers or servers were lost, came back or joined: a table for the report."""

from collections.abc import Sequence

from hvdtrain.formatting import with_noun
from hvdtrain.report.table import Table, words_table
from hvdtrain.runs.read import Run
from hvdtrain.runs.schema import Life


def membership_table(runs: Sequence[tuple[str, Run]]) -> Table | None:
    """A row for each return of a server and each life of a worker, of the runs, with their names, in which any came or
    went.
    """
    rows = []
    for name, run in runs:
        summary = run.summary
        began = min((life.joined for life in summary.membership), default=0.0)
        lives: dict[int, int] = {}
        for back in summary.returned_servers:
            lives[back.rank] = lives.get(back.rank, 1) + 1
            cost = f"{with_noun(back.lost_updates, 'update')} lost"
            why = f"a server, killed {back.returned - back.lost:.1f} s before: {cost}"
            rows.append([name, str(back.rank), str(lives[back.rank]), f"{back.returned - began:.1f} s", "", why, ""])
        if run.workers_changed or summary.returned_servers:
            in_order = sorted(summary.membership, key=lambda life: (life.rank, life.incarnation))
            rows += [[name, *_cells(life, began)] for life in in_order]
    headings = ["run", "rank", "life", "joined after", "left after", "why", "samples"]
    return words_table("", headings, rows) if rows else None


def _cells(life: Life, began: float) -> list[str]:
    left = "" if life.left is None else f"{life.left - began:.1f} s"
    samples, why = "" if life.samples is None else f"{life.samples:,}", life.why or "until the end"
    return [str(life.rank), str(life.incarnation), f"{life.joined - began:.1f} s", left, why, samples]
