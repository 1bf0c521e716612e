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
    help="Also write results.csv, report.md, report.html and plots/ there: a new or empty folder, or one "
    "with an earlier report, which is replaced.",
)  # fmt: skip
def report(runs: tuple[Path, ...], out: Path | None) -> None:
    """Compare finished runs: a table here, with --out also a report with plots.

    A RUN is the folder of one job, a folder of such folders, or what `hvdtrain compare` made.

    Runs that differ in what has to be equal for a fair comparison (model, data, global batch, learning rate,
    threads of a worker, hardware, versions, the samples of a repeat …) are refused, and the field is named.
    Mode, number of workers and of servers are what is compared. Repeats are summarised by median and range.

    \b
    hvdtrain report comparison                       print the table of a comparison again
    hvdtrain report a/runs/ps-sync b --out both      put single runs side by side
    """
    from hvdtrain.report import check_out, write_report
    from hvdtrain.report.runs import find

    if out:
        check_out(out)
    found = find(runs)
    show(found)
    if out:
        write_report(found, out)
        click.echo(f"report: {out / 'report.html'}")


def show(runs: "list[Run]") -> None:
    """Print the table of these runs and what it says. UsageError where they may not be compared."""
    from rich.console import Console

    from hvdtrain.report.cells import summary_table
    from hvdtrain.report.document import collect

    content = collect(runs)
    # A pipe has no width of its own: give the table what it needs, and each sentence its line.
    console = Console(width=None if sys.stdout.isatty() else 200, highlight=False)
    console.print(summary_table(content.groups))
    for line in (content.answer.headline, *content.answer.sentences, *content.omitted):
        console.print(line, markup=False, soft_wrap=not sys.stdout.isatty())
