"""What a report says of one comparison or of several.

`page.py` has how the page is written; `Content.show` prints it on a terminal.
"""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdtrain.base import modes
from hvdtrain.base.errors import UsageError
from hvdtrain.base.formatting import in_minutes, three_digits
from hvdtrain.reporting import fairness, figures, page, plot_style
from hvdtrain.reporting.answer import UNKNOWN_CONDUCT, Answer, reach_answer
from hvdtrain.reporting.comparisons import ComparedRuns, split_into_comparisons
from hvdtrain.reporting.conduct import Conduct
from hvdtrain.reporting.contenders import DEFAULT, Margins
from hvdtrain.reporting.fairness import EqualField, format_value
from hvdtrain.reporting.measures import speed_runs
from hvdtrain.reporting.page import Plot
from hvdtrain.reporting.reference_tables import build_table, load_preset
from hvdtrain.reporting.results import Row, cost_table, result_rows
from hvdtrain.reporting.subject import links_words, pushes_words, subject
from hvdtrain.reporting.table import Table, markdown, print_table, words_table
from hvdtrain.runs.read import Run, display_names, finished_by_kind

if TYPE_CHECKING:
    from hvdtrain.base.console import Console

_CHECKED = "Checked before anything was compared; runs that differ in one of these are refused."
_SIZES_NOTE = "×2+1 is 2 workers and 1 server; "
_MEANS_NOTE = "speeds and times are geometric means, with their range"
_SOONER_NOTE = "; × is how many times as fast the target was reached"
_BUSIEST_NOTE = "busiest: which part of all samples the busiest worker computed"
# How many plots the page shows unfolded.
UNFOLDED = 5
# Columns of a terminal that the label of a line takes.
_MARGIN = 10
# The label of the line with the next command. About how long the command takes stands behind it.
_NEXT = "next"


@dataclass(frozen=True)
class Content:
    """What a report says, without its plots.

    Attributes:
        comparisons: the comparisons, each with its answer.
        title: the headline, or how many comparisons there are.
        rows: the figures of each run.
        costs: what runs cost, by setting and kind.
        equal: what was found equal in all runs.
        omitted: runs that are not in the tables, and why, a line each.
        runs: the finished runs with their names, in the order of rows.
        reference: the table with a published experiment's figures, if one was asked for.
        left_out: contenders that a search left out, and why, a line each.
        tried: how many settings each side had, and who was left out, in a line; empty without a
            search.
        rates: the learning rates that were found, in a line; empty if none was looked for.
    """

    comparisons: list[tuple[ComparedRuns, Answer]]
    title: str
    rows: list[Row]
    costs: Table
    equal: list[EqualField]
    omitted: list[str]
    runs: list[tuple[str, Run]]
    reference: Table | None = None
    left_out: Sequence[str] = ()
    tried: str = ""
    rates: str = ""

    @property
    def data(self) -> dict[str, Any]:
        """The content of verdict.json."""
        if len(self.comparisons) == 1:
            _, answer = self.comparisons[0]
            return answer.data
        listed = [
            {"comparison": compared.title, **answer.data} for compared, answer in self.comparisons
        ]
        return {"comparisons": listed}

    @property
    def answered(self) -> list[tuple[ComparedRuns, Answer]]:
        """The comparisons of several kinds; all comparisons if there are none of several."""
        several = []
        for compared, answer in self.comparisons:
            if len(compared.by_kind) > 1:
                several.append((compared, answer))
        return several or self.comparisons

    @property
    def colours(self) -> dict[str, str]:
        """The colour of each row of a table, by its label."""
        colours = {}
        for compared, _ in self.comparisons:
            for kind in compared.by_kind:
                colour = plot_style.colour(kind)
                colours[kind.label] = colour
                colours[compared.label(kind)] = colour
        return colours

    def show(self, console: "Console | None" = None) -> None:
        """Prints the tables, and then the answer, which stands next to the prompt.

        Args:
            console: where it is printed; by default this terminal.
        """
        from hvdtrain.base.console import Console

        console = console or Console(1000)
        if self.reference:
            print_table(console, self.reference)
            console.print("\n" + "\n".join(self.reference.notes), soft_wrap=not console.is_terminal)
        if len(self.comparisons) > 1:
            console.print(self.title, soft_wrap=True)
        for number, (compared, answer) in enumerate(self.answered, 1):
            if compared.title:
                console.print(f"\n{compared.title}", style="bold")
            print_table(console, figures.table(answer.data))
            has_servers = any(kind.servers for kind in compared.by_kind)
            note = _SIZES_NOTE + _MEANS_NOTE if has_servers else _MEANS_NOTE
            beside = answer.data["beside"]
            if answer.data["by_speed"]:
                note += _SOONER_NOTE
            else:
                note += f"; × {beside}: the samples/s, divided by those of {_the(beside)}"
            for line in filter(None, (f"{note}; {_BUSIEST_NOTE}", pushes_words(compared))):
                console.print(line, style="dim italic", soft_wrap=True)
            if number == len(self.answered):
                self._show_notes(console)
            console.print()
            _show_answer(compared, answer, console)

    def _show_notes(self, console: "Console") -> None:
        """Prints which runs were omitted and what was tried first."""
        if self.omitted:
            more = len(self.omitted) - 1
            rest = f"; {more} more: see report.html" if more else ""
            console.print(self.omitted[0] + rest, soft_wrap=True)
        for line in filter(None, (self.tried, self.rates)):
            console.print(line, soft_wrap=True)

    def markdown(
        self,
        plots: Sequence[Plot],
        tables: Sequence[Table] = (),
        notes: Sequence[str] = (),
        folded: Mapping[str, Sequence[str]] | None = None,
    ) -> str:
        """Returns report.md: the answer, what it rests on, and a block to paste.

        Args:
            plots: the page shows them from plots/.
            tables: more tables, which stand below the table of costs.
            notes: what is missing in the plots, a line each.
            folded: lines that are folded away, by title.
        """
        screen = self.first_screen()
        left_out = [*self.omitted, *self.left_out, *notes]
        doubts: dict[str, None] = {}
        for _, answer in self.comparisons:
            doubts |= dict.fromkeys(answer.besides)
        equal = words_table(
            "", ["field", "value", "equal in", "why it has to be equal"], self.equal
        )
        more_tables = [self.reference, *tables] if self.reference else tables
        more_details = [
            page.details(title, *page.listed(lines)) for title, lines in (folded or {}).items()
        ]
        parts = [
            f"# {page.plain(self.title)}" if len(self.comparisons) > 1 else "",
            screen,
            *map(page.plot, plots[:UNFOLDED]),
            "## What it costs",
            markdown(self.costs),
            *map(markdown, more_tables),
            page.details("More plots", *map(page.plot, plots[UNFOLDED:])),
            page.details(f"What to keep in mind: {len(doubts)}", *page.listed(list(doubts))),
            page.details(f"Not in the tables and plots: {len(left_out)}", *page.listed(left_out)),
            *map(page.plain, filter(None, (self.tried, self.rates))),
            *more_details,
            page.details(f"What was equal: {len(self.equal)} things", _CHECKED, markdown(equal)),
            page.details("Machine and versions", markdown(self._machine_table())),
            "## To paste",
            "\n".join(["````markdown", screen, "````"]),
        ]
        return "\n\n".join(filter(None, parts)) + "\n"

    def _machine_table(self) -> Table:
        """Returns the hardware and the versions of the first run."""
        _, run = self.runs[0]
        manifest = run.manifest
        facts: dict[str, Any] = {}
        for name in ("cpu", "cores", "memory_gb", "gpus", "hosts"):
            facts[name] = getattr(manifest.hardware, name)
        facts |= {"hvdtrain": manifest.hvdtrain, **manifest.versions, "started": manifest.started}
        rows = [(name, format_value(value)) for name, value in facts.items()]
        return words_table("", ["", "of the first run"], rows)

    def first_screen(self) -> str:
        """Returns each answer with its table, as Markdown."""
        parts = []
        for compared, answer in self.answered:
            if compared.title:
                parts.append(f"## {page.plain(compared.title)}: {answer.headline}")
            else:
                parts.append(f"# {answer.headline}")
            (_, about), *lines = _answer_lines(compared, answer)
            parts.append(page.plain(about))
            for label, text in lines:
                if label.startswith(_NEXT):
                    parts.append(f"**{label}** {page.code(text)}")
                else:
                    parts.append(page.plain(text, label))
            words = (links_words(compared), pushes_words(compared))
            parts += map(page.plain, filter(None, words))
            parts.append(markdown(figures.table(answer.data)))
        return "\n\n".join(parts)


def _the(beside: str) -> str:
    """Returns whom a table's ratios are beside, in a sentence."""
    return "the fastest ring" if beside == "ring" else beside


def _answer_lines(compared: ComparedRuns, answer: Answer) -> list[tuple[str, str]]:
    """Returns the lines of an answer as (label, text). The label of the first is the headline."""
    lines = [(answer.headline, subject(compared)), ("because", answer.because)]
    parts = answer.data["steps_and_samples"]
    by_speed = answer.data["by_speed"]
    if by_speed and parts and answer.is_known:
        lines.append(("explain", parts["says"]))
    if by_speed:
        lines.append(("by speed", f"{by_speed['answer']}: {by_speed['because']}"))
    lines += [("but", but) for but in answer.but]
    if "flips" in answer.data:
        says = answer.data["flips"]["says"]
        lines.append(("forecast", f"by speed, {says}" if by_speed else says))
    seconds = answer.data["next_s"]
    duration = f", {in_minutes(seconds)}" if seconds else ""
    lines.append((f"{_NEXT}{duration}", answer.next))
    return lines


def _show_answer(compared: ComparedRuns, answer: Answer, console: "Console") -> None:
    """Prints an answer, wrapped behind its labels."""
    for label, text in _answer_lines(compared, answer):
        line = f"{label:{_MARGIN - 2}}  {text}"
        # The command is not wrapped, since it is pasted whole.
        if not label.startswith(_NEXT):
            line = textwrap.fill(
                line, console.width, subsequent_indent=" " * _MARGIN, break_on_hyphens=False
            )
        console.print(line, soft_wrap=True, style="bold" if label == answer.headline else "")


def collect(
    runs: Sequence[Run],
    margins: Margins = DEFAULT,
    reference: str = "",
    conduct: Conduct = UNKNOWN_CONDUCT,
) -> Content:
    """Returns the content of a report.

    Args:
        runs: the runs, finished or not.
        margins: the smallest differences that matter.
        reference: the preset of an experiment whose figures stand beside these; empty for none.
        conduct: how the comparison that made the runs was conducted.

    Raises:
        UsageError: none of the runs finished, they differ in what should be equal (the message
            names the field), or there is no such experiment.
    """
    preset = load_preset(reference) if reference else None
    names = display_names(runs)
    omitted = [_why_omitted(run, names[run.folder]) for run in runs if not run.is_finished]
    comparisons = split_into_comparisons(runs)
    finished = _each_once(comparisons)
    if not finished:
        raise UsageError(f"no finished run to report: {'; '.join(omitted) or 'no runs were given'}")
    equal = fairness.check(finished)
    answered = [
        (compared, reach_answer(compared.runs, margins, conduct)) for compared in comparisons
    ]
    _, first_answer = answered[0]
    rows = {run.folder: row for run, row in zip(finished, result_rows(finished), strict=True)}
    return Content(
        comparisons=answered,
        title=f"{len(answered)} comparisons" if len(answered) > 1 else first_answer.headline,
        rows=list(rows.values()),
        costs=_costs(comparisons, rows),
        equal=equal,
        omitted=omitted,
        runs=[(names[run.folder], run) for run in finished],
        reference=build_table(preset, finished) if preset else None,
        left_out=[f"{left.run}: left out, {left.why}" for left in conduct.left_out],
        tried=_tried_words(conduct),
        rates=_rates_words(conduct),
    )


def _why_omitted(run: Run, name: str) -> str:
    """Returns why a run is not in the report, and where its logs are."""
    logs = run.folder / "logs"
    see = f"; see {logs}" if logs.is_dir() else ""
    return f"{name}: left out, {run.problem}{see}"


def _costs(comparisons: Sequence[ComparedRuns], rows: Mapping[Path, Row]) -> Table:
    """Returns the table of costs.

    Args:
        comparisons: the comparisons.
        rows: the figures of each run, by its folder.
    """
    labelled = []
    for compared in comparisons:
        for kind, members in compared.by_kind.items():
            label = compared.label(kind)
            labelled += [(label, rows[run.folder]) for run in speed_runs(members)]
    return cost_table(labelled)


def _tried_words(conduct: Conduct) -> str:
    """Returns how many settings each side had, and which were left out; empty without a search."""
    if not conduct.tried:
        return ""
    words = {modes.RING: "rings", modes.SERVERS: "servers", modes.ONE_MACHINE: "one machine"}
    tried = [
        f"{side.settings} of {words.get(family, family)}" for family, side in conduct.tried.items()
    ]
    left_out = ", ".join(left.run for left in conduct.left_out) or "none"
    return (
        f"settings tried first, in sprints that do not count: {', '.join(tried)}; "
        f"left out: {left_out}"
    )


def _rates_words(conduct: Conduct) -> str:
    """Returns which learning rates were found; empty if none was looked for."""
    if not conduct.rates:
        return ""
    found = []
    for rate in conduct.rates:
        spent = f"{rate.trainings} trainings, {three_digits(rate.seconds)} s"
        found.append(f"{rate.words} for {', '.join(rate.of)} ({spent})")
    tried = conduct.rates[0].tried
    return (
        f"learning rates, each the best of {len(tried)} settings around {conduct.rates[0].around:g} with "
        f"seeds that do not count: {'; '.join(found)}"
    )


def _each_once(comparisons: Sequence[ComparedRuns]) -> list[Run]:
    """Returns the runs by kind and repeat. One machine may be in several comparisons."""
    runs: dict[Path, Run] = {}
    for compared in comparisons:
        for run in compared.runs:
            if run.one_machine or run.folder not in runs:
                runs[run.folder] = run
    ordered = []
    for members in finished_by_kind(list(runs.values())).values():
        ordered += members
    return ordered
