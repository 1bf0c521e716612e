"""`hvdtrain report`: tables and plots from any run folders."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from hvdtrain.report.runs import Run


@click.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN...", type=click.Path(path_type=Path))
@click.option(
    "--out", metavar="DIR", type=click.Path(path_type=Path),
    help="Also write results.csv, report.md, report.html and plots/ (SVG and PNG) there: a new or empty folder, or one "
    "with an earlier report, which is replaced.",
)  # fmt: skip
@click.option(
    "--reference", metavar="PRESET", default="",
    help="Also make the table of the experiment that this preset repeats, its authors' figures beside these runs': "
    "here, and with --out in the pages, in reference.csv and as LaTeX in reference.tex. See `hvdtrain compare --help`.",
)  # fmt: skip
def report(runs: tuple[Path, ...], out: Path | None, reference: str) -> None:
    """Compare finished runs: a table here, with --out also a report with plots.

    A RUN is the folder of one job, a folder of such folders, or what `hvdtrain compare` made.

    Mode, number of workers and of servers are what is compared. Repeats are summarised by median and range. Runs of
    several models or global batches (and then of learning rates that grow with the workers, or with their root) are
    compared within each, and listed in one table.

    Runs that differ in anything else that has to be equal for a fair comparison (data, threads of a worker, hardware,
    versions, the samples of a repeat …) are refused, and the field is named.

    \b
    hvdtrain report comparison                       print the table of a comparison again
    hvdtrain report a/runs/ps-sync b --out both      put single runs side by side
    hvdtrain report comparison --reference cnn-mnist --out beside
    """
    from hvdtrain.report import check_out, write_report
    from hvdtrain.report.runs import find

    if out:
        check_out(out)
    found = find(runs)
    show(found, reference)
    if out:
        write_report(found, out, reference)
        click.echo(f"report: {out / 'report.html'}")


def show(runs: "list[Run]", reference: str = "") -> None:
    """Print the table of these runs and what it says. UsageError where they may not be compared."""
    from rich.console import Console

    from hvdtrain.report import document, references
    from hvdtrain.report.cells import summary_table
    from hvdtrain.report.grid import collect_grid
    from hvdtrain.report.parts import parted
    from hvdtrain.report.table import for_terminal

    beside = [references.build(references.layout(reference), runs)] if reference else []
    parts = parted(runs)
    if len(parts) < 2:
        content = document.collect(runs)
        tables = [summary_table(content.groups)]
        lines = [content.answer.headline, *content.answer.sentences, *content.omitted]
    else:
        grid = collect_grid(parts, runs)
        tables = for_terminal(grid.overview)
        lines = [f"{part.title}: {said.answer.headline}" for part, said, _ in grid.parts if len(said.groups) > 1]
        lines += grid.omitted
    # A pipe has no width of its own: give the table what it needs, and each sentence its line.
    console = Console(width=None if sys.stdout.isatty() else 200, highlight=False)
    for table in tables:
        console.print(table)
    for line in lines:
        console.print(line, markup=False, soft_wrap=not sys.stdout.isatty())
    for reference_table in beside:
        for narrow in for_terminal(reference_table):
            console.print()
            console.print(narrow)
        for note in reference_table.notes:
            console.print(note, markup=False, soft_wrap=not sys.stdout.isatty())
