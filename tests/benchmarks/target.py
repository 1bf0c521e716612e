"""Ring or servers by the time to a target, and by speed: on one host, on two hosts, and beside a worker that is slow.

    python tests/benchmarks/target.py one-host slow-worker vgg --out target
    sudo python tests/benchmarks/target.py two-hosts --out target
    python tests/benchmarks/target.py --dry-run
    python tests/benchmarks/target.py --table --out target

A case is a `compare --decide-by target` of one machine, all-reduce, and synchronous and asynchronous servers on
`noisy-turntable`. Nobody is given a learning rate. So 16 trainings for each side, which do not count, look for its rate
and settings; then each contender is trained five times.

one-host      a small convolutional network (1.7 MB), two workers on this machine. It reaches the target in about a
              second, and short trainings differ more: each contender is trained 20 times
slow-worker   the same, and worker 1 is made four times as slow, in the search as in the comparison
two-hosts     the same on two namespaces of one core each, joined by 200 Mbit/s, which the script makes and removes.
              Needs what `hvdtrain hosts up` needs, such as root
vgg           a small VGG-F (8.7 MB) on this machine, whose trainings take longer

Needs a machine that does nothing else meanwhile: --dry-run says for about how long. The data set is built on first use.
A case that was interrupted goes on with the same command.

Prints a Markdown table of the cases that are in OUT. Writes OUT/target.json with the same, and with what the table
leaves out: each rate that was tried, each contender's seconds, and the doubts.
"""

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from two_hosts import hvdtrain, two_hosts

PREFIX = "target"
RATE = "200mbit"
JOB = (
    "--dataset",
    "noisy-turntable",
    "--image-size",
    "32",
    "--batch-size",
    "32",
    "--modes",
    "single,allreduce,ps-sync,ps-async",
    "--wire",
    "zmq",
    "--servers",
    "1",
    "--decide-by",
    "target",
)
# In place of a measurement: what makes each case end in a few minutes, and says nothing.
REHEARSED = ("--repeats", "1", "--epochs", "2", "--lr", "0.001", "--target-accuracy", "0.06")
COLUMNS = ("", "by target", "because", "by speed", "rates that were found", "seconds")


class Case(NamedTuple):
    """A comparison.

    Attributes:
        words: of the command.
        minutes: an estimate of how long it takes on two cores that do nothing else.
    """

    words: Sequence[str]
    minutes: int


CNN = ("--model", "cnn", "--epochs", "8", "--target-accuracy", "0.95")
VGG = ("--model", "vggf", "--width", "0.125", "--epochs", "16", "--target-accuracy", "0.5")
CASES = {
    "one-host": Case((*CNN, "--repeats", "20"), 7),
    "slow-worker": Case((*CNN, "--slow", "1:4x"), 6),
    "two-hosts": Case((*CNN, "-H", f"{PREFIX}1:1,{PREFIX}2:1"), 16),
    "vgg": Case(VGG, 12),
}


def compare(name: str, out: Path, is_rehearsed: bool, is_dry: bool) -> None:
    """Makes the comparison of a case, or goes on with it, and notes how long it took."""
    words = ["compare", *JOB, *CASES[name].words, "--out", str(out / name)]
    if is_rehearsed:
        words += REHEARSED
    if is_dry:
        hvdtrain(*words, "--dry-run")
        minutes = CASES[name].minutes
        print(f"{name}: an estimate is {minutes} minutes on two cores that do nothing else\n")
        return
    began = time.monotonic()
    if "-H" in words:
        with two_hosts(PREFIX, RATE):
            hvdtrain(*words)
    else:
        hvdtrain(*words)
    took = out / f"{name}.seconds"
    earlier_s = float(took.read_text(encoding="utf-8")) if took.exists() else 0.0
    took.write_text(f"{earlier_s + time.monotonic() - began:.0f}\n", encoding="utf-8")


def found(name: str, out: Path) -> dict[str, Any] | None:
    """What a comparison said; None if it has not finished."""
    verdict_file = out / name / "verdict.json"
    if not verdict_file.is_file():
        return None
    verdict = json.loads(verdict_file.read_text(encoding="utf-8"))
    took = out / f"{name}.seconds"
    seconds = float(took.read_text(encoding="utf-8")) if took.exists() else None
    parts = verdict["steps_and_samples"]
    return {
        "case": name,
        "seconds": seconds,
        "answer": verdict["answer"],
        "because": verdict["because"],
        "but": verdict["but"],
        "explain": parts["says"] if parts else None,
        "target": verdict["target"],
        "by_speed": verdict["by_speed"],
        "rates": verdict["rates"],
        "runs": [
            {key: run.get(key) for key in ("run", "samples_per_s", "to_target")}
            for run in verdict["runs"]
        ],
    }


def rates_in_words(rates: Sequence[dict[str, Any]]) -> str:
    """The rate and settings of each side, and what looking for them took."""
    sides = []
    for rate in rates:
        settings = "".join(f", {name} {value}" for name, value in rate["settings"].items())
        spent = f"{rate['trainings']} trainings, {rate['seconds']:.0f} s"
        sides.append(f"{', '.join(rate['of'])}: {rate['found']:g}{settings} ({spent})")
    return "; ".join(sides) or "given"


def table(cases: Sequence[dict[str, Any]]) -> str:
    lines = [f"| {' | '.join(COLUMNS)} |", "|---|---|---|---|---|--:|"]
    for case in cases:
        because = "; ".join(filter(None, [case["because"], case["explain"]]))
        seconds = "" if case["seconds"] is None else f"{case['seconds']:,.0f}"
        cells = [
            f"`{case['case']}`",
            case["answer"],
            because,
            case["by_speed"]["answer"],
            rates_in_words(case["rates"]),
            seconds,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"Of {', '.join(CASES)}; all.")
    parser.add_argument("--out", type=Path, default=Path("target"))
    parser.add_argument("--table", action="store_true", help="Run nothing: print what is there.")
    parser.add_argument("--dry-run", action="store_true", help="Print the runs of each case.")
    parser.add_argument("--rehearse", action="store_true", help="Tiny runs, which say nothing.")
    asked = parser.parse_args()
    unknown = set(asked.cases) - CASES.keys()
    if unknown:
        parser.error(f"no case {sorted(unknown)[0]}: {', '.join(CASES)}")
    names = [] if asked.table else asked.cases or list(CASES)
    for name in names:
        compare(name, asked.out, asked.rehearse, asked.dry_run)
    if asked.dry_run:
        return
    cases = [case for name in CASES if (case := found(name, asked.out))]
    (asked.out / "target.json").write_text(json.dumps(cases, indent=1) + "\n", encoding="utf-8")
    print(table(cases))


if __name__ == "__main__":
    main()
