"""Asynchronous modes and slow workers on two hosts: predicted first, and then measured.

    sudo python tests/benchmarks/foretold.py calibrate
    python tests/benchmarks/foretold.py foretell
    git commit tests/benchmarks/foretold.csv
    sudo python tests/benchmarks/foretold.py measure
    python tests/benchmarks/foretold.py table

`calibrate` makes three runs on two hosts at 500 Mbit/s, in lockstep and without a slow worker, and
a calibration from them. `foretell` writes a prediction of each cell into foretold.csv, which is
committed before `measure` makes the runs. A cell is a mode, a slow worker and a rate. Two workers
are on a host each. The server is beside worker 1. Either worker may be slow. Each host has 0.9 of a
core: of less, a process that was asleep has more than its part for a moment.

`measure` begins no further run after --seconds. The same command goes on, and makes --repeats of
each cell. `table` prints each prediction beside what was measured, and beside two simple rules:

- linear scaling: a worker is as fast as one alone. Workers are as fast as the slowest of them, but
  in ps-async each has its own speed.
- slower of both: linear scaling, or the time that the busiest link needs, whichever is longer.

The Brier score is of the probability that the ring is faster than the servers of a mode. Needs what
`hvdtrain hosts up` needs, such as root; `foretell` and `table` do not.
"""

import argparse
import csv
import itertools
import shutil
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from plan import chance_of_faster
from two_hosts import hvdtrain, two_hosts

from hvdtrain.planning import predict
from hvdtrain.planning.calibration import Calibration, load
from hvdtrain.planning.check import finished, measured_step_s
from hvdtrain.planning.naive import wire_s
from hvdtrain.planning.scenario import Scenario
from hvdtrain.planning.units import BANDWIDTH, SlowRules

FORETOLD = Path(__file__).with_name("foretold.csv")
PREFIX = "fore"
CORES = 0.9  # of each host
CALIBRATED_AT = "500mbit"
BATCH = 16  # of each worker
# Fewer than an epoch of the digits has, so that no worker waits for an evaluation.
STEPS = 30
# 8.7 MB. Of far less, much would be through before the token bucket of a link begins to count.
MODEL = ("--model", "vggf", "--width", "0.125", "--image-size", "64", "--optimizer", "sgd")
SERVERS = {"ps-async": 1, "ps-ssp": 1, "ps-sync": 1, "allreduce": 0}
SLOW = ("none", "0:2x", "1:2x")
RATES = ("250mbit", "1gbit")
FIGURES = ("predicted_step_s", "low", "high", "linear_s", "slower_of_both_s")
# What is compared with a measurement: the prediction, and the two simple rules.
RULES = ("predicted_step_s", "linear_s", "slower_of_both_s")
Row = dict[str, Any]


class Cell(NamedTuple):
    """What is predicted and measured."""

    rate: str
    slow: str
    mode: str

    @property
    def name(self) -> str:
        return "-".join((self.rate, self.slow.replace(":", "x"), self.mode))

    @property
    def is_as_calibrated(self) -> bool:
        """Whether only the rate differs from a run of the calibration."""
        return self.slow == "none" and self.mode in ("allreduce", "ps-sync")


CELLS = [Cell(*words) for words in itertools.product(RATES, SLOW, SERVERS)]


def run(mode: str, slow: str, workers: int, folder: Path) -> None:
    """Trains, unless the run is there."""
    if (folder / "summary.json").exists():
        return
    shutil.rmtree(folder, ignore_errors=True)  # what an interrupted run left
    servers = SERVERS.get(mode, 0)
    hosts = [f"{PREFIX}1:{1 + servers}", f"{PREFIX}2:1"][:workers]
    launch = ["launch", "--launcher", "ssh", "-n", str(workers), "-s", str(servers)]
    launch += ["-H", ",".join(hosts), "--out", str(folder), "--", "--mode", mode, *MODEL]
    launch += ["--batch-size", str(workers * BATCH), "--steps", str(STEPS), "--threads", "1"]
    launch += ["--slow", slow, "--snapshot-every", "never", "--save", "none"]
    hvdtrain(*launch)


def calibrate(out: Path) -> None:
    """Makes the three runs and the calibration."""
    runs = []
    with two_hosts(PREFIX, CALIBRATED_AT, CORES):
        for mode, workers in (("single", 1), ("allreduce", 2), ("ps-sync", 2)):
            folder = out / f"calibration-{mode}"
            run(mode, "none", workers, folder)
            runs += ["--from", str(folder)]
    measured = ["plan", "calibrate", *MODEL, "--batch-size", str(BATCH), *runs]
    hvdtrain(*measured, "--bandwidth", CALIBRATED_AT, "--out", str(out / "calibration.json"))


def scenario(cell: Cell) -> Scenario:
    """Returns the job of a cell."""
    in_lockstep = Scenario(cell.mode).in_lockstep
    return Scenario(
        cell.mode,
        workers=2,
        servers=SERVERS[cell.mode],
        bandwidth_gbit=BANDWIDTH.convert(cell.rate, None, None),
        placement="shared",
        slow=SlowRules().convert(cell.slow, None, None),
        round_steps=0 if in_lockstep else STEPS,
    )


def foretell(calibration: Calibration, cell: Cell) -> Row:
    """Returns the prediction of a cell, and what the simple rules say."""
    job = calibration.with_costs(scenario(cell))
    predicted = predict.row(calibration, scenario(cell))
    alone_s = predict.simulate(calibration.with_costs(Scenario("single"))).step_s
    linear_s = alone_s * max(job.factors)
    if cell.mode == "ps-async":
        linear_s = alone_s * job.workers / sum(1 / factor for factor in job.factors)
    return cell._asdict() | {
        "predicted_step_s": predicted["step_s"],
        "low": predicted["step_s_low"],
        "high": predicted["step_s_high"],
        "linear_s": linear_s,
        "slower_of_both_s": max(linear_s, wire_s(job)),
    }


def write(rows: Sequence[Row]) -> None:
    with FORETOLD.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow((*Cell._fields, *FIGURES))
        for row in rows:
            writer.writerow(
                [row[name] for name in Cell._fields] + [f"{row[f]:.4f}" for f in FIGURES]
            )


def read() -> list[Row]:
    with FORETOLD.open(encoding="utf-8", newline="") as file:
        rows: list[Row] = list(csv.DictReader(file))
    for row in rows:
        row |= {name: float(row[name]) for name in FIGURES}
    return rows


def measure(out: Path, repeats: int, seconds: float) -> None:
    """Makes the runs that are not there, as far as there is time."""
    began = time.monotonic()
    for repeat, rate in itertools.product(range(repeats), RATES):
        cells = [cell for cell in CELLS if cell.rate == rate]
        missing = [
            cell for cell in cells if not (_folder(out, cell, repeat) / "summary.json").exists()
        ]
        if not missing:
            continue
        with two_hosts(PREFIX, rate, CORES):
            for cell in missing:
                if time.monotonic() - began > seconds:
                    return
                run(cell.mode, cell.slow, 2, _folder(out, cell, repeat))


def _folder(out: Path, cell: Cell, repeat: int) -> Path:
    return out / f"{cell.name}-{repeat}"


def table(out: Path, repeats: int) -> None:
    """Prints each prediction beside the median of what was measured, and how good they are."""
    rows = []
    for row in read():
        cell = Cell(*(row[name] for name in Cell._fields))
        folders = [_folder(out, cell, repeat) for repeat in range(repeats)]
        done = [folder for folder in folders if (folder / "summary.json").exists()]
        if done:
            measured = statistics.median(measured_step_s(finished(folder)) for folder in done)
            rows.append(row | {"cell": cell, "measured_step_s": measured, "n": len(done)})
    print(
        "| rate | slow | mode | predicted, s | measured, s | n | error | linear scaling | slower of both |"
    )
    print("|---|---|---|--:|--:|--:|--:|--:|--:|")
    for row in rows:
        interval = f"{row['predicted_step_s']:.3f} ({row['low']:.3f} to {row['high']:.3f})"
        errors = " | ".join(f"{_error(row, rule):+.1%}" for rule in RULES)
        words = f"{row['rate']} | {row['slow']} | `{row['mode']}` | {interval}"
        print(f"| {words} | {row['measured_step_s']:.3f} | {row['n']} | {errors} |")
    print()
    for name, chosen in _groups(rows).items():
        print(f"{name}: {_summary(chosen)}")
    print(_brier_scores(rows))


def _error(row: Row, rule: str) -> float:
    return float(row[rule] / row["measured_step_s"] - 1)


def _groups(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Returns the cells of each kind: those that differ from the calibration in the rate alone, and
    all others, also by mode.
    """
    others = [row for row in rows if not row["cell"].is_as_calibrated]
    groups = {
        "lockstep, nobody slow": [row for row in rows if row["cell"].is_as_calibrated],
        "asynchronous, or somebody slow": others,
    }
    for mode in SERVERS:
        groups[f"of these {mode}"] = [row for row in others if row["mode"] == mode]
    return {name: chosen for name, chosen in groups.items() if chosen}


def _summary(rows: Sequence[Row]) -> str:
    inside = sum(row["low"] <= row["measured_step_s"] <= row["high"] for row in rows)
    words = [f"{len(rows)} cells, {inside} in their intervals"]
    for rule in RULES:
        errors = [_error(row, rule) for row in rows]
        sizes = [abs(error) for error in errors]
        words.append(
            f"{rule} off by {statistics.median(sizes):.1%} (median; largest {max(sizes):.1%}; with "
            f"signs {statistics.median(errors):+.1%})"
        )
    return "; ".join(words)


def _brier_scores(rows: Sequence[Row]) -> str:
    """Returns the Brier scores of which is the faster, a ring or servers, and the skill over rules."""
    squares: dict[str, list[float]] = {rule: [] for rule in RULES}
    for ring, servers in itertools.product(rows, rows):
        are_alike = ring["rate"] == servers["rate"] and ring["slow"] == servers["slow"]
        if not are_alike or SERVERS[ring["mode"]] or not SERVERS[servers["mode"]]:
            continue
        is_ring = ring["measured_step_s"] < servers["measured_step_s"]
        chances = {rule: _chance_by_rule(ring[rule], servers[rule]) for rule in RULES}
        chances["predicted_step_s"] = chance_of_faster(ring, servers)
        for rule, chance in chances.items():
            squares[rule].append((chance - is_ring) ** 2)
    if not squares["linear_s"]:
        return "no ring beside servers"
    scores = {rule: statistics.fmean(of_rule) for rule, of_rule in squares.items()}
    words = [f"{len(squares['linear_s'])} pairs of a ring and servers: Brier score"]
    for rule, score in scores.items():
        words.append(f"{rule} {score:.3f}")
    for rule in RULES[1:]:
        skill = 1 - scores["predicted_step_s"] / scores[rule] if scores[rule] else float("nan")
        words.append(f"skill over {rule} {skill:.2f}")
    return ", ".join(words)


def _chance_by_rule(ring_s: float, servers_s: float) -> float:
    """Returns 1 or 0 as a rule has the ring the faster one or not, and 0.5 where it cannot tell."""
    if abs(ring_s / servers_s - 1) < 1e-3:
        return 0.5
    return float(ring_s < servers_s)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["calibrate", "foretell", "measure", "table"])
    parser.add_argument("--out", type=Path, default=Path("foretold"))
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=3600.0)
    args = parser.parse_args()
    out = args.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    if args.what == "calibrate":
        calibrate(out)
    elif args.what == "foretell":
        calibration = load(out / "calibration.json")
        write([foretell(calibration, cell) for cell in CELLS])
    elif args.what == "measure":
        measure(out, args.repeats, args.seconds)
    else:
        table(out, args.repeats)


if __name__ == "__main__":
    main()
