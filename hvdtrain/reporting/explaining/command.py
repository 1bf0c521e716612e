"""`hvdtrain explain`: from the run folder alone."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hvdtrain.base.config.option_types import FileToWrite
from hvdtrain.base.config.writing import write_whole
from hvdtrain.base.errors import UsageError

if TYPE_CHECKING:
    from hvdtrain.reporting.explaining.brief import Brief
    from hvdtrain.reporting.explaining.explained import Explained


@click.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN…", type=click.Path(path_type=Path))
@click.option("--json", "json_file", type=FileToWrite(), help="Write the figures to this file.")
@click.option("--plot", type=FileToWrite(), help="Draw every rank's steps: a .png, .svg or .pdf.")
@click.option(
    "--timeline",
    type=FileToWrite(),
    help="Draw a typical step of runs with --trace, across all ranks.",
)
def explain(
    runs: tuple[Path, ...], json_file: Path | None, plot: Path | None, timeline: Path | None
) -> None:
    """Say who was waited for in a run, where its steps' time went, and what would have made it
    faster.

    \b
    hvdtrain explain runs/ring
    hvdtrain explain runs/ring --plot steps.png
    hvdtrain explain runs/ring runs/ps-async --json explained.json
    hvdtrain explain runs/comparison

    Everything comes from the recorded steps in the run folder. A worker is a straggler if for a
    fifth of the run or more

    \b
    - even its quicker steps (the lower quartile) take at least 1.5 times as long as the quicker
      steps of the others,
    - the others wait for it three times as long as for any other worker,
    - the time that the others wait for it is at least a tenth of the time of its steps,
    - chance is an unlikely cause (a t-test over blocks of the run has p of at most 0.01).

    In asynchronous modes no worker waits for another. There explain takes the time that the others
    would wait if all workers took each step together. The line `without straggler` predicts the
    samples/s if the straggler were as fast as the others. In asynchronous modes this prediction
    takes the hosts' cores into account. In other modes it is too high if the workers share cores.

    The file of --json has an object, or a list for several runs: `straggler` (a rank, or null);
    `waited_s`: how long the others waited for each rank (null in asynchronous modes without a
    straggler); `absent_s` by rank: from which second to which second it was away, because it was
    lost or had left; `left_out`: lost ranks with too few steps to explain; `parts` of a step in
    seconds; and `what_if`: samples/s of all workers.

    If a run has fewer than 45 steps, explain prints how long they took, with an interval, and the
    command of a longer run.

    Of a comparison's folder it explains one run of the fastest ring and one of the fastest servers.
    If trainings of at least two contenders reached the target accuracy, it also says why one took
    longer: more seconds for a sample, or more samples.
    """
    from hvdtrain.base.console import Console
    from hvdtrain.reporting.explaining.explained import Explained
    from hvdtrain.reporting.explaining.heatmap import heatmap
    from hvdtrain.reporting.explaining.step_picture import one_step
    from hvdtrain.reporting.explaining.to_target import (
        fastest_of_sides,
        is_comparison,
        parts_of_differences,
    )
    from hvdtrain.reporting.plot_style import save

    comparisons = [folder for folder in runs if is_comparison(folder)]
    for option, file in (("--plot", plot), ("--timeline", timeline)):
        _check_picture(option, file)
    differences: list[dict[str, Any]] = []
    for folder in comparisons:
        differences += parts_of_differences(folder)
    folders = [folder for folder in runs if folder not in comparisons]
    for folder in comparisons:
        folders += fastest_of_sides(folder)
    explanations = [_explain(folder) for folder in folders]
    if timeline:
        save(one_step({found.title: found.run.folder for found in explanations}), timeline)
    console = Console(stderr=str(json_file) == "-")
    for difference in differences:
        console.print(difference["says"], soft_wrap=True)
    for explained in explanations:
        explained.show(console)
    if plot:
        timelines = {
            explained.title: explained.timeline
            for explained in explanations
            if isinstance(explained, Explained)
        }
        if not timelines:
            raise UsageError(f"--plot: no run has the steps for it: {explanations[0].run.folder}")
        save(heatmap(timelines), plot)
    if json_file:
        _write([*differences, *(explained.data for explained in explanations)], json_file)


def _explain(folder: Path) -> "Explained | Brief":
    """Returns what a run says, or what little if it has too few steps."""
    from hvdtrain.reporting.explaining.brief import brief
    from hvdtrain.reporting.explaining.explained import explain_run
    from hvdtrain.reporting.explaining.timeline import TooFewSteps

    try:
        return explain_run(folder)
    except TooFewSteps as too_few:
        return brief(folder, too_few)


def _check_picture(option: str, file: Path | None) -> None:
    """Refuses a picture that cannot be drawn.

    Args:
        option: names the picture.
        file: where it goes; None if it was not asked for.

    Raises:
        UsageError: the file has another ending.
    """
    if file and file.suffix not in (".png", ".svg", ".pdf"):
        raise UsageError(f"{option} {file}: end its name in .png, .svg or .pdf")


def _write(data: Sequence[dict[str, Any]], file: Path) -> None:
    """Writes the figures, or prints them if the file is `-`."""
    text = json.dumps(data[0] if len(data) == 1 else data, indent=2) + "\n"
    if str(file) == "-":
        click.echo(text, nl=False)
    else:
        write_whole(file, text)
