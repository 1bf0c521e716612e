"""The one console: rich's, which shows text from anybody's folder as it is; and the progress bars of long work."""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

import rich.console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.segment import Segment

from hvdtrain.formatting import printable


class Console(rich.console.Console):
    """Reads no markup in text, and makes it `printable`; `elsewhere` is its width where the output is no terminal."""

    def __init__(self, elsewhere: int | None = None, file: TextIO | None = None, stderr=False, **options: Any) -> None:
        file = file or (sys.stderr if stderr else sys.stdout)
        options = {"width": None if file.isatty() else elsewhere} | options
        file = getattr(file, "stream", file)  # what rich has a terminal do is to reach it
        super().__init__(file=file, markup=False, emoji=False, highlight=False, **options)

    def render(self, renderable: Any, options: Any = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))


def bar(console: Console, *columns: ProgressColumn) -> Progress:
    """The one look of hvdtrain's progress bars; columns: what is shown of how much is done, by default its number."""
    done = columns or (MofNCompleteColumn(),)
    return Progress(TextColumn("{task.description}"), BarColumn(), *done, TimeRemainingColumn(), console=console)


@contextmanager
def count_bar(what: str, unit: str = "images") -> Iterator[Callable[[int, int], None]]:
    """(done, total), with the time left, and of `bytes` the rate: on a terminal a bar, elsewhere a line for each
    quarter.
    """
    columns = (DownloadColumn(), TransferSpeedColumn()) if unit == "bytes" else ()
    console = Console(stderr=True, soft_wrap=True)
    if console.is_terminal:
        with bar(console, *columns) as progress:
            task = progress.add_task(what, total=None)
            yield lambda now, total: progress.update(task, completed=now, total=total)
        return
    quarters = 0

    def line(now: int, total: int) -> None:
        nonlocal quarters
        if 4 * now // total > quarters:
            quarters = 4 * now // total
            console.print(f"{what}: {now:,} of {total:,} {unit}")

    yield line
