"""From run folders to a report: what was equal, one table, plots, and what they say."""

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from hvdtrain.errors import UsageError

if TYPE_CHECKING:
    from hvdtrain.report.runs import Run


def write_report(runs: "list[Run]", out: Path) -> None:
    """Write results.csv, report.md, report.html and plots/*.svg into `out`, replacing these files alone.

    Everything is computed before the first file is touched, and each file appears complete.

    Raises:
        UsageError: none of the runs finished, they differ in what should be equal (the field is named), or
            `out` cannot be written to.
    """
    from hvdtrain.report import document, plots, tables

    content = document.collect(runs)
    drawn, notes = plots.draw(runs)
    content.omitted.extend(notes)
    files = {f"plots/{plot.name}.svg": plot.svg for plot in drawn}
    files["report.md"] = document.markdown(content, drawn)
    files["report.html"] = document.html(content, drawn)
    try:
        (out / "plots").mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".report-", dir=out) as temporary:
            new = Path(temporary)
            (new / "plots").mkdir()
            tables.write_csv(content.rows, new / "results.csv")
            for name, text in files.items():
                (new / name).write_text(text, encoding="utf-8")
            for name in (*files, "results.csv"):
                os.replace(new / name, out / name)
        for name in plots.NAMES:  # what an earlier report had and this one has not
            if f"plots/{name}.svg" not in files:
                (out / "plots" / f"{name}.svg").unlink(missing_ok=True)
    except OSError as error:
        raise UsageError(f"cannot write the report to {out}: {error}") from None


def check_out(out: Path) -> None:
    """UsageError where `out` holds something that is no earlier report."""
    from hvdtrain.report.document import GENERATOR

    if out.exists() and not out.is_dir():
        raise UsageError(f"{out} is not a folder: give --out a new one")
    if not out.is_dir() or not any(out.iterdir()):
        return
    page = out / "report.html"
    if not page.is_file() or GENERATOR not in page.read_text(encoding="utf-8", errors="replace")[:2000]:
        raise UsageError(f"{out} is not empty and holds no earlier report: give --out a new or empty folder")
