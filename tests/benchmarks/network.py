"""Ring against servers over a real network: four hosts of `hvdtrain hosts`, at several rates, step
by step.

    sudo python tests/benchmarks/network.py --rates 100mbit,1gbit,20gbit --out network

Prints a table of seconds a step beside the floor that the links set, and writes it as CSV and as a
plot. Needs what `hvdtrain hosts up` needs. 20gbit is more than two cores can send: memory is the
limit there.

The floor of a step, for a message of M bytes, links of B bytes/s each way, n hosts with a worker
each, k of which have a server too, every link busy both ways at once:

    ring      2 (n - 1) M / (n B)                    each host sends and receives this much servers
    (n + k - 2) M / (k B)                  a host with a server sends its share to n - 1 others,
                                                     and its worker's gradients to k - 1 other servers
"""

import argparse
import csv
import itertools
import json
import statistics
import subprocess
import sys
from pathlib import Path

from hvdtrain.planning.units import BANDWIDTH
from hvdtrain.runs.schema import each_share, read_steps

HOSTS = 4
MODELS = {"vggf": ("0.25", "VGG-F at quarter width"), "vgg16": ("0.5", "VGG-16 at half width")}


def hvdtrain(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "hvdtrain", *words], check=True)


def floor(size: float, link: str, servers: int) -> float:
    """Seconds that a step's bytes take."""
    rate = BANDWIDTH.convert(link, None, None) * 1e9 / 8
    if servers:
        return (HOSTS + servers - 2) * size / (servers * rate)
    return 2 * (HOSTS - 1) * size / (HOSTS * rate)


def step_seconds(run: Path) -> list[float]:
    """Seconds from a step's end to the next's at the first worker; the first step, which sets
    things up, left out.
    """
    first = json.loads((run / "manifest.json").read_text())["servers"]
    shares = each_share(read_steps(run / f"metrics.rank{first}.jsonl")[0])
    ends = [share.time for share in shares]
    return [after - before for before, after in itertools.pairwise(ends)]


def measure(rate: str, steps: int, out: Path) -> list[dict]:
    hvdtrain("hosts", "up", "--count", str(HOSTS), "--rate", rate)
    rows = []
    try:
        for model, (width, name) in MODELS.items():
            folder = out / f"{model}-{rate}"
            hosts = ",".join(f"node{n}:2" for n in range(1, HOSTS + 1))
            hvdtrain(
                "compare",
                "-H",
                hosts,
                "--modes",
                "allreduce,ps-sync",
                "--workers",
                str(HOSTS),
                "--servers",
                "1,2,3",
                "--model",
                model,
                "--width",
                width,
                "--steps",
                str(steps),
                "--batch-size",
                "16",
                "--threads",
                "1",
                "--optimizer",
                "sgd",
                "--timeout",
                "30m",
                "--out",
                str(folder),
            )
            for run in sorted((folder / "runs").iterdir()):
                facts = json.loads((run / "manifest.json").read_text())
                seconds = step_seconds(run)
                rows.append(
                    {
                        "rate": rate,
                        "model": name,
                        "megabytes": facts["parameters"] * 4 / 1e6,
                        "mode": facts["mode"],
                        "servers": facts["servers"],
                        "seconds": round(statistics.median(seconds), 3),
                        "least": round(min(seconds), 3),
                        "most": round(max(seconds), 3),
                        "steps": len(seconds),
                        "floor": round(floor(facts["parameters"] * 4, rate, facts["servers"]), 3),
                    }
                )
    finally:
        hvdtrain("hosts", "down")
    return rows


def draw(rows: list[dict], path: Path) -> None:
    """Seconds a step by number of servers, a panel for each model and rate, with the floor."""
    from matplotlib import pyplot, rc_context

    from hvdtrain.reporting import plot_style

    rates, models = ([*dict.fromkeys(row[key] for row in rows)] for key in ("rate", "model"))
    with rc_context(plot_style.RC):
        figure, axes = pyplot.subplots(
            len(models),
            len(rates),
            figsize=(plot_style.WIDTH, 2.3 * len(models)),
            squeeze=False,
            layout="constrained",
        )
        for line, model in zip(axes, models, strict=True):
            for ax, rate in zip(line, rates, strict=True):
                bars = [row for row in rows if row["rate"] == rate and row["model"] == model]
                bars.sort(key=lambda row: row["servers"])
                colours = [plot_style.look_of(row["mode"])[0] for row in bars]
                ax.bar(
                    range(len(bars)), [row["seconds"] for row in bars], color=colours, width=0.65
                )
                for place, row in enumerate(bars):
                    ax.plot(
                        [place - 0.42, place + 0.42],
                        [row["floor"]] * 2,
                        color=plot_style.INK,
                        linewidth=1.6,
                    )
                    seconds = f"{row['seconds']:.3g}"
                    ax.annotate(
                        seconds,
                        (place, row["seconds"]),
                        (0, 2),
                        textcoords="offset points",
                        ha="center",
                    )
                ax.margins(y=0.15)
                ax.set_xticks(
                    range(len(bars)),
                    [str(row["servers"]) if row["servers"] else "ring" for row in bars],
                )
                ax.set_title(f"{model}, {rate.replace('bit', 'bit/s')}")
            line[0].set_ylabel("seconds a step")
        for ax in axes[-1]:
            ax.set_xlabel("ring, or servers")
        path.write_text(plot_style.svg(figure))
        figure.savefig(path.with_suffix(".png"), dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rates", default="100mbit,1gbit,20gbit")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--out", type=Path, default=Path("network"))
    args = parser.parse_args()
    rows = []
    for rate in args.rates.split(","):
        rows += measure(rate, args.steps, args.out)
    with (args.out / "network.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, rows[0])
        table.writeheader()
        table.writerows(rows)
    draw(rows, args.out / "network.svg")
    for row in rows:
        print(*(f"{value:>20}" for value in row.values()))


if __name__ == "__main__":
    main()
