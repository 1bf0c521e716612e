"""The report as a reader gets it: all it says, collected once, then written as HTML and as Markdown."""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdtrain.errors import UsageError
from hvdtrain.report import cells, fairness, style, tables
from hvdtrain.report.answer import Answer, answer
from hvdtrain.report.caveats import caveats
from hvdtrain.report.runs import Run, grouped, names
from hvdtrain.report.table import Table

if TYPE_CHECKING:
    from jinja2 import Template

    from hvdtrain.report.plots import Plot

# Stands in every report.html, so that a later report knows what it may replace.
GENERATOR = '<meta name="generator" content="hvdtrain report">'


@dataclass(frozen=True)
class Content:
    """What a report says, but for its plots.

    Attributes:
        subject: what was trained, in a sentence.
        answer: the first lines.
        rows, groups: each run's figures, and their summary.
        equal: what was found equal.
        caveats: what to keep in mind.
        differences: the settings in which kinds of runs differ: name, then a value for each group.
        omitted: runs that are not in the tables, one line each.
        runs: the finished runs with the names to call them by, in the order of rows.
        machine: hardware and versions, name and value.
    """

    subject: str
    answer: Answer
    rows: list[tables.Row]
    groups: list[tables.Group]
    equal: list[fairness.Equal]
    caveats: list[str]
    differences: dict[str, list[str]]
    omitted: list[str]
    runs: list[tuple[str, Run]]
    machine: dict[str, str]


def collect(runs: Sequence[Run], others: Sequence[Run] = ()) -> Content:
    """All that there is to say about these runs.

    Args:
        others: further runs among which the baseline of scaling efficiency may be.

    Raises:
        UsageError: none of them finished, or they differ in what should be equal.
    """
    called = names(runs)
    omitted = left_out(runs)
    members = grouped(runs)
    done = [run for group in members.values() for run in group]
    if not done:
        raise UsageError(f"no finished run to report: {'; '.join(omitted) or 'no runs were given'}")
    equal = fairness.check(done)
    rows = tables.results(done, others)
    groups = tables.summarise(rows)
    first = done[0]
    return Content(
        subject=_subject(first),
        answer=answer(groups, first.summary.get("target_accuracy"), first.manifest.get("validation_samples")),
        rows=rows,
        groups=groups,
        equal=equal,
        caveats=caveats(done),
        differences=_differences([group[0] for group in members.values()]),
        omitted=omitted,
        runs=[(called[run.folder], run) for run in done],
        machine=machine(done),
    )


def html(content: Content, plots: Sequence["Plot"], beside: Sequence[Table] = ()) -> str:
    """report.html: one file that needs no other. Text from files is escaped."""
    colours = {group.kind: style.colour(group.kind) for group in content.groups}
    return page("report.html.jinja", plots, tables=beside, colours=colours, **_shown(content))


def markdown(content: Content, plots: Sequence["Plot"], beside: Sequence[Table] = ()) -> str:
    """report.md, which shows the plots that lie beside it in plots/. Text from files is escaped."""
    return text("report.md.jinja", plots, tables=beside, **_shown(content))


def _shown(content: Content) -> dict[str, Any]:
    """What both templates need: the content, and which columns it has."""
    rows = content.rows
    varying = [name for name in tables.COLUMNS if any(row[name] != rows[0][name] for row in rows)]
    alone = [name for name in tables.COLUMNS if rows[0][name] is not None]
    each = varying if len(rows) > 1 else alone
    summary = cells.summary_columns(content.groups)
    return {"content": content, "columns": {"summary": summary, "each": each, "all": tables.COLUMNS}}


def text(template: str, plots: Sequence["Plot"], **more: Any) -> str:
    """A page as Markdown."""
    return _template(template).render(plots=plots, **more)


def page(template: str, plots: Sequence["Plot"], **more: Any) -> str:
    """An HTML page of this look, with the plots inside it."""
    from markupsafe import Markup

    figures = [(plot, Markup(style.inline(plot.svg, plot.name, plot.title))) for plot in plots]
    themes = [style.css(theme) for theme in (0, 1)]
    return _template(template).render(figures=figures, themes=themes, generator=Markup(GENERATOR), **more)


@cache
def _template(name: str) -> "Template":
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    is_html = name.endswith(".html.jinja")
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True, keep_trailing_newline=True, autoescape=is_html,
        finalize=None if is_html else _escape_markdown,
    )  # fmt: skip
    environment.globals |= {"cell": cells.cell, "figure": cells.figure}
    environment.filters |= {"command": _command, "fenced": _fenced, "unbroken": _unbroken}
    return environment.get_template(name)


def left_out(runs: Sequence[Run]) -> list[str]:
    """The runs that cannot stand in a table, and why, a line each."""
    called = names(runs)
    return [f"{called[run.folder]}: left out, {run.problem}{_logs(run)}" for run in runs if not run.done]


def _logs(run: Run) -> str:
    return f"; see {run.folder / 'logs'}" if (run.folder / "logs").is_dir() else ""


def _subject(run: Run) -> str:
    def of(field: str) -> str:
        return fairness.show(fairness.value(run, field))

    side = of("image_size")
    return (
        f"{of('model')} (width {of('width')}, {of('parameters')} weights) on {of('dataset')}: "
        f"{of('train_samples')} training and {of('validation_samples')} validation images of {side}×{side} "
        f"pixels in {of('classes')} classes; global batch {of('global_batch')}, {of('optimizer')}, learning "
        f"rate {of('lr')}, threads of a worker: {of('threads_per_worker')}, device: {of('device')}."
    )


def _differences(firsts: Sequence[Run]) -> dict[str, list[str]]:
    fields = {
        "processes": "processes, servers included", "hardware.hosts": "hosts",
        "backend": "messages carried by", "starter": "started by",
        "push_scale": "push scale", "effective_lr": "learning rate of one gradient",
        "compression": "gradients sent as", "staleness_bound": "steps ahead at most",
        "delay_compensation": "delay compensation", "staleness_lr": "learning rate divided by staleness",
        "server_bytes": "bytes of weights on each server",
    }  # fmt: skip
    values = {text: [fairness.show(fairness.value(run, field)) for run in firsts] for field, text in fields.items()}
    return {text: row for text, row in values.items() if len(set(row)) > 1}


def machine(runs: Sequence[Run]) -> dict[str, str]:
    """Hardware and versions of the finished runs, name and value."""
    hardware, versions = runs[0].manifest.get("hardware", {}), runs[0].manifest.get("versions", {})
    hosts: dict[str, None] = {}
    for run in runs:
        listed = run.manifest.get("hardware", {}).get("hosts")
        hosts |= dict.fromkeys(map(str, listed if isinstance(listed, list) else []))
    started = sorted(str(run.manifest["started"]) for run in runs if run.manifest.get("started"))
    return {
        "processor": fairness.show(hardware.get("cpu")),
        "cores": fairness.show(hardware.get("cores")),
        "memory": f"{fairness.show(hardware.get('memory_gb'))} GB",
        "GPUs": fairness.show(hardware.get("gpus")),
        "hosts": ", ".join(hosts) or "not recorded",
        "hvdtrain": fairness.show(runs[0].manifest.get("hvdtrain")),
        **{str(name): fairness.show(version) for name, version in versions.items()},
        "first run started": started[0] if started else "not recorded",
    }


def _command(run: Run) -> str:
    """The command as a shell takes it; how it was started is no part of it, and stands above as a comment."""
    command, starter = run.manifest.get("command"), fairness.show(run.manifest.get("starter"))
    ranks = cells.count(run.kind.workers + run.kind.servers, "rank")
    # One line, whatever the name holds: what follows a line break would be run.
    how = " ".join(f"# {ranks}, starter: {starter}".split())
    words = list(map(str, command)) if isinstance(command, list) else []
    if "--out" in words[:-1]:  # the folder is in use: by the run itself
        words[words.index("--out") + 1] += "-again"
    text = shlex.join(words) if words else "# not recorded"
    return f"{how}\n{text}"


def _unbroken(text: str) -> str:
    """HTML in which no line breaks inside a range or the name of a kind of run, such as `ps-sync ×2+1`."""
    from markupsafe import Markup, escape

    return Markup(re.sub(r"[\w-]+ ×\d+(\+\d+)?|[\d.,]+–[\d.,]+", r'<span class="run">\g<0></span>', str(escape(text))))


def _fenced(text: str) -> str:
    """A code block whose fence is longer than any in the text."""
    from markupsafe import Markup

    longest = max((len(ticks) for ticks in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return Markup(f"{fence}sh\n{text}\n{fence}")


def _escape_markdown(value: Any) -> Any:
    """Text that Markdown and the HTML inside it show as it is. What is Markup already stays."""
    if hasattr(value, "__html__"):
        return value
    text = " ".join(str(value).replace("&", "&amp;").replace("<", "&lt;").split())
    return re.sub(r"([\\`*\[\]|])", r"\\\1", text)
