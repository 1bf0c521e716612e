"""What a report says: of one comparison, or of several. `page.py` writes it, a terminal prints it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from hvdtrain import plot_style
from hvdtrain.errors import UsageError
from hvdtrain.report import fairness, page
from hvdtrain.report.columns import COLUMNS, Setting
from hvdtrain.report.comparisons import Comparison, split_into_comparisons
from hvdtrain.report.fairness import EqualField, format_value
from hvdtrain.report.headline import Verdict, reach_verdict
from hvdtrain.report.membership import membership_table
from hvdtrain.report.page import Plot
from hvdtrain.report.results import Group, Row, result_rows, scales_weakly, summarise, summary_table
from hvdtrain.report.table import Table, markdown, words_table
from hvdtrain.report.verdict import DEFAULT, Margins, same_network
from hvdtrain.runs.fields import field_value
from hvdtrain.runs.read import Run, display_names, finished_by_kind

_CHECKED = "Checked before anything was compared; runs that differ in one of these are refused."


@dataclass(frozen=True)
class Content:
    """What a report says, without its plots.

    Attributes:
        comparisons: each with its verdict.
        title: the headline, or of several comparisons what they differ in.
        rows, groups: each run's figures, and their summary by setting and kind.
        equal: what was found equal in all runs.
        omitted: runs that are not in the tables, and why, a line each.
        runs: the finished runs with their names, in the order of rows.
    """

    comparisons: list[tuple[Comparison, Verdict]]
    title: str
    rows: list[Row]
    groups: list[Group]
    equal: list[EqualField]
    omitted: list[str]
    runs: list[tuple[str, Run]]

    @property
    def data(self) -> dict[str, Any]:
        """The content of verdict.json."""
        listed = [{"comparison": of.title, **verdict.data} for of, verdict in self.comparisons]
        return {"comparisons": listed} if len(listed) > 1 else self.comparisons[0][1].data

    @property
    def varied(self) -> list[str]:
        """The columns that tell the comparisons apart."""
        return Setting.varied(group.setting for group in self.groups)

    @property
    def headlines(self) -> list[str]:
        """The title, and of several comparisons the headline of each in which something is compared."""
        several = [(of, verdict) for of, verdict in self.comparisons if of.title and len(of.by_kind) > 1]
        return [self.title, *(f"{of.title}: {verdict.headline}" for of, verdict in several)]

    @property
    def caveats(self) -> list[str]:
        return list(dict.fromkeys(line for _, verdict in self.comparisons for line in verdict.caveats))

    def terminal(self) -> tuple[Table, list[str]]:
        """The table that is printed, and the lines below it."""
        sentences = self.comparisons[0][1].sentences if len(self.comparisons) == 1 else []
        lines = [*self.headlines, *(f"- {line}" for line in self.caveats), "", *sentences, *self.omitted]
        return summary_table(self.groups, on_terminal=True), lines

    @property
    def colours(self) -> dict[str, str]:
        """Of the rows of tables, by their label."""
        return {group.kind.label: plot_style.colour(group.kind) for group in self.groups}

    def parts(self, plots: Sequence[Plot], tables: Sequence[Table] = (), notes: Sequence[str] = ()) -> list[str]:
        """The page as Markdown: what was found, then what it was found in, then what it rests on."""
        effect = [page.plot(plot) for plot in plots if plot.name == "effect"]
        left_out = [*self.omitted, *notes]
        about: list[str] = []
        for of, verdict in self.comparisons:
            own = page.listed(verdict.sentences), f"Trained: {page.plain(_subject(of.runs[0]))}"
            about += [page.details(of.title, *own)] if of.title else own
        return [
            f"**{page.plain(self.title)}**",
            page.listed(self.headlines[1:]),
            page.notice(self.caveats),
            page.notice(["Not in the tables and plots:", *left_out]) if left_out else "",
            *effect,
            *about,
            "## Summary",
            markdown(replace(summary_table(self.groups), title="")),
            *map(markdown, tables),
            *(["## Plots"] if len(plots) > len(effect) else []),
            *(page.plot(plot) for plot in plots if plot.name != "effect"),
            "## What it rests on",
            *(_differences(of) for of, _ in self.comparisons),
            *([markdown(there)] if (there := membership_table(self.runs)) else []),
            page.details("What was equal", _CHECKED, *_equal_tables(self.equal)),
            page.details("Machine and versions", _machine([run for _, run in self.runs])),
        ]


def collect(runs: Sequence[Run], margins: Margins = DEFAULT) -> Content:
    """Collect what there is to say.

    Args:
        margins: what the verdict counts as a difference.

    Raises:
        UsageError: none of the runs finished, or they differ in what should be equal.
    """
    names = display_names(runs)
    omitted = [f"{names[run.folder]}: left out, {run.problem}{_see_logs(run)}" for run in runs if not run.is_finished]
    comparisons = split_into_comparisons(runs)
    finished = [run for members in finished_by_kind(runs).values() for run in members]
    if not finished:
        raise UsageError(f"no finished run to report: {'; '.join(omitted) or 'no runs were given'}")
    equal = [field for of in comparisons for field in fairness.check(of.runs)]
    judged = [(of, reach_verdict(of.runs, margins)) for of in comparisons]
    title = judged[0][1].headline
    if len(comparisons) > 1:
        equal = fairness.check_grid(finished)
        title = f"{len(comparisons)} comparisons; what differs between them is {_differing(comparisons, equal)}."
    rows = result_rows(finished)
    return Content(judged, title, rows, summarise(rows), equal, omitted, [(names[run.folder], run) for run in finished])


def _differing(comparisons: Sequence[Comparison], equal: Sequence[EqualField]) -> str:
    """In what comparisons differ, in words.

    Args:
        equal: what was found equal in all of them, with how learning rates depend on the number of workers.
    """
    finished = [run for of in comparisons for run in of.runs]
    is_weak = scales_weakly(result_rows(finished))
    who = {"slow": "who was made slow"}
    words = {name: who.get(name, COLUMNS[name].heading) for name in Setting.varied(map(Setting.of, finished))}
    for name, detail in (
        ("global_batch", "grows with the workers" if is_weak else ""),
        ("lr", next(field.value for field in equal if field.field == "lr")),
    ):
        if name in words and detail:
            words[name] += f" ({detail})"
    also = ", ".join(_also_varied(comparisons, is_weak))
    return " and ".join(words.values()) + (f", but also {also}" if also else ", and nothing else")


def _also_varied(comparisons: Sequence[Comparison], is_weak: bool) -> list[str]:
    """In what comparisons differ, the baseline aside, that is checked among runs of one kind alone.

    Args:
        is_weak: they differ in the number of workers, and in what follows from it.
    """
    own = [runs for comparison in comparisons if (runs := [r for r in comparison.runs if r.kind.mode != "single"])]
    follow = {"processes", "effective_lr", "server_bytes", *(["workers", "servers"] if is_weak else [])}
    words = {"mode": "modes", "workers": "workers", "servers": "servers", "samples": "samples trained on"} | _TITLES
    words |= {"hosts.cores_usable": "cores of each host", "bucket_mb": "size of messages"}
    also = [
        title for field, title in words.items()
        if field not in follow and len({frozenset(str(field_value(run, field)) for run in runs) for runs in own}) > 1
    ]  # fmt: skip
    return also + ([] if same_network([run for runs in own for run in runs]) else ["the network's speed"])


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


_TITLES = {
    "processes": "processes, servers included", "hardware.hosts": "hosts", "backend": "messages carried by",
    "starter": "started by", "push_scale": "push scale", "effective_lr": "learning rate of one gradient",
    "compression": "gradients sent as", "staleness_bound": "steps ahead at most", "backup": "backup workers",
    "delay_compensation": "delay compensation", "staleness_lr": "learning rate divided by staleness",
    "server_bytes": "bytes of weights on each server",
}  # fmt: skip


def _differences(of: Comparison) -> str:
    kinds = of.by_kind
    rows = [[title, *(format_value(field_value(run, f)) for run, *_ in kinds.values())] for f, title in _TITLES.items()]
    rows = [row for row in rows if len(set(row[1:])) > 1]
    title = ": ".join(filter(None, ["What differs", of.title]))
    return markdown(words_table(title, ["", *(kind.label for kind in kinds)], rows)) if rows else ""


def _equal_tables(equal: Sequence[EqualField]) -> list[str]:
    headings = ["field", "value", "why it has to be equal"]
    return [
        markdown(words_table(f"Among {among}", headings, [(e.field, e.value, e.why) for e in members]))
        for among, members in groupby(equal, key=lambda item: item.among)
    ]


def _machine(runs: Sequence[Run]) -> str:
    """Hardware and versions of the finished runs."""
    first = runs[0].manifest
    hosts = dict.fromkeys(host for run in runs for host in run.manifest.hardware.hosts)
    started = sorted(run.manifest.started for run in runs if run.manifest.started)
    facts = {
        "processor": format_value(first.hardware.cpu),
        "cores": format_value(first.hardware.cores),
        "memory": f"{format_value(first.hardware.memory_gb)} GB",
        "GPUs": format_value(first.hardware.gpus),
        "hosts": ", ".join(hosts) or "not recorded",
        "hvdtrain": format_value(first.hvdtrain),
        **first.versions,
        "first run started": started[0] if started else "not recorded",
    }
    return markdown(words_table("", ["", "of the first run"], list(facts.items())))
