"""`hvdtrain explain`: from the run folder alone."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from hvdtrain.base.config.option_types import FileToWrite
from hvdtrain.base.config.writing import write_whole
from hvdtrain.base.errors import UsageError


@click.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN…", type=click.Path(path_type=Path))
@click.option("--json", "json_file", type=FileToWrite(), help="Write the figures to this file.")
@click.option("--plot", type=FileToWrite(), help="Draw every rank's steps: a .png, .svg or .pdf.")
@click.option(
    "--timeline", type=FileToWrite(), help="Draw one step of runs with --trace, across all ranks."
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

    Everything comes from the recorded steps in the run folder. A straggler is slow for a fifth of
    the run or more: even its quicker steps take 1.5 times as long as the others' or longer, and the
    others wait for it (or would, if they were in step) three times as long as for any other worker,
    and for a tenth of its steps. What a run without the straggler would have done is limited by the
    hosts' cores in ps-async and ps-ssp. In other modes it is too much where a straggler that sleeps
    leaves the others cores that they share. The file of --json has an object, or a list for several
    runs: `straggler` (a rank, or null), `waited_s` by rank (null where workers are not in step and
    none is a straggler), `absent_s`, from when to when a rank that was lost or left was away,
    `left_out`, such ranks that took too few steps to be explained, `parts` of a step in seconds,
    and `what_if`: samples/s of all workers.

    Of a comparison's folder it says whether steps or samples made the difference: of the time to
    the target, how much was due to seconds a sample, and how much to the samples that it took.
    """
    from hvdtrain.base.console import Console
    from hvdtrain.reporting.explaining.explained import explain_run
    from hvdtrain.reporting.explaining.heatmap import heatmap
    from hvdtrain.reporting.explaining.step_picture import one_step
    from hvdtrain.reporting.explaining.to_target import is_comparison, parts_of_differences
    from hvdtrain.reporting.plot_style import save

    comparisons = [folder for folder in runs if is_comparison(folder)]
    for option, file in (("--plot", plot), ("--timeline", timeline)):
        _check_picture(option, file, comparisons)
    differences: list[dict[str, Any]] = []
    for folder in comparisons:
        differences += parts_of_differences(folder)
    explanations = [explain_run(folder) for folder in runs if folder not in comparisons]
    if timeline:
        folders = {explained.title: explained.run.folder for explained in explanations}
        save(one_step(folders), timeline)
    console = Console(stderr=str(json_file) == "-")
    for difference in differences:
        console.print(difference["says"], soft_wrap=True)
    for explained in explanations:
        explained.show(console)
    if plot:
        timelines = {explained.title: explained.timeline for explained in explanations}
        save(heatmap(timelines), plot)
    if json_file:
        _write([*differences, *(explained.data for explained in explanations)], json_file)


def _check_picture(option: str, file: Path | None, comparisons: Sequence[Path]) -> None:
    """Refuses a picture that cannot be drawn.

    Args:
        option: names the picture.
        file: where it goes; None if it was not asked for.
        comparisons: the folders that are no runs.

    Raises:
        UsageError: the file has another ending, or there are comparisons.
    """
    if file and file.suffix not in (".png", ".svg", ".pdf"):
        raise UsageError(f"{option} {file}: end its name in .png, .svg or .pdf")
    if file and comparisons:
        raise UsageError(f"{option} is of runs: {comparisons[0]} is a comparison")


def _write(data: Sequence[dict[str, Any]], file: Path) -> None:
    """Writes the figures, or prints them if the file is `-`."""
    text = json.dumps(data[0] if len(data) == 1 else data, indent=2) + "\n"
    if str(file) == "-":
        click.echo(text, nl=False)
    else:
        write_whole(file, text)
