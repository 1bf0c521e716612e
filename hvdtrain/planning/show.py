"""Tables on the terminal."""

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from hvdtrain.console import Console
from hvdtrain.report.table import rich_table, words_table

Row = dict[str, Any]
WIDTH = 140  # where the output is no terminal
MAP = "Ring or servers: the faster, and how many times as fast as the best of the other"


def _print(headings: Sequence[str], rows: Iterable[Sequence[Any]], title: str = "") -> None:
    """A table; zeros and None are empty cells."""
    table = words_table(title, headings, [[str(cell or "") for cell in row] for row in rows])
    Console(WIDTH).print(rich_table(table))


def seconds(value: float) -> str:
    return f"{value * 1e3:,.3g} ms" if value < 1 else f"{value:,.4g} s"


def rate(gbit: float) -> str:
    return f"{gbit:g} Gbit/s" if gbit >= 1 else f"{gbit * 1e3:g} Mbit/s"


def between(low: float, high: float) -> str:
    return f"{seconds(low)} to {seconds(high)}"


def predictions(rows: Sequence[Row]) -> None:
    """Predictions, a line each."""
    headings = "mode workers servers sends link step interval samples/s exposed staleness sent/worker".split()
    _print(headings, (
        (
            row["mode"], row["workers"], row["servers"], row["compression"], rate(row["bandwidth_gbit"]),
            seconds(row["step_s"]), between(row["step_s_low"], row["step_s_high"]), f"{row['samples_per_s']:,.4g}",
            seconds(row["exposed_comm_s"]), f"{row['staleness_mean']:.2f}" if row["servers"] else "",
            f"{row['bytes_sent_per_worker'] / 1e6:,.4g} MB",
        )
        for row in rows
    ))  # fmt: skip


def label(mode: str, servers: int, compression: str) -> str:
    return mode + (f" +{servers}" if servers else "") + ("" if compression == "none" else f" {compression}")


def winner(row: Row) -> str:
    """Who is faster at a place of the map, and how many times."""
    name = f"{label(row['winner'], row['servers'], row['compression'])} {row['times_as_fast']:.2f}×"
    return f"either ({name})" if row["either"] else name


def crossover(places: Sequence[Row]) -> None:
    """Who wins: a line for each number of workers, a column for each bandwidth."""
    if not places:
        return
    bandwidths = sorted({row["bandwidth_gbit"] for row in places})
    lines: dict[int, dict[float, str]] = {}
    for row in places:
        lines.setdefault(row["workers"], {})[row["bandwidth_gbit"]] = winner(row)
    rows = [(workers, *map(line.get, bandwidths)) for workers, line in sorted(lines.items())]
    _print(["workers", *map(rate, bandwidths)], rows, MAP)


def case(title: str, source: str, rows: Sequence[Row], fitted: dict[str, float]) -> None:
    """A published table beside its prediction."""
    console = Console(WIDTH)
    console.print(f"{title}\n{source}")
    _print(("mode", "workers", "servers", "published", "predicted", "interval", "error"), (
        (
            row["mode"], row["workers"], row["servers"], f"{row['samples_per_s']:,.5g}", f"{row['predicted']:,.4g}",
            f"{row['low']:,.4g} to {row['high']:,.4g}", "fitted" if row["calibrate"] else f"{row['error']:+.1%}",
        )
        for row in rows
    ))  # fmt: skip
    console.print("fitted: " + ", ".join(f"{name} {value:.3g}" for name, value in fitted.items()))
    if off := [abs(row["error"]) for row in rows if not row["calibrate"]]:
        console.print(f"{len(off)} blind cells: median error {statistics.median(off):.1%}, largest {max(off):.1%}")


def splits(rows: Sequence[Row], hosts: int, budget: float) -> None:
    """The best uses of some hosts, and the best ring among them."""
    rings, servers = ([row for row in rows if bool(row["servers"]) == has] for has in (False, True))
    headings = ("mode", "workers", "servers", "where", "sends", "step", "samples/s", "interval", "price/h")
    _print(headings, (
        (
            row["mode"], row["workers"], row["servers"], row["placement"], row["compression"], seconds(row["step_s"]),
            f"{row['samples_per_s']:,.4g}", f"{row['samples_per_s_low']:,.4g} to {row['samples_per_s_high']:,.4g}",
            f"{row['price']:,.4g}",
        )
        for row in [*rows[:8], *(row for row in rings[:1] if row not in rows[:8])]
    ), f"Best use of {hosts} hosts, or of {budget:,.4g} an hour")  # fmt: skip
    if rings and servers:
        best = rows[0]
        second, other = (rings[0], "the ring does") if best["servers"] else (servers[0], "servers do")
        ratio = best["samples_per_s"] / second["samples_per_s"]
        name = label(best["mode"], best["servers"], best["compression"])
        Console(WIDTH).print(f"{name}: {ratio:.2f} times what {other} with the same money.")
