"""Whether what `hvdtrain explain` says would have been comes true: by really doing it, on hosts of
this machine.

    sudo python tests/benchmarks/what_if.py --out what-if-check

At 200 Mbit/s run a ring of two hosts, the same with one worker made three times as slow, and
`ps-sync` and `ps-async` with a server on a host alone and a worker on each of two others; on four
hosts a ring, and `ps-sync` with a server beside each worker. Messages decide these jobs. At 1 Gbit/s
run a ring, in which computing takes about half of a step, and `ps-async` with a worker that is three
times as slow. Of each explain says what twice the bandwidth, no straggler or one more server would
have given. Then that is done: the links get twice their rate, nobody is slow, there is a second
server beside a worker. Repeats go through all of it in turns, so that the machine's speed, which
changes from minute to minute, is alike on both sides; a run is asked and compared with the one of
the same repeat.

Prints by how much each was foretold to be faster, by how much it was, and how far the former is
off, as medians and ranges. Three repeats take a quarter of an hour on two idle cores. Finished runs in the
folder stay, so that more repeats may follow. Needs what `hvdtrain hosts up` needs.
"""

import argparse
import json
import shutil
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from explain import hvdtrain

from hvdtrain.reporting.explaining.timeline import FEWEST_STEPS
from hvdtrain.runs.read import load_run

NODES = ("node1", "node2", "node3", "node4")
RATES = ("200mbit", "400mbit", "1gbit", "2gbit")
JOB = (
    "--model",
    "vggf",
    "--batch-size",
    32,
    "--optimizer",
    "sgd",
    "--threads",
    1,
    "--steps",
    FEWEST_STEPS,
    "--snapshot-every",
    "never",
    "--save",
    "none",
)
WIDTHS = {"allreduce": "0.125", "ps-sync": "0.0625", "ps-async": "0.0625"}


class Kind(NamedTuple):
    """A job; `slow` is the worker that is made slow, as --slow has it."""

    mode: str
    servers: int = 0
    rate: str = RATES[0]
    slow: str = "none"
    workers: int = 2

    @property
    def name(self) -> str:
        words = [self.mode, str(self.servers), self.rate, self.slow.replace(":", "x")]
        if self.workers != 2:
            words.append(f"{self.workers}-workers")
        return "-".join(words)

    @property
    def hosts(self) -> str:
        """The hosts and slots, as -H has them."""
        if self.workers == len(NODES):
            slots = 2 if self.servers else 1
            return ",".join(f"{node}:{slots}" for node in NODES)
        places = {0: "node2:1,node3:1", 1: "node1:1,node2:1,node3:1", 2: "node1:1,node2:2,node3:1"}
        return places[self.servers]


RING, SERVER = Kind("allreduce"), Kind("ps-sync", 1)
LEASING = Kind("ps-async", 1)
RING_OF_FOUR = RING._replace(workers=4)
FOUR_SERVERS = SERVER._replace(workers=4, servers=4)
FAST_RING = RING._replace(rate=RATES[2])
FAST_LEASING = LEASING._replace(rate=RATES[2])
SLOW = RING._replace(slow="1:3x")
# What explain is asked, of which kind, and the kind that is it.
QUESTIONS = [
    ("double_bandwidth", RING, RING._replace(rate=RATES[1])),
    ("double_bandwidth", SERVER, SERVER._replace(rate=RATES[1])),
    ("without_straggler", SLOW, RING),
    ("one_more_server", SERVER, SERVER._replace(servers=2)),
    ("double_bandwidth", LEASING, LEASING._replace(rate=RATES[1])),
    ("double_bandwidth", FAST_RING, FAST_RING._replace(rate=RATES[3])),
    ("without_straggler", FAST_LEASING._replace(slow="1:3x"), FAST_LEASING),
    ("double_bandwidth", RING_OF_FOUR, RING_OF_FOUR._replace(rate=RATES[1])),
    ("double_bandwidth", FOUR_SERVERS, FOUR_SERVERS._replace(rate=RATES[1])),
]


def train(kind: Kind, folder: Path) -> None:
    """The job, unless it is there."""
    if (folder / "summary.json").exists():
        return
    shutil.rmtree(folder, ignore_errors=True)  # what an interrupted job left
    hvdtrain(
        "launch",
        "--launcher",
        "ssh",
        "-n",
        kind.workers,
        "-s",
        kind.servers,
        "-H",
        kind.hosts,
        "--out",
        folder,
        "--",
        "--mode",
        kind.mode,
        "--width",
        WIDTHS[kind.mode],
        "--slow",
        kind.slow,
        *JOB,
    )


def rate_of(folder: Path) -> float:
    return load_run(folder).summary.samples_per_s or 0.0


def foretold(folder: Path, question: str) -> float:
    file = folder / "explained.json"
    hvdtrain("explain", folder, "--json", file)
    return float(json.loads(file.read_text())["what_if"][question]["samples_per_s"])


def told(values: Sequence[float], form: str) -> str:
    return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("what-if-check"))
    args = parser.parse_args()
    out = args.out.absolute()
    kinds = {kind for _, *both in QUESTIONS for kind in both}
    hvdtrain("hosts", "up", "--count", len(NODES), "--rate", RATES[0])
    try:
        for repeat in range(args.repeats):
            for rate in RATES:
                for node in NODES:
                    hvdtrain("hosts", "rate", node, rate)
                for kind in sorted(kind for kind in kinds if kind.rate == rate):
                    train(kind, out / f"{kind.name}-{repeat}")
                    print(
                        f"{kind.name}-{repeat}: {rate_of(out / f'{kind.name}-{repeat}'):.1f} samples/s",
                        flush=True,
                    )
    finally:
        hvdtrain("hosts", "down")
    for question, before, after in QUESTIONS:
        asked, done = (
            [out / f"{kind.name}-{repeat}" for repeat in range(args.repeats)]
            for kind in (before, after)
        )
        predicted = [foretold(folder, question) / rate_of(folder) for folder in asked]
        measured = [rate_of(b) / rate_of(a) for a, b in zip(asked, done, strict=True)]
        off = [a / b - 1 for a, b in zip(predicted, measured, strict=True)]
        print(
            f"{question} of {before.name}: foretold {told(predicted, '.2f')} times as fast, was "
            f"{told(measured, '.2f')}, off by {told(off, '+.1%')}; n = {args.repeats}"
        )


if __name__ == "__main__":
    main()
