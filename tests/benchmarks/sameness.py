"""How often an answer calls two things different that are the same: one job under two labels, compared many times.

    python tests/benchmarks/sameness.py --out sameness
    python tests/benchmarks/sameness.py --times 40 --repeats 5 --minutes 15 --out sameness

Sprints of one job, two workers of `ddp` with a thread each, are made one after the other. They are given two labels in
turn, A B, B A, A B …, as if they were of a ring and of servers, and the answer's rule is asked what it says of them:
after --repeats, and of longer stretches of the same sprints as with --until-sure. Nothing tells the two of a pair apart
but the order, so that each other way to label the pairs is a comparison as well, though not an independent one. The
machine is taken as it is: no sprint is set aside, and what hosts did besides is counted. The word should be EITHER or
NOT YET KNOWN: RING and SERVERS are wrong. Of both together the rule allows 2.5 in 100 after five repeats, and 5 however
often one looks.

Run folders in OUT stay, and are not made again: so the script goes on where --minutes stopped it, and what counts them
can be changed and tried again. The table is printed as Markdown, and written to OUT/sameness.md.
"""

import argparse
import itertools
import math
import os
import shutil
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from msgspec import structs

sys.path.insert(0, str(Path(__file__).parent.parent))

from helpers.jobs import hvdtrain

from hvdtrain.base.world.load import beside_others
from hvdtrain.reporting.answer import EITHER, RING_WINS, SERVERS_WIN, UNKNOWN, reach_answer
from hvdtrain.reporting.drift import drift
from hvdtrain.reporting.rule import LOOKS
from hvdtrain.runs.read import Run, load_run

WORKERS = 2
JOB = ("--mode", "ddp", "--width", "0.125", "--threads", "1", "--seed", "1")
LABELS = ({"mode": "allreduce", "servers": 0}, {"mode": "ps-sync", "servers": 1})
WORDS = (RING_WINS, SERVERS_WIN, EITHER, UNKNOWN)
MOST_REPEATS = 20  # of the longer stretches
MOST_RELABELLED = 6  # repeats, of which there are 64 ways


def sprint(folder: Path, seconds: float) -> Run:
    """A sprint of the job, which is made where it is not there yet."""
    if not (folder / "summary.json").is_file():
        shutil.rmtree(folder, ignore_errors=True)  # an interrupted one
        done = hvdtrain("train", *JOB, "--sprint", f"{seconds}s", "--out", folder, ranks=WORKERS)
        if done.returncode:
            sys.exit(done.stdout)
    return load_run(folder)


def labelled(runs: Sequence[Run], first: Sequence[int] = (0, 1) * LOOKS[-1]) -> list[Run]:
    """Repeats of two labels, of sprints in the order in which they were made: A B, B A, A B …

    Args:
        first: which label the first sprint of each repeat has.
    """
    made = []
    for number, run in enumerate(runs):
        repeat, place = divmod(number, 2)
        label = LABELS[(place + first[repeat]) % 2]
        made.append(
            replace(run, manifest=structs.replace(run.manifest, repeat=repeat + 1, **label))
        )
    return made


def until_sure(runs: Sequence[Run]) -> str:
    """The word of a comparison that goes on until there is one, as far as these sprints go."""
    for look in (look for look in LOOKS if 2 * look <= len(runs)):
        word = reach_answer(labelled(runs[: 2 * look])).word
        if word != UNKNOWN:
            return word
    return UNKNOWN


def stretches(runs: Sequence[Run], repeats: int) -> Iterator[Sequence[Run]]:
    """The sprints of one comparison after the other, of so many repeats each; a rest is left out."""
    each = 2 * repeats
    for first in range(0, len(runs) - each + 1, each):
        yield runs[first : first + each]


def table(runs: Sequence[Run], repeats: int) -> str:
    parts = list(stretches(runs, repeats))
    orders = list(itertools.product((0, 1), repeat=repeats)) if repeats <= MOST_RELABELLED else []
    rows = {
        f"{repeats} repeats": [reach_answer(labelled(part)).word for part in parts],
        f"the same, each of {len(orders)} ways to label the pairs": [
            reach_answer(labelled(part, order)).word
            for part, order in itertools.product(parts, orders)
        ],
        f"until sure, at most {MOST_REPEATS}": [
            until_sure(part) for part in stretches(runs, MOST_REPEATS)
        ],
    }
    lines = [
        f"| looked at after | comparisons | {' | '.join(WORDS)} |",
        f"|---|{'--:|' * (1 + len(WORDS))}",
    ]
    for name, words in rows.items():
        counts = Counter(words)
        lines.append(
            f"| {name} | {len(words)} | {' | '.join(str(counts[word]) for word in WORDS)} |"
        )
    return "\n".join(lines)


def about(runs: Sequence[Run], repeats: int) -> str:
    """How noisy the machine was."""
    pairs = zip(runs[::2], runs[1::2], strict=False)
    deviation = statistics.stdev(
        math.log(a.summary.samples_per_s / b.summary.samples_per_s) for a, b in pairs
    )
    busy = sum(bool(beside_others(run.summary.load)) for run in runs)
    parts = list(stretches(runs, repeats))
    drifting = sum(drift(part) is not None for part in parts)
    return (
        f"{len(runs)} sprints, {busy} of them beside other work; a repeat's ratio has a deviation of {deviation:.1%}; "
        f"the sprints of {drifting} of {len(parts)} comparisons are said to drift"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--times", type=int, default=40, help="comparisons")
    parser.add_argument(
        "--repeats", type=int, default=LOOKS[0], help="of each label in a comparison"
    )
    parser.add_argument("--sprint", type=float, default=0.5, help="seconds")
    parser.add_argument("--minutes", type=float, default=15.0, help="no sprint begins later")
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + 60 * asked.minutes
    before = os.getloadavg()
    runs = []
    for number in range(2 * asked.repeats * asked.times):
        folder = asked.out / f"sprint-{number:04d}"
        if time.monotonic() > deadline and not (folder / "summary.json").is_file():
            break
        runs.append(sprint(folder, asked.sprint))
    if len(runs) < 2 * asked.repeats:
        sys.exit(
            f"{len(runs)} sprints are no comparison of {asked.repeats} repeats: give more --minutes"
        )
    loads = ", ".join(f"{load:.1f}" for load in (*before[:1], *os.getloadavg()[:1]))
    told = f"{table(runs, asked.repeats)}\n\n{about(runs, asked.repeats)}\n"
    told += f"load before and after: {loads}; {datetime.now(UTC):%Y-%m-%d %H:%M} UTC\n"
    (asked.out / "sameness.md").write_text(told)
    print(told)


if __name__ == "__main__":
    main()
