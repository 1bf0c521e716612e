"""Push and pull between two hosts: network namespaces joined by a pair of interfaces, each limited to so many Gbit/s.

    python tests/benchmarks/two_hosts.py --bytes 553648128 --gbit 1

Needs root, ip and tc. What is made is removed at the end.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys

NAMES, ADDRESSES = ("hvdtrain-a", "hvdtrain-b"), ("10.77.0.1", "10.77.0.2")


def sh(words: str) -> None:
    subprocess.run(words.split(), check=True)


def join(gbit: float) -> None:
    for name in NAMES:
        sh(f"ip netns add {name}")
    sh(f"ip link add hvda netns {NAMES[0]} type veth peer name hvdb netns {NAMES[1]}")
    for name, link, address in zip(NAMES, ("hvda", "hvdb"), ADDRESSES, strict=True):
        sh(f"ip -n {name} addr add {address}/24 dev {link}")
        sh(f"ip -n {name} link set {link} up")
        sh(f"ip -n {name} link set lo up")
        sh(f"tc -n {name} qdisc add dev {link} root tbf rate {int(gbit * 1000)}mbit burst 256kb latency 50ms")


def part() -> None:
    for name in NAMES:
        subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", type=int, default=553648128)
    parser.add_argument("--gbit", type=float, default=1.0)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    part()
    try:
        join(args.gbit)
        program = [sys.executable, "-m", "hvdtrain.bench.ranks", "rpc", "1", str(args.repeats), str(args.bytes)]
        ranks = []
        for rank, (name, link) in enumerate(zip(NAMES, ("hvda", "hvdb"), strict=True)):
            env = os.environ | {
                "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
                "MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": "29777", "TP_SOCKET_IFNAME": link,
                "GLOO_SOCKET_IFNAME": link, "HVDTRAIN_OVER_TCP": "1", "OMP_NUM_THREADS": "1",
            }  # fmt: skip
            ranks.append(
                subprocess.Popen(["ip", "netns", "exec", name, *program], env=env, stdout=subprocess.PIPE, text=True)
            )
        try:
            printed = [rank.communicate(timeout=300)[0] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        [seconds] = json.loads(printed[1].splitlines()[-1])
    finally:
        part()
    floor = args.bytes * 8 / args.gbit / 1e9
    print(
        f"push and pull of {args.bytes / 1e6:.0f} MB over {args.gbit:g} Gbit/s: "
        f"median {statistics.median(seconds):.2f} s ({min(seconds):.2f} to {max(seconds):.2f}, n={len(seconds)}); "
        f"one direction alone takes {floor:.2f} s"
    )


if __name__ == "__main__":
    main()
