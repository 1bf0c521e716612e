"""A table of figures as a value, and how it is written as CSV, as LaTeX and on a terminal. HTML and Markdown are
templates.
"""

import csv
import io
import re
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table as RichTable

_LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "×": r"$\times$", "–": "--", "<": r"$<$", ">": r"$>$",
    "≥": r"$\ge$", "√": r"$\surd$",
}  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """A figure as it is shown, with all its digits for CSV, and what to know about it: the range over repeats."""

    text: str = ""
    value: float | None = None
    detail: str = ""


@dataclass(frozen=True)
class Table:
    """Rows of cells.

    Attributes:
        name: of the files it is written to.
        title: what stands above it.
        notes: what stands below it, a paragraph each.
        corner: what the rows' labels are.
        columns: for each column what it belongs to (empty where columns belong to nothing), and its heading.
        rows: a label, and a cell for each column.
    """

    name: str
    title: str
    notes: list[str]
    corner: str
    columns: list[tuple[str, str]]
    rows: list[tuple[str, list[Cell]]]

    @property
    def spans(self) -> list[tuple[str, int]]:
        """What neighbouring columns belong to, and how many they are; empty where columns belong to nothing."""
        spans = [(over, len(list(columns))) for over, columns in groupby(self.columns, key=lambda column: column[0])]
        return spans if any(over for over, _ in spans) else []

    @property
    def headings(self) -> list[str]:
        """One line of headings: `single, training time`."""
        return [f"{over}, {heading}" if over else heading for over, heading in self.columns]


def csv_text(table: Table) -> str:
    """The medians with all their digits; an empty cell where there is none."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow([table.corner, *table.headings])
    for label, cells in table.rows:
        writer.writerow([label, *("" if cell.value is None else cell.value for cell in cells)])
    return file.getvalue()


def latex(table: Table) -> str:
    r"""A tabular that needs no package, for `\input`; the title and the notes are comments."""
    lines = [f"% {' '.join(text.split())}" for text in (table.title, *table.notes)]
    lines += [f"\\begin{{tabular}}{{l{'r' * len(table.columns)}}}", r"\hline"]
    if table.spans:
        spans = [rf"\multicolumn{{{n}}}{{c}}{{{_tex(over)}}}" for over, n in table.spans]
        lines.append(" & ".join(["", *spans]) + r" \\")
    lines += [" & ".join(map(_tex, [table.corner, *(heading for _, heading in table.columns)])) + r" \\", r"\hline"]
    for label, cells in table.rows:
        shown = [f"{cell.text} ({cell.detail})" if cell.detail else cell.text for cell in cells]
        lines.append(" & ".join(map(_tex, [label, *shown])) + r" \\")
    return "\n".join([*lines, r"\hline", r"\end{tabular}", ""])


def _tex(text: str) -> str:
    return re.sub(r"[\\&%$#_{}~^×–<>≥√]", lambda match: _LATEX[match[0]], " ".join(text.split()))


def for_terminal(table: Table) -> "list[RichTable]":
    """The table for a terminal, without notes; where columns belong to something, a narrow table for each heading."""
    if not table.spans:
        return [_rich(table.title, table)]
    narrow = []
    for heading in dict.fromkeys(heading for _, heading in table.columns):
        kept = [i for i, column in enumerate(table.columns) if column[1] == heading]
        rows = [(label, [cells[i] for i in kept]) for label, cells in table.rows]
        columns = [("", table.columns[i][0]) for i in kept]
        narrow.append(_rich(f"{table.title}: {heading}", replace(table, columns=columns, rows=rows)))
    return narrow


def _rich(title: str, table: Table) -> "RichTable":
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    shown = RichTable(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, title_justify="left")
    shown.title = Text(title)
    shown.add_column(Text(table.corner), no_wrap=True)
    for heading in table.headings:
        shown.add_column(Text(heading), justify="right", overflow="fold")
    for label, cells in table.rows:
        texts = [Text(cell.text).append(f"\n{cell.detail}" if cell.detail else "", style="dim") for cell in cells]
        shown.add_row(Text(label), *texts)
    return shown
