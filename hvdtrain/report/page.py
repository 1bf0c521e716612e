"""A report's page is Markdown, and report.html is made of it. Text from run folders is escaped, and shown as it is."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from hvdtrain import plot_style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TITLE = "Ring all-reduce or a parameter server?"
# Marks every report.html as ours: a later report may replace it.
GENERATOR = '<meta name="generator" content="hvdtrain report">'


@dataclass(frozen=True)
class Plot:
    """A plot: the name of its files, its title and its caption."""

    name: str
    title: str
    caption: str
    figure: "Figure"

    @cached_property
    def svg(self) -> str:
        """The SVG file's text."""
        return plot_style.svg(self.figure)


def plain(text: str, label: str = "") -> str:
    """One line that Markdown, and the HTML inside it, show unchanged; behind a label, if there is one."""
    line = " ".join(text.replace("&", "&amp;").replace("<", "&lt;").split())
    escaped = re.sub(r"^([#>+-])", r"\\\1", re.sub(r"([\\`*\[\]|])", r"\\\1", line))
    return f"**{label}** {escaped}" if label else escaped


def listed(lines: Sequence[str]) -> list[str]:
    """A part of the page; none without lines."""
    return ["\n".join(f"- {plain(line)}" for line in lines)] if lines else []


def code(text: str) -> str:
    """A command, shown as it is."""
    line, fence = " ".join(text.split()), "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence} {line} {fence}" if len(fence) > 1 else f"`{line}`"


def details(title: str, *parts: str) -> str:
    """What is folded away until somebody asks for it; empty without parts."""
    return "\n\n".join([f"<details>\n<summary>{plain(title)}</summary>", *parts, "</details>"]) if parts else ""


def plot(shown: Plot) -> str:
    return f"### {shown.title}\n\n{plain(shown.caption)}\n\n![{shown.title}](plots/{shown.name}.svg)"


def rendered(page: str) -> str:
    """Markdown as HTML, without what is around a page's body."""
    from markdown_it import MarkdownIt

    return MarkdownIt("commonmark").enable("table").render(page)


def html(page: str, plots: Sequence[Plot], colours: Mapping[str, str], title: str) -> str:
    """report.html: one file that needs no other, and follows the reader's light or dark theme.

    Args:
        page: the same as Markdown.
        colours: of rows of tables, by their label.
    """
    from markdown_it.common.utils import escapeHtml

    body = rendered(page)
    body = body.replace(' style="text-align:right"', ' class="number"').replace(' style="text-align:left"', "")
    body = re.sub(r'(<td class="number">[^<]*) \(([^()<]*)\)</td>', r"\1<small>\2</small></td>", body)
    for label, colour in colours.items():
        swatch = f'<span class="swatch" style="background:{colour}"></span>'
        body = body.replace(f"<td>{escapeHtml(label)}</td>", f'<td class="run">{swatch}{escapeHtml(label)}</td>')
    body = re.sub(r"([\w-]) (×\d)", r"\1&nbsp;\2", body)
    for shown in plots:
        image = f'<p><img src="plots/{shown.name}.svg" alt="{escapeHtml(shown.title)}" /></p>'
        picture = plot_style.inline(shown.svg, shown.name, escapeHtml(shown.title))
        body = body.replace(image, f'<div class="wide">{picture}</div>')
    body = (
        body.replace("<pre>", '<pre tabindex="0">')
        .replace("<table>", '<div class="wide"><table>')
        .replace("</table>", "</table></div>")
    )
    light, dark = (" ".join(f"--{role}: {value};" for role, value in plot_style.css(theme).items()) for theme in (0, 1))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
{GENERATOR}
<title>{escapeHtml(f"{TITLE} {title}")}</title>
<style>
:root {{ {light} color-scheme: light; }}
@media screen and (prefers-color-scheme: dark) {{ :root {{ {dark} color-scheme: dark; }} }}
{Path(__file__).with_name("page.css").read_text(encoding="utf-8")}</style>
</head>
<body>
{body}</body>
</html>
"""
