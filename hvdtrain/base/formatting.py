"""Numbers as text for people: the same on a terminal, in Markdown, in HTML and in plots."""

import codecs
import contextlib
import io
import math
import os
import re
from collections.abc import Iterable
from typing import Any, TextIO, cast

# C0 and C1 but for newline and tab, marks that turn the direction of text, line separators, and
# surrogates.
_CONTROL = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def three_digits(value: float) -> str:
    """Returns a number with about three digits: 0.0312, 1.20, 84.3, 843 or 12,345.

    Integers have all digits.
    """
    if abs(value) >= 99.95 or isinstance(value, int):
        return f"{value:,.0f}"
    return f"{value:#.3g}"


def printable(text: str) -> str:
    """Returns the text with escape sequences for characters that a terminal would obey."""
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def printable_name(name: str) -> str:
    """Returns a name as `printable`, in one line and one column."""
    return printable(name).replace("\n", "\\n").replace("\t", "\\t")


# What stands for a character that a terminal's encoding lacks, as KOI8-R lacks most of these.
_PLAINER = {
    "…": "...",
    "×": "x",
    "→": "->",
    "←": "<-",
    "–": "-",
    "−": "-",
    "·": ".",
    "²": "^2",
    "‖": "||",
    "√": "sqrt ",
    "Δ": "delta",
    "β": "beta",
    "η": "eta",
    "θ": "theta",
}
PLAINER = "hvdtrain.plainer"  # the name of the handler of such characters, for `errors`


def _plainer(error: UnicodeError) -> tuple[str | bytes, int]:
    """Returns what stands for characters that cannot be encoded, as codecs asks error handlers."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lacking = error.object[error.start : error.end]
    escaped = [
        _PLAINER.get(char) or char.encode("ascii", "backslashreplace").decode() for char in lacking
    ]
    return "".join(escaped), error.end


codecs.register_error(PLAINER, _plainer)


def recoded(line: bytes, encoding: str) -> bytes:
    """Returns a line of UTF-8, as our logs have it, in a terminal's encoding."""
    if codecs.lookup(encoding).name == "utf-8":
        return line
    return line.decode(errors="replace").encode(encoding, PLAINER)


def set_encoding(stream: TextIO, encoding: str | None = None) -> None:
    """Gives a stream an encoding, by default the one it has, in which lacking characters are plainer."""
    if not isinstance(stream, io.TextIOWrapper):
        return
    # A forked process may have got a pipe where its parent had a file, at whose end Python looks
    # for the stream's place once the encoding is set.
    with contextlib.suppress(OSError):
        stream.reconfigure(encoding=encoding or stream.encoding, errors=PLAINER)


class _Shown:
    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        return self.stream.write(printable(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def shown(stream: TextIO | None) -> TextIO:
    """Returns a stream that makes text `printable`, since it may come from anybody's folder.

    Characters that the stream's encoding lacks become plainer ones. Bytes pass unchanged. What is
    written to a stream that a shell has closed (`>&-`) goes nowhere.
    """
    if stream is None:
        stream = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8")
    set_encoding(stream)
    return cast(TextIO, _Shown(stream))


def some_of(names: Iterable[str], number: int = 5) -> str:
    """Returns the first names, and how many more there are."""
    listed = [printable_name(name) for name in names]
    text = ", ".join(listed[:number])
    if len(listed) > number:
        text += f" and {len(listed) - number:,} more"
    return text


def with_noun(number: float, noun: str) -> str:
    """Returns `1 worker`, `2 workers` or `0.5 cores`."""
    text = str(number) if isinstance(number, int) else f"{number:g}"
    return f"{text} {noun}" if number == 1 else f"{text} {noun}s"


def in_minutes(seconds: float) -> str:
    """Returns `12 min` or `1.5 h`."""
    if seconds < 5400:
        return f"{max(1, round(seconds / 60)):,} min"
    return f"{seconds / 3600:.1f} h"


def format_bytes(value: float) -> str:
    """Returns bytes in the decimal unit that fits, as `53.2 MB`."""
    if value == 0:
        return "0 B"
    for unit in ("B", "kB", "MB", "GB"):
        if abs(value) < 999.5:
            return f"{three_digits(value)} {unit}"
        value /= 1000
    return f"{three_digits(value)} TB"


def with_unit(value: float, unit: str = "", digits: str = "") -> str:
    """Returns a figure with its unit.

    Args:
        value: seconds for `ms`, a share of 1 for `%`, bytes for `B`; else in the unit.
        digits: a format specification, in place of three digits.
    """
    if math.isnan(value):
        return "diverged"
    if unit == "B":
        return format_bytes(value)
    value = value * {"ms": 1000, "%": 100}.get(unit, 1)
    text = format(value, digits) if digits else three_digits(value)
    if unit == "%":
        return f"{text}%"
    return f"{text} {unit}" if unit else text
