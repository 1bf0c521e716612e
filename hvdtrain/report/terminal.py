"""Tables on a terminal: the summary of a comparison, and any other table."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from hvdtrain.report.formatting import MEANS, format_cell
from hvdtrain.report.results import Group
from hvdtrain.report.table import Table

if TYPE_CHECKING:
    from rich.table import Table as RichTable

# The summary's columns: heading, figure, whether the range over repeats stands below. They fit 100 columns.
_SUMMARY_COLUMNS = (
    ("samples\n/s", "samples_per_s", True),
    ("CPU of\n1,000", "cpu_s_per_1000_samples", False),
    ("scaling\neffic.", "scaling_efficiency", True),
    ("validation\naccuracy", "val_accuracy", True),
    ("time to\ntarget", "time_to_target_s", True),
    ("comm.\nwait", "exposed_comm_fraction", False),
    ("sent per\nstep", "bytes_sent_per_step", False),
    ("stale-\nness", "staleness_mean", False),
    ("\nmemory", "peak_rss_mb", False),
)


def summary_table(groups: Sequence[Group]) -> "RichTable":
    """The summary for a terminal of 100 columns: the repeats' means, with their range below."""
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    table = RichTable(box=box.SIMPLE_HEAD, padding=0, show_edge=False, caption_justify="left")
    table.add_column("\nrun", no_wrap=True)
    table.add_column("\nn", justify="right", overflow="fold")
    columns = [column for column in _SUMMARY_COLUMNS if any(group[column[1]] for group in groups)]
    for heading, _, _ in columns:
        table.add_column(heading, justify="right", overflow="fold")
    for group in groups:
        cells = []
        for _, name, has_range in columns:
            mean, detail = format_cell(group, name)
            cells.append(Text(mean).append(f"\n{detail}", style="dim") if has_range and detail else Text(mean))
        table.add_row(Text(group.kind.label), str(group.n), *cells)
    legend = ["n runs each" + (f", with range: {MEANS}" if any(group.n > 1 for group in groups) else "")]
    if any(group.kind.servers for group in groups):
        legend.append("×2+1 is 2 workers and 1 server")
    if any(group["cpu_s_per_1000_samples"] for group in groups):
        legend.append("CPU time is of 1,000 samples")
    table.caption = "\n".join(legend)
    return table


def terminal_tables(table: Table) -> "list[RichTable]":
    """The table for a terminal, without notes; where columns are grouped, a narrow table for each heading instead."""
    if not table.column_groups:
        return [_rich_table(table.title, table)]
    narrow = []
    for heading in dict.fromkeys(heading for _, heading in table.columns):
        kept = [i for i, column in enumerate(table.columns) if column[1] == heading]
        rows = [(label, [cells[i] for i in kept]) for label, cells in table.rows]
        columns = [("", table.columns[i][0]) for i in kept]
        narrow.append(_rich_table(f"{table.title}: {heading}", replace(table, columns=columns, rows=rows)))
    return narrow


def _rich_table(title: str, table: Table) -> "RichTable":
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    rich_table = RichTable(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, title_justify="left")
    rich_table.title = Text(title)
    rich_table.add_column(Text(table.corner), no_wrap=True)
    for heading in table.headings:
        rich_table.add_column(Text(heading), justify="right", overflow="fold")
    for label, cells in table.rows:
        texts = [Text(cell.text).append(f"\n{cell.detail}" if cell.detail else "", style="dim") for cell in cells]
        rich_table.add_row(Text(label), *texts)
    return rich_table
