"""Writes a report as HTML and as Markdown, with the templates beside this file. Text from run folders is escaped."""

import re
import shlex
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdtrain.report import formatting, results, style
from hvdtrain.report.content import Content
from hvdtrain.report.fairness import format_value
from hvdtrain.report.runs import Run
from hvdtrain.report.table import Table

if TYPE_CHECKING:
    from jinja2 import Template

    from hvdtrain.report.plots import Plot

# Marks every report.html as ours: a later report may replace it.
GENERATOR = '<meta name="generator" content="hvdtrain report">'


def html(content: Content, plots: Sequence["Plot"], tables: Sequence[Table] = ()) -> str:
    """report.html: one file that needs no other.

    Args:
        tables: shown below the summary.
    """
    colours = {group.kind: style.colour(group.kind) for group in content.groups}
    return render_html("report.html.jinja", plots, tables=tables, colours=colours, **_variables(content))


def markdown(content: Content, plots: Sequence["Plot"], tables: Sequence[Table] = ()) -> str:
    """report.md, which shows the plots from the folder plots/ beside it."""
    return render_markdown("report.md.jinja", plots, tables=tables, **_variables(content))


def _variables(content: Content) -> dict[str, Any]:
    """The variables of both templates: the content, and which columns its tables have."""
    rows = content.rows
    varying = [name for name in results.COLUMNS if any(row[name] != rows[0][name] for row in rows)]
    measured = [name for name in results.COLUMNS if rows[0][name] is not None]
    each_run = varying if len(rows) > 1 else measured
    summary = formatting.summary_columns(content.groups)
    return {"content": content, "columns": {"summary": summary, "each_run": each_run, "all": results.COLUMNS}}


def render_markdown(template: str, plots: Sequence["Plot"], **variables: Any) -> str:
    """A page as Markdown."""
    return _template(template).render(plots=plots, **variables)


def render_html(template: str, plots: Sequence["Plot"], **variables: Any) -> str:
    """An HTML page in the report's style, with the plots inside it."""
    from markupsafe import Markup

    figures = [(plot, Markup(style.inline(plot.svg, plot.name, plot.title))) for plot in plots]
    themes = [style.css(theme) for theme in (0, 1)]
    return _template(template).render(figures=figures, themes=themes, generator=Markup(GENERATOR), **variables)


@cache
def _template(name: str) -> "Template":
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    is_html = name.endswith(".html.jinja")
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True, keep_trailing_newline=True, autoescape=is_html,
        finalize=None if is_html else _escape_markdown,
    )  # fmt: skip
    environment.globals |= {"means": formatting.MEANS}
    environment.globals |= {"format_cell": formatting.format_cell, "format_figure": formatting.format_figure}
    environment.filters |= {"command": _command, "fenced": _fenced, "unbroken": _unbroken}
    return environment.get_template(name)


def _command(run: Run) -> str:
    """The run's command for a shell, below a comment that says how many ranks were started by what."""
    command, starter = run.manifest.get("command"), format_value(run.manifest.get("starter"))
    ranks = formatting.with_noun(run.kind.workers + run.kind.servers, "rank")
    # The comment has to be one line: a shell would run what follows a line break in the starter's name.
    comment = " ".join(f"# {ranks}, starter: {starter}".split())
    words = list(map(str, command)) if isinstance(command, list) else []
    if "--out" in words[:-1]:  # the run itself is in that folder
        words[words.index("--out") + 1] += "-again"
    text = shlex.join(words) if words else "# not recorded"
    return f"{comment}\n{text}"


def _unbroken(text: str) -> str:
    """HTML without line breaks inside a range or the label of a kind of run, such as `ps-sync ×2+1`."""
    from markupsafe import Markup, escape

    return Markup(re.sub(r"[\w-]+ ×\d+(\+\d+)?|[\d.,]+–[\d.,]+", r'<span class="run">\g<0></span>', str(escape(text))))


def _fenced(text: str) -> str:
    """A code block whose fence is longer than any in the text."""
    from markupsafe import Markup

    longest = max((len(ticks) for ticks in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return Markup(f"{fence}sh\n{text}\n{fence}")


def _escape_markdown(value: Any) -> Any:
    """Text that Markdown, and the HTML inside it, show unchanged. Markup is left alone."""
    if hasattr(value, "__html__"):
        return value
    text = " ".join(str(value).replace("&", "&amp;").replace("<", "&lt;").split())
    return re.sub(r"([\\`*\[\]|])", r"\\\1", text)
