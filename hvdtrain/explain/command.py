"""`hvdtrain explain`: from the run folder alone."""

import json
from pathlib import Path

import click

from hvdtrain.config.option_types import FileToWrite
from hvdtrain.errors import UsageError


@click.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN…", type=click.Path(path_type=Path))
@click.option("--json", "json_file", type=FileToWrite(), help="Write the figures there.")
@click.option("--plot", type=FileToWrite(), help="Draw every rank's steps there: .png, .svg or .pdf.")
@click.option("--timeline", type=FileToWrite(), help="Draw one step of runs with --trace there, across all ranks.")
def explain(runs: tuple[Path, ...], json_file: Path | None, plot: Path | None, timeline: Path | None) -> None:
    """Say who was waited for in a run, where its steps' time went, and what would have made it faster.

    \b
    hvdtrain explain runs/ring
    hvdtrain explain runs/ring --plot steps.png
    hvdtrain explain runs/ring runs/ps-async --json explained.json

    Everything comes from the recorded steps in the run folder. A straggler is a worker whose quicker steps, too, took
    it half as long again as the others theirs, or more, for a fifth of the run, and that the others waited for, or
    would have if they had been in step, three times as long as for any other, and for a tenth of its steps. What a run
    without it would have done is as much as the hosts' cores allow in ps-async and ps-ssp; in other modes it is too
    much where a straggler that sleeps leaves the others cores that they share. The file of --json has an object, or a
    list where there are several runs: `straggler` (a rank, or null), `waited_s` by rank (null where workers are not in
    step and none is a straggler), `absent_s`, from when to when a rank that was lost was not there, `parts` of a step
    in seconds, and `what_if`: samples/s of all workers.
    """
    from hvdtrain.console import Console
    from hvdtrain.explain.explained import explain_run
    from hvdtrain.explain.heatmap import heatmap
    from hvdtrain.explain.step_picture import one_step
    from hvdtrain.plot_style import save

    for option, file in (("--plot", plot), ("--timeline", timeline)):
        if file and file.suffix not in (".png", ".svg", ".pdf"):
            raise UsageError(f"{option} {file}: end its name in .png, .svg or .pdf")
    explanations = [explain_run(folder) for folder in runs]
    if timeline:
        save(one_step({explained.title: explained.run.folder for explained in explanations}), timeline)
    for explained in explanations:
        explained.show(Console(stderr=str(json_file) == "-"))
    if plot:
        save(heatmap({explained.title: explained.timeline for explained in explanations}), plot)
    if json_file:
        data = [explained.data for explained in explanations]
        text = json.dumps(data[0] if len(data) == 1 else data, indent=2) + "\n"
        with click.open_file(str(json_file), "w") as opened:
            opened.write(text)
