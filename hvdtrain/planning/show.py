"""Tables on the terminal."""

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from hvdtrain.console import Console
from hvdtrain.modes import ONE_MACHINE
from hvdtrain.planning.best import LONE
from hvdtrain.planning.needs import MOST_GBIT
from hvdtrain.report.table import Table, rich_table, words_table

Row = dict[str, Any]
WIDTH = 140  # where the output is no terminal
MAP = "The fastest, and how probably"
LEAST = 0.1  # a less probable answer is not named
ANSWERS = {"p_ring": "RING", "p_servers": "SERVERS", "p_one_machine": "ONE MACHINE"}


def _print(headings: Sequence[str], rows: Iterable[Sequence[Any]], title: str = "") -> None:
    """A table; zeros and None are empty cells."""
    show(words_table(title, headings, [[str(cell or "") for cell in row] for row in rows]))


def show(table: Table) -> None:
    Console(WIDTH).print(rich_table(table))


def seconds(value: float) -> str:
    return f"{value * 1e3:,.3g} ms" if value < 1 else f"{value:,.4g} s"


def rate(gbit: float) -> str:
    return f"{gbit:g} Gbit/s" if gbit >= 1 else f"{gbit * 1e3:g} Mbit/s"


def between(low: float, high: float) -> str:
    return f"{seconds(low)} to {seconds(high)}"


def predictions(rows: Sequence[Row], title: str = "") -> None:
    """Predictions, a line each."""
    headings = (
        "mode batch workers servers where machines sends H link step interval samples/s exposed stale sent price/h"
    )
    columns = [
        (
            _mode(row), row["workers"] * row["batch_per_worker"], row["workers"], row["servers"], row["placement"],
            row["hosts"], row["compression"], row["local_steps"], row["bandwidth_gbit"] and rate(row["bandwidth_gbit"]),
            seconds(row["step_s"]), between(row["step_s_low"], row["step_s_high"]), f"{row['samples_per_s']:,.4g}",
            row["workers"] > 1 and seconds(row["exposed_comm_s"]),
            f"{row['staleness_mean']:.2f}" if row["servers"] else "",
            row["workers"] > 1 and f"{row['bytes_sent_per_worker'] / 1e6:,.4g} MB",
            row.get("price") and f"{row['price']:,.4g}",
        )
        for row in rows
    ]  # fmt: skip
    shown = [n for n in range(len(headings.split())) if len({line[n] for line in columns}) > 1]
    _print([headings.split()[n] for n in shown], [[line[n] for n in shown] for line in columns], title)


def _mode(row: Row) -> str:
    """The mode; of a row of which one worker does nearly all, that it does."""
    name = ONE_MACHINE if row["mode"] == "single" else str(row["mode"])
    is_lone = row["workers"] > 1 and row["busiest_share"] >= LONE
    return f"{name} (one worker does {row['busiest_share']:.0%})" if is_lone else name


def answer(place: Row) -> str:
    """`RING 97 %`; several where none is sure."""
    likely = sorted(((place[key], name) for key, name in ANSWERS.items() if place[key] >= LEAST), reverse=True)
    return ", ".join(f"{name} {p:.0%}" for p, name in likely)


def map_table(places: Sequence[Row]) -> Table:
    """A line for each number of workers and of local steps, a column for each bandwidth."""
    bandwidths = sorted({place["bandwidth_gbit"] for place in places})
    lines: dict[tuple[int, int, int], dict[float, str]] = {}
    for place in places:
        key = place["workers"], place["hosts"], place["local_steps"]
        lines.setdefault(key, {})[place["bandwidth_gbit"]] = answer(place)
    several = len({steps for _, _, steps in lines}) > 1
    headings = ["workers", "machines", *(["H"] if several else []), *map(rate, bandwidths)]
    rows = [[*key[: 2 + several], *map(line.get, bandwidths)] for key, line in sorted(lines.items())]
    return words_table(MAP, headings, [[str(cell or "") for cell in row] for row in rows])


def needs(rows: Sequence[Row]) -> None:
    """What bandwidth is needed, and what is in nine of ten cases."""
    _print(("mode", "workers", "servers", "H", "needs", "to be sure", "at most"), (
        (
            row["mode"], row["workers"], row["servers"], row["local_steps"],
            *(
                rate(float(f"{gbit:.2g}")) if gbit < MOST_GBIT else "none is enough"
                for gbit in (row["bandwidth_gbit"], row["sure_gbit"])
            ),
            f"{row['most']:.0%}",
        )
        for row in rows
    ), f"The bandwidth for {rows[0]['efficiency']:.0%} of what workers do that never wait")  # fmt: skip


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
