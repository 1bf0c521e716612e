"""A report's page: Markdown, and report.html, which is made of it.

Text from run folders is escaped, so that a page shows it as it is.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from hvdtrain.reporting import plot_style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TITLE = "Ring all-reduce or a parameter server?"
# Marks every report.html as ours: a later report may replace it.
GENERATOR = '<meta name="generator" content="hvdtrain report">'


@dataclass(frozen=True)
class Plot:
    """A plot.

    Attributes:
        name: the name of the plot's files.
        title: the heading above it.
        caption: how to read it.
        figure: the drawing.
    """

    name: str
    title: str
    caption: str
    figure: "Figure"

    @cached_property
    def svg(self) -> str:
        """The text of the SVG file."""
        return plot_style.svg(self.figure)


def plain(text: str, label: str = "") -> str:
    """Returns a line that Markdown, and the HTML inside it, show unchanged.

    Args:
        text: the line.
        label: a word before it, in bold; empty for none.
    """
    line = " ".join(text.replace("&", "&amp;").replace("<", "&lt;").split())
    escaped = re.sub(r"([\\`*\[\]|])", r"\\\1", line)
    escaped = re.sub(r"^([#>+-])", r"\\\1", escaped)
    return f"**{label}** {escaped}" if label else escaped


def listed(lines: Sequence[str]) -> list[str]:
    """Returns lines as a list, which is one part of the page; no part without lines."""
    return ["\n".join(f"- {plain(line)}" for line in lines)] if lines else []


def code(text: str) -> str:
    """Returns a command as Markdown that shows it unchanged."""
    line = " ".join(text.split())
    longest_ticks = max(map(len, re.findall("`+", text)), default=0)
    if not longest_ticks:
        return f"`{line}`"
    fence = "`" * (longest_ticks + 1)
    return f"{fence} {line} {fence}"


def details(title: str, *parts: str) -> str:
    """Returns parts of the page that are folded away; empty without parts."""
    if not parts:
        return ""
    return "\n\n".join([f"<details>\n<summary>{plain(title)}</summary>", *parts, "</details>"])


def plot(shown: Plot) -> str:
    """Returns a plot with its title and caption."""
    image = f"![{shown.title}](plots/{shown.name}.svg)"
    return "\n\n".join([f"### {shown.title}", plain(shown.caption), image])


def rendered(page: str) -> str:
    """Returns Markdown as HTML: the body of a page alone."""
    from markdown_it import MarkdownIt

    return MarkdownIt("commonmark").enable("table").render(page)


def html(page: str, plots: Sequence[Plot], colours: Mapping[str, str], title: str) -> str:
    """Returns report.html.

    The page is one file that needs no other, and follows the reader's light or dark theme.

    Args:
        page: the page as Markdown.
        plots: the plots that the page shows.
        colours: the colours of rows of tables, by their label.
        title: what the report says, for the title.
    """
    from markdown_it.common.utils import escapeHtml

    body = rendered(page)
    body = body.replace(' style="text-align:right"', ' class="number"')
    body = body.replace(' style="text-align:left"', "")
    # A figure's detail stands smaller.
    body = re.sub(
        r'(<td class="number">[^<]*) \(([^()<]*)\)</td>', r"\1<small>\2</small></td>", body
    )
    for label, colour in colours.items():
        swatch = f'<span class="swatch" style="background:{colour}"></span>'
        shown_label = escapeHtml(label)
        body = body.replace(
            f"<td>{shown_label}</td>", f'<td class="run">{swatch}{shown_label}</td>'
        )
    # No line breaks between a mode and its number of workers.
    body = re.sub(r"([\w-]) (×\d)", r"\1&nbsp;\2", body)
    for shown in plots:
        image = f'<p><img src="plots/{shown.name}.svg" alt="{escapeHtml(shown.title)}" /></p>'
        picture = plot_style.inline(shown.svg, shown.name, escapeHtml(shown.title))
        body = body.replace(image, f'<div class="wide">{picture}</div>')
    body = body.replace("<pre>", '<pre tabindex="0">')
    body = body.replace("<table>", '<div class="wide"><table>')
    body = body.replace("</table>", "</table></div>")
    light = _css_variables(plot_style.LIGHT)
    dark = _css_variables(plot_style.DARK)
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


def _css_variables(theme: int) -> str:
    """Returns the declarations of a theme's colours in CSS."""
    return " ".join(f"--{role}: {value};" for role, value in plot_style.css(theme).items())
