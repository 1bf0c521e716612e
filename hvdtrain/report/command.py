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
    from hvdtrain.report.runs import find_runs

    if out:
        check_out(out)
    found = find_runs(runs)
    print_report(found, reference)
    if out:
        write_report(found, out, reference)
        click.echo(f"report: {out / 'report.html'}")


def print_report(runs: "list[Run]", reference: str = "") -> None:
    """Print the table of these runs and the verdict. UsageError where they may not be compared."""
    from rich.console import Console

    from hvdtrain.report.comparisons import split_into_comparisons
    from hvdtrain.report.content import collect
    from hvdtrain.report.grid import collect_grid
    from hvdtrain.report.reference_tables import build_table, load_layout
    from hvdtrain.report.terminal import summary_table, terminal_tables

    reference_tables = [build_table(load_layout(reference), runs)] if reference else []
    comparisons = split_into_comparisons(runs)
    if len(comparisons) < 2:
        content = collect(runs)
        tables = [summary_table(content.groups)]
        lines = [content.verdict.headline, *content.verdict.sentences, *content.omitted]
    else:
        grid = collect_grid(comparisons, runs)
        tables = terminal_tables(grid.overview)
        compared = [section for section in grid.sections if len(section.content.groups) > 1]
        lines = [f"{section.comparison.title}: {section.content.verdict.headline}" for section in compared]
        lines += grid.omitted
    # Where the output is no terminal, it has no width: nothing is wrapped then.
    console = Console(width=None if sys.stdout.isatty() else 200, highlight=False)
    for table in tables:
        console.print(table)
    for line in lines:
        console.print(line, markup=False, soft_wrap=not sys.stdout.isatty())
    for reference_table in reference_tables:
        for table in terminal_tables(reference_table):
            console.print()
            console.print(table)
        for note in reference_table.notes:
            console.print(note, markup=False, soft_wrap=not sys.stdout.isatty())
