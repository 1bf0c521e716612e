"""What a report says: of one comparison, and across those of a grid. `page.py` writes it, a terminal prints it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from hvdtrain import plot_style
from hvdtrain.errors import UsageError
from hvdtrain.report import fairness, page
from hvdtrain.report.comparisons import Comparison, one_worker, split_into_comparisons
from hvdtrain.report.fairness import EqualField, format_value
from hvdtrain.report.headline import Verdict, reach_verdict
from hvdtrain.report.membership import membership_table
from hvdtrain.report.page import Plot
from hvdtrain.report.reference_tables import OVERVIEW, build_table
from hvdtrain.report.results import Group, Row, result_rows, scales_weakly, summarise, summary_table
from hvdtrain.report.table import Table, markdown, words_table
from hvdtrain.report.verdict import DEFAULT, Margins, same_network
from hvdtrain.runs.fields import field_value
from hvdtrain.runs.read import Run, display_names, finished_by_kind

_CHECKED = "Checked before anything was compared; runs that differ in one of these are refused."
_CHECKED_GRID = "Checked among all runs before anything was compared, beside what each comparison has in common."


@dataclass(frozen=True)
class Content:
    """What a report of one comparison says, without its plots.

    Attributes:
        subject: what was trained, in a sentence.
        verdict: the headline, its sentences and its caveats.
        rows, groups: each run's figures, and their summary by kind.
        equal: what was found equal.
        omitted: runs that are not in the tables, and why, a line each.
        runs: the finished runs with their display names, in the order of rows.
    """

    subject: str
    verdict: Verdict
    rows: list[Row]
    groups: list[Group]
    equal: list[EqualField]
    omitted: list[str]
    runs: list[tuple[str, Run]]

    @property
    def data(self) -> dict[str, Any]:
        """The content of verdict.json."""
        return self.verdict.data

    @property
    def title(self) -> str:
        return self.verdict.headline

    @property
    def summary(self) -> Table:
        """A row for each kind of runs."""
        return summary_table(self.groups)

    def terminal(self) -> tuple[Table, list[str]]:
        """The table that is printed, and the lines below it."""
        caveats = [f"- {line}" for line in self.verdict.caveats]
        lines = [self.verdict.headline, *caveats, "", *self.verdict.sentences, *self.omitted]
        return summary_table(self.groups, on_terminal=True), lines

    @property
    def colours(self) -> dict[str, str]:
        """Of the rows of tables, by their label."""
        return {group.kind.label: plot_style.colour(group.kind) for group in self.groups}

    def parts(self, plots: Sequence[Plot], tables: Sequence[Table] = (), notes: Sequence[str] = ()) -> list[str]:
        """The page as Markdown: what was found, then what it was found in, then what it rests on."""
        finished = [run for _, run in self.runs]
        effect = [page.plot(plot) for plot in plots if plot.name == "effect"]
        return [
            f"**{page.plain(self.verdict.headline)}**",
            page.notice(self.verdict.caveats),
            _left_out([*self.omitted, *notes]),
            *effect,
            page.listed(self.verdict.sentences),
            f"Trained: {page.plain(self.subject)}",
            "## Summary",
            markdown(replace(self.summary, title="")),
            *map(markdown, tables),
            *(["## Plots"] if len(plots) > len(effect) else []),
            *(page.plot(plot) for plot in plots if plot.name != "effect"),
            "## What it rests on",
            _differences(finished),
            *([markdown(there)] if (there := membership_table(self.runs)) else []),
            page.details("What was equal", _CHECKED, *_equal_tables(self.equal)),
            page.details("Machine and versions", _machine(finished)),
        ]


@dataclass(frozen=True)
class Grid:
    """What a report of several comparisons says, without its plots.

    Attributes:
        varied: what the comparisons differ in, in words.
        sections: each comparison, and what it says.
        summary: all runs in one table.
        equal: what was found equal in all runs.
        omitted: runs that are not in the tables, and why, a line each.
        alone: where one worker is faster than several; see comparisons.one_worker.
    """

    varied: str
    sections: list[tuple[Comparison, Content]]
    summary: Table
    equal: list[EqualField]
    omitted: list[str]
    alone: list[dict[str, Any]]

    @property
    def data(self) -> dict[str, Any]:
        """The content of verdict.json."""
        listed = [{"comparison": comparison.title, **content.data} for comparison, content in self.sections]
        return {"comparisons": listed, "one_worker": self.alone}

    @property
    def title(self) -> str:
        return "A grid of runs"

    @property
    def rows(self) -> list[Row]:
        """The figures of all runs."""
        return result_rows(self._finished)

    @property
    def _finished(self) -> list[Run]:
        return [run for _, content in self.sections for _, run in content.runs]

    @property
    def _headlines(self) -> list[str]:
        compared = [(c.title, content.verdict.headline) for c, content in self.sections if len(content.groups) > 1]
        return [line["words"] for line in self.alone] + [f"{title}: {headline}" for title, headline in compared]

    @property
    def _caveats(self) -> list[str]:
        return list(dict.fromkeys(line for _, content in self.sections for line in content.verdict.caveats))

    def terminal(self) -> tuple[Table, list[str]]:
        """The table that is printed, and the lines below it."""
        return self.summary, [*self._headlines, *(f"- {line}" for line in self._caveats), *self.omitted]

    @property
    def colours(self) -> dict[str, str]:
        """Of the rows of tables, by their label."""
        return {label: colour for _, content in self.sections for label, colour in content.colours.items()}

    def parts(self, plots: Sequence[Plot], tables: Sequence[Table] = (), notes: Sequence[str] = ()) -> list[str]:
        """The page as Markdown, with links to the reports of the comparisons."""
        number = f"{len(self.sections)} comparisons; what differs between them is {self.varied}."
        sections = []
        for comparison, content in self.sections:
            sections += [
                f"## {page.plain(comparison.title)}",
                page.plain(content.verdict.headline) if len(content.groups) > 1 else "",
                markdown(replace(content.summary, title="")),
                f"Trained: {page.plain(content.subject)}",
                f"[Its report](groups/{comparison.name}/report.md) has plots.",
            ]
        return [
            f"**{page.plain(number)}**",
            page.listed(self._headlines),
            page.notice(self._caveats),
            _left_out([*self.omitted, *notes]),
            *map(page.plot, plots),
            *map(markdown, [*tables, self.summary]),
            *sections,
            "## What it rests on",
            page.details("What was equal", _CHECKED_GRID, *_equal_tables(self.equal)),
            page.details("Machine and versions", _machine(self._finished)),
        ]


def collect(runs: Sequence[Run], others: Sequence[Run] = (), margins: Margins = DEFAULT) -> Content:
    """Collect what there is to say about the runs of a comparison.

    Args:
        others: further runs that may hold the baseline of scaling efficiency.
        margins: what the verdict counts as a difference.

    Raises:
        UsageError: none of them finished, or they differ in what should be equal.
    """
    names, omitted = display_names(runs), _omitted(runs)
    finished = [run for members in finished_by_kind(runs).values() for run in members]
    if not finished:
        raise UsageError(f"no finished run to report: {'; '.join(omitted) or 'no runs were given'}")
    equal = fairness.check(finished)
    rows = result_rows(finished, others)
    return Content(
        subject=_subject(finished[0]),
        verdict=reach_verdict(finished, margins),
        rows=rows,
        groups=summarise(rows),
        equal=equal,
        omitted=omitted,
        runs=[(names[run.folder], run) for run in finished],
    )


def collect_any(runs: Sequence[Run], margins: Margins = DEFAULT) -> Content | Grid:
    """Collect what there is to say: of one comparison, or of a grid of several.

    Raises:
        UsageError: runs differ in what should be equal, or none finished.
    """
    comparisons = split_into_comparisons(runs)
    if len(comparisons) < 2:
        return collect(runs, margins=margins)
    finished = [run for comparison in comparisons for run in comparison.runs]
    sections = [(comparison, collect(comparison.runs, finished, margins)) for comparison in comparisons]
    equal = fairness.check_grid(finished)
    rule = next(item.value for item in equal if item.field == "lr")
    words = {
        "model": "model", "global_batch": "global batch", "lr": f"learning rate ({rule})",
        "slow.asked": "who was made slow",
    }  # fmt: skip
    if is_weak := scales_weakly(result_rows(finished)):
        words["global_batch"] += " (grows with the workers)"
    fields = [f for f in fairness.GRID_FIELDS if len({field_value(run, f) for run in finished}) > 1]
    also = ", ".join(_also_varied(comparisons, is_weak))
    varied = " and ".join(words[field] for field in fields) + (f", but also {also}" if also else ", and nothing else")
    return Grid(varied, sections, build_table(OVERVIEW, finished), equal, _omitted(runs), one_worker(finished))


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


def _left_out(lines: Sequence[str]) -> str:
    return page.notice(["Not in the tables and plots:", *lines]) if lines else ""


def _omitted(runs: Sequence[Run]) -> list[str]:
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


_TITLES = {
    "processes": "processes, servers included", "hardware.hosts": "hosts", "backend": "messages carried by",
    "starter": "started by", "push_scale": "push scale", "effective_lr": "learning rate of one gradient",
    "compression": "gradients sent as", "staleness_bound": "steps ahead at most", "backup": "backup workers",
    "delay_compensation": "delay compensation", "staleness_lr": "learning rate divided by staleness",
    "server_bytes": "bytes of weights on each server",
}  # fmt: skip


def _differences(runs: Sequence[Run]) -> str:
    kinds = finished_by_kind(runs)
    rows = [[title, *(format_value(field_value(run, f)) for run, *_ in kinds.values())] for f, title in _TITLES.items()]
    rows = [row for row in rows if len(set(row[1:])) > 1]
    return markdown(words_table("What differs", ["", *(kind.label for kind in kinds)], rows)) if rows else ""


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
