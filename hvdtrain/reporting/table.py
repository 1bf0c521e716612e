"""Tables: every table as a value, and its forms as CSV, as Markdown, and on a terminal."""

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from hvdtrain.reporting.page import plain

if TYPE_CHECKING:
    from rich.table import Table as RichTable

    from hvdtrain.base.console import Console

# Characters of a cell on a terminal. What is longer is a sentence, and stands on the left.
LONGEST_FIGURE = 40
# Characters between two columns on a terminal: the padding of one, and the line beside it.
_AROUND_COLUMN = 2
# A spreadsheet takes a text that starts with one of these for a formula.
FORMULA = ("=", "+", "-", "@", "\t", "\r")


@dataclass(frozen=True)
class Cell:
    """A figure in a table.

    Attributes:
        text: the figure with its unit.
        value: the number with all digits, for CSV.
        detail: what stands beside it in brackets, such as the range over repeats.
    """

    text: str = ""
    value: float | None = None
    detail: str = ""


@dataclass(frozen=True)
class Table:
    """A table of cells.

    Attributes:
        title: stands above the table.
        notes: stand below the table, a paragraph each.
        corner: the heading of the rows' labels.
        headings: a heading for each column.
        rows: for each row the label and a cell for each column.
        is_text: whether cells are words, which stand on the left.
    """

    title: str
    notes: Sequence[str]
    corner: str
    headings: Sequence[str]
    rows: Sequence[tuple[str, Sequence[Cell]]]
    is_text: bool = False


def words_table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Returns a table of words. The first column has the rows' labels."""
    cells = [(label, [Cell(text) for text in texts]) for label, *texts in rows]
    return Table(title, [], headings[0], headings[1:], cells, is_text=True)


def csv_text(headings: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Returns rows as CSV: None is an empty cell, numbers have all their digits.

    A text that a spreadsheet would take for a formula gets an apostrophe before it and so stays
    text, since run folders may be anybody's.
    """
    file = io.StringIO()
    lines = [[_as_text(cell) for cell in row] for row in [headings, *rows]]
    csv.writer(file, lineterminator="\n").writerows(lines)
    return file.getvalue()


def _as_text(cell: object) -> object:
    return f"'{cell}" if isinstance(cell, str) and cell.startswith(FORMULA) else cell


def markdown(table: Table) -> str:
    """Returns the table as Markdown, below its title and above its notes."""
    lines = [[table.corner, *table.headings]]
    for label, cells in table.rows:
        lines.append([label, *map(_with_detail, cells)])
    rows = [f"| {' | '.join(map(plain, line))} |" for line in lines]
    alignment = "|:--" if table.is_text else "|--:"
    rows.insert(1, "|:--" + alignment * len(table.headings) + "|")
    title = [f"### {plain(table.title)}"] if table.title else []
    return "\n\n".join([*title, "\n".join(rows), *map(plain, table.notes)])


def _with_detail(cell: Cell) -> str:
    return f"{cell.text} ({cell.detail})" if cell.detail else cell.text


def print_table(console: "Console", table: Table) -> None:
    """Prints the table without notes.

    On a terminal that is too narrow for the longest word of each column, the table is as wide as
    these words, and the terminal breaks its lines.
    """
    shown = _rich_table(table)
    least = sum((column.min_width or 0) + _AROUND_COLUMN for column in shown.columns)
    if least > console.width:
        shown.width = least
    console.print(shown, crop=False)


def _rich_table(table: Table) -> "RichTable":
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    shown = RichTable(
        title=Text(table.title) if table.title else None,
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        show_edge=False,
        title_justify="left",
    )
    longest_label = max((len(label) for label, _ in table.rows), default=0)
    shown.add_column(Text(table.corner), no_wrap=True, min_width=longest_label)
    for number, heading in enumerate(table.headings):
        texts = [cells[number].text for _, cells in table.rows]
        is_sentence = max(map(len, texts), default=0) > LONGEST_FIGURE
        justify: Literal["left", "right"] = "left" if is_sentence else "right"
        details = [cells[number].detail for _, cells in table.rows]
        words = " ".join([heading, *texts, *(f"({detail})" for detail in details)]).split()
        widest = max(map(len, words), default=0)
        shown.add_column(Text(heading), justify=justify, overflow="fold", min_width=widest)
    for label, cells in table.rows:
        shown_cells = []
        for cell in cells:
            detail = f" ({cell.detail})" if cell.detail else ""
            shown_cells.append(Text(cell.text).append(detail, style="dim"))
        shown.add_row(Text(label), *shown_cells)
    return shown
