"""From run folders to a report: what was equal, tables, plots and a verdict.

- `comparisons.py` splits a grid's runs (`hvdtrain/runs/read.py`) into comparable ones, and `fairness.py` refuses those
  that may not be compared.
- `columns.py` has the figures of a run, one entry each; `results.py` summarises them by kind.
- `verdict.py` decides who won on the statistics of `paired.py`, `headline.py` puts it into words and into verdict.json,
  and `caveats.py` says what to keep in mind; `content.py` collects it all, of one comparison or of a grid.
- `page.py` writes Markdown, and HTML of it; `table.py` is every table, in any form; `reference_tables.py`
  puts published figures beside ours.
- `plots.py` draws with `plot_effect.py`, `step_parts.py`, `plot_learning.py` and `plot_grid.py`, and `curves.py` draws
  curves panel by panel.
"""

import json
import os
import re
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdtrain.errors import UsageError
from hvdtrain.formatting import printable

if TYPE_CHECKING:
    from hvdtrain.report.content import Content, Grid
    from hvdtrain.report.page import Plot
    from hvdtrain.report.table import Table
    from hvdtrain.report.verdict import Margins
    from hvdtrain.runs.read import Run

Files = dict[str, str | bytes]  # content by path below the report's folder
Drawing = tuple[list["Plot"], list[str]]
More = Callable[["Sequence[Run]"], "Sequence[Plot]"]


def write_report(
    runs: "Sequence[Run]", out: Path, reference: str = "", margins: "Margins | None" = None,
    png: Path | None = None, more: More = lambda runs: [], more_tables: "Sequence[Table]" = (),
) -> list[str]:  # fmt: skip
    """Write results.csv, verdict.json, report.md, report.html and plots/ into `out`.

    Only an earlier report's files are replaced.

    The runs of a grid, which differ in model, global batch or learning rate, get a report across them, and in groups/
    one for each comparison. Everything is computed before the first file is written, and each file appears complete.

    Args:
        reference: the preset of an experiment whose table is added to the pages, and as reference.csv and
            reference.tex.
        margins: what the verdict counts as a difference, if not the default.
        png: a folder for PNG pictures of the plots, of a grid those across all runs.
        more: draws further plots of the runs of a comparison.
        more_tables: stand below the summary too.

    Returns:
        Notes on what is missing in the plots, a line each.

    Raises:
        UsageError: none of the runs finished, they differ in what should be equal (the field is named), or
            `out` cannot be written to.
    """
    from hvdtrain.report import page, results, table
    from hvdtrain.report.content import Grid, collect_any
    from hvdtrain.report.reference_tables import build_table, load_layout
    from hvdtrain.report.verdict import DEFAULT

    margins = margins or DEFAULT
    files: Files = {}

    def add(folder: str, own: "Content | Grid", drawing: "Drawing", tables: "Sequence[Table]" = ()) -> None:
        drawn, notes = drawing
        text = page.markdown(own.parts(drawn, tables, notes))
        files.update({f"{folder}plots/{plot.name}.svg": plot.svg for plot in drawn})
        files[f"{folder}results.csv"] = results.csv_text(own.rows)
        files[f"{folder}verdict.json"] = json_text(own.data)
        files[f"{folder}report.md"] = text
        files[f"{folder}report.html"] = page.html(text, drawn, own.colours, own.title)

    tables = [build_table(load_layout(reference), runs)] if reference else []
    collected = collect_any(runs, margins)
    drawing = draw(runs, margins, collected, more)
    add("", collected, drawing, [*tables, *more_tables])
    for comparison, own in collected.sections if isinstance(collected, Grid) else []:
        add(f"groups/{comparison.name}/", own, draw(comparison.runs, margins, own, more))
    for own_table in tables:
        files |= {"reference.csv": table.csv_text(own_table), "reference.tex": table.latex(own_table)}
    stale = _earlier(out) - {out / name for name in files}
    _write_files(files, out, f"the report to {out}")
    for path in stale:
        path.unlink(missing_ok=True)
    for folder in (*out.glob("groups/*/plots"), *out.glob("groups/*"), out / "groups"):
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
    if png:
        write_png(drawing[0], png)
    return drawing[1]


def draw(
    runs: "Sequence[Run]", margins: "Margins", collected: "Content | Grid", more: More = lambda runs: []
) -> "Drawing":
    """The plots of a report, and notes on what is missing in them, a line each."""
    from hvdtrain.report import content, plots

    is_grid = isinstance(collected, content.Grid)
    drawn, notes = plots.draw_grid(runs) if is_grid else plots.draw(runs, margins)
    return [*drawn, *more(runs)], notes


def write_png(plots: "Sequence[Plot]", folder: Path) -> None:
    """Write the plots as pictures."""
    _write_files({f"{plot.name}.png": plot.png for plot in plots}, folder, f"pictures to --png {folder}")


def json_text(data: dict[str, Any]) -> str:
    """verdict.json, which README.md beside this file describes."""
    return json.dumps(data, indent=2, allow_nan=False) + "\n"


def _write_files(files: Files, out: Path, what: str) -> None:
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


def _earlier(out: Path) -> set[Path]:
    """The files of an earlier report there that not every report has: a reference's table, the plots of its page, and
    what it says of each comparison of a grid.
    """
    found = {out / "reference.csv", out / "reference.tex"}
    for page in (out / "report.md", *out.glob("groups/*/report.md")):
        if page.is_file():
            text = page.read_text(encoding="utf-8", errors="replace")
            found |= {page.parent / name for name in re.findall(r"\]\((plots/[\w-]+\.svg)\)", text)}
            found |= {file for file in page.parent.glob("[rv]e*.*") if page.parent != out}
    return found


def check_out(out: Path) -> None:
    """UsageError where `out` is neither free nor holds an earlier report."""
    from hvdtrain.report.page import GENERATOR

    if out.exists() and not out.is_dir():
        raise UsageError(f"{out} is not a folder: give --out a new one")
    if not out.is_dir() or not any(out.iterdir()):
        return
    page = out / "report.html"
    if not page.is_file() or GENERATOR not in page.read_text(encoding="utf-8", errors="replace")[:2000]:
        raise UsageError(f"{out} is not empty and holds no earlier report: give --out a new or empty folder")
