"""Tables on the terminal, and plots."""

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from hvdtrain import plot_style
from hvdtrain.config.run_config import WIRES
from hvdtrain.console import Console
from hvdtrain.modes import ONE_MACHINE
from hvdtrain.planning.predict import MOST_GBIT, Row, is_lone
from hvdtrain.report.table import Table, rich_table, words_table

WIDTH = 160  # where the output is no terminal
MAP = "The fastest, and how probably"
LEAST, SURE = 0.1, 0.8  # a less probable answer is not named; as probable as that, it has its colour
ANSWERS = {"p_ring": "RING", "p_servers": "SERVERS", "p_one_machine": "ONE MACHINE"}


def table_of(title: str, headings: Sequence[str], rows: Iterable[Sequence[Any]]) -> Table:
    """Zeros and None are empty cells."""
    return words_table(title, headings, [[str(cell or "") for cell in row] for row in rows])


def show(table: Table) -> None:
    Console(WIDTH).print(rich_table(table))


def seconds(value: float) -> str:
    return f"{value * 1e3:,.3g} ms" if value < 1 else f"{value:,.4g} s"


def rate(gbit: float) -> str:
    return f"{gbit:g} Gbit/s" if gbit >= 1 else f"{gbit * 1e3:g} Mbit/s"


def predictions(rows: Sequence[Row], title: str = "") -> None:
    """A line each, of what is not the same in all lines."""
    lines = []
    for row in rows:
        name = ONE_MACHINE if row["mode"] == "single" else row["mode"]
        if is_lone(row["workers"], row["busiest_share"]):
            name += f" (one worker does {row['busiest_share']:.0%})"
        is_alone = row["workers"] == 1
        lines.append({
            "mode": name, "batch": row["workers"] * row["batch_per_worker"], "workers": row["workers"],
            "servers": row["servers"], "where": row["placement"], "machines": row["hosts"],
            "wire": row["wire"] if row["wire"] != WIRES[0] else "", "sends": row["compression"],
            "H": row["local_steps"], "link": row["bandwidth_gbit"] and rate(row["bandwidth_gbit"]),
            "step": seconds(row["step_s"]),
            "interval": f"{seconds(row['step_s_low'])} to {seconds(row['step_s_high'])}",
            "samples/s": f"{row['samples_per_s']:,.4g}", "exposed": "" if is_alone else seconds(row["exposed_comm_s"]),
            "stale": f"{row['staleness_mean']:.2f}" if row["servers"] else "",
            "sent": "" if is_alone else f"{row['bytes_sent_per_worker'] / 1e6:,.4g} MB",
            "price/h": f"{row['price']:,.4g}" if "price" in row else "",
            "price/million": f"{row['price_per_million']:,.4g}" if "price" in row else "",
        })  # fmt: skip
    differing = [heading for heading in lines[0] if len({line[heading] for line in lines}) > 1]
    show(table_of(title, differing, [[line[heading] for heading in differing] for line in lines]))


def answer(place: Row) -> str:
    """`RING 97 %`; several where none is sure."""
    likely = sorted(((place[key], name) for key, name in ANSWERS.items() if place[key] >= LEAST), reverse=True)
    return ", ".join(f"{name} {p:.0%}" for p, name in likely)


def map_table(places: Sequence[Row], title: str = MAP) -> Table:
    """A line for each number of workers and of local steps, a column for each bandwidth."""
    bandwidths = sorted({place["bandwidth_gbit"] for place in places})
    lines: dict[tuple[int, int, int], dict[float, str]] = {}
    for place in places:
        key = place["workers"], place["hosts"], place["local_steps"]
        lines.setdefault(key, {})[place["bandwidth_gbit"]] = answer(place)
    several = len({steps for _, _, steps in lines}) > 1
    headings = ["workers", "machines", *(["H"] if several else []), *map(rate, bandwidths)]
    rows = [[*key[: 2 + several], *map(line.get, bandwidths)] for key, line in sorted(lines.items())]
    return table_of(title, headings, rows)


def needs(rows: Sequence[Row]) -> None:
    """What bandwidth is needed, and what is in nine of ten cases."""
    lines = []
    for row in rows:
        enough, sure = (
            rate(float(f"{row[key]:.2g}")) if row[key] < MOST_GBIT else "none is enough"
            for key in ("bandwidth_gbit", "sure_gbit")
        )
        size = row["mode"], row["workers"], row["servers"], row["local_steps"]
        lines.append([*size, enough, sure, f"{row['most']:.0%}"])
    title = f"The bandwidth for {rows[0]['efficiency']:.0%} of what workers do that never wait"
    show(table_of(title, ["mode", "workers", "servers", "H", "needs", "to be sure", "at most"], lines))


def case(title: str, source: str, rows: Sequence[Row], fitted: dict[str, float]) -> None:
    """A published table beside its prediction."""
    console = Console(WIDTH)
    console.print(f"{title}\n{source}")
    lines = [
        [
            row["mode"], row["workers"], row["servers"], f"{row['samples_per_s']:,.5g}", f"{row['predicted']:,.4g}",
            f"{row['low']:,.4g} to {row['high']:,.4g}", "fitted" if row["calibrate"] else f"{row['error']:+.1%}",
        ]
        for row in rows
    ]  # fmt: skip
    show(table_of("", ["mode", "workers", "servers", "published", "predicted", "interval", "error"], lines))
    console.print("fitted: " + ", ".join(f"{name} {value:.3g}" for name, value in fitted.items()))
    if off := [abs(row["error"]) for row in rows if not row["calibrate"]]:
        console.print(f"{len(off)} blind cells: median error {statistics.median(off):.1%}, largest {max(off):.1%}")


def plot(path: Path, rows: Sequence[Row], map_: Sequence[Row]) -> None:
    """An SVG: for each bandwidth samples/s over workers, the best number of servers of each mode; below, the map."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    rows = [row for row in rows if row["bandwidth_gbit"]]  # one machine has no links
    names = [rate(bandwidth) for bandwidth in sorted({row["bandwidth_gbit"] for row in rows})]
    heights = [3.2, *([0.9 + 0.3 * len({row["workers"] for row in map_})] if map_ else [])]
    with rc_context(plot_style.RC):
        figure = Figure(figsize=(plot_style.WIDTH, sum(heights)), layout="constrained")
        lines: list[Any] = [names, ["map"] * len(names)]
        panels: dict[str, Any] = figure.subplot_mosaic(lines[: len(heights)], height_ratios=heights)
        for name in names:
            panels[name].sharey(panels[names[0]])
            _draw_throughput(panels[name], [row for row in rows if rate(row["bandwidth_gbit"]) == name])
            panels[name].set(title=name, xlabel="workers")
            panels[name].tick_params(labelleft=name == names[0])
        panels[names[0]].set_ylabel("samples/s")
        plot_style.legend(figure, [panels[name] for name in names])
        if map_:
            _draw_map(panels["map"], map_)
        path.write_text(plot_style.svg(figure))


def _draw_throughput(panel: Any, rows: Sequence[Row]) -> None:
    for mode in dict.fromkeys(row["mode"] for row in rows):
        slowest_first = sorted((row for row in rows if row["mode"] == mode), key=lambda row: -row["step_s"])
        best = {row["workers"]: row for row in slowest_first}
        workers = sorted(best)
        colour, marker = plot_style.look_of(mode)
        speeds = [best[n]["samples_per_s"] for n in workers]
        panel.plot(workers, speeds, marker=marker, markersize=4, color=colour, label=mode)
        panel.fill_between(
            workers, [best[n]["samples_per_s_low"] for n in workers], [best[n]["samples_per_s_high"] for n in workers],
            color=colour, alpha=0.12, linewidth=0,
        )  # fmt: skip
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.xaxis.set_major_formatter("{x:g}")
    panel.yaxis.set_major_formatter("{x:g}")
    panel.grid(True)


def _draw_map(panel: Any, places: Sequence[Row]) -> None:
    """Workers by bandwidth: the colour says what is the fastest, its strength how probably; grey where that is open."""
    from matplotlib.patches import Rectangle

    bandwidths, numbers = (sorted({row[key] for row in places}) for key in ("bandwidth_gbit", "workers"))
    modes = dict(zip(ANSWERS, ("allreduce", "ps-sync", "single"), strict=True))
    for row in places:
        x, y = bandwidths.index(row["bandwidth_gbit"]), numbers.index(row["workers"])
        first = max(ANSWERS, key=row.__getitem__)
        colour = plot_style.look_of(modes[first])[0] if row[first] >= SURE else plot_style.GRID
        panel.add_patch(Rectangle((x - 0.48, y - 0.46), 0.96, 0.92, color=colour, alpha=0.6, linewidth=0))
        panel.text(x, y, answer(row), ha="center", va="center", fontsize=8, color="#101010")
    panel.set(xlim=(-0.5, len(bandwidths) - 0.5), ylim=(-0.5, len(numbers) - 0.5), ylabel="workers", title=MAP)
    panel.set_xticks(range(len(bandwidths)), map(rate, bandwidths))
    panel.set_yticks(range(len(numbers)), [str(n) for n in numbers])
    panel.tick_params(length=0)
