"""Figures as a person reads them, in a terminal, in Markdown and in HTML."""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from hvdtrain.report.tables import Group, Spread

if TYPE_CHECKING:
    from rich.table import Table

# The columns of the summary with their headings. Figures that are equal by construction are told once, above
# it.
HEADINGS = {
    "samples_per_s": "samples/s",
    "scaling_efficiency": "scaling efficiency",
    "val_accuracy": "validation accuracy",
    "time_to_target_s": "time to target",
    "exposed_comm_fraction": "comm. wait",
    "bytes_sent_per_step": "sent per step",
    "staleness_mean": "mean staleness",
    "peak_rss_mb": "memory",
}
# And of figures that only some tables have.
MORE_HEADINGS = {
    "global_batch": "global batch",
    "lr": "learning rate",
    "steps_per_epoch": "steps per epoch",
    "epochs": "epochs",
    "wall_s": "training time",
    "epoch_s": "time of an epoch",
    "worker_samples_per_s": "samples/s of a worker",
    "val_loss": "validation loss",
    "best_val_loss": "best validation loss",
    "test_loss": "test loss",
    "test_accuracy": "test accuracy (top-1)",
    "train_loss": "training loss",
    "train_accuracy": "training accuracy",
}


def digits(value: float) -> str:
    """About three digits, thousands set apart: 0.0312, 1.20, 84.3, 843, 12,345; whole numbers in full."""
    return f"{value:,.0f}" if abs(value) >= 99.95 or isinstance(value, int) else f"{value:#.3g}"


def count(number: int, noun: str) -> str:
    """`1 worker`, `2 workers`."""
    return f"{number} {noun}" + ("" if number == 1 else "s")


def size(value: float) -> str:
    """Bytes in the unit that fits, of a thousand: `53.2 MB`."""
    if value == 0:
        return "0 B"
    for unit in ("B", "kB", "MB", "GB"):
        if abs(value) < 999.5:
            return f"{digits(value)} {unit}"
        value /= 1000
    return f"{digits(value)} TB"


def _seconds(value: float) -> str:
    return f"{digits(value)} s"


_FORMATS: dict[str, Callable[[float], str]] = {
    "global_batch": "{:,.0f}".format,
    "steps_per_epoch": "{:,.0f}".format,
    "lr": "{:.3g}".format,
    "epochs": lambda value: f"{value:.1f}".removesuffix(".0"),
    "scaling_efficiency": "{:.2f}".format,
    "val_accuracy": "{:.3f}".format,
    "test_accuracy": "{:.3f}".format,
    "wall_s": _seconds,
    "epoch_s": _seconds,
    "time_to_target_s": _seconds,
    "exposed_comm_fraction": "{:.0%}".format,
    "bytes_sent_per_step": size,
    "staleness_mean": "{:.2f}".format,
    "staleness_max": "{:g}".format,
    "peak_rss_mb": lambda value: f"{digits(value)} MB",
}


def figure(name: str, value: float | None) -> str:
    """One figure with its unit; empty for None."""
    if value is None:
        return ""
    return "diverged" if math.isnan(value) else _FORMATS.get(name, digits)(value)


def cell(group: Group, name: str) -> tuple[str, str]:
    """The median with its unit, and what to know about it: range, how many runs have it; or empty texts."""
    found = group[name]
    if not found:
        return "", ""
    notes = [spread_text(name, found)] if found.low != found.high else []
    if found.n < group.n:
        notes.append(f"{found.n} of {group.n} runs")
    if name == "staleness_mean" and (largest := group["staleness_max"]):
        notes.append(f"max. {figure('staleness_max', largest.high)}")
    return figure(name, found.median), ", ".join(filter(None, notes))


def spread_text(name: str, found: Spread, shown: Callable[[str, float], str] = figure) -> str:
    """`7.6–11.2`, its unit left to the median where there is one; empty where the two look the same."""
    low, high = shown(name, found.low), shown(name, found.high)
    if low == high:
        return ""
    (low_number, _, low_unit), (high_number, _, high_unit) = low.partition(" "), high.partition(" ")
    return f"{low_number}–{high_number}" if low_unit == high_unit else f"{low}–{high}"


def summary_columns(groups: Sequence[Group]) -> dict[str, str]:
    """HEADINGS of the figures that at least one group has."""
    return {name: heading for name, heading in HEADINGS.items() if any(group[name] for group in groups)}


# For a terminal: heading, figure, whether the range over repeats is shown under the median. 100 columns hold
# no more.
_TERMINAL = (
    ("samples\n/s", "samples_per_s", True),
    ("scaling\neffic.", "scaling_efficiency", True),
    ("validation\naccuracy", "val_accuracy", True),
    ("time to\ntarget", "time_to_target_s", True),
    ("comm.\nwait", "exposed_comm_fraction", False),
    ("sent per\nstep", "bytes_sent_per_step", False),
    ("stale-\nness", "staleness_mean", False),
    ("\nmax.", "staleness_max", False),
    ("\nmemory", "peak_rss_mb", False),
)


def summary_table(groups: Sequence[Group]) -> "Table":
    """The summary for a terminal of 100 columns: medians, under them the range over repeats."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, padding=0, show_edge=False, caption_justify="left")
    table.add_column("\nrun", no_wrap=True)
    table.add_column("\nn", justify="right", overflow="fold")
    columns = [column for column in _TERMINAL if any(group[column[1]] for group in groups)]
    for heading, _, _ in columns:
        table.add_column(heading, justify="right", overflow="fold")
    for group in groups:
        cells = []
        for _, name, ranged in columns:
            main, detail = cell(group, name)
            cells.append(Text(main).append(f"\n{detail}", style="dim") if ranged and detail else Text(main))
        table.add_row(Text(group.kind.label), str(group.n), *cells)
    legend = ["n runs each" + (", median and range" if any(group.n > 1 for group in groups) else "")]
    if any(group.kind.servers for group in groups):
        legend.append("×2+1 is 2 workers and 1 server")
    table.caption = "; ".join(legend)
    return table
