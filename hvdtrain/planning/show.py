"""Predictions as tables on the terminal, and as plots."""

import statistics
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from hvdtrain.base.config.run_config import WIRES
from hvdtrain.base.config.writing import write_whole
from hvdtrain.base.console import Console
from hvdtrain.base.modes import ONE_MACHINE
from hvdtrain.planning.predict import MOST_GBIT, Row, is_lone
from hvdtrain.reporting import plot_style
from hvdtrain.reporting.table import Table, print_table, words_table

# Where the output is no terminal.
WIDTH = 160
MAP = "The fastest, and how probably"
SOONEST = "The soonest at the target, and how probably"
# Columns that give way where there is a time to a target: --json has them.
_OF_STEP = ("batch", "interval", "exposed", "stale", "sent")
# Characters that have room in a line of the drawn map.
CHARACTERS = 120
# Rules that simulate nothing, as columns of a case.
NAIVE = {"linear": "linear scaling", "slower_of_both": "slower of computing and wire"}
# The probabilities from which on an answer is named, and has its colour in the map.
LEAST = 0.1
SURE = 0.8
# Beside each probability of a calibration that other work disturbed.
OTHER_WORK = "other work"
ANSWERS = {"p_ring": "RING", "p_servers": "SERVERS", "p_one_machine": "ONE MACHINE"}


def table_of(title: str, headings: Sequence[str], rows: Iterable[Sequence[Any]]) -> Table:
    """Returns a table of words, in which zeros and None are empty cells."""
    texts = []
    for row in rows:
        texts.append([str(cell or "") for cell in row])
    return words_table(title, headings, texts)


def show(table: Table) -> None:
    print_table(Console(WIDTH), table)


def seconds(value: float) -> str:
    return f"{value * 1e3:,.3g} ms" if value < 1 else f"{value:,.4g} s"


def rate(gbit: float) -> str:
    return f"{gbit:g} Gbit/s" if gbit >= 1 else f"{gbit * 1e3:g} Mbit/s"


def predictions(rows: Sequence[Row], title: str = "") -> None:
    """Prints a line for each prediction, with what is not the same in all lines."""
    lines = [_line(row) for row in rows]
    headings = list(lines[0])
    if any(row.get("to_target") for row in rows):
        headings = [heading for heading in headings if heading not in _OF_STEP]
    differing = [heading for heading in headings if len({line[heading] for line in lines}) > 1]
    show(table_of(title, differing, [[line[heading] for heading in differing] for line in lines]))


def _line(row: Row) -> dict[str, Any]:
    """Returns a prediction in words, by heading."""
    name = ONE_MACHINE if row["mode"] == "single" else row["mode"]
    if is_lone(row["workers"], row["busiest_share"]):
        name += f" (one worker does {row['busiest_share']:.0%})"
    is_alone = row["workers"] == 1
    return {
        "mode": name,
        "batch": row["workers"] * row["batch_per_worker"],
        "workers": row["workers"],
        "servers": row["servers"],
        "where": row["placement"],
        "machines": row["hosts"],
        "wire": "" if row["wire"] in (None, WIRES[0]) else row["wire"],
        "sends": row["compression"],
        "H": row["local_steps"],
        "link": row["bandwidth_gbit"] and rate(row["bandwidth_gbit"]),
        "step": seconds(row["step_s"]),
        "interval": f"{seconds(row['step_s_low'])} to {seconds(row['step_s_high'])}",
        "samples/s": f"{row['samples_per_s']:,.4g}",
        "exposed": "" if is_alone else seconds(row["exposed_comm_s"]),
        "stale": f"{row['staleness_mean']:.2f}" if row["servers"] else "",
        "sent": "" if is_alone else f"{row['bytes_sent_per_worker'] / 1e6:,.4g} MB",
        **_to_target(row.get("to_target")),
        "price/h": f"{row['price']:,.4g}" if "price" in row else "",
        "price/million": f"{row['price_per_million']:,.4g}" if "price" in row else "",
    }


def _to_target(part: Row | None) -> dict[str, str]:
    """Returns the time to the target in words, by heading. `?` marks what was never validated."""
    if not part:
        return {"samples": "", "to target": "", "90% of trainings": ""}
    mark = " ?" if part["not_validated"] else ""
    return {
        "samples": f"{part['samples']:,.0f}",
        "to target": f"{seconds(part['seconds'])}{mark}",
        "90% of trainings": f"{seconds(part['low'])} to {seconds(part['high'])}",
    }


def answer(place: Row) -> str:
    """Returns `RING 97 %`; several answers where none is sure.

    In brackets is what the answer hangs on, and OTHER_WORK. Where hardly anything was validated it is
    `RING?`.
    """
    if place["not_validated"]:
        return ", ".join(f"{name}?" for key, name in ANSWERS.items() if place[key] >= SURE) or "?"
    likely = [(place[key], name) for key, name in ANSWERS.items() if place[key] >= LEAST]
    likely.sort(reverse=True)
    said = ", ".join(f"{name} {chance:.0%}" for chance, name in likely)
    remarks = [*place["hangs_on"]]
    if place["others_share"]:
        remarks.append(OTHER_WORK)
    return f"{said} ({', '.join(remarks)})" if remarks else said


def map_table(places: Sequence[Row], title: str = MAP) -> Table:
    """Returns a table with a line for each number of workers and of local steps, and a column for
    each bandwidth.
    """
    bandwidths = sorted({place["bandwidth_gbit"] for place in places})
    answers: dict[tuple[int, int, int], dict[float, str]] = {}
    for place in places:
        line = place["workers"], place["hosts"], place["local_steps"]
        answers.setdefault(line, {})[place["bandwidth_gbit"]] = answer(place)
    has_several_steps = len({steps for _, _, steps in answers}) > 1
    headings = ["workers", "machines"]
    if has_several_steps:
        headings.append("H")
    rows = []
    for line, by_bandwidth in sorted(answers.items()):
        numbers = line[: len(headings)]
        rows.append([*numbers, *map(by_bandwidth.get, bandwidths)])
    return table_of(title, [*headings, *map(rate, bandwidths)], rows)


def notes_of_map(places: Sequence[Row]) -> list[str]:
    """Returns sentences that say what marks in a map mean."""
    notes = []
    if any(place["not_validated"] for place in places):
        reasons = sorted({reason for place in places for reason in place["not_validated"]})
        notes.append(
            f"RING?: without a probability, since predictions of {' or '.join(reasons)} were hardly "
            "ever compared with measurements; `?` alone: no side is likely enough."
        )
    if any(place["hangs_on"] and not place["not_validated"] for place in places):
        notes.append(
            "In brackets: figures on which the answer depends. If one were half or twice as large, "
            "the fastest would lead by less than 5 % (for jitter: 0.02, or twice the value)."
        )
    if any(place["others_share"] and not place["not_validated"] for place in places):
        share = max(place["others_share"] for place in places)
        notes.append(
            f"({OTHER_WORK}): the machine did other work: {share:.0%} of it, while it was calibrated."
        )
    return notes


def needs(rows: Sequence[Row]) -> None:
    """Prints what bandwidth each job needs, and what is enough in nine of ten cases."""
    lines = []
    for row in rows:
        job = row["mode"], row["workers"], row["servers"], row["local_steps"]
        enough = _needed(row["bandwidth_gbit"])
        lines.append([*job, enough, _needed(row["sure_gbit"]), f"{row['most']:.0%}"])
    title = f"The bandwidth for {rows[0]['efficiency']:.0%} of what workers do that never wait"
    headings = ["mode", "workers", "servers", "H", "needs", "to be sure", "at most"]
    show(table_of(title, headings, lines))


def _needed(gbit: float) -> str:
    if gbit >= MOST_GBIT:
        return "none is enough"
    return rate(float(f"{gbit:.2g}"))


def case(title: str, source: str, rows: Sequence[Row], fitted: dict[str, float]) -> None:
    """Prints a published table beside its prediction."""
    console = Console(WIDTH)
    console.print(f"{title}\n{source}")
    lines = [
        [
            row["mode"],
            row["workers"],
            row["servers"],
            f"over {row['over']}" if row["over"] else "",
            f"{row['published']:,.5g}",
            f"{row['predicted']:,.4g}",
            f"{row['low']:,.4g} to {row['high']:,.4g}",
            "fitted" if row["calibrate"] else f"{row['error']:+.1%}",
            *(f"{row[f'{rule}_error']:+.1%}" for rule in NAIVE),
        ]
        for row in rows
    ]
    headings = ["mode", "workers", "servers", "times", "published", "predicted", "interval"]
    show(table_of("", [*headings, "error", *NAIVE.values()], lines))
    console.print("fitted: " + ", ".join(f"{name} {value:.3g}" for name, value in fitted.items()))
    blind = [row for row in rows if not row["calibrate"]]
    if not blind:
        return
    words = []
    rules = {"error": ""} | {f"{rule}_error": f"; {name}: " for rule, name in NAIVE.items()}
    for key, name in rules.items():
        errors = [abs(row[key]) for row in blind]
        words.append(
            f"{name}median error {statistics.median(errors):.1%}, largest {max(errors):.1%}"
        )
    console.print(f"{len(blind)} blind cells: {''.join(words)}")


def plot(path: Path, rows: Sequence[Row], places: Sequence[Row]) -> None:
    """Writes an SVG: for each bandwidth samples/s over workers, with the best number of servers of
    each mode; below, the map.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    # One machine has no links.
    over_links = [row for row in rows if row["bandwidth_gbit"]]
    bandwidths = sorted({row["bandwidth_gbit"] for row in over_links})
    names = [rate(bandwidth) for bandwidth in bandwidths]
    layout: list[Any] = [names]
    heights = [3.2]
    if places:
        layout.append(["map"] * len(names))
        heights.append(0.9 + 0.3 * len({place["workers"] for place in places}))
    with rc_context(plot_style.RC):
        figure = Figure(figsize=(plot_style.WIDTH, sum(heights)), layout="constrained")
        panels: dict[str, Any] = figure.subplot_mosaic(layout, height_ratios=heights)
        first = panels[names[0]]
        for name in names:
            panel = panels[name]
            panel.sharey(first)
            _draw_throughput(
                panel, [row for row in over_links if rate(row["bandwidth_gbit"]) == name]
            )
            panel.set(title=name, xlabel="workers")
            panel.tick_params(labelleft=panel is first)
        first.set_ylabel("samples/s")
        plot_style.legend(figure, [panels[name] for name in names])
        if places:
            _draw_map(panels["map"], places)
        write_whole(path, plot_style.svg(figure))


def _draw_throughput(panel: Any, rows: Sequence[Row]) -> None:
    """Draws a line with its interval for each mode, with the best number of servers."""
    for mode in dict.fromkeys(row["mode"] for row in rows):
        of_mode = [row for row in rows if row["mode"] == mode]
        slowest_first = sorted(of_mode, key=lambda row: -row["step_s"])
        # The last that is put in is the fastest.
        best = {row["workers"]: row for row in slowest_first}
        workers = sorted(best)
        colour, marker = plot_style.look_of(mode)
        speeds = [best[n]["samples_per_s"] for n in workers]
        lows = [best[n]["samples_per_s_low"] for n in workers]
        highs = [best[n]["samples_per_s_high"] for n in workers]
        panel.plot(workers, speeds, marker=marker, markersize=4, color=colour, label=mode)
        panel.fill_between(workers, lows, highs, color=colour, alpha=0.12, linewidth=0)
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.xaxis.set_major_formatter("{x:g}")
    panel.yaxis.set_major_formatter("{x:g}")
    panel.grid(True)


def _draw_map(panel: Any, places: Sequence[Row]) -> None:
    """Draws workers by bandwidth. The colour says what is the fastest, grey where that is open."""
    from matplotlib.patches import Rectangle

    bandwidths = sorted({place["bandwidth_gbit"] for place in places})
    numbers = sorted({place["workers"] for place in places})
    modes = dict(zip(ANSWERS, ("allreduce", "ps-sync", "single"), strict=True))
    for place in places:
        x = bandwidths.index(place["bandwidth_gbit"])
        y = numbers.index(place["workers"])
        likeliest = max(ANSWERS, key=place.__getitem__)
        colour = plot_style.GRID
        if place[likeliest] >= SURE and not place["not_validated"]:
            colour, _ = plot_style.look_of(modes[likeliest])
        panel.add_patch(
            Rectangle((x - 0.48, y - 0.46), 0.96, 0.92, color=colour, alpha=0.6, linewidth=0)
        )
        said = textwrap.fill(answer(place), CHARACTERS // len(bandwidths))
        panel.text(x, y, said, ha="center", va="center", fontsize=8, color="#101010")
    panel.set(
        xlim=(-0.5, len(bandwidths) - 0.5),
        ylim=(-0.5, len(numbers) - 0.5),
        ylabel="workers",
        title=MAP,
    )
    panel.set_xticks(range(len(bandwidths)), map(rate, bandwidths))
    panel.set_yticks(range(len(numbers)), [str(n) for n in numbers])
    panel.tick_params(length=0)
