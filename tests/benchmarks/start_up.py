"""What `hvdtrain launch` takes longer than the same starter by hand, for a job of one step on two workers.

    python tests/benchmarks/start_up.py local
    python tests/benchmarks/start_up.py ssh --hosts node1:1,node2:1 --interface hvdtrain0
    python tests/benchmarks/start_up.py mpi --hosts node1:1,node2:1 --interface hvdtrain0

The two take turns. Hosts are looked at first by `launch` alone.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BIN = Path(sys.executable).parent
OPTIONS = ["--mode", "allreduce", "--width", "0.0625", "--threads", "1", "--steps", "1"]


def command(how: str, launcher: str, hosts: str, interface: str, out: Path) -> list[str]:
    """What starts the job, `by hand` or with `launch`."""
    place = ["-H", hosts] if launcher != "local" else []
    rank = [sys.executable, "-m", "hvdtrain", "train", *OPTIONS, "--out", str(out)]
    if how == "launch":
        ours = [sys.executable, "-m", "hvdtrain", "launch", "--launcher", launcher, *place, "-n", "2"]
        return [*ours, "--out", str(out), "--", *OPTIONS]
    if launcher == "ssh":
        narrowed = ["--network-interfaces", interface] if interface else []
        return [str(BIN / "horovodrun"), "--gloo", "-np", "2", *place, *narrowed, *rank]
    words = ["--prefix", str(BIN.parent), "--map-by", "node"] if place else ["--oversubscribe"]
    words += ["--prtemca", "prte_if_include", interface] if interface else []
    words += ["-x", "PYTHONPATH"] if place and "PYTHONPATH" in os.environ else []
    return [str(BIN / "mpirun"), *place, *words, "--bind-to", "none", "-np", "2", *rank]


def seconds(words: list[str]) -> float:
    env = os.environ | {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    began = time.perf_counter()
    subprocess.run(words, check=True, env=env, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("launcher", choices=["local", "ssh", "mpi"])
    parser.add_argument("--hosts", default="localhost:2")
    parser.add_argument("--interface", default="")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    taken: dict[str, list[float]] = {"by hand": [], "launch": []}
    if args.launcher == "local":  # what the recipe sets
        os.environ["OMPI_MCA_btl"] = "self,sm"
    with tempfile.TemporaryDirectory(prefix="hvdtrain-start-up-") as folder:
        for turn in range(args.rounds + 1):
            for how, its in taken.items():
                out = Path(folder) / f"{how.replace(' ', '-')}-{turn}"
                took = seconds(command(how, args.launcher, args.hosts, args.interface, out))
                if turn:  # the first warms up
                    its.append(took)
    for name, its in taken.items():
        print(f"{name:<8} {statistics.median(its):.2f} s ({min(its):.2f} to {max(its):.2f}, n = {len(its)})")
    more = [ours - theirs for ours, theirs in zip(taken["launch"], taken["by hand"], strict=True)]
    print(f"launch takes {statistics.median(more):+.2f} s ({min(more):+.2f} to {max(more):+.2f})")


if __name__ == "__main__":
    main()
