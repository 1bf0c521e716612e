"""`hvdtrain report`: tables and plots of any run folders."""

import contextlib
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from msgspec import structs

from hvdtrain.base.config.option_types import FileToWrite, Folder, Real
from hvdtrain.base.config.writing import write_whole
from hvdtrain.base.errors import UsageError
from hvdtrain.base.system.memory import without_collecting
from hvdtrain.reporting.conduct import BY_SPEED, BY_TIME_TO_TARGET

if TYPE_CHECKING:
    from hvdtrain.reporting.answer import Answer
    from hvdtrain.reporting.content import Content
    from hvdtrain.reporting.table import Table
    from hvdtrain.runs.read import Run

# What --decide-by takes for BY_TIME_TO_TARGET too.
TARGET = "target"
_Command = TypeVar("_Command", bound=Callable[..., Any])
# What takes long to import for a report.
_SLOW_IMPORTS = (
    "hvdtrain.planning.flips",
    "hvdtrain.reporting.content",
    "hvdtrain.reporting.explaining.pictures",
    "hvdtrain.reporting.plots",
    "matplotlib.backends.backend_svg",
    "matplotlib.figure",
    "scipy.special",
)


class DecidingMeasure(click.Choice):
    """What decides a comparison: the name of a measure, or the short one."""

    def __init__(self) -> None:
        super().__init__([BY_SPEED, TARGET, BY_TIME_TO_TARGET])

    def convert(self, value: Any, param: Any, ctx: Any) -> str:
        name = str(super().convert(value, param, ctx))
        return BY_TIME_TO_TARGET if name == TARGET else name


def deciding_options(command: _Command) -> _Command:
    """Adds the options that say what decides, and which differences matter to the answer."""
    decide_by = click.option(
        "--decide-by",
        type=DecidingMeasure(),
        default=None,
        show_default="speed; in `report`, what the comparison was made with",
        help="What decides: `speed` (the faster contender also has to be as accurate), or "
        "`time-to-target` (short `target`): the seconds of training to --target-accuracy. With "
        "`target` every repeat is a whole training, which ends at the target, and the report has "
        "the answer by speed too.",
    )
    margin = click.option(
        "--margin",
        type=Real(0, 1),
        default=0.05,
        show_default=True,
        help="How much faster the winner has to be, as a share: a smaller lead does not matter.",
    )
    accuracy_margin = click.option(
        "--accuracy-margin",
        type=Real(0, 1, min_open=True),
        default=0.01,
        show_default=True,
        help="The faster contender wins only if its validation accuracy is shown to be within "
        "this of its opponent's.",
    )
    return decide_by(margin(accuracy_margin(command)))


@click.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN...", type=click.Path(path_type=Path))
@click.option(
    "--out",
    metavar="DIR",
    type=Folder(path_type=Path),
    help="Also write results.csv, verdict.json, report.md, report.html and plots/ (SVG) there: a "
    "new or empty folder, or one with an earlier report, which is replaced.",
)
@click.option(
    "--png",
    metavar="DIR",
    type=Folder(path_type=Path, file_okay=False),
    help="Also write the plots there as pictures, 1,350 pixels wide.",
)
@click.option(
    "--reference",
    metavar="PRESET",
    default="",
    help="Also print the figures of this preset's authors beside the figures of these runs. With "
    "--out the table is in the pages and in reference.csv too. See `hvdtrain compare --help`.",
)
@click.option(
    "--calibration",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    help="With --out: also put there what `hvdtrain plan` predicts from this calibration, beside "
    "what was measured.",
)
@click.option(
    "--json",
    "json_file",
    metavar="FILE",
    type=FileToWrite(),
    help="Also write the verdict there, as verdict.json in a report's folder has it.",
)
@deciding_options
def report(
    runs: tuple[Path, ...],
    out: Path | None,
    png: Path | None,
    reference: str,
    calibration: Path | None,
    json_file: Path | None,
    decide_by: str | None,
    margin: float,
    accuracy_margin: float,
) -> None:
    """Ring or servers? Print a table of finished runs and the answer. With --out, also write a
    report with plots.

    A RUN is the folder of one job, a folder of such folders, or what `hvdtrain compare` made.

    The table compares modes, numbers of workers and numbers of servers. Runs with the same repeat
    number form a pair, and an answer needs five pairs. With --decide-by target the times to the
    target are compared instead of samples/s. Each combination of model, global batch and --slow has
    a separate answer. Within it learning rates have to be equal, unless `compare` searched for them.

    Runs that differ in anything else that has to be equal for a fair comparison (data, hosts and
    their cores, hardware, versions, the samples of a repeat …) are refused, and the field is named.

    \b
    hvdtrain report comparison                       print the table of a comparison again
    hvdtrain report a/runs/ps-sync b --out both      put single runs side by side
    hvdtrain report comparison --png pictures
    hvdtrain report comparison --reference cnn-mnist --out beside
    """
    from hvdtrain.comparing.comparison_state import conducted, tried_lines
    from hvdtrain.reporting import check_out, json_text
    from hvdtrain.reporting.contenders import Margins
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
    conduct = conducted(runs)
    if decide_by:
        conduct = structs.replace(conduct, decided_by=decide_by)
    content = content_of(loaded, Margins(margin, accuracy_margin), reference, conduct)
    content.show()
    if json_file:
        try:
            write_whole(json_file, json_text(content.data))
        except OSError as error:
            raise UsageError(f"--json {json_file} cannot be written: {error.strerror}") from None
    if out or png:
        folded: dict[str, list[str]] = {}
        for path in runs:
            folded |= tried_lines(path)
        draw_report(content, out, png, tables, folded)


def import_for_report() -> None:
    """Imports what a report needs, while this process has to wait anyway.

    An import that fails is left to the report, which says so when the runs are made. A notebook may
    call this, so its objects stay with its garbage collector, as `importing` would not have it.
    """
    with without_collecting(), contextlib.suppress(ImportError):
        for name in _SLOW_IMPORTS:
            importlib.import_module(name)


def content_of(runs: "list[Run]", *given: Any, are_ours: bool = False, **more: Any) -> "Content":
    """Returns what a report says, and where each answer flips.

    Args:
        runs: the runs.
        given: further arguments of reporting.content.collect.
        are_ours: whether the runs were made with the options of this command. The next command
            needs no placeholders then.
        more: keyword arguments of reporting.content.collect.

    Raises:
        UsageError: the runs may not be compared.
    """
    from hvdtrain.planning.flips import flips
    from hvdtrain.reporting.content import collect

    content = collect(runs, *given, **more)
    if not are_ours:
        comparisons = [
            (compared, _with_placeholders(answer)) for compared, answer in content.comparisons
        ]
        content = replace(content, comparisons=comparisons)
    for compared, answer in content.answered:
        answer.data["flips"] = flips(compared.runs, answer.word_by_speed)
    return content


def _with_placeholders(answer: "Answer") -> "Answer":
    """Returns the answer with placeholders in its next command."""
    from hvdtrain.runs.command_lines import with_placeholders

    command = with_placeholders(answer.next)
    return replace(answer, next=command, data=answer.data | {"next": command})


def draw_report(
    content: "Content",
    out: Path | None,
    png: Path | None = None,
    tables: "Sequence[Table]" = (),
    folded: Mapping[str, Sequence[str]] | None = None,
) -> None:
    """Writes a report's files, and its plots as pictures.

    Args:
        content: what the report says.
        out: the folder of the report; None if it is not written.
        png: the folder of the pictures; None if they are not written.
        tables: see write_report.
        folded: see write_report.
    """
    from hvdtrain.planning.flips import table
    from hvdtrain.reporting import plot_style, plots, write_files, write_report
    from hvdtrain.reporting.explaining.pictures import pictures

    # Plots are many small objects that live to the end, so that collections find nothing.
    with without_collecting():
        drawn, notes = plots.draw(content.comparisons)
        drawn += pictures([run for _, run in content.runs])
        if out:
            tables_of_flips = [table(answer.data["flips"]) for _, answer in content.answered]
            more_tables = [*filter(None, tables_of_flips), *tables]
            write_report(content, drawn, notes, out, more_tables, folded)
            click.echo(f"report: {out / 'report.html'}")
        if png:
            files: dict[str, str | bytes] = {}
            for plot in drawn:
                files[f"{plot.name}.png"] = plot_style.png(plot.figure)
            write_files(files, png, f"pictures to --png {png}")
    for note in notes:
        click.echo(f"not in the plots: {note}")
