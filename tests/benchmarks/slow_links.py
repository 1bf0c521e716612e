"""What local steps save on slow links: the preset slow-links on four hosts at several rates, and
README's plot of it.

    sudo python tests/benchmarks/slow_links.py --rates 20,50,200 --out slow-links

Takes an hour with one repeat. Finished runs stay, so that the same command draws again. Needs what
`hvdtrain hosts up` needs.
"""

import argparse
import subprocess
import sys
from pathlib import Path

from matplotlib import rc_context

from hvdtrain.reporting import plot_style
from hvdtrain.reporting.figures import expected_time
from hvdtrain.runs.read import find_runs, finished_by_kind

HOSTS = "node1:1,node2:1,node3:1,node4:1"


def hvdtrain(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "hvdtrain", *words], check=True)


def seconds_by_steps(folder: Path) -> dict[str, dict[int, float]]:
    """By mode, seconds to the target by local steps; 1 is an exchange each step."""
    found: dict[str, dict[int, float]] = {}
    for kind, runs in finished_by_kind(find_runs([folder])).items():
        if (seconds := expected_time(runs)["seconds"]) is not None:
            found.setdefault(kind.mode, {})[runs[0].local_steps] = seconds
    return found


def draw(folders: dict[str, Path], path: Path) -> None:
    with rc_context(plot_style.RC):
        figure, panels = plot_style.new_figure(3.0, len(folders))
        for (rate, folder), axes in zip(folders.items(), panels, strict=True):
            for mode, points in seconds_by_steps(folder).items():
                colour, marker = plot_style.look_of(mode)
                label = "one machine, the control" if mode == "single" else mode
                axes.plot(
                    *zip(*sorted(points.items()), strict=True),
                    color=colour,
                    marker=marker,
                    label=label,
                )
                print(
                    f"{rate} Mbit/s {mode}: "
                    + ", ".join(f"H {h} {s:.1f} s" for h, s in sorted(points.items()))
                )
            axes.set(
                xscale="log",
                yscale="log",
                xlabel="local steps",
                title=f"{rate} Mbit/s",
                xticks=[1, 4, 16, 64],
            )
            axes.sharey(panels[0])
            axes.minorticks_off()
            axes.xaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_major_formatter("{x:g}")
            axes.grid(True)
        panels[0].set_ylabel("seconds to accuracy 0.9")
        plot_style.legend(figure, panels)
        path.write_text(plot_style.svg(figure))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rates", default="20,50,200", help="In Mbit/s.")
    parser.add_argument("--repeats", default="1")
    parser.add_argument("--out", type=Path, default=Path("slow-links"))
    asked = parser.parse_args()
    folders = {rate: asked.out / f"at-{rate}" for rate in asked.rates.split(",")}
    for rate, folder in folders.items():
        hvdtrain("hosts", "up", "--count", "4", "--rate", f"{rate}mbit")
        try:
            words = (
                "--preset",
                "slow-links",
                "-H",
                HOSTS,
                "--repeats",
                asked.repeats,
                "--out",
                str(folder),
            )
            hvdtrain("compare", *words)
        finally:
            hvdtrain("hosts", "down")
    draw(folders, asked.out / "slow-links.svg")


if __name__ == "__main__":
    main()
