"""What a Python program calls: the commands, with their options as arguments, and their results
as values. API.md is made from this file.

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

FilePath = str | os.PathLike[str]


@dataclass(frozen=True)
class Result:
    """The result of a comparison. A notebook displays it as the first screen of the report."""

    content: "Content"

    def __repr__(self) -> str:
        return f"<{self.answer}: {self.because}>"

    @cached_property
    def verdict(self) -> dict[str, Any]:
        """The content of verdict.json: reporting/README.md explains each field."""
        return self.content.data

    @property
    def answer(self) -> str:
        """RING, SERVERS, EITHER, ONE MACHINE, ONE PROCESS or NOT YET KNOWN.

        If the runs are several comparisons, it has the answer of each, after the comparison's
        title.
        """
        return self._told("word")

    @property
    def because(self) -> str:
        """The sentence with the figures that decide.

        If the runs are several comparisons, it has a sentence for each, after the comparison's
        title.
        """
        return self._told("because")

    @property
    def runs(self) -> "list[Run]":
        """The finished runs."""
        return [run for _, run in self.content.runs]

    @property
    def table(self) -> Any:
        """A pandas.DataFrame with a row for each run.

        Its columns are `run`, the run's name, and the columns of results.csv.

        Raises:
            Failure: pandas is not installed. hvdtrain does not install it.
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
        """Draws the samples/s of each contender relative to the fastest ring, with confidence intervals.

        Returns:
            The plot's axes, of matplotlib.

        Raises:
            UsageError: there is only one contender.
        """
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
    """Trains in several modes and compares them, as `hvdtrain compare` does.

    The command's options are the arguments: `--batch-size 64` is `batch_size=64`. A list stands for
    values with commas. The function prints what the command prints. It may be called from any
    thread. Ctrl-C interrupts it in the main thread only.

    Returns:
        The comparison; None with `dry_run=True`.

    Raises:
        UsageError: an option or its value is wrong.
        Failure: a run failed. `read` returns the runs that finished.
    """
    from hvdtrain.comparing.command import compare as command

    content = _done(command, options)
    return Result(content) if content else None


def read(*runs: FilePath) -> Result:
    """Compares finished runs, as `hvdtrain report` does.

    Args:
        runs: folders of runs or of comparisons, or folders that contain such folders.

    Returns:
        The comparison.

    Raises:
        UsageError: there are no runs, or they may not be compared. The sentence names the field
            in which they differ.
    """
    from hvdtrain.comparing.comparison_state import conducted
    from hvdtrain.comparing.report_command import content_of
    from hvdtrain.runs.read import find_runs

    folders = [Path(folder) for folder in runs]
    return Result(content_of(find_runs(folders), conduct=conducted(folders)))


def explain(run: FilePath) -> "Explained":
    """Returns where the time of a run's steps went, and which worker the others waited for.

    `hvdtrain explain` prints the same.

    Args:
        run: a run folder.

    Raises:
        UsageError: the folder is no run folder, or its run recorded too few steps.
    """
    from hvdtrain.reporting.explaining.explained import explain_run

    return explain_run(Path(run))


def init(batch_size: int | None = None, early: bool = True) -> "ScriptJob":
    """Joins the job that this training script was started in, and returns it.

    Blocks until the other workers have called `init` too.

    import hvdtrain as hv
    job = hv.init(batch_size=64)
    model, optimizer = job.prepare(model, torch.optim.AdamW(model.parameters()))

    Args:
        batch_size: the global batch: the samples of one optimizer step of all workers. Samples/s
            are computed from it. With None the samples that `sampler` gives out are counted.
        early: whether to send gradients while backward computes the rest. This begins with the
            second step, if the first step has shown that the script allows it.

    Raises:
        Failure: ranks were started without a command of hvdtrain, or `init` was called twice.
    """
    from hvdtrain.job.script.handle import init as begin

    return begin(batch_size, early)


def plan(calibration: FilePath, **options: Any) -> dict[str, Any]:
    """Predicts the speed of a cluster, as `hvdtrain plan predict` does.

    The command's options are the arguments.

    Args:
        calibration: the file that `hvdtrain plan calibrate` wrote.

    Returns:
        The content of the file that `--json` writes.

    Raises:
        UsageError: the calibration, an option or its value is wrong.
    """
    from hvdtrain.planning.command import predict

    return _done(predict, options, [os.fspath(calibration)])


def _done(command: click.Command, options: Mapping[str, Any], arguments: Sequence[str] = ()) -> Any:
    """Runs the command, and returns what it returns."""
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
    """Returns an option as words of a command line; no words if its value is None."""
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
