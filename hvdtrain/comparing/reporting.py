"""`hvdtrain report`: tables and plots from any run folders."""

import gc
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from hvdtrain.config.option_types import FileToWrite, Folder, Real
from hvdtrain.errors import UsageError

if TYPE_CHECKING:
    from hvdtrain.report.content import Content
    from hvdtrain.report.table import Table
    from hvdtrain.runs.read import Run

_Command = TypeVar("_Command", bound=Callable[..., Any])


def margin_options(command: _Command) -> _Command:
    """The options that say what the answer counts as a difference."""
    for option in (
        click.option(
            "--accuracy-margin", type=Real(0, 1, min_open=True), default=0.01, show_default=True,
            help="What is faster is no answer unless its validation accuracy is shown to be within this of its "
            "opponent's.",
        ),
        click.option(
            "--margin", type=Real(0, 1), default=0.05, show_default=True,
            help="By which share something has to be faster to be the answer; a lead that is less does not matter.",
        ),
    ):  # fmt: skip
        command = option(command)
    return command


@click.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN...", type=click.Path(path_type=Path))
@click.option(
    "--out", metavar="DIR", type=Folder(path_type=Path),
    help="Also write results.csv, verdict.json, report.md, report.html and plots/ (SVG) there: a new or empty folder, "
    "or one with an earlier report, which is replaced.",
)  # fmt: skip
@click.option(
    "--png", metavar="DIR", type=Folder(path_type=Path, file_okay=False),
    help="Also write the plots there as pictures, 1,350 pixels wide.",
)  # fmt: skip
@click.option(
    "--reference", metavar="PRESET", default="",
    help="Also make the table of the experiment that this preset repeats, its authors' figures beside these runs': "
    "here, and with --out in the pages and in reference.csv. See `hvdtrain compare --help`.",
)  # fmt: skip
@click.option(
    "--calibration", metavar="FILE", type=click.Path(path_type=Path, dir_okay=False),
    help="With --out: also put there what `hvdtrain plan` predicts from this calibration, beside what was measured.",
)  # fmt: skip
@click.option(
    "--json", "json_file", metavar="FILE", type=FileToWrite(),
    help="Also write the verdict there, as verdict.json in a report's folder has it.",
)  # fmt: skip
@margin_options
def report(
    runs: tuple[Path, ...], out: Path | None, png: Path | None, reference: str, calibration: Path | None,
    json_file: Path | None, margin: float, accuracy_margin: float,
) -> None:  # fmt: skip
    """Ring or servers? A table of finished runs and the answer here, with --out also a report with plots.

    A RUN is the folder of one job, a folder of such folders, or what `hvdtrain compare` made.

    Mode, number of workers and of servers are what is compared. Repeats of the same number are compared with each
    other, and an answer needs five of them. Runs of several models, global batches (each of one learning rate) or
    values of --slow are compared within each.

    Runs that differ in anything else that has to be equal for a fair comparison (data, threads of a worker, hardware,
    versions, the samples of a repeat …) are refused, and the field is named.

    \b
    hvdtrain report comparison                       print the table of a comparison again
    hvdtrain report a/runs/ps-sync b --out both      put single runs side by side
    hvdtrain report comparison --png pictures
    hvdtrain report comparison --reference cnn-mnist --out beside
    """
    from hvdtrain.report import check_out, json_text
    from hvdtrain.report.contenders import Margins
    from hvdtrain.runs.read import find_runs

    if out:
        check_out(out)
    if calibration and not out:
        raise UsageError("--calibration puts a table into the pages of a report: give --out too")
    loaded = find_runs(runs)
    tables = []
    if calibration:
        from hvdtrain.planning.calibration import load
        from hvdtrain.planning.check import table

        tables = [table(load(calibration), loaded)]
    content = content_of(loaded, Margins(margin, accuracy_margin), reference)
    content.show()
    if json_file:
        try:
            json_file.write_text(json_text(content.data))
        except OSError as error:
            raise UsageError(f"--json {json_file} cannot be written: {error.strerror}") from None
    if out or png:
        from hvdtrain.comparing.tune import told

        folded = {title: lines for path in runs for title, lines in told(path).items()}
        draw_report(content, out, png, tables, folded)


def content_of(runs: "list[Run]", *given: Any) -> "Content":
    """All that a report says, as report.content.collect has it, and where each answer flips.

    Raises:
        UsageError: the runs may not be compared.
    """
    from hvdtrain.planning.flips import flips
    from hvdtrain.report.content import collect

    content = collect(runs, *given)
    for of, answer in content.answered:
        answer.data["flips"] = flips(of.runs, answer.word)
    return content


def draw_report(
    content: "Content", out: Path | None, png: Path | None = None, tables: "Sequence[Table]" = (),
    folded: Mapping[str, Sequence[str]] | None = None,
) -> None:  # fmt: skip
    """Write the report's files, and its plots as pictures, where folders are given for them; see write_report."""
    from hvdtrain import plot_style
    from hvdtrain.explaining.pictures import pictures
    from hvdtrain.planning.flips import table
    from hvdtrain.report import plots, write_files, write_report

    gc.disable()  # plots are many small objects that live to the end: to look for garbage is a tenth of the time
    try:
        drawn, notes = plots.draw(content.comparisons)
        drawn += pictures([run for _, run in content.runs])
        if out:
            maps = [table(answer.data["flips"]) for _, answer in content.answered]
            write_report(content, drawn, notes, out, [*filter(None, maps), *tables], folded)
            click.echo(f"report: {out / 'report.html'}")
        if png:
            write_files(
                {f"{plot.name}.png": plot_style.png(plot.figure) for plot in drawn}, png, f"pictures to --png {png}"
            )
    finally:
        gc.enable()
    for note in notes:
        click.echo(f"not in the plots: {note}")
