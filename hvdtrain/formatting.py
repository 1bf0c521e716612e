"""Numbers as text for people: the same on a terminal, in Markdown, in HTML and in plots."""

import math
import re
from collections.abc import Iterable
from typing import Any, TextIO, cast

# Of C0 and C1 but for newline and tab, marks that turn the direction of text, line separators, halves of pairs.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def three_digits(value: float) -> str:
    """About three digits, thousands set apart: 0.0312, 1.20, 84.3, 843, 12,345; integers in full."""
    return f"{value:,.0f}" if abs(value) >= 99.95 or isinstance(value, int) else f"{value:#.3g}"


def printable(text: str) -> str:
    """Text for a terminal, which would obey control characters: they become escape sequences."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class _Shown:
    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        return self.stream.write(printable(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def shown(stream: TextIO) -> TextIO:
    """The same, which makes what is printed `printable`: it may come from anybody's folder. Bytes pass unchanged."""
    return cast(TextIO, _Shown(stream))


def some_of(names: Iterable[str], number: int = 5) -> str:
    """So many of the names, and how many more there are."""
    listed = [printable(name) for name in names]
    return ", ".join(listed[:number]) + (f" and {len(listed) - number:,} more" if len(listed) > number else "")


def with_noun(number: float, noun: str) -> str:
    """`1 worker`, `2 workers`, `0.5 cores`."""
    text = str(number) if isinstance(number, int) else f"{number:g}"
    return f"{text} {noun}" + ("" if number == 1 else "s")


def in_minutes(seconds: float) -> str:
    """`12 min`, `1.5 h`."""
    return f"{max(1, round(seconds / 60)):,} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def format_bytes(value: float) -> str:
    """Bytes in the decimal unit that fits: `53.2 MB`."""
    if value == 0:
        return "0 B"
    for unit in ("B", "kB", "MB", "GB"):
        if abs(value) < 999.5:
            return f"{three_digits(value)} {unit}"
        value /= 1000
    return f"{three_digits(value)} TB"


def with_unit(value: float, unit: str = "", digits: str = "") -> str:
    """A figure in its unit: `ms` is given in seconds, `%` as a share, `B` in bytes.

    Args:
        digits: a format specification, in place of three digits.
    """
    if math.isnan(value):
        return "diverged"
    if unit == "B":
        return format_bytes(value)
    value = value * {"ms": 1000, "%": 100}.get(unit, 1)
    text = format(value, digits) if digits else three_digits(value)
    return text + ("%" if unit == "%" else f" {unit}" if unit else "")
