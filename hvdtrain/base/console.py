"""The console, which shows text from anybody's folder safely, and progress bars of long work."""

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

from hvdtrain.base.formatting import printable


class Console(rich.console.Console):
    """Rich's console without markup, which makes text `printable`.

    Args:
        elsewhere: the width if the output is no terminal.
    """

    def __init__(
        self, elsewhere: int | None = None, file: TextIO | None = None, stderr=False, **options: Any
    ) -> None:
        file = file or (sys.stderr if stderr else sys.stdout)
        options = {"width": None if file.isatty() else elsewhere} | options
        # Rich's control codes have to reach the terminal unescaped.
        file = getattr(file, "stream", file)
        super().__init__(file=file, markup=False, emoji=False, highlight=False, **options)

    def render(self, renderable: Any, options: Any = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))


def bar(console: Console, *columns: ProgressColumn) -> Progress:
    """Returns a progress bar in the look of hvdtrain.

    Args:
        columns: how the amount done is shown; by default as a number.
    """
    amount = columns or (MofNCompleteColumn(),)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        *amount,
        TimeRemainingColumn(),
        console=console,
    )


@contextmanager
def count_bar(what: str, unit: str = "images") -> Iterator[Callable[[int, int], None]]:
    """Shows progress: on a terminal as a bar with the time left, elsewhere as a line each quarter.

    Args:
        unit: the unit of the amounts. Of `bytes` the bar shows the rate too.

    Yields:
        A function of the amount done and the total.
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
