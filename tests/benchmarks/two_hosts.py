"""One message between two hosts of `hvdtrain hosts`, joined by links of so many Gbit/s each way.

    sudo python tests/benchmarks/two_hosts.py --bytes 553648128 --gbit 1

`allreduce` is Horovod's, over Gloo, between two workers; `pushpull` a worker's gradients to a server and the weights
back. Of the first each host sends and receives the whole message, and so it does of the second: the floor is the same.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from hvdtrain.launch import testbed

KINDS = {"allreduce": ("horovod", 0), "pushpull": ("rpc", 1)}


def measure(kind: str, repeats: int, size: int) -> list[float]:
    backend, servers = KINDS[kind]
    program = [sys.executable, "-m", "hvdtrain.bench.ranks", backend, str(servers), str(repeats), str(size)]
    starter = [str(Path(sys.executable).parent / "horovodrun"), "--gloo", "-np", "2", "-H", "node1:1,node2:1"]
    env = os.environ | {"HVDTRAIN_OVER_TCP": "1", "OMP_NUM_THREADS": "1"}
    words = [*starter, "--network-interfaces", testbed.INTERFACE, *program]
    printed = subprocess.run(words, env=env, check=True, stdout=subprocess.PIPE, text=True, timeout=600).stdout
    [measured] = json.loads(printed[printed.index("[{") : printed.index("}]") + 2])
    return measured["seconds"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", type=int, default=553648128)
    parser.add_argument("--gbit", type=float, default=1.0)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    floor = args.bytes * 8 / args.gbit / 1e9
    testbed.up([f"{args.gbit * 1000:.0f}mbit"] * 2)
    try:
        for kind in KINDS:
            seconds = measure(kind, args.repeats, args.bytes)
            median = statistics.median(seconds)
            print(
                f"{kind} of {args.bytes / 1e6:.0f} MB over {args.gbit:g} Gbit/s: median {median:.2f} s "
                f"({min(seconds):.2f} to {max(seconds):.2f}, n={len(seconds)}), floor {floor:.2f} s: "
                f"{floor / median:.2f} of line rate"
            )
    finally:
        testbed.down()


if __name__ == "__main__":
    main()
