"""The one console: rich's, which shows text from anybody's folder as it is."""

import sys
from collections.abc import Iterable
from typing import Any, TextIO

import rich.console
from rich.segment import Segment

from hvdtrain.formatting import printable


class Console(rich.console.Console):
    """Reads no markup in text, and makes it `printable`; `elsewhere` is its width where the output is no terminal."""

    def __init__(self, elsewhere: int | None = None, file: TextIO | None = None, stderr=False, **options: Any) -> None:
        file = file or (sys.stderr if stderr else sys.stdout)
        options.setdefault("width", None if file.isatty() else elsewhere)
        file = getattr(file, "stream", file)  # what rich has a terminal do is to reach it
        super().__init__(file=file, markup=False, emoji=False, highlight=False, **options)

    def render(self, renderable: Any, options: Any = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))
