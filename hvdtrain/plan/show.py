"""Tables on the terminal."""

import statistics
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.table import Table

from hvdtrain.console import Console
from hvdtrain.formatting import with_noun

Row = dict[str, Any]
WIDTH = 140  # where the output is no terminal


def _table(headings: Sequence[str], left: int = 1) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False)
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="left" if number < left else "right", no_wrap=True)
    return table


def seconds(value: float) -> str:
    return f"{value * 1e3:,.3g} ms" if value < 1 else f"{value:,.4g} s"


def rate(gbit: float) -> str:
    return f"{gbit:g} Gbit/s" if gbit >= 1 else f"{gbit * 1e3:g} Mbit/s"


def table(rows: Sequence[Row]) -> None:
    """Predictions, a line each."""
    made = _table("mode workers servers sends link step interval samples/s exposed staleness sent/worker".split())
    for row in rows:
        made.add_row(
            row["mode"], str(row["workers"]), str(row["servers"] or ""), row["compression"],
            rate(row["bandwidth_gbit"]), seconds(row["step_s"]),
            f"{seconds(row['step_s_low'])} to {seconds(row['step_s_high'])}",
            f"{row['samples_per_s']:,.4g}", seconds(row["exposed_comm_s"]),
            f"{row['staleness_mean']:.2f}" if row["servers"] else "", f"{row['bytes_sent_per_worker'] / 1e6:,.4g} MB",
        )  # fmt: skip
    Console(WIDTH).print(made)


def label(mode: str, servers: int, compression: str) -> str:
    return mode + (f" +{servers}" if servers else "") + ("" if compression == "none" else f" {compression}")


def crossover(found: Sequence[Row]) -> None:
    """Who wins: a line for each number of workers, a column for each bandwidth."""
    if not found:
        return
    bandwidths = sorted({row["bandwidth_gbit"] for row in found})
    made = _table(["workers", *map(rate, bandwidths)], left=0)
    at = {(row["workers"], row["bandwidth_gbit"]): row for row in found}
    for workers in sorted({row["workers"] for row in found}):
        cells = []
        for bandwidth in bandwidths:
            if row := at.get((workers, bandwidth)):
                name = label(row["winner"], row["servers"], row["compression"])
                gap = f"{row['times_as_fast']:.2f}×"
                cells.append(f"either ({name} {gap})" if row["either"] else f"{name} {gap}")
            else:
                cells.append("")
        made.add_row(str(workers), *cells)
    made.title = "Ring or servers: the faster, and how many times as fast as the best of the other"
    Console(WIDTH).print(made)


def case(title: str, source: str, rows: Sequence[Row], fitted: dict[str, float]) -> None:
    """A published table beside its prediction."""
    console = Console(WIDTH)
    console.print(title)
    console.print(source)
    made = _table(("mode", "workers", "servers", "published", "predicted", "interval", "error"))
    for row in rows:
        error = "fitted" if row.get("calibrate") else f"{row['error']:+.1%}"
        made.add_row(
            row["mode"], str(row["workers"]), str(row.get("servers") or ""), f"{row['samples_per_s']:,.5g}",
            f"{row['predicted']:,.4g}", f"{row['low']:,.4g} to {row['high']:,.4g}", error,
        )  # fmt: skip
    console.print(made)
    console.print("fitted: " + ", ".join(f"{name} {value:.3g}" for name, value in fitted.items()))
    if off := sorted(abs(row["error"]) for row in rows if not row.get("calibrate")):
        console.print(f"{len(off)} blind cells: median error {statistics.median(off):.1%}, largest {off[-1]:.1%}")


def check(rows: Sequence[Row], errors: dict[str, tuple[float, float, int]]) -> None:
    """Runs beside their predictions."""
    made = _table(("run", "mode", "workers", "servers", "measured", "predicted", "interval", "error"), left=2)
    for row in rows:
        made.add_row(
            row["run"][-40:], row["mode"], str(row["workers"]), str(row["servers"] or ""),
            seconds(row["measured_step_s"]), seconds(row["predicted_step_s"]),
            f"{seconds(row['low'])} to {seconds(row['high'])}", f"{row['error']:+.1%}",
        )  # fmt: skip
    console = Console(WIDTH)
    console.print(made)
    for mode, (middle, largest, runs) in errors.items():
        console.print(f"{mode}: median error {middle:.1%}, largest {largest:.1%}, of {with_noun(runs, 'run')}")


def splits(rows: Sequence[Row], hosts: int, budget: float) -> None:
    """The best uses of some hosts, and the best ring among them."""
    made = _table(("mode", "workers", "servers", "where", "sends", "step", "samples/s", "interval", "price/h"))
    rings = [row for row in rows if not row["servers"]]
    for row in [*rows[:8], *(row for row in rings[:1] if row not in rows[:8])]:
        made.add_row(
            row["mode"], str(row["workers"]), str(row["servers"] or ""), row["placement"] or "", row["compression"],
            seconds(row["step_s"]), f"{row['samples_per_s']:,.4g}",
            f"{row['samples_per_s_low']:,.4g} to {row['samples_per_s_high']:,.4g}", f"{row['price']:,.4g}",
        )  # fmt: skip
    console = Console(WIDTH)
    console.print(f"Best use of {hosts} hosts, or of {budget:,.4g} an hour:")
    console.print(made)
    servers = [row for row in rows if row["servers"]]
    if rings and servers:
        ratio = rows[0]["samples_per_s"] / (servers if rows[0] is rings[0] else rings)[0]["samples_per_s"]
        other = "servers do" if rows[0] is rings[0] else "the ring does"
        name = label(rows[0]["mode"], rows[0]["servers"], rows[0]["compression"])
        console.print(f"{name}: {ratio:.2f} times what {other} with the same money.")
