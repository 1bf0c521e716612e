"""A table as a value, and how it is written: as CSV, Markdown, and on a terminal. There is no other kind."""

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
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
        title: stands above it.
        notes: stand below it, a paragraph each.
        corner: the heading of the rows' labels.
        headings: one for each column.
        rows: (label, a cell for each column).
        is_text: cells are words, and stand on the left.
    """

    title: str
    notes: Sequence[str]
    corner: str
    headings: Sequence[str]
    rows: Sequence[tuple[str, Sequence[Cell]]]
    is_text: bool = False


def words_table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A table of words, for the pages."""
    cells = [(label, [Cell(text) for text in texts]) for label, *texts in rows]
    return Table(title, [], headings[0], headings[1:], cells, is_text=True)


def csv_text(headings: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Rows as CSV: None is an empty cell, numbers have all their digits."""
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows([headings, *rows])
    return file.getvalue()


def markdown(table: Table) -> str:
    """The table below its title, and its notes below it."""
    lines = [[table.corner, *table.headings]]
    for label, cells in table.rows:
        lines.append([label, *(f"{cell.text} ({cell.detail})" if cell.detail else cell.text for cell in cells)])
    rows = [f"| {' | '.join(map(plain, line))} |" for line in lines]
    rows.insert(1, "|:--" + ("|:--" if table.is_text else "|--:") * len(table.headings) + "|")
    title = [f"### {plain(table.title)}"] if table.title else []
    return "\n\n".join([*title, "\n".join(rows), *map(plain, table.notes)])


def rich_table(table: Table) -> "RichTable":
    """The table for a terminal, without notes."""
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    title = Text(table.title) if table.title else None
    shown = RichTable(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, title_justify="left")
    shown.add_column(Text(table.corner), no_wrap=True)
    for heading in table.headings:
        shown.add_column(Text(heading), justify="right", overflow="fold")
    for label, cells in table.rows:
        texts = [Text(cell.text).append(f" ({cell.detail})" if cell.detail else "", style="dim") for cell in cells]
        shown.add_row(Text(label), *texts)
    return shown
