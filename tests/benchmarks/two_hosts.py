"""One message between two hosts of `hvdtrain hosts`, joined by links of so many Gbit/s each way.

    sudo python tests/benchmarks/two_hosts.py --bytes 553648128 --gbit 1

`allreduce` is Horovod's, over Gloo, between two workers; `pushpull` a worker's gradients to a server and the weights
back. Of the first each host sends and receives the whole message, and so it does of the second: the floor is the same.
Buckets are smaller than usual: what nothing else overlaps is the time that one of them takes. With headers of TCP and
Ethernet no connection gets more than 0.956 of line rate.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from hvdtrain.launch import testbed

KINDS = {"allreduce": ("horovod", "2"), "pushpull": ("rpc", "1")}  # backend, workers


def measure(kind: str, repeats: int, size: int, bucket_mb: str) -> dict[str, Any]:
    backend, workers = KINDS[kind]
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder, "rows.json")
        command = [
            sys.executable, "-m", "hvdtrain", "bench", "--op", kind, "--backend", backend, "--bytes", str(size),
            "-n", workers, "--bucket-mb", bucket_mb, "-H", "node1:1,node2:1",
            "--repeats", str(repeats), "--json", str(rows),
        ]  # fmt: skip
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=600)
        [row] = json.loads(rows.read_text())
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", type=int, default=553648128)
    parser.add_argument("--gbit", type=float, default=1.0)
    parser.add_argument("--bucket-mb", default="2")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    floor = args.bytes * 8 / args.gbit / 1e9
    testbed.up([f"{args.gbit * 1000:.0f}mbit"] * 2)
    try:
        for kind in KINDS:
            row = measure(kind, args.repeats, args.bytes, args.bucket_mb)
            median = row["seconds_median"]
            print(
                f"{kind} of {args.bytes / 1e6:.0f} MB over {args.gbit:g} Gbit/s: median {median:.2f} s "
                f"({row['seconds_min']:.2f} to {row['seconds_max']:.2f}, n={row['repeats']}), floor {floor:.2f} s: "
                f"{floor / median:.2f} of line rate"
            )
    finally:
        testbed.down()


if __name__ == "__main__":
    main()
