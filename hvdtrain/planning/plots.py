"""Plots of predictions: samples a second over workers, and who wins where."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hvdtrain import plot_style
from hvdtrain.planning.predict import Row
from hvdtrain.planning.show import ANSWERS, MAP, answer, rate

SURE = 0.8  # as probable as that, an answer has its colour


def save(path: Path, rows: Sequence[Row], map_: Sequence[Row]) -> None:
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
            _throughput(panels[name], [row for row in rows if rate(row["bandwidth_gbit"]) == name])
            panels[name].sharey(panels[names[0]])
            panels[name].set(title=name, xlabel="workers")
        panels[names[0]].set_ylabel("samples/s")
        plot_style.legend(figure, [panels[name] for name in names])
        if map_:
            _map(panels["map"], map_)
        path.write_text(plot_style.svg(figure))


def _throughput(panel: Any, rows: Sequence[Row]) -> None:
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
    panel.grid(True)


def _map(panel: Any, places: Sequence[Row]) -> None:
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
    panel.set(xlim=(-0.5, len(bandwidths) - 0.5), ylim=(-0.5, len(numbers) - 0.5), ylabel="workers")
    panel.set_xticks(range(len(bandwidths)), map(rate, bandwidths))
    panel.set_yticks(range(len(numbers)), [str(n) for n in numbers])
    panel.set_title(MAP)
    panel.tick_params(length=0)
