"""From run folders to a report: what was equal, tables, plots and an answer.

- `comparisons.py` splits runs (`hvdtrain/runs/read.py`) into comparable ones, and `fairness.py` refuses those that may
  not be compared.
- `columns.py` has the figures of a run, one entry each, and what several comparisons differ in; `results.py` summarises
  them by kind.
- `answer.py` has the word, why and what next: `contenders.py` says who is compared with whom, `rule.py` and `race.py`
  what their speeds say, `quality.py` what they learn, `doubts.py` what could turn it, and `figures.py`
  has the table and verdict.json; `content.py` collects it.
- `page.py` writes Markdown, and HTML of it; `table.py` is every table, in any form; `reference_tables.py`
  puts published figures beside ours.
- `plots.py` draws.
"""

import json
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdtrain.errors import UsageError
from hvdtrain.formatting import printable

if TYPE_CHECKING:
    from hvdtrain.report.content import Content
    from hvdtrain.report.page import Plot
    from hvdtrain.report.table import Table

Files = dict[str, str | bytes]  # content by path below the report's folder


def write_report(
    content: "Content", plots: "Sequence[Plot]", notes: Sequence[str], out: Path, tables: "Sequence[Table]" = (),
    folded: Mapping[str, Sequence[str]] | None = None,
) -> None:  # fmt: skip
    """Write results.csv, verdict.json, report.md, report.html and plots/ into `out`.

    Only an earlier report's files are replaced. Everything is computed before the first file is written, and each file
    appears complete.

    Args:
        notes: on what is missing in the plots, a line each.
        tables: stand below that of costs.
        folded: lines that are folded away, by title.

    Raises:
        UsageError: `out` cannot be written to.
    """
    from hvdtrain.report import page
    from hvdtrain.report.columns import COLUMNS
    from hvdtrain.report.table import csv_text

    text = content.markdown(plots, tables, notes, folded or {})
    files: Files = {f"plots/{plot.name}.svg": plot.svg for plot in plots}
    files["results.csv"] = csv_text(list(COLUMNS), [list(row.values()) for row in content.rows])
    files |= {"verdict.json": json_text(content.data), "report.md": text}
    files["report.html"] = page.html(text, plots, content.colours, content.title)
    if table := content.reference:
        values = [[label, *(cell.value for cell in cells)] for label, cells in table.rows]
        files["reference.csv"] = csv_text([table.corner, *table.headings], values)
    # Of an earlier report, what not every one has: a reference's table, the plots of its page.
    old_page = out / "report.md"
    old_text = old_page.read_text(encoding="utf-8", errors="replace") if old_page.is_file() else ""
    stale = {"reference.csv", *re.findall(r"\]\((plots/[\w-]+\.svg)\)", old_text)} - files.keys()
    write_files(files, out, f"the report to {out}")
    for name in stale:
        (out / name).unlink(missing_ok=True)


def json_text(data: dict[str, Any]) -> str:
    """verdict.json, which README.md beside this file describes."""
    return json.dumps(data, indent=2, allow_nan=False) + "\n"


def write_files(files: Files, out: Path, what: str) -> None:
    """Write them into the folder, each of them whole or not at all."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".report-", dir=out) as temporary:
            for name, content in files.items():
                new = Path(temporary, name)
                new.parent.mkdir(parents=True, exist_ok=True)
                new.write_bytes(content if isinstance(content, bytes) else printable(content).encode())
            for name in files:
                (out / name).parent.mkdir(parents=True, exist_ok=True)
                os.replace(Path(temporary, name), out / name)
    except OSError as error:
        raise UsageError(f"cannot write {what}: {error}") from None


def check_out(out: Path) -> None:
    """UsageError where `out` is neither free nor holds an earlier report."""
    from hvdtrain.report.page import GENERATOR

    if out.exists() and not out.is_dir():
        raise UsageError(f"{out} is not a folder: give --out a new one")
    if (out / "plots").is_symlink():
        raise UsageError(f"{out / 'plots'} is a symbolic link, which no report has: give --out a new folder")
    if not out.is_dir() or not any(out.iterdir()):
        return
    page = out / "report.html"
    if not page.is_file() or GENERATOR not in page.read_text(encoding="utf-8", errors="replace")[:2000]:
        raise UsageError(f"{out} is not empty and holds no earlier report: give --out a new or empty folder")
