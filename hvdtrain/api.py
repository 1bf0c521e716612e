"""hvdtrain from Python: what the commands do, with their options as arguments, and what they find
as values.

import hvdtrain as hv
result = hv.compare(modes=["allreduce", "ps-sync"], workers=2, steps=20, out="runs/first")
result.answer, result.table
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hvdtrain.base.errors import Failure, UsageError, unknown

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from hvdtrain.job.script.handle import ScriptJob
    from hvdtrain.reporting.content import Content
    from hvdtrain.reporting.explaining.explained import Explained
    from hvdtrain.runs.read import Run

Folder = str | os.PathLike[str]


@dataclass(frozen=True)
class Result:
    """What a comparison came to; in a notebook, its first screen."""

    content: "Content"

    def __repr__(self) -> str:
        return f"<{self.answer}: {self.because}>"

    @cached_property
    def verdict(self) -> dict[str, Any]:
        """All figures, as verdict.json has them (hvdtrain/reporting/README.md)."""
        return self.content.data

    @property
    def answer(self) -> str:
        """RING, SERVERS, EITHER, ONE MACHINE, ONE PROCESS or NOT YET KNOWN; of several comparisons,
        a word each behind the comparison's title.
        """
        return self._told("word")

    @property
    def because(self) -> str:
        """The figures that decide, in a sentence; of several comparisons, each one's behind its
        title.
        """
        return self._told("because")

    @property
    def runs(self) -> "list[Run]":
        """The finished runs."""
        return [run for _, run in self.content.runs]

    @property
    def table(self) -> Any:
        """A pandas.DataFrame with a row for each run: its name, and the columns of results.csv.

        Raises:
            Failure: pandas is missing, which hvdtrain does not need otherwise.
        """
        try:
            pandas = import_module("pandas")
        except ImportError:
            raise Failure(
                "a table is a data frame of pandas, which is missing here: `uv pip install pandas`"
            ) from None
        return pandas.DataFrame(
            [
                {"run": name} | row
                for (name, _), row in zip(self.content.runs, self.content.rows, strict=True)
            ]
        )

    def plot(self) -> "Axes":
        """Samples/s beside the ring, with intervals. UsageError where there is only one contender."""
        from hvdtrain.reporting import plots

        drawn, _ = plots.draw(self.content.comparisons)
        if not drawn or drawn[0].name != "ratios":
            raise UsageError("nothing is compared here: a plot of ratios needs two contenders")
        return drawn[0].figure.axes[0]

    def _repr_html_(self) -> str:
        from hvdtrain.reporting import page

        return page.rendered(self.content.first_screen())

    def _told(self, what: str) -> str:
        several = len(self.content.answered) > 1
        told = [(of.title, getattr(answer, what)) for of, answer in self.content.answered]
        return "; ".join(f"{title}: {text}" if several else text for title, text in told)


def compare(**options: Any) -> Result | None:
    """Train in several modes, and compare: `hvdtrain compare`, whose options are the arguments,
    with lists for commas.

    It prints what the command prints, and with dry_run returns nothing. It may be called from any
    thread; Ctrl-C is the main thread's.

    Raises:
        UsageError, Failure: with the command's sentence. Where some runs failed, `read` has the
            others.
    """
    from hvdtrain.comparing.command import compare as command

    content = _done(command, options)
    return Result(content) if content else None


def read(*runs: Folder) -> Result:
    """Compare finished runs, as `hvdtrain report` does.

    Args:
        runs: the folder of a comparison, of a job, or of such folders.

    Raises:
        UsageError: there is none, or they may not be compared: the field in which they differ is
            named.
    """
    from hvdtrain.comparing.comparison_state import conducted
    from hvdtrain.comparing.report_command import content_of
    from hvdtrain.runs.read import find_runs

    folders = [Path(folder) for folder in runs]
    return Result(content_of(find_runs(folders), conduct=conducted(folders)))


def explain(run: Folder) -> "Explained":
    """Who was waited for in a run, and where its steps' time went: `hvdtrain explain`; `.data` has
    the figures.
    """
    from hvdtrain.reporting.explaining.explained import explain_run

    return explain_run(Path(run))


def init(batch_size: int | None = None, early: bool = True) -> "ScriptJob":
    """Joins the job that this training script was started in: see job.script.handle.init.

    import hvdtrain as hv
    job = hv.init(batch_size=64)
    model, optimizer = job.prepare(model, torch.optim.AdamW(model.parameters()))
    """
    from hvdtrain.job.script.handle import init as begin

    return begin(batch_size, early)


def plan(calibration: Folder, **options: Any) -> dict[str, Any]:
    """Predict clusters that are not here: `hvdtrain plan predict`, whose options are the arguments.

    Returns:
        what its --json writes.

    Raises:
        UsageError: with the command's sentence.
    """
    from hvdtrain.planning.command import predict

    return _done(predict, options, [os.fspath(calibration)])


def _done(command: click.Command, options: Mapping[str, Any], arguments: Sequence[str] = ()) -> Any:
    """What the command returns."""
    try:
        words = [
            *(word for name, value in options.items() for word in _words(command, name, value)),
            "--",
            *arguments,
        ]
        return command.main(words, command.name, standalone_mode=False)
    except click.ClickException as error:
        raise UsageError(error.format_message()) from None
    except click.Abort:
        raise KeyboardInterrupt from None


def _words(command: click.Command, name: str, value: Any) -> list[str]:
    """An option as it is on the command line; none where it is None."""
    options = [param for param in command.params if isinstance(param, click.Option)]
    params = {
        word.lstrip("-").replace("-", "_"): param
        for param in options
        for word in param.opts
        if "--" in word
    }
    if name not in params:
        raise unknown("option", name, sorted(params))
    flag, *_ = sorted(params[name].opts, key=len, reverse=True)
    if params[name].is_flag:
        return [flag] if value else params[name].secondary_opts[:1]
    if value is None:
        return []
    if callable(value):
        raise UsageError(
            f"{name} is a {type(value).__name__}: name what makes it, as {name}='FILE.py:FUNCTION'"
        )
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    return [f"{flag}={','.join(map(str, value)) if is_list else value}"]
