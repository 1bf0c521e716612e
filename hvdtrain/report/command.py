"""`hvdtrain report`: tables and plots from any run folders."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from hvdtrain.errors import UsageError

if TYPE_CHECKING:
    from hvdtrain.report.runs import Run
    from hvdtrain.report.verdict import Margins

_Command = TypeVar("_Command", bound=Callable[..., Any])


def margin_options(command: _Command) -> _Command:
    """The options that say what the verdict counts as a difference."""
    for option in (
        click.option(
            "--accuracy-margin", type=click.FloatRange(0, 1, min_open=True), default=0.01, show_default=True,
            help="A mode whose validation accuracy is not shown to be within this of the best cannot win.",
        ),
        click.option(
            "--margin", type=click.FloatRange(0, 1), default=0.03, show_default=True,
            help="A winner is faster by at least this share, with a 95 % interval above 1, in at least 5 repeats.",
        ),
    ):  # fmt: skip
        command = option(command)
    return command


@click.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN...", type=click.Path(path_type=Path))
@click.option(
    "--out", metavar="DIR", type=click.Path(path_type=Path),
    help="Also write results.csv, verdict.json, report.md, report.html and plots/ (SVG and PNG) there: a new or empty "
    "folder, or one with an earlier report, which is replaced.",
)  # fmt: skip
@click.option(
    "--reference", metavar="PRESET", default="",
    help="Also make the table of the experiment that this preset repeats, its authors' figures beside these runs': "
    "here, and with --out in the pages, in reference.csv and as LaTeX in reference.tex. See `hvdtrain compare --help`.",
)  # fmt: skip
@click.option(
    "--json", "json_file", metavar="FILE", type=click.Path(path_type=Path, dir_okay=False),
    help="Also write the verdict there, as verdict.json in a report's folder has it.",
)  # fmt: skip
@margin_options
def report(
    runs: tuple[Path, ...], out: Path | None, reference: str, json_file: Path | None, margin: float,
    accuracy_margin: float,
) -> None:  # fmt: skip
    """Compare finished runs: a table here, with --out also a report with plots.

    A RUN is the folder of one job, a folder of such folders, or what `hvdtrain compare` made.

    Mode, number of workers and of servers are what is compared. Repeats of the same number are compared with each
    other, and a winner needs five of them. Runs of several models or global batches (and then of learning rates that
    grow with the workers, or with their root) are compared within each, and listed in one table.

    Runs that differ in anything else that has to be equal for a fair comparison (data, threads of a worker, hardware,
    versions, the samples of a repeat …) are refused, and the field is named.

    \b
    hvdtrain report comparison                       print the table of a comparison again
    hvdtrain report a/runs/ps-sync b --out both      put single runs side by side
    hvdtrain report comparison --reference cnn-mnist --out beside
    """
    from hvdtrain.report import check_out, json_text, write_report
    from hvdtrain.report.runs import find_runs
    from hvdtrain.report.verdict import Margins

    if out:
        check_out(out)
    found = find_runs(runs)
    margins = Margins(margin, accuracy_margin)
    verdict = print_report(found, reference, margins)
    if json_file:
        try:
            json_file.write_text(json_text(verdict))
        except OSError as error:
            raise UsageError(f"--json {json_file} cannot be written: {error.strerror}") from None
    if out:
        write_report(found, out, reference, margins)
        click.echo(f"report: {out / 'report.html'}")


def print_report(runs: "list[Run]", reference: str = "", margins: "Margins | None" = None) -> dict[str, Any]:
    """Print the table of these runs and the verdict, and return what verdict.json has of it.

    Raises:
        UsageError: the runs may not be compared.
    """
    from rich.console import Console

    from hvdtrain.report.comparisons import split_into_comparisons
    from hvdtrain.report.content import collect
    from hvdtrain.report.grid import collect_grid
    from hvdtrain.report.reference_tables import build_table, load_layout
    from hvdtrain.report.terminal import summary_table, terminal_tables
    from hvdtrain.report.verdict import DEFAULT

    reference_tables = [build_table(load_layout(reference), runs)] if reference else []
    comparisons = split_into_comparisons(runs)
    if len(comparisons) < 2:
        content = collect(runs, margins=margins or DEFAULT)
        verdict = content.verdict.data
        tables = [summary_table(content.groups)]
        lines = [content.verdict.headline, *(f"- {line}" for line in content.verdict.caveats)]
        lines += ["", *content.verdict.sentences, *content.omitted]
    else:
        grid = collect_grid(comparisons, runs, margins or DEFAULT)
        verdict = grid.verdicts
        tables = terminal_tables(grid.overview)
        compared = [section for section in grid.sections if len(section.content.groups) > 1]
        lines = [f"{section.comparison.title}: {section.content.verdict.headline}" for section in compared]
        lines += [*(f"- {line}" for line in grid.caveats), *grid.omitted]
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
    return verdict
