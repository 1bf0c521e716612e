"""From run folders to a report: what was equal, tables, plots and an answer.

- `comparisons.py` splits runs (`hvdtrain/runs/read.py`) into comparisons. `fairness.py` refuses
  runs that may not be compared.
- `columns.py` has the figures of a run, one entry each, and what several comparisons differ in.
  `results.py` summarises figures by kind.
- `answer.py` has the word. `contenders.py` says who is compared with whom, `measures.py` by what
  (`target.py`: when a training reached its target), `rule.py` and `race.py` who is ahead,
  `quality.py` what they learn, `reasons.py` why, `steps_and_samples.py` whether steps or samples
  made the difference, `doubts.py` what could turn the answer (`drift.py`: whether steps become
  slower within sprints), and `next_command.py` what to do next. `conduct.py` has what the runs do
  not tell. `figures.py` has the answer's table and verdict.json.
- `content.py` collects what a report says. `page.py` writes Markdown, and HTML of it. `table.py` is
  every table, in any form. `reference_tables.py` puts published figures beside ours.
- `plots.py` draws, in the style of `plot_style.py`.
- `explaining/` says who was waited for in a run, and where the time of its steps went.
"""

import json
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdtrain.base.errors import UsageError
from hvdtrain.base.formatting import printable

if TYPE_CHECKING:
    from hvdtrain.reporting.content import Content
    from hvdtrain.reporting.page import Plot
    from hvdtrain.reporting.table import Table

Files = dict[str, str | bytes]  # content by path below the report's folder


def write_report(
    content: "Content",
    plots: "Sequence[Plot]",
    notes: Sequence[str],
    out: Path,
    tables: "Sequence[Table]" = (),
    folded: Mapping[str, Sequence[str]] | None = None,
) -> None:
    """Writes results.csv, verdict.json, report.md, report.html and plots/ into `out`.

    Only an earlier report's files are replaced. Everything is computed before the first file is
    written, and each file appears complete.

    Args:
        content: what the report says.
        plots: the report's plots.
        notes: what is missing in the plots, a line each.
        out: the folder of the report.
        tables: more tables, which stand below the table of costs.
        folded: lines that are folded away, by title.

    Raises:
        UsageError: `out` cannot be written to.
    """
    from hvdtrain.reporting import page
    from hvdtrain.reporting.columns import COLUMNS
    from hvdtrain.reporting.table import csv_text

    text = content.markdown(plots, tables, notes, folded or {})
    files: Files = {f"plots/{plot.name}.svg": plot.svg for plot in plots}
    files["results.csv"] = csv_text(list(COLUMNS), [list(row.values()) for row in content.rows])
    files |= {"verdict.json": json_text(content.data), "report.md": text}
    files["report.html"] = page.html(text, plots, content.colours, content.title)
    table = content.reference
    if table:
        values = [[label, *(cell.value for cell in cells)] for label, cells in table.rows]
        files["reference.csv"] = csv_text([table.corner, *table.headings], values)
    stale = _optional_files(out) - files.keys()
    write_files(files, out, f"the report to {out}")
    for name in stale:
        (out / name).unlink(missing_ok=True)


def _optional_files(out: Path) -> set[str]:
    """Returns the files of an earlier report that not every report has.

    These are the table of a reference and the plots of the report's page.
    """
    page = out / "report.md"
    text = page.read_text(encoding="utf-8", errors="replace") if page.is_file() else ""
    return {"reference.csv", *re.findall(r"\]\((plots/[\w-]+\.svg)\)", text)}


def json_text(data: dict[str, Any]) -> str:
    """Returns the text of verdict.json, which README.md beside this file describes."""
    return json.dumps(data, indent=2, allow_nan=False) + "\n"


def write_files(files: Files, out: Path, what: str) -> None:
    """Writes files into a folder, each of them whole or not at all.

    Args:
        files: the content of each file.
        out: the folder.
        what: what is written, for the message.

    Raises:
        UsageError: a file cannot be written.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".report-", dir=out) as temporary:
            for name, content in files.items():
                new = Path(temporary, name)
                new.parent.mkdir(parents=True, exist_ok=True)
                if isinstance(content, str):
                    content = printable(content).encode()
                new.write_bytes(content)
            for name in files:
                (out / name).parent.mkdir(parents=True, exist_ok=True)
                os.replace(Path(temporary, name), out / name)
    except OSError as error:
        raise UsageError(f"cannot write {what}: {error}") from None


def check_out(out: Path) -> None:
    """Checks that a report may be written into a folder.

    Raises:
        UsageError: the folder has something that is no report.
    """
    from hvdtrain.reporting.page import GENERATOR

    if out.exists() and not out.is_dir():
        raise UsageError(f"{out} is not a folder: give --out a new one")
    if (out / "plots").is_symlink():
        raise UsageError(
            f"{out / 'plots'} is a symbolic link, which no report has: give --out a new folder"
        )
    if not out.is_dir() or not any(out.iterdir()):
        return
    page = out / "report.html"
    text = page.read_text(encoding="utf-8", errors="replace") if page.is_file() else ""
    if GENERATOR not in text[:2000]:
        raise UsageError(
            f"{out} is not empty and holds no earlier report: give --out a new or empty folder"
        )
