"""Predictions against measurements: `hvdtrain plan` calibrated at one rate on two hosts, and asked
about others.

    sudo python tests/benchmarks/plan.py --out plan-check

For each model: two hosts of `hvdtrain hosts` at 300 Mbit/s, a run of one process, one of the ring
and one of a server there, and `plan calibrate --from` these; then other rates, numbers of hosts and
of servers, sharded rings, rings that wait for layers, and local steps, which really run, a worker
on each host and servers beside them. Prints each error, how often the faster of ring and servers
was foretold where they differ by more than a tenth, how many runs lie in their intervals, and the
Brier score of which is the faster; writes rows.json and predicted.svg. The calibration never sees a
run that is predicted. Needs what `hvdtrain hosts up` needs.

Each host has 0.45 of a core to itself (`hosts up --cpus`), however many there are: four of them on
two cores do not take each other's time, as real hosts do not.
"""

import argparse
import itertools
import json
import math
import statistics
from pathlib import Path
from statistics import NormalDist

from explain import hvdtrain

from hvdtrain.planning.best import SHARED
from hvdtrain.planning.calibration import MODEL_ERROR, Z90, load
from hvdtrain.planning.check import compare, finished, measured_step_s
from hvdtrain.planning.units import BANDWIDTH

CALIBRATED_AT = "300mbit"
CORES = 0.45  # of each host
MODELS = {"vggf": "0.25", "vgg16": "0.5"}
BATCH = 4  # of each worker
# the more steps, the less the first one weighs in what a run's messages cost
STEPS, CALIBRATION_STEPS = (
    7,
    15,
)
# (hosts, rate) to modes, with their servers, and to `layer`, --wait-for layer, `H`, --local-steps,
# or `zmq`, --wire.
RINGS = ("allreduce", "sharded", "allreduce layer")
CELLS = {
    "vggf": {
        (2, "50mbit"): ("allreduce", "ps-sync 1", "ps-sync 2"),
        (2, "100mbit"): (*RINGS, "ps-sync 1", "ps-sync 2", "allreduce H", "ps-sync 2 H"),
        (2, "1gbit"): ("allreduce", "sharded", "ps-sync 1", "ps-sync 2", "ps-sync 2 zmq"),
        (3, "100mbit"): (
            "allreduce",
            "sharded",
            "ps-sync 1",
            "ps-sync 2",
            "allreduce H",
            "ps-sync 2 H",
        ),
        (3, "200mbit"): ("allreduce", "sharded", "ps-sync 1", "ps-sync 2"),
        (3, "1gbit"): ("allreduce", "ps-sync 1", "ps-sync 3"),
        (4, "100mbit"): ("allreduce", "ps-sync 4"),
        (4, "200mbit"): (*RINGS, "ps-sync 1", "ps-sync 3", "allreduce H", "ps-sync 3 H"),
        (4, "500mbit"): ("allreduce", "ps-sync 2", "ps-sync 4", "ps-sync 4 zmq"),
        (4, "1gbit"): ("allreduce", "ps-sync 1", "ps-sync 4"),
    },
    "vgg16": {
        (2, "500mbit"): ("allreduce", "ps-sync 1", "ps-sync 2"),
        (2, "1gbit"): (*RINGS, "ps-sync 1", "ps-sync 2"),
        (3, "300mbit"): ("allreduce", "sharded", "ps-sync 1", "ps-sync 3"),
        (3, "1gbit"): ("allreduce", "sharded", "ps-sync 3"),
        (4, "1gbit"): ("allreduce", "ps-sync 2", "ps-sync 3"),
    },
}
LOCAL_STEPS, ROUNDS = 4, 4


def hosts(count: int, servers: int) -> str:
    return ",".join(f"node{n}:{2 if n <= servers else 1}" for n in range(1, count + 1))


def up(count: int, rate: str) -> None:
    hvdtrain(
        "hosts",
        "up",
        "--count",
        str(count),
        "--rate",
        rate,
        "--cpus",
        ",".join([str(CORES)] * count),
    )


def run(model: str, count: int, cell: str, out: Path, steps: int = STEPS) -> None:
    mode, *words = cell.split()
    servers = int(next(filter(str.isdigit, words), 0))
    more = (
        ["--wait-for", "layer"] if "layer" in words else ["--wire", "zmq"] if "zmq" in words else []
    )
    if "H" in words:
        more, steps = ["--local-steps", str(LOCAL_STEPS)], LOCAL_STEPS * ROUNDS
    hvdtrain(
        "launch",
        "--launcher",
        "ssh",
        "-n",
        str(count),
        "-s",
        str(servers),
        "-H",
        hosts(count, servers),
        "--out",
        str(out),
        "--",
        "--mode",
        mode,
        "--model",
        model,
        "--width",
        MODELS[model],
        "--optimizer",
        "sgd",
        "--batch-size",
        str(BATCH * count),
        "--steps",
        str(steps),
        "--threads",
        "1",
        "--snapshot-every",
        "never",
        "--timeout",
        "10m",
        *more,
    )


def measure(model: str, out: Path, repeats: int) -> list[dict]:
    calibration = out / f"{model}.json"
    if not calibration.exists():
        up(2, CALIBRATED_AT)
        cells = {"single": 1, "allreduce": 2, "ps-sync 1": 2}  # and workers
        known = {cell: out / f"{model}-calibration-{cell}".replace(" ", "-") for cell in cells}
        for cell, folder in known.items():
            if not (folder / "summary.json").exists():
                run(model, cells[cell], cell, folder, CALIBRATION_STEPS)
        hvdtrain(
            "plan",
            "calibrate",
            "--model",
            model,
            "--width",
            MODELS[model],
            "--batch-size",
            str(BATCH),
            "--optimizer",
            "sgd",
            *(word for folder in known.values() for word in ("--from", str(folder))),
            "--bandwidth",
            CALIBRATED_AT,
            "--out",
            str(calibration),
        )
    rows, made = [], load(calibration)
    for (count, rate), cells in CELLS[model].items():
        names = {cell: f"{model}-{count}-{rate}-{cell}".replace(" ", "-") for cell in cells}
        of = {cell: [out / f"{name}-{n}" for n in range(repeats)] for cell, name in names.items()}
        missing = [
            (n, cell)
            for n in range(repeats)
            for cell in cells
            if not (of[cell][n] / "summary.json").exists()
        ]
        if missing:
            up(count, rate)
        for n, cell in missing:
            run(model, count, cell, of[cell][n])
        for cell in cells:
            runs = [finished(folder) for folder in of[cell]]
            row = compare(made, runs[0], BANDWIDTH.convert(rate, None, None))
            row["measured_step_s"] = statistics.median(map(measured_step_s, runs))
            row["error"] = row["predicted_step_s"] / row["measured_step_s"] - 1
            rows.append(row | {"model": model, "rate": rate, "cell": cell, "local": "H" in cell})
            told = f"measured {row['measured_step_s']:7.3f} s, predicted {row['predicted_step_s']:7.3f} s"
            told += f" ({row['low']:.3g} to {row['high']:.3g}), {row['error']:+.1%}"
            print(f"{model:6} {cell:15} x{row['workers']} {rate:8} {told}", flush=True)
    return rows


def winners(rows: list[dict]) -> tuple[int, int]:
    """Pairs of runs on the same hosts that differ by more than a tenth, and of them, those foretold
    right.
    """
    pairs = right = 0
    for a, b in itertools.combinations(rows, 2):
        same = all(a[key] == b[key] for key in ("model", "rate", "workers", "local"))
        if same and abs(a["measured_step_s"] / b["measured_step_s"] - 1) > 0.1:
            pairs += 1
            right += (a["measured_step_s"] < b["measured_step_s"]) == (
                a["predicted_step_s"] < b["predicted_step_s"]
            )
    return pairs, right


def sureness(rows: list[dict]) -> tuple[float, list[float]]:
    """Of runs, the share in their intervals; of each ring and servers on the same hosts, the error
    of P squared.
    """
    inside = [row["low"] <= row["measured_step_s"] <= row["high"] for row in rows]
    errors = []
    for ring, servers in itertools.permutations(rows, 2):
        same = all(ring[key] == servers[key] for key in ("model", "rate", "workers", "local"))
        if same and not ring["servers"] and servers["servers"]:
            first = chance_of_faster(ring, servers)
            errors.append((first - (ring["measured_step_s"] < servers["measured_step_s"])) ** 2)
    return statistics.fmean(inside), errors


def chance_of_faster(row: dict, other: dict) -> float:
    """The probability that a predicted job is faster than another one on the same hosts."""
    apart = sum((math.log(one["high"] / one["low"]) / 2 / Z90) ** 2 for one in (row, other))
    apart -= 2 * (SHARED * MODEL_ERROR) ** 2  # errors that both have
    lead = math.log(other["predicted_step_s"] / row["predicted_step_s"])
    return NormalDist().cdf(lead / math.sqrt(apart))


def draw(rows: list[dict], path: Path) -> None:
    from matplotlib import rc_context

    from hvdtrain.reporting import plot_style

    with rc_context(plot_style.RC):
        figure, (axes,) = plot_style.new_figure(4.2)
        seconds = [row["measured_step_s"] for row in rows]
        ends = [min(seconds) * 0.7, max(seconds) * 1.4]
        axes.plot(ends, ends, color=plot_style.INK, linewidth=1)
        below, above = ([share * end for end in ends] for share in (0.75, 1.25))
        axes.fill_between(ends, below, above, color=plot_style.GRID, label="within 25 %")
        for mode in dict.fromkeys(row["mode"] for row in rows):
            of_mode = [row for row in rows if row["mode"] == mode]
            colour, marker = plot_style.look_of(mode)
            middle = [row["predicted_step_s"] for row in of_mode]
            below = [row["predicted_step_s"] - row["low"] for row in of_mode]
            above = [row["high"] - row["predicted_step_s"] for row in of_mode]
            axes.errorbar(
                [row["measured_step_s"] for row in of_mode],
                middle,
                [below, above],
                fmt=marker,
                color=colour,
                label=mode,
                elinewidth=0.8,
            )
        axes.set(
            xscale="log",
            yscale="log",
            xlabel="seconds a step, measured",
            ylabel="predicted",
            xlim=ends,
        )
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_ticks([0.5, 1, 2, 5], labels=["0.5", "1", "2", "5"])
        axes.minorticks_off()
        axes.grid(True)
        axes.legend()
        path.write_text(plot_style.svg(figure))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("plan-check"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    rows = []
    try:
        for model in args.models.split(","):
            rows += measure(model, args.out.absolute(), args.repeats)
    finally:
        hvdtrain("hosts", "down")
    (args.out / "rows.json").write_text(json.dumps(rows, indent=1) + "\n")
    draw(rows, args.out / "predicted.svg")
    errors = sorted(abs(row["error"]) for row in rows)
    pairs, right = winners(rows)
    inside, squares = sureness(rows)
    print(
        f"{len(errors)} cells: median error {statistics.median(errors):.1%}, largest {errors[-1]:.1%}"
    )
    print(
        f"in their intervals of 90 %: {inside:.0%}; of two that differ by a tenth the faster: {right} of {pairs}"
    )
    print(
        f"Brier score of {len(squares)} pairs of ring and servers: {statistics.fmean(squares):.3f}"
    )


if __name__ == "__main__":
    main()
