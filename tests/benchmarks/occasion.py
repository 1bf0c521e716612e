"""Whether the first command says the same on another occasion: runs it, and adds its answer to a
file.

    python tests/benchmarks/occasion.py occasions.csv
    python tests/benchmarks/occasion.py occasions.csv --count

Run it some hours apart, five times, on the machine as it is. A line has the time, the word, the
ratio that decides with its interval, seconds, and the load before. --count runs nothing, and says
how often each word came.
"""

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

COLUMNS = ("time", "word", "ratio", "ci_low", "ci_high", "seconds", "load", "because")
ONE_MACHINE = ("ONE MACHINE", "ONE PROCESS")


def first_command() -> dict[str, object]:
    """What `hvdtrain compare` says now."""
    load, began = os.getloadavg()[0], time.monotonic()
    with tempfile.TemporaryDirectory() as out:
        subprocess.run(
            [sys.executable, "-m", "hvdtrain", "compare", "--out", f"{out}/first"], check=True
        )
        verdict = json.loads((Path(out) / "first" / "verdict.json").read_text())
    decides = verdict["one_machine" if verdict["answer"] in ONE_MACHINE else "speed"] or {}
    return {
        "time": f"{datetime.now(UTC):%Y-%m-%d %H:%M}",
        "word": verdict["answer"],
        **{key: decides.get(key) for key in ("ratio", "ci_low", "ci_high")},
        "seconds": round(time.monotonic() - began),
        "load": round(load, 2),
        "because": verdict["because"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--count", action="store_true")
    asked = parser.parse_args()
    if not asked.count:
        row = first_command()
        is_new = not asked.file.exists()
        with asked.file.open("a", newline="") as lines:
            writer = csv.DictWriter(lines, COLUMNS)
            if is_new:
                writer.writeheader()
            writer.writerow(row)
    with asked.file.open(newline="") as lines:
        words = Counter(row["word"] for row in csv.DictReader(lines))
    print(
        f"{words.total()} occasions: {', '.join(f'{word} {count}' for word, count in words.most_common())}"
    )


if __name__ == "__main__":
    main()
