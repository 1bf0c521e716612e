"""From run folders to a report: what was equal, tables, plots and a verdict.

- `runs.py` and `run_files.py` read run folders, `comparisons.py` splits a grid's runs into comparable ones, and
  `fairness.py` refuses those that may not be compared.
- `results.py` computes figures, `formatting.py` makes text of them; `step_parts.py` says where a step's time went, and
  `loss_curve.py` thins training losses for plots.
- `verdict.py` decides who won on the statistics of `paired.py`, `headline.py` puts it into words and into verdict.json,
  and `caveats.py` says what to keep in mind; `content.py` (one comparison) and `grid.py` (several) collect it all.
- `pages.py` writes HTML and Markdown, `table.py` CSV and LaTeX, `terminal.py` prints; `reference_tables.py` puts
  published figures beside ours.
- `plots.py` draws with `plot_learning.py`, `plot_cost.py`, `plot_grid.py` and `style.py`.
"""

import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdtrain.errors import UsageError

if TYPE_CHECKING:
    from hvdtrain.report.plots import Plot
    from hvdtrain.report.runs import Run
    from hvdtrain.report.table import Table
    from hvdtrain.report.verdict import Margins

Files = dict[str, str | bytes]  # content by path below the report's folder


def write_report(runs: "Sequence[Run]", out: Path, reference: str = "", margins: "Margins | None" = None) -> None:
    """Write results.csv, verdict.json, report.md, report.html and plots/ into `out`.

    Only an earlier report's files are replaced.

    The runs of a grid, which differ in model, global batch or learning rate, get a report across them, and in groups/
    one for each comparison. Everything is computed before the first file is written, and each file appears complete.

    Args:
        reference: the preset of an experiment whose table is added to the pages, and as reference.csv and
            reference.tex.
        margins: what the verdict counts as a difference, if not the default.

    Raises:
        UsageError: none of the runs finished, they differ in what should be equal (the field is named), or
            `out` cannot be written to.
    """
    from hvdtrain.report.reference_tables import build_table, load_layout
    from hvdtrain.report.verdict import DEFAULT

    reference_tables = [build_table(load_layout(reference), runs)] if reference else []
    files = _report_files(runs, reference_tables, margins or DEFAULT)
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


def _report_files(runs: "Sequence[Run]", reference_tables: "Sequence[Table]", margins: "Margins") -> Files:
    from hvdtrain.report import grid, plots, results, table
    from hvdtrain.report.comparisons import split_into_comparisons

    comparisons = split_into_comparisons(runs)
    if len(comparisons) < 2:
        files = _comparison_files(runs, margins, reference_tables)
    else:
        collected = grid.collect_grid(comparisons, runs, margins)
        finished = [run for comparison in comparisons for run in comparison.runs]
        drawn = plots.draw_grid(finished)
        files = _plot_files(drawn) | {
            "results.csv": results.csv_text(results.result_rows(finished)),
            "verdict.json": json_text(collected.verdicts),
            "report.md": grid.markdown(collected, drawn, reference_tables),
            "report.html": grid.html(collected, drawn, reference_tables),
        }
        for comparison in comparisons:
            own_files = _comparison_files(comparison.runs, margins, others=finished)
            files |= {f"groups/{comparison.name}/{name}": content for name, content in own_files.items()}
    for reference_table in reference_tables:
        files |= {"reference.csv": table.csv_text(reference_table), "reference.tex": table.latex(reference_table)}
    return files


def _comparison_files(
    runs: "Sequence[Run]", margins: "Margins", reference_tables: "Sequence[Table]" = (), others: "Sequence[Run]" = ()
) -> Files:
    """The report of one comparison; others: further runs that may hold the baseline of scaling efficiency."""
    from hvdtrain.report import content, pages, plots, results
    from hvdtrain.report.runs import finished_by_kind
    from hvdtrain.report.step_parts import parts_table

    collected = content.collect(runs, others, margins)
    drawn, notes = plots.draw(runs)
    collected.omitted.extend(notes)
    parts = parts_table(finished_by_kind(runs), collected.groups)
    tables = [*([parts] if parts else []), *reference_tables]
    return _plot_files(drawn) | {
        "results.csv": results.csv_text(collected.rows),
        "verdict.json": json_text(collected.verdict.data),
        "report.md": pages.markdown(collected, drawn, tables),
        "report.html": pages.html(collected, drawn, tables),
    }


def json_text(data: dict[str, Any]) -> str:
    """verdict.json, which README.md beside this file describes."""
    return json.dumps(data, indent=2, allow_nan=False) + "\n"


def _plot_files(drawn: "Sequence[Plot]") -> Files:
    return {f"plots/{plot.name}.{kind}": getattr(plot, kind) for plot in drawn for kind in ("svg", "png")}


def _remove_stale(out: Path, files: Files) -> None:
    """Remove the files that an earlier report had and this one has not, and nothing else."""
    from hvdtrain.report import plots

    plot_files = [f"plots/{name}.{kind}" for name in (*plots.NAMES, *plots.GRID_NAMES) for kind in ("svg", "png")]
    group_files = ("results.csv", "verdict.json", "report.md", "report.html", *plot_files)
    former = [out / name for name in ("reference.csv", "reference.tex", *plot_files)]
    former += [group / name for group in out.glob("groups/*") for name in group_files]
    for path in former:
        if str(path.relative_to(out)) not in files:
            path.unlink(missing_ok=True)
    for folder in (*out.glob("groups/*/plots"), *out.glob("groups/*"), out / "groups"):
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()


def check_out(out: Path) -> None:
    """UsageError where `out` is neither free nor holds an earlier report."""
    from hvdtrain.report.pages import GENERATOR

    if out.exists() and not out.is_dir():
        raise UsageError(f"{out} is not a folder: give --out a new one")
    if not out.is_dir() or not any(out.iterdir()):
        return
    page = out / "report.html"
    if not page.is_file() or GENERATOR not in page.read_text(encoding="utf-8", errors="replace")[:2000]:
        raise UsageError(f"{out} is not empty and holds no earlier report: give --out a new or empty folder")
