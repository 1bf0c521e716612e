"""`hvdtrain explain`: from the run folder alone."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hvdtrain.config.option_types import FileToWrite
from hvdtrain.errors import UsageError

if TYPE_CHECKING:
    from hvdtrain.explain.account import Account
    from hvdtrain.explain.straggler import Straggler
    from hvdtrain.explain.timeline import Timeline
    from hvdtrain.runs.read import Run

WHAT_IF = {
    "without_straggler": "without the straggler", "double_bandwidth": "with twice the bandwidth",
    "one_more_server": "with one more server",
}  # fmt: skip


@click.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN…", type=click.Path(path_type=Path))
@click.option("--json", "json_file", type=FileToWrite(), help="Write the figures there.")
@click.option(
    "--plot", type=FileToWrite(),
    help="Draw every rank's steps there: .png, .svg or .pdf. For one run.",
)  # fmt: skip
@click.option(
    "--timeline", type=FileToWrite(),
    help="Draw one step across all ranks there, from the trace of a run with --trace. For one run.",
)  # fmt: skip
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
    list where there are several runs: `straggler` (a rank, or null), `slow_link` (the rank that waited for it, or
    null), `waited_s` by rank (null where workers are not in step and none is a straggler), `absent_s`, from when to
    when a rank that was lost was not there, `parts` of a step in seconds, and `what_if`: samples/s of all workers.
    """
    from hvdtrain.explain.account import account, waits_for_others
    from hvdtrain.explain.heatmap import heatmap
    from hvdtrain.explain.step_picture import one_step
    from hvdtrain.explain.straggler import find_slow_link, find_straggler, waited_for
    from hvdtrain.explain.timeline import read_timeline
    from hvdtrain.explain.what_if import what_if
    from hvdtrain.plot_style import save
    from hvdtrain.runs.read import load_run, resumed_otherwise

    for option, file in (("--plot", plot), ("--timeline", timeline)):
        if file and len(runs) > 1:
            raise UsageError(f"{option} draws one run: name one")
        if file and file.suffix not in (".png", ".svg", ".pdf"):
            raise UsageError(f"{option} {file}: end its name in .png, .svg or .pdf")
    if timeline:
        save(one_step({load_run(runs[0]).kind.label: runs[0]}), timeline)
    recorded = []
    for folder in runs:
        run = load_run(folder)
        if not run.summary.steps:
            raise UsageError(f"{folder} cannot be explained: {run.problem}; --resume goes on with a run")
        if why := resumed_otherwise(run.manifest):
            raise UsageError(f"{folder} cannot be explained: {why}")
        recorded.append((run, read_timeline(run)))
    explained = []
    for run, steps in recorded:
        straggler, link, found = find_straggler(steps), find_slow_link(run, steps), account(run, steps)
        waited: dict[int, float | None] = dict(zip(steps.ranks, waited_for(steps).sum(1).tolist(), strict=True))
        if not steps.in_step:
            waited = dict.fromkeys(waited, 0.0 if straggler else None)
            if straggler:  # by each of the others, on average
                beyond = waits_for_others(steps) * [len(own) for own in steps.each_step]
                own = beyond[steps.ranks.index(straggler.rank)]
                waited[straggler.rank] = float((beyond.sum() - own) / (len(beyond) - 1))
        rates = what_if(run, steps, straggler, found)
        _show(run, steps, straggler, link, waited, found, rates, to_stderr=str(json_file) == "-")
        explained.append({
            "run": str(run.folder), "mode": run.kind.mode, "workers": run.kind.workers, "servers": run.kind.servers,
            "straggler": straggler.rank if straggler else None,
            "factor": straggler.factor if straggler else None,
            "slow_from_s": straggler.since_s if straggler else None,
            "slow_until_s": straggler.until_s if straggler else None,
            "slow_link": link[0] if link else None,
            "absent_s": {str(rank): stretches for rank, stretches in steps.absent.items()},
            "waited_s": {str(rank): seconds for rank, seconds in waited.items()},
            "step_s": found.step_s, "parts": found.parts, "unknown": found.unknown,
            "samples_per_s": run.summary.samples_per_s,
            "what_if": {name: {"samples_per_s": rate} for name, rate in rates.items()},
        })  # fmt: skip
        if plot:
            save(heatmap({f"{run.kind.label}: what each step took a worker on its own": steps}), plot)
    if json_file:
        text = json.dumps(explained[0] if len(explained) == 1 else explained, indent=2)
        if str(json_file) == "-":
            sys.stdout.write(text + "\n")
        else:
            json_file.write_text(text + "\n")


def _show(
    run: "Run", timeline: "Timeline", straggler: "Straggler | None", link: tuple[int, float, float] | None,
    waited: Mapping[int, float | None], found: "Account", rates: Mapping[str, float | None], to_stderr: bool,
) -> None:  # fmt: skip
    from rich.table import Table

    from hvdtrain.console import Console
    from hvdtrain.explain.account import PARTS, made_slow
    from hvdtrain.explain.heatmap import shade

    console = Console(stderr=to_stderr)
    console.print(f"{run.name}: {run.kind.label}, {run.summary.samples_per_s:,.0f} samples/s", style="bold")
    if run.manifest.slow.asked not in ("", "none"):
        console.print(f"--slow {run.manifest.slow.asked} made workers slow: what they slept counts as computing.")
        for rank, times in made_slow(run).items():
            if times > 1:
                console.print(f"Rank {rank} computed {times:.1f} times as long as it can.")
    if lost := run.summary.lost_workers:
        who = ", ".join(map(str, lost))
        console.print(f"Workers were lost (rank {who}): while one was not there, a step before or after stands for it.")
        for rank, stretches in timeline.absent.items():
            end = max(timeline.ends_s)
            when = [f"{a:.1f} s to {'the end' if b >= end else f'{b:.1f} s'}" for a, b in stretches]
            console.print(f"Rank {rank} was not there from {', '.join(when)}.")
    if straggler:
        waits = waited[straggler.rank] or 0.0
        console.print(
            f"Rank {straggler.rank} was slow, from {straggler.since_s:.1f} to {straggler.until_s:.1f} s of training: "
            f"its steps took it {straggler.factor:.1f} times as long as the others theirs, and "
            + (f"the others waited for it for {waits:.1f} s." if waits >= 0.05 else "nobody waited for it.")
        )
    elif len(timeline.ranks) > 1:
        console.print("No worker was slower than the others by a tenth of a step, all the time or for a fifth of it.")
    if link:
        console.print(
            f"Rank {link[0]} waited for its link: in a step {1000 * link[1]:,.1f} ms for messages, and the others "
            f"{1000 * link[2]:,.1f} ms."
        )
    ranks = Table()
    for heading in ("rank", "worker", "its own time of a step", "waited for it", "darker: longer steps; ×: gone"):
        ranks.add_column(heading, justify="left" if "darker" in heading else "right")
    for row, (rank, line) in enumerate(zip(timeline.ranks, shade(timeline), strict=True)):
        own = f"{1000 * timeline.each_step[row][:, 1].mean():,.1f} ms"
        others = "" if (seconds := waited[rank]) is None else f"{seconds:,.1f} s"
        ranks.add_row(str(rank), str(rank - run.kind.servers), own, others, line)
    console.print(ranks)
    parts = Table()
    for heading in ("part of a step", "ms", "share", "what it is"):
        parts.add_column(heading, justify="right" if heading in ("ms", "share") else "left")
    for name, seconds in found.parts.items():
        figures = (f"{1000 * seconds:,.1f}", f"{seconds / found.step_s:.1%}")
        what = found.unknown.get(name, PARTS[name])
        if name == "lost_overlap" and seconds:
            of_each = {of: found.exposed_s[of] - found.parts[of] for of in found.exposed_s}
            what += f" ({', '.join(f'{of} {1000 * spent:,.1f} ms' for of, spent in of_each.items() if spent)})"
        parts.add_row(name.replace("_", " "), *(("", "") if name in found.unknown else figures), what)
    parts.add_section()
    parts.add_row("together", f"{1000 * found.step_s:,.1f}", "100%", "the mean of all steps that workers took")
    console.print(parts)
    for name, rate in rates.items():
        if rate and (name != "without_straggler" or straggler):
            gain = rate / (run.summary.samples_per_s or rate)
            console.print(f"{WHAT_IF[name]}: {rate:,.0f} samples/s, {gain:.2f} times as many")
