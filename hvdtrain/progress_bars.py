"""Progress bars of long work: on a terminal a bar, elsewhere a line for each quarter."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.text import Text


def bar(console: Console) -> Progress:
    """The one look of hvdtrain's progress bars."""
    return Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), console=console
    )  # fmt: skip


@contextmanager
def bytes_bar(what: str, total: int, done: int) -> Iterator[Callable[[int], None]]:
    """Bytes of so many, with rate and time left: on a terminal a bar, elsewhere a line for each quarter."""
    console = Console(stderr=True)
    if console.is_terminal:
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
            task = progress.add_task(what, total=total, completed=done)
            yield lambda now: progress.update(task, completed=now)
        return
    quarters = 4 * done // total

    def line(now: int) -> None:
        nonlocal quarters
        if 4 * now // total > quarters:
            quarters = 4 * now // total
            console.print(f"{what}: {now:,} of {total:,} bytes", highlight=False, soft_wrap=True)

    yield line


@contextmanager
def count_bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """(done, total) of images, with rate and time left: on a terminal a bar, elsewhere a line for each quarter."""
    console = Console(stderr=True)
    if console.is_terminal:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), _Rate(), TimeRemainingColumn())
        with Progress(*columns, console=console) as progress:
            task = progress.add_task(what, total=None)
            yield lambda done, total: progress.update(task, completed=done, total=total)
        return

    def line(done: int, total: int) -> None:
        if done * 4 // total > (done - 1) * 4 // total:
            console.print(f"{what}: {done:,} of {total:,} images", highlight=False, soft_wrap=True)

    yield line


class _Rate(ProgressColumn):
    """Images a second."""

    def render(self, task: Task) -> Text:
        return Text(f"{task.finished_speed or task.speed or 0:,.0f}/s")
