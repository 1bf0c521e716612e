"""From run folders to a report: what was equal, tables, plots, and what they say."""

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hvdtrain.errors import UsageError

if TYPE_CHECKING:
    from hvdtrain.report.plots import Plot
    from hvdtrain.report.runs import Run
    from hvdtrain.report.table import Table

Files = dict[str, str | bytes]  # content by path below the report's folder


def write_report(runs: "Sequence[Run]", out: Path, reference: str = "") -> None:
    """Write results.csv, report.md, report.html and plots/ into `out`, replacing an earlier report's files alone.

    Runs of a grid, which differ in model, global batch or learning rate, get a report across them, and one for each
    part that may be compared in groups/. Everything is computed before the first file is touched, and each file
    appears complete.

    Args:
        reference: the preset whose experiment's table is made too, as reference.csv and reference.tex and in the pages.

    Raises:
        UsageError: none of the runs finished, they differ in what should be equal (the field is named), or
            `out` cannot be written to.
    """
    from hvdtrain.report import references

    beside = [references.build(references.layout(reference), runs)] if reference else []
    files = _files(runs, beside)
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".report-", dir=out) as temporary:
            for name, content in files.items():
                new = Path(temporary, name)
                new.parent.mkdir(parents=True, exist_ok=True)
                new.write_bytes(content if isinstance(content, bytes) else content.encode())
            for name in files:
                (out / name).parent.mkdir(parents=True, exist_ok=True)
                os.replace(Path(temporary, name), out / name)
        _remove_stale(out, files)
    except OSError as error:
        raise UsageError(f"cannot write the report to {out}: {error}") from None


def _files(runs: "Sequence[Run]", beside: "Sequence[Table]") -> Files:
    """All files of a report."""
    from hvdtrain.report import grid, plots, table, tables
    from hvdtrain.report.parts import parted

    parts = parted(runs)
    if len(parts) < 2:
        files = _one(runs, beside, ())
    else:
        collected = grid.collect_grid(parts, runs)
        done = [run for part in parts for run in part.runs]
        drawn = plots.draw_grid(done)
        files = _of_plots(drawn) | {
            "results.csv": tables.csv_text(tables.results(done)),
            "report.md": grid.markdown(collected, drawn, beside),
            "report.html": grid.html(collected, drawn, beside),
        }
        for part in parts:
            files |= {f"groups/{part.name}/{name}": text for name, text in _one(part.runs, (), done).items()}
    for each in beside:
        files |= {"reference.csv": table.csv_text(each), "reference.tex": table.latex(each)}
    return files


def _one(runs: "Sequence[Run]", beside: "Sequence[Table]", others: "Sequence[Run]") -> Files:
    """The files of a report of runs that may all be compared."""
    from hvdtrain.report import document, plots, tables

    content = document.collect(runs, others)
    drawn, notes = plots.draw(runs)
    content.omitted.extend(notes)
    return _of_plots(drawn) | {
        "results.csv": tables.csv_text(content.rows),
        "report.md": document.markdown(content, drawn, beside),
        "report.html": document.html(content, drawn, beside),
    }


def _of_plots(drawn: "Sequence[Plot]") -> Files:
    return {f"plots/{plot.name}.{kind}": getattr(plot, kind) for plot in drawn for kind in ("svg", "png")}


def _remove_stale(out: Path, files: Files) -> None:
    """Remove what an earlier report had and this one has not, and nothing else."""
    from hvdtrain.report import plots

    drawn = [f"plots/{name}.{kind}" for name in (*plots.NAMES, *plots.GRID_NAMES) for kind in ("svg", "png")]
    ours = ("results.csv", "report.md", "report.html", *drawn)
    old = [out / name for name in ("reference.csv", "reference.tex", *drawn)]
    old += [group / name for group in out.glob("groups/*") for name in ours]
    for path in old:
        if str(path.relative_to(out)) not in files:
            path.unlink(missing_ok=True)
    for folder in (*out.glob("groups/*/plots"), *out.glob("groups/*"), out / "groups"):
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()


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
