"""A table of figures as a value, and how it is written as CSV and as LaTeX. HTML and Markdown are templates."""

import csv
import io
import re
from dataclasses import dataclass
from itertools import groupby

_LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "×": r"$\times$", "–": "--", "<": r"$<$", ">": r"$>$",
    "≥": r"$\ge$", "√": r"$\surd$",
}  # fmt: skip


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
    """

    name: str
    title: str
    notes: list[str]
    corner: str
    columns: list[tuple[str, str]]
    rows: list[tuple[str, list[Cell]]]

    @property
    def column_groups(self) -> list[tuple[str, int]]:
        """Each group of neighbouring columns, and how many columns it has; empty where columns are not grouped."""
        groups = [(name, len(list(columns))) for name, columns in groupby(self.columns, key=lambda column: column[0])]
        return groups if any(name for name, _ in groups) else []

    @property
    def headings(self) -> list[str]:
        """One heading for each column, with its group: `single, training time`."""
        return [f"{group}, {heading}" if group else heading for group, heading in self.columns]


def csv_text(table: Table) -> str:
    """The means of repeats with all their digits; a cell is empty where there is none."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow([table.corner, *table.headings])
    for label, cells in table.rows:
        writer.writerow([label, *("" if cell.value is None else cell.value for cell in cells)])
    return file.getvalue()


def latex(table: Table) -> str:
    r"""A LaTeX tabular for `\input`, which needs no package; the title and the notes are comments."""
    lines = [f"% {' '.join(text.split())}" for text in (table.title, *table.notes)]
    lines += [f"\\begin{{tabular}}{{l{'r' * len(table.columns)}}}", r"\hline"]
    if table.column_groups:
        groups = [rf"\multicolumn{{{n}}}{{c}}{{{_tex(name)}}}" for name, n in table.column_groups]
        lines.append(" & ".join(["", *groups]) + r" \\")
    lines += [" & ".join(map(_tex, [table.corner, *(heading for _, heading in table.columns)])) + r" \\", r"\hline"]
    for label, cells in table.rows:
        texts = [f"{cell.text} ({cell.detail})" if cell.detail else cell.text for cell in cells]
        lines.append(" & ".join(map(_tex, [label, *texts])) + r" \\")
    return "\n".join([*lines, r"\hline", r"\end{tabular}", ""])


def _tex(text: str) -> str:
    return re.sub(r"[\\&%$#_{}~^×–<>≥√]", lambda match: _LATEX[match[0]], " ".join(text.split()))
