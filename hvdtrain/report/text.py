"""Text from run folders made harmless, for HTML and for Markdown: both show it unchanged, and obey none of it."""

import html
import re



def html_text(text: str) -> str:
    """HTML without line breaks inside a range or the label of a kind of run, such as `ps-sync ×2+1`."""
    return re.sub(r"[\w-]+ ×\d+(\+\d+)?|[\d.,]+–[\d.,]+", r'<span class="run">\g<0></span>', html.escape(text))


def markdown_text(text: str) -> str:
    """One line of Markdown."""
    line = " ".join(text.replace("&", "&amp;").replace("<", "&lt;").split())
    return re.sub(r"([\\`*\[\]|])", r"\\\1", line)


def markdown_code(text: str) -> str:
    """A code block whose fence is longer than any in the text."""
    fence = "`" * max(3, 1 + max((len(ticks) for ticks in re.findall("`+", text)), default=0))
    return f"{fence}sh\n{text}\n{fence}"
