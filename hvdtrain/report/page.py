"""A report's pages: a list of blocks, written as HTML and as Markdown. Text from run folders is escaped."""

import html as escaping
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from hvdtrain.report import style, table
from hvdtrain.report.table import Table
from hvdtrain.report.text import html_text, markdown_code, markdown_text

if TYPE_CHECKING:
    from hvdtrain.report.plots import Plot

TITLE = "Ring all-reduce or a parameter server?"
# Marks every report.html as ours: a later report may replace it.
GENERATOR = '<meta name="generator" content="hvdtrain report">'


@dataclass(frozen=True)
class Heading:
    """Of a section; other sections of the page have another id."""

    text: str
    id: str = ""


@dataclass(frozen=True)
class Text:
    """A paragraph. `kind` is its class in HTML: `verdict`, `quiet` or none."""

    text: str
    kind: str = ""


@dataclass(frozen=True)
class Lines:
    """A list, or as a notice what nobody should miss."""

    lines: Sequence[str]
    is_notice: bool = False


@dataclass(frozen=True)
class Code:
    """Commands for a shell, below what they do."""

    title: str
    text: str


@dataclass(frozen=True)
class Link:
    """A link to another report's page of the same form; `page` is its path without the form's ending."""

    page: str
    text: str
    rest: str


@dataclass(frozen=True)
class Details:
    """What is folded away until somebody asks for it."""

    title: str
    blocks: "Sequence[Block]"


Block: TypeAlias = "Heading | Text | Lines | Code | Link | Details | Table | Plot"


def html(blocks: "Sequence[Block]", title: str = "") -> str:
    """report.html: one file that needs no other. It follows the reader's light or dark theme."""
    light, dark = (" ".join(f"--{role}: {value};" for role, value in style.css(theme).items()) for theme in (0, 1))
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f'<meta name="color-scheme" content="light dark">\n{GENERATOR}',
            f"<title>{html_plain(f'{TITLE} {title}'.strip())}</title>\n<style>",
            f":root {{ {light} color-scheme: light; }}",
            f"@media screen and (prefers-color-scheme: dark) {{ :root {{ {dark} color-scheme: dark; }} }}",
            Path(__file__).with_name("page.css").read_text(encoding="utf-8") + "</style>\n</head>\n<body>",
            f"<h1>{TITLE}</h1>",
            *map(_html, blocks),
            "</body>\n</html>\n",
        ]
    )


def html_plain(text: str) -> str:
    """Text as HTML, without elements."""
    return escaping.escape(text)


def _html(block: "Block") -> str:
    match block:
        case Heading(text, identity):
            return f'<h2 id="{html_plain(identity)}">{html_text(text)}</h2>' if identity else f"<h2>{html_text(text)}</h2>"
        case Text(text, kind):
            return f'<p class="{kind}">{html_text(text)}</p>' if kind else f"<p>{html_text(text)}</p>"
        case Lines(lines, True):
            return '<div class="notice">\n' + "\n".join(f"<p>{html_text(line)}</p>" for line in lines) + "\n</div>"
        case Lines(lines):
            return "<ul>\n" + "\n".join(f"<li>{html_text(line)}</li>" for line in lines) + "\n</ul>"
        case Code(title, text):
            return f"<p>{html_text(title)}</p>\n<pre>{html_plain(text)}</pre>"
        case Link(page, text, rest):
            return f'<p><a href="{html_plain(page)}.html">{html_text(text)}</a>{html_text(rest)}</p>'
        case Details(title, blocks):
            inner = "\n".join(map(_html, blocks))
            return f"<details>\n<summary>{html_text(title)}</summary>\n{inner}\n</details>"
        case Table():
            title = f"<h3>{html_text(block.title)}</h3>\n" if block.title else ""
            return title + table.html(block)
    picture = style.inline(block.svg, block.name, block.title)
    return (
        f"<figure>\n<h3>{html_text(block.title)}</h3>\n<figcaption>{html_text(block.caption)}</figcaption>\n"
        f'<div class="wide">{picture}</div>\n</figure>'
    )


def markdown(blocks: "Sequence[Block]") -> str:
    """report.md, which shows the plots from the folder plots/ beside it."""
    return f"# {TITLE}\n\n" + "\n\n".join(map(_markdown, blocks)) + "\n"


def _markdown(block: "Block") -> str:
    match block:
        case Heading(text):
            return f"## {markdown_text(text)}"
        case Text(text, "verdict"):
            return f"**{markdown_text(text)}**"
        case Text(text):
            return markdown_text(text)
        case Lines(lines, True):
            return "\n>\n".join(f"> {markdown_text(line)}" for line in lines)
        case Lines(lines):
            return "\n".join(f"- {markdown_text(line)}" for line in lines)
        case Code(title, text):
            return f"{markdown_text(title)}:\n\n{markdown_code(text)}"
        case Link(page, text, rest):
            return f"[{markdown_text(text)}]({page}.md){markdown_text(rest)}"
        case Details(title, blocks):
            inner = "\n\n".join(map(_markdown, blocks))
            return f"<details>\n<summary>{html_plain(title)}</summary>\n\n{inner}\n\n</details>"
        case Table():
            return (f"### {markdown_text(block.title)}\n\n" if block.title else "") + table.markdown(block)
    title = markdown_text(block.title)
    return f"### {title}\n\n{markdown_text(block.caption)}\n\n![{title}](plots/{block.name}.svg)"
