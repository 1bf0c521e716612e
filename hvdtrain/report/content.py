"""All that the report of a comparison says, collected from its runs; `pages.py` writes it."""

from collections.abc import Sequence
from dataclasses import dataclass

from hvdtrain.errors import UsageError
from hvdtrain.report.fairness import EqualField, check, field_value, format_value
from hvdtrain.report.headline import Verdict, reach_verdict
from hvdtrain.report.results import Group, Row, result_rows, summarise
from hvdtrain.report.runs import Run, display_names, finished_by_kind
from hvdtrain.report.verdict import DEFAULT, Margins


@dataclass(frozen=True)
class Content:
    """What a report says, without its plots.

    Attributes:
        subject: what was trained, in a sentence.
        verdict: the headline, its sentences and its caveats.
        rows, groups: each run's figures, and their summary by kind.
        equal: what was found equal.
        differences: the settings in which kinds of runs differ, each with a value for each group.
        omitted: runs that are not in the tables, and why, a line each.
        runs: the finished runs with their display names, in the order of rows.
        machine: hardware and versions by name.
    """

    subject: str
    verdict: Verdict
    rows: list[Row]
    groups: list[Group]
    equal: list[EqualField]
    differences: dict[str, list[str]]
    omitted: list[str]
    runs: list[tuple[str, Run]]
    machine: dict[str, str]


def collect(runs: Sequence[Run], others: Sequence[Run] = (), margins: Margins = DEFAULT) -> Content:
    """Collect what there is to say about the runs of a comparison.

    Args:
        others: further runs that may hold the baseline of scaling efficiency.
        margins: what the verdict counts as a difference.

    Raises:
        UsageError: none of them finished, or they differ in what should be equal.
    """
    names = display_names(runs)
    omitted = omitted_runs(runs)
    by_kind = finished_by_kind(runs)
    finished = [run for members in by_kind.values() for run in members]
    if not finished:
        raise UsageError(f"no finished run to report: {'; '.join(omitted) or 'no runs were given'}")
    equal = check(finished)
    rows = result_rows(finished, others)
    groups = summarise(rows)
    first = finished[0]
    return Content(
        subject=_subject(first),
        verdict=reach_verdict(finished, margins),
        rows=rows,
        groups=groups,
        equal=equal,
        differences=_differences([members[0] for members in by_kind.values()]),
        omitted=omitted,
        runs=[(names[run.folder], run) for run in finished],
        machine=machine(finished),
    )


def omitted_runs(runs: Sequence[Run]) -> list[str]:
    """The runs that are left out of the tables, and why, a line each."""
    names = display_names(runs)
    return [f"{names[run.folder]}: left out, {run.problem}{_see_logs(run)}" for run in runs if not run.is_finished]


def _see_logs(run: Run) -> str:
    return f"; see {run.folder / 'logs'}" if (run.folder / "logs").is_dir() else ""


def _subject(run: Run) -> str:
    def of(field: str) -> str:
        return format_value(field_value(run, field))

    side = of("image_size")
    return (
        f"{of('model')} (width {of('width')}, {of('parameters')} weights) on {of('dataset')}: "
        f"{of('train_samples')} training and {of('validation_samples')} validation images of {side}×{side} "
        f"pixels in {of('classes')} classes; global batch {of('global_batch')}, {of('optimizer')}, learning "
        f"rate {of('lr')}, threads of a worker: {of('threads_per_worker')}, device: {of('device')}."
    )


def _differences(first_of_kinds: Sequence[Run]) -> dict[str, list[str]]:
    titles = {
        "processes": "processes, servers included", "hardware.hosts": "hosts",
        "backend": "messages carried by", "starter": "started by",
        "push_scale": "push scale", "effective_lr": "learning rate of one gradient",
        "compression": "gradients sent as", "staleness_bound": "steps ahead at most",
        "backup": "backup workers",
        "delay_compensation": "delay compensation", "staleness_lr": "learning rate divided by staleness",
        "server_bytes": "bytes of weights on each server",
    }  # fmt: skip
    rows = {title: [format_value(field_value(run, field)) for run in first_of_kinds] for field, title in titles.items()}
    return {title: values for title, values in rows.items() if len(set(values)) > 1}


def machine(runs: Sequence[Run]) -> dict[str, str]:
    """Hardware and versions of the finished runs by name."""
    hardware, versions = runs[0].manifest.get("hardware", {}), runs[0].manifest.get("versions", {})
    hosts: dict[str, None] = {}
    for run in runs:
        listed = run.manifest.get("hardware", {}).get("hosts")
        hosts |= dict.fromkeys(map(str, listed if isinstance(listed, list) else []))
    started = sorted(str(run.manifest["started"]) for run in runs if run.manifest.get("started"))
    return {
        "processor": format_value(hardware.get("cpu")),
        "cores": format_value(hardware.get("cores")),
        "memory": f"{format_value(hardware.get('memory_gb'))} GB",
        "GPUs": format_value(hardware.get("gpus")),
        "hosts": ", ".join(hosts) or "not recorded",
        "hvdtrain": format_value(runs[0].manifest.get("hvdtrain")),
        **{str(name): format_value(version) for name, version in versions.items()},
        "first run started": started[0] if started else "not recorded",
    }
