"""A table as a value, and how it is written: as CSV, Markdown, and on a terminal. There is no other kind."""

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING

from hvdtrain.report.page import plain

if TYPE_CHECKING:
    from rich.table import Table as RichTable


@dataclass(frozen=True)
class Cell:
    """A figure as text, as a number with all digits for CSV, and its detail, such as the range over repeats."""

    text: str = ""
    value: float | None = None
    detail: str = ""


@dataclass(frozen=True)
class Table:
    """Rows of cells.

    Attributes:
        name: of the files that it is written to.
        title: stands above it.
        notes: stand below it, a paragraph each.
        corner: the heading of the rows' labels.
        columns: (group, heading) of each column; neighbours of the same group share a heading above theirs. The group
            is empty where columns are not grouped.
        rows: (label, a cell for each column).
        is_text: cells are words, and stand on the left.
    """

    name: str
    title: str
    notes: Sequence[str]
    corner: str
    columns: Sequence[tuple[str, str]]
    rows: Sequence[tuple[str, Sequence[Cell]]]
    is_text: bool = False

    @property
    def column_groups(self) -> list[tuple[str, int]]:
        """Each group of neighbouring columns, and how many columns it has; empty where columns are not grouped."""
        groups = [(name, len(list(columns))) for name, columns in groupby(self.columns, key=lambda column: column[0])]
        return groups if any(name for name, _ in groups) else []

    @property
    def headings(self) -> list[str]:
        """One heading for each column, with its group: `single, training time`."""
        return [f"{group}, {heading}" if group else heading for group, heading in self.columns]


def words_table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A table of words, for the pages."""
    columns = [("", heading) for heading in headings[1:]]
    cells = [(label, [Cell(text) for text in texts]) for label, *texts in rows]
    return Table("", title, [], headings[0], columns, cells, is_text=True)


def csv_text(table: Table) -> str:
    """The means of repeats with all their digits; a cell is empty where there is none."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow([table.corner, *table.headings])
    for label, cells in table.rows:
        writer.writerow([label, *("" if cell.value is None else cell.value for cell in cells)])
    return file.getvalue()


def _with_detail(cell: Cell) -> str:
    return f"{cell.text} ({cell.detail})" if cell.detail else cell.text


def markdown(table: Table) -> str:
    """The table below its title, and its notes below it."""
    lines = [[table.corner, *table.headings], *([label, *map(_with_detail, cells)] for label, cells in table.rows)]
    rows = ["| " + " | ".join(map(plain, line)) + " |" for line in lines]
    rows.insert(1, "|:--" + ("|:--" if table.is_text else "|--:") * len(table.columns) + "|")
    title = [f"### {plain(table.title)}"] if table.title else []
    return "\n\n".join([*title, "\n".join(rows), *map(plain, table.notes)])


def terminal_tables(table: Table) -> "list[RichTable]":
    """The table for a terminal, without notes; where columns are grouped, a narrow table for each heading instead."""
    if not table.column_groups:
        return [rich_table(table)]
    narrow = []
    for heading in dict.fromkeys(heading for _, heading in table.columns):
        own = _columns(table, [i for i, column in enumerate(table.columns) if column[1] == heading])
        columns = [("", group) for group, _ in own.columns]
        narrow.append(rich_table(replace(own, title=f"{table.title}: {heading}", columns=columns)))
    return narrow


def _columns(table: Table, kept: Sequence[int]) -> Table:
    rows = [(label, [cells[i] for i in kept]) for label, cells in table.rows]
    return replace(table, columns=[table.columns[i] for i in kept], rows=rows)


def rich_table(table: Table) -> "RichTable":
    """The table for a terminal, without notes."""
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    title = Text(table.title) if table.title else None
    found = RichTable(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, title_justify="left")
    found.add_column(Text(table.corner), no_wrap=True)
    for heading in table.headings:
        found.add_column(Text(heading), justify="right", overflow="fold")
    for label, cells in table.rows:
        texts = [Text(cell.text).append(f" ({cell.detail})" if cell.detail else "", style="dim") for cell in cells]
        found.add_row(Text(label), *texts)
    return found
