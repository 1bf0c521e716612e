"""What a report says: of one comparison, or of several. `page.py` writes it, a terminal prints it."""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hvdtrain import plot_style
from hvdtrain.errors import UsageError
from hvdtrain.formatting import in_minutes, three_digits, with_noun
from hvdtrain.report import fairness, figures, page
from hvdtrain.report.answer import Answer, reach_answer
from hvdtrain.report.comparisons import Comparison, split_into_comparisons
from hvdtrain.report.contenders import DEFAULT, Margins, timed
from hvdtrain.report.fairness import EqualField, format_value
from hvdtrain.report.page import Plot
from hvdtrain.report.reference_tables import build_table, load_preset
from hvdtrain.report.results import Row, cost_table, result_rows
from hvdtrain.report.table import Table, markdown, rich_table, words_table
from hvdtrain.runs.network_bound import network_bound
from hvdtrain.runs.read import Run, display_names, finished_by_kind

if TYPE_CHECKING:
    from hvdtrain.console import Console

_CHECKED = "Checked before anything was compared; runs that differ in one of these are refused."
_SIZES, _READ = "×2+1 is 2 workers and 1 server; ", "speeds and times are geometric means, with their range"
UNFOLDED = 5  # plots
_MARGIN = 10  # columns of a terminal, for what a line is


@dataclass(frozen=True)
class Content:
    """What a report says, without its plots.

    Attributes:
        comparisons: each with its answer.
        title: the word, or how many comparisons there are.
        rows: each run's figures.
        costs: what runs cost, by setting and kind.
        equal: what was found equal in all runs.
        omitted: runs that are not in the tables, and why, a line each.
        runs: the finished runs with their names, in the order of rows.
        reference: the table with a published experiment's figures, if one was asked for.
    """

    comparisons: list[tuple[Comparison, Answer]]
    title: str
    rows: list[Row]
    costs: Table
    equal: list[EqualField]
    omitted: list[str]
    runs: list[tuple[str, Run]]
    reference: Table | None = None

    @property
    def data(self) -> dict[str, Any]:
        """The content of verdict.json."""
        listed = [{"comparison": of.title, **answer.data} for of, answer in self.comparisons]
        return {"comparisons": listed} if len(listed) > 1 else self.comparisons[0][1].data

    @property
    def answered(self) -> list[tuple[Comparison, Answer]]:
        """The comparisons in which something is compared, or all."""
        return [pair for pair in self.comparisons if len(pair[0].by_kind) > 1] or self.comparisons

    @property
    def colours(self) -> dict[str, str]:
        """Of the rows of tables, by their label."""
        kinds = [(of, kind) for of, _ in self.comparisons for kind in of.by_kind]
        return {label: plot_style.colour(kind) for of, kind in kinds for label in (kind.label, of.label(kind))}

    def show(self, console: "Console | None" = None) -> None:
        """On a terminal, by default this one: the tables, and the answer last, where the prompt comes."""
        from hvdtrain.console import Console

        console = console or Console(1000)
        if self.reference:
            console.print(rich_table(self.reference))
            console.print("\n" + "\n".join(self.reference.notes), soft_wrap=not console.is_terminal)
        if len(self.comparisons) > 1:
            console.print(self.title, soft_wrap=True)
        for of, answer in self.answered:
            if of.title:
                console.print(f"\n{of.title}", style="bold")
            console.print(rich_table(figures.table(answer.data)))
            console.print(_SIZES * any(kind.servers for kind in of.by_kind) + _READ, style="dim italic", soft_wrap=True)
            if of is self.answered[-1][0] and self.omitted:
                more = f" and {len(self.omitted) - 1} more: see report.html" if len(self.omitted) > 1 else ""
                console.print(self.omitted[0] + more, soft_wrap=True)
            console.print()
            for label, text in _answer_lines(of, answer):
                line = f"{label:{_MARGIN - 2}}  {text}"
                if label != "next":  # which is pasted whole
                    line = textwrap.fill(line, console.width, subsequent_indent=" " * _MARGIN, break_on_hyphens=False)
                console.print(line, soft_wrap=True, style="bold" if label == answer.word else "")

    def markdown(
        self,
        plots: Sequence[Plot],
        tables: Sequence[Table] = (),
        notes: Sequence[str] = (),
        folded: Mapping[str, Sequence[str]] | None = None,
    ) -> str:
        """report.md, which shows the plots from plots/: the answer, what it rests on, and a block to paste."""
        left_out, screen = [*self.omitted, *notes], self.first_screen()
        lines = list(dict.fromkeys(line for _, answer in self.comparisons for line in answer.besides))
        equal = words_table("", ["field", "value", "equal in", "why it has to be equal"], self.equal)
        manifest = self.runs[0][1].manifest
        facts = {name: getattr(manifest.hardware, name) for name in ("cpu", "cores", "memory_gb", "gpus", "hosts")}
        facts |= {"hvdtrain": manifest.hvdtrain, **manifest.versions, "started": manifest.started}
        told = [(name, format_value(value)) for name, value in facts.items()]
        machine = words_table("", ["", "of the first run"], told)
        parts = [
            *([f"# {page.plain(self.title)}"] if len(self.comparisons) > 1 else []),
            screen,
            *map(page.plot, plots[:UNFOLDED]),
            "## What it costs",
            markdown(self.costs),
            *map(markdown, [self.reference, *tables] if self.reference else tables),
            page.details("More plots", *map(page.plot, plots[UNFOLDED:])),
            page.details(f"What to keep in mind: {len(lines)}", *page.listed(lines)),
            page.details(f"Not in the tables and plots: {len(left_out)}", *page.listed(left_out)),
            *(page.details(title, *page.listed(of_title)) for title, of_title in (folded or {}).items()),
            page.details(f"What was equal: {len(self.equal)} things", _CHECKED, markdown(equal)),
            page.details("Machine and versions", markdown(machine)),
            "## To paste",
            "\n".join(["````markdown", screen, "````"]),
        ]
        return "\n\n".join(filter(None, parts)) + "\n"

    def first_screen(self) -> str:
        """Each answer with its table, as Markdown."""
        parts = []
        for of, answer in self.answered:
            parts.append(f"## {page.plain(of.title)}: {answer.word}" if of.title else f"# {answer.word}")
            (_, about), *lines = _answer_lines(of, answer)
            parts.append(page.plain(about))
            for label, text in lines:
                parts.append(f"**{label}** {page.code(text)}" if label == "next" else page.plain(text, label))
            if links := _links(of):
                parts.append(page.plain(links))
            parts.append(markdown(figures.table(answer.data)))
        return "\n\n".join(parts)


def _answer_lines(of: Comparison, answer: Answer) -> list[tuple[str, str]]:
    """Each line of an answer with what it is."""
    lines = [(answer.word, _subject(of)), ("because", answer.because), *(("but", but) for but in answer.but)]
    if "flips" in answer.data:
        lines.append(("flips", answer.data["flips"]["says"]))
    seconds = answer.data["next_s"]
    return [*lines, ("next", answer.next), *([("", f"takes about {in_minutes(seconds)}")] if seconds else [])]


def collect(runs: Sequence[Run], margins: Margins = DEFAULT, reference: str = "") -> Content:
    """Collect what there is to say.

    Args:
        margins: what the answer counts as a difference.
        reference: the preset of an experiment whose figures are put beside these.

    Raises:
        UsageError: none of the runs finished, or they differ in what should be equal (the field is named); or there is
            no such experiment.
    """
    preset = load_preset(reference) if reference else None
    names = display_names(runs)
    omitted = []
    for run in (run for run in runs if not run.is_finished):
        see = f"; see {run.folder / 'logs'}" if (run.folder / "logs").is_dir() else ""
        omitted.append(f"{names[run.folder]}: left out, {run.problem}{see}")
    comparisons = split_into_comparisons(runs)
    finished = [run for members in finished_by_kind(runs).values() for run in members]
    if not finished:
        raise UsageError(f"no finished run to report: {'; '.join(omitted) or 'no runs were given'}")
    equal = fairness.check(finished)
    answered = [(of, reach_answer(of.runs, margins)) for of in comparisons]
    title = f"{len(comparisons)} comparisons" if len(comparisons) > 1 else answered[0][1].word
    rows = {run.folder: row for run, row in zip(finished, result_rows(finished), strict=True)}
    costs = cost_table([
        (of.label(kind), rows[run.folder])
        for of in comparisons for kind, members in of.by_kind.items() for run in timed(members)
    ])  # fmt: skip
    named = [(names[run.folder], run) for run in finished]
    table = build_table(preset, runs) if preset else None
    return Content(answered, title, list(rows.values()), costs, equal, omitted, named, table)


def _subject(of: Comparison) -> str:
    """`vggf, 2.2M weights, digits; 2 workers on one host of 2 cores`."""
    run = next((run for run in of.runs if run.kind.is_distributed), of.runs[0])
    manifest, weights = run.manifest, run.manifest.parameters or 0
    size = f"{three_digits(weights / 1e6)}M weights" if weights >= 1e5 else f"{weights:,} weights" if weights else ""
    what = ", ".join(filter(None, [manifest.model, size, manifest.dataset]))
    hosts, cores = len(manifest.hardware.hosts), manifest.hardware.cores_usable or manifest.hardware.cores
    each = "GPUs" if (manifest.device or "").startswith("cuda") else with_noun(cores, "core") if cores else ""
    place = "one host" if hosts < 2 else with_noun(hosts, "host")
    sizes = sorted({run.kind.workers for run in of.runs if run.kind.family}) or [run.kind.workers]
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
