"""Numbers as text for people, with their units and headings: the same on a terminal, in Markdown and in HTML."""

import math
from collections.abc import Callable, Sequence

from hvdtrain.report.results import Group, Spread

# The columns of the summary with their headings. What is equal in all runs stands once, above the summary.
HEADINGS = {
    "samples_per_s": "samples/s",
    "process_samples_per_s": "samples/s of a process",
    "cpu_s_per_1000_samples": "processor time of 1,000 samples",
    "scaling_efficiency": "scaling efficiency",
    "val_accuracy": "validation accuracy",
    "time_to_target_s": "time to target",
    "exposed_comm_fraction": "comm. wait",
    "bytes_sent_per_step": "sent per step",
    "staleness_mean": "mean staleness",
    "peak_rss_mb": "memory",
}
# Headings of what only some tables have.
MORE_HEADINGS = {
    "global_batch": "global batch",
    "lr": "learning rate",
    "steps_per_epoch": "steps per epoch",
    "epochs": "epochs",
    "wall_s": "training time",
    "epoch_s": "time of an epoch",
    "step_p50_s": "median step",
    "step_p95_s": "step, 95 %",
    "step_p99_s": "step, 99 %",
    "worker_samples_per_s": "samples/s of a worker",
    "val_loss": "validation loss",
    "best_val_loss": "best validation loss",
    "test_loss": "test loss",
    "test_accuracy": "test accuracy (top-1)",
    "train_loss": "training loss",
    "train_accuracy": "training accuracy",
}

# How repeats of a figure are summarised; see results.spread.
MEANS = "means, of speeds and times the geometric"


def three_digits(value: float) -> str:
    """About three digits, thousands set apart: 0.0312, 1.20, 84.3, 843, 12,345; integers in full."""
    return f"{value:,.0f}" if abs(value) >= 99.95 or isinstance(value, int) else f"{value:#.3g}"


def with_noun(number: int, noun: str) -> str:
    """`1 worker`, `2 workers`."""
    return f"{number} {noun}" + ("" if number == 1 else "s")


def format_bytes(value: float) -> str:
    """Bytes in the decimal unit that fits: `53.2 MB`."""
    if value == 0:
        return "0 B"
    for unit in ("B", "kB", "MB", "GB"):
        if abs(value) < 999.5:
            return f"{three_digits(value)} {unit}"
        value /= 1000
    return f"{three_digits(value)} TB"


def _seconds(value: float) -> str:
    return f"{three_digits(value)} s"


def _milliseconds(value: float) -> str:
    return f"{three_digits(1000 * value)} ms"


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
    "cpu_s_per_1000_samples": _seconds,
    "exposed_comm_fraction": "{:.0%}".format,
    "step_p50_s": _milliseconds,
    "step_p95_s": _milliseconds,
    "step_p99_s": _milliseconds,
    "bytes_sent_per_step": format_bytes,
    "staleness_mean": "{:.2f}".format,
    "staleness_max": "{:g}".format,
    "peak_rss_mb": lambda value: f"{three_digits(value)} MB",
}


def format_figure(name: str, value: float | None) -> str:
    """The figure of this name with its unit; empty for None."""
    if value is None:
        return ""
    return "diverged" if math.isnan(value) else _FORMATS.get(name, three_digits)(value)


def format_cell(group: Group, name: str) -> tuple[str, str]:
    """A figure's mean with its unit, and details: the range, and how many runs have it. Empty texts for none."""
    spread = group[name]
    if not spread:
        return "", ""
    details = [format_range(name, spread)] if spread.low != spread.high else []
    if spread.n < group.n:
        details.append(f"{spread.n} of {group.n} runs")
    if name == "staleness_mean" and (largest := group["staleness_max"]):
        details.append(f"max. {format_figure('staleness_max', largest.high)}")
    return format_figure(name, spread.mean), ", ".join(filter(None, details))


def format_range(name: str, spread: Spread, format_value: Callable[[str, float], str] = format_figure) -> str:
    """`7.6–11.2`, without a unit that both have, as the mean has it too; empty where both ends read the same."""
    low, high = format_value(name, spread.low), format_value(name, spread.high)
    if low == high:
        return ""
    (low_number, _, low_unit), (high_number, _, high_unit) = low.partition(" "), high.partition(" ")
    return f"{low_number}–{high_number}" if low_unit == high_unit else f"{low}–{high}"


def summary_columns(groups: Sequence[Group]) -> dict[str, str]:
    """HEADINGS of the figures that at least one group has."""
    return {name: heading for name, heading in HEADINGS.items() if any(group[name] for group in groups)}
