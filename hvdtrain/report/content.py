"""What a report says: of one comparison, or of several. `page.py` writes it, a terminal prints it."""

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

from hvdtrain import plot_style
from hvdtrain.errors import UsageError
from hvdtrain.formatting import three_digits, with_noun
from hvdtrain.report import fairness, figures, page
from hvdtrain.report.answer import Answer, reach_answer
from hvdtrain.report.caveats import caveats
from hvdtrain.report.columns import COLUMNS, Setting
from hvdtrain.report.comparisons import Comparison, split_into_comparisons
from hvdtrain.report.contenders import DEFAULT, Margins, same_network, timed
from hvdtrain.report.fairness import EqualField, format_value
from hvdtrain.report.membership import membership_table
from hvdtrain.report.page import Plot
from hvdtrain.report.results import Group, Row, cost_table, result_rows, scales_weakly, summarise
from hvdtrain.report.table import Table, markdown, rich_table, words_table
from hvdtrain.runs.fields import field_value
from hvdtrain.runs.network_bound import network_bound
from hvdtrain.runs.read import Run, display_names, finished_by_kind

if TYPE_CHECKING:
    from hvdtrain.console import Console

_CHECKED = "Checked before anything was compared; runs that differ in one of these are refused."
_READ = "×2+1 is 2 workers and 1 server; speeds and times are geometric means, with their range"
UNFOLDED = 5  # plots
_MARGIN = 10  # columns of a terminal, for what a line is


@dataclass(frozen=True)
class Content:
    """What a report says, without its plots.

    Attributes:
        comparisons: each with its answer.
        title: the word, or of several comparisons what they differ in.
        rows, groups: each run's figures, and their summary by setting and kind.
        equal: what was found equal in all runs.
        omitted: runs that are not in the tables, and why, a line each.
        runs: the finished runs with their names, in the order of rows.
    """

    comparisons: list[tuple[Comparison, Answer]]
    title: str
    rows: list[Row]
    groups: list[Group]
    equal: list[EqualField]
    omitted: list[str]
    runs: list[tuple[str, Run]]

    @property
    def data(self) -> dict[str, Any]:
        """The content of verdict.json."""
        listed = [{"comparison": of.title, **answer.data} for of, answer in self.comparisons]
        return {"comparisons": listed} if len(listed) > 1 else self.comparisons[0][1].data

    @property
    def answered(self) -> list[tuple[Comparison, Answer]]:
        """The comparisons in which something is compared, or all."""
        return [own for own in self.comparisons if len(own[0].by_kind) > 1] or self.comparisons

    @property
    def colours(self) -> dict[str, str]:
        """Of the rows of tables, by their label."""
        return {group.kind.label: plot_style.colour(group.kind) for group in self.groups}

    def print_to(self, console: "Console") -> None:
        """On a terminal: the table, and the answer last, where the prompt comes."""
        if len(self.comparisons) > 1:
            console.print(self.title, soft_wrap=True)
        for of, answer in self.answered:
            if of.title:
                console.print(f"\n{of.title}", style="bold")
            console.print(rich_table(figures.table(answer.data)))
            console.print(_READ, style="dim italic", soft_wrap=True)
            if of is self.answered[-1][0] and self.omitted:
                more = f" and {len(self.omitted) - 1} more: see report.html" if len(self.omitted) > 1 else ""
                console.print(self.omitted[0] + more, soft_wrap=True)
            console.print()
            for label, text in _answer_lines(of, answer):
                line = f"{label:{_MARGIN - 2}}  {text}"
                if label != "next":  # which is pasted whole
                    line = textwrap.fill(line, console.width, subsequent_indent=" " * _MARGIN, break_on_hyphens=False)
                console.print(line, soft_wrap=True, style="bold" if label == answer.word else "")
            if answer.data["next_s"]:
                console.print(f"{'':{_MARGIN}}takes about {_minutes(answer.data['next_s'])}")

    def parts(self, plots: Sequence[Plot], tables: Sequence[Table] = (), notes: Sequence[str] = ()) -> list[str]:
        """The page as Markdown: the answer, what it was found in, what it rests on, and a block to paste."""
        shown = {shown.name: shown for shown in plots}
        ratios = shown.pop("ratios", None)
        unfolded, folded = list(shown.values())[: UNFOLDED - 1], list(shown.values())[UNFOLDED - 1 :]
        left_out = [*self.omitted, *notes]
        lines = list(dict.fromkeys(line for of, _ in self.comparisons for line in caveats(of.runs)))
        return [
            *([f"# {page.plain(self.title)}"] if len(self.comparisons) > 1 else []),
            *(part for of, answer in self.answered for part in self._answered(of, answer)),
            page.plot(ratios) if ratios else "",
            *map(page.plot, unfolded),
            "## What it costs",
            markdown(cost_table(self.groups)),
            *map(markdown, tables),
            page.details("More plots", *map(page.plot, folded)) if folded else "",
            page.details(f"What to keep in mind: {len(lines)}", page.listed(lines)) if lines else "",
            page.details(f"Not in the tables and plots: {len(left_out)}", page.listed(left_out)) if left_out else "",
            *(_differences(of) for of, _ in self.comparisons),
            page.details("Who was there", markdown(replace(there, title="")))
            if (there := membership_table(self.runs)) else "",
            page.details(f"What was equal: {len(self.equal)} things", _CHECKED, *_equal_tables(self.equal)),
            page.details("Machine and versions", _machine([run for _, run in self.runs])),
            "## To paste",
            page.fenced([line for of, answer in self.answered for line in _pasted(of, answer)]),
        ]  # fmt: skip

    def _answered(self, of: Comparison, answer: Answer) -> Iterator[str]:
        """The answer of a comparison with its table."""
        yield f"## {page.plain(of.title)}: {answer.word}" if of.title else f"# {answer.word}"
        (_, about), *lines = _answer_lines(of, answer)
        yield page.plain(about)
        for label, text in lines:
            takes = f" (about {_minutes(answer.data['next_s'])})" if label == "next" and answer.data["next_s"] else ""
            yield f"**{label}** {page.code(text) if label == 'next' else page.plain(text)}{takes}"
        if links := _links(of):
            yield page.plain(links)
        yield markdown(figures.table(answer.data))


def _answer_lines(of: Comparison, answer: Answer) -> list[tuple[str, str]]:
    """Each line of an answer with what it is."""
    lines = [(answer.word, _subject(of)), ("because", answer.because), *(("but", but) for but in answer.but)]
    return [*lines, ("next", answer.next)]


def _minutes(seconds: float) -> str:
    return f"{max(1, round(seconds / 60)):,} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _pasted(of: Comparison, answer: Answer) -> list[str]:
    (_, about), *lines = _answer_lines(of, answer)
    told = [f"- {label}: {page.code(text) if label == 'next' else page.plain(text)}" for label, text in lines]
    head = f"**{answer.word}** {page.plain(', '.join(filter(None, [of.title, about])))}"
    return [head, "", *told, "", *markdown(figures.table(answer.data)).splitlines(), ""]


def collect(runs: Sequence[Run], margins: Margins = DEFAULT) -> Content:
    """Collect what there is to say.

    Args:
        margins: what the answer counts as a difference.

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
    answered = [(of, reach_answer(of.runs, margins)) for of in comparisons]
    title = answered[0][1].word
    if len(comparisons) > 1:
        equal = fairness.check_grid(finished)
        title = f"{len(comparisons)} comparisons; what differs between them is {_differing(comparisons, equal)}."
    rows, named = result_rows(finished), [(names[run.folder], run) for run in finished]
    fast = {run.folder for of in comparisons for members in of.by_kind.values() for run in timed(members)}
    groups = summarise([row for row, run in zip(rows, finished, strict=True) if run.folder in fast])
    return Content(answered, title, rows, groups, equal, omitted, named)


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
    """In what comparisons differ, one machine aside, that is checked among runs of one kind alone.

    Args:
        is_weak: they differ in the number of workers, and in what follows from it.
    """
    own = [runs for comparison in comparisons if (runs := [r for r in comparison.runs if r.kind.is_distributed])]
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


def _subject(of: Comparison) -> str:
    """`vggf, 2.2M weights, digits; 2 workers on one host of 2 cores`."""
    run = next((run for run in of.runs if run.kind.is_distributed), of.runs[0])
    manifest, weights = run.manifest, run.manifest.parameters
    size = f"{three_digits(weights / 1e6)}M weights" if weights else ""
    what = ", ".join(filter(None, [manifest.model, size, manifest.dataset]))
    hosts, cores = len(manifest.hardware.hosts), manifest.hardware.cores_usable or manifest.hardware.cores
    each = "GPUs" if (manifest.device or "").startswith("cuda") else with_noun(int(cores), "core") if cores else ""
    place = "one host" if hosts < 2 else with_noun(hosts, "host")
    sizes = sorted({run.kind.workers for run in of.runs if run.kind.family})
    workers = " or ".join(map(str, sizes[1:] if len(sizes) > 1 and sizes[0] == 1 else sizes))
    return f"{what}; {workers} worker{'s' * (workers != '1')} on {place}{f' of {each}' if each else ''}"


def _links(of: Comparison) -> str:
    """The measured links between hosts, and the most samples/s that they allow; empty on one host."""
    speeds = [link.gbit_s for run in of.runs for link in run.manifest.network.pairs]
    bounds = {kind: bound for kind, runs in of.by_kind.items() if (bound := network_bound(runs[0]))}
    if not speeds:
        return ""
    ends = dict.fromkeys(three_digits(speed) for speed in (min(speeds), max(speeds)))
    allowed = ", ".join(f"{kind.label} {three_digits(bound)}" for kind, bound in bounds.items())
    told = f"; whatever computes, they carry at most this many samples/s: {allowed}" if allowed else ""
    return f"Links between hosts: {' to '.join(ends)} Gbit/s{told}."


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
    return page.details(title, markdown(words_table("", ["", *(kind.label for kind in kinds)], rows))) if rows else ""


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
