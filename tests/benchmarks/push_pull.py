"""A push and pull over hvdtrain's wires, beside the least that memory takes for it, beside a first
attempt with torch's rpc and beside MXNet 1.9.1's KVStore.

    python tests/benchmarks/push_pull.py --bytes 553648128 --repeats 7
    python tests/benchmarks/push_pull.py --peers memory calls

One worker and one server on this machine, one peer after the other. uv makes an environment for
MXNet. The memory's time is measured before and after hvdtrain's. `calls` are as many calls of
torch's rpc as there are buckets, which carry nothing.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

PEERS = ["memory", "calls", "rpc", "mxnet"]
WARM_UP = 2
MXNET = [
    "uv",
    "run",
    "--no-project",
    "--isolated",
    "--python",
    "3.11",
    "--with",
    "mxnet==1.9.1",
    "--with",
]
MXNET += ["numpy==1.23.5", "python"]


def timed(act: Callable[[], object], repeats: int) -> None:
    """Print the seconds of each repeat, as JSON."""
    seconds = []
    for _ in range(WARM_UP + repeats):
        began = time.perf_counter()
        act()
        seconds.append(time.perf_counter() - began)
    print(json.dumps(seconds[WARM_UP:]), flush=True)


def of_mxnet(kind: str, size: int, repeats: int) -> None:
    import numpy

    vars(numpy)["bool"] = bool  # MXNet asks for numpy.bool, deprecated by then
    import mxnet as mx

    # which serves, where this is no worker, until the worker is done, and exits
    store = mx.kv.create(kind)
    store.set_optimizer(mx.optimizer.SGD(learning_rate=0.1))
    gradient, weights = mx.nd.ones((size // 4,)), mx.nd.zeros((size // 4,))
    store.init(0, gradient)

    def act() -> None:
        store.push(0, gradient)
        store.pull(0, out=weights)
        weights.wait_to_read()

    timed(act, repeats)


BUCKET = 4 * 2**20  # bytes, as hvdtrain's buckets
SLOTS = 12  # of the memory that both share: as many as may be under way


def of_memory(size: int, repeats: int) -> None:
    """The same reads and writes without a message: a thread for the worker and one for the server,
    neither of which waits for the other. Gradients are copied to where the server reads them, and
    the worker copies the weights from where the server updates them."""
    import torch

    torch.set_num_threads(1)
    buckets = size // BUCKET
    shape = (buckets, BUCKET // 4)
    gradient, model, weights = torch.ones(shape), torch.zeros(shape), torch.zeros(shape)
    pushed = torch.ones(SLOTS, BUCKET // 4)

    def work() -> None:
        for i in range(buckets):
            pushed[i % SLOTS].copy_(gradient[i])
            model[i].copy_(weights[i])

    def serve() -> None:
        for i in range(buckets):
            weights[i].sub_(pushed[i % SLOTS], alpha=0.1)

    def act() -> None:
        threads = [threading.Thread(target=work), threading.Thread(target=serve)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    timed(act, repeats)


def of_rpc(size: int, repeats: int) -> None:
    """What one writes first: push the whole tensor, then pull the whole tensor."""
    import torch
    from torch.distributed import rpc

    torch.set_num_threads(1)
    role = os.environ["DMLC_ROLE"]
    rpc.init_rpc(role, rank=int(role == "worker"), world_size=2)
    if role == "worker":
        x = torch.ones(size // 4)

        def act() -> None:
            rpc.rpc_sync("server", update, args=(x,), timeout=0)
            x.copy_(rpc.rpc_sync("server", pull, timeout=0))

        timed(act, repeats)
    rpc.shutdown()


def of_calls(size: int, repeats: int) -> None:
    """Calls of a function that does nothing, as many at a time as buckets may be under way."""
    import torch
    from torch.distributed import rpc

    torch.set_num_threads(1)
    role = os.environ["DMLC_ROLE"]
    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=4, _transports=["ibv", "uv"])
    rpc.init_rpc(role, rank=int(role == "worker"), world_size=2, rpc_backend_options=options)
    if role == "worker":

        def act() -> None:
            under_way: deque[Any] = deque()
            for _ in range(size // BUCKET):
                if len(under_way) == SLOTS:
                    under_way.popleft().wait()
                under_way.append(rpc.rpc_async("server", nothing))
            for call in under_way:
                call.wait()

        timed(act, repeats)
    rpc.shutdown()


def nothing() -> None:
    pass


held = {}  # the server's weights


def update(gradient) -> None:
    held.setdefault("weights", gradient.new_zeros(gradient.shape)).sub_(gradient, alpha=0.1)


def pull():
    return held["weights"]


OF_KIND = {"memory": of_memory, "calls": of_calls, "rpc": of_rpc}


def seconds_of(
    python: list[str], kind: str, roles: list[str], args: argparse.Namespace
) -> list[float]:
    """What the worker printed, of processes in these roles."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    shared = {
        "DMLC_PS_ROOT_URI": "127.0.0.1",
        "DMLC_PS_ROOT_PORT": port,
        "DMLC_NODE_HOST": "127.0.0.1",
        "DMLC_NUM_SERVER": "1",
        "DMLC_NUM_WORKER": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    words = [
        *python,
        __file__,
        "--kind",
        kind,
        "--bytes",
        str(args.bytes),
        "--repeats",
        str(args.repeats),
    ]
    ranks = [
        subprocess.Popen(
            words,
            env={**os.environ, **shared, "DMLC_ROLE": role},
            stdout=subprocess.PIPE,
            text=True,
        )
        for role in roles
    ]
    try:
        return json.loads(ranks[-1].communicate(timeout=600)[0].splitlines()[-1])
    finally:
        for rank in ranks:
            rank.kill()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bytes", type=int, default=553648128)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=PEERS)
    parser.add_argument("--kind", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.kind in OF_KIND:
        return OF_KIND[args.kind](args.bytes, args.repeats)
    if args.kind:
        return of_mxnet(args.kind, args.bytes, args.repeats)
    words = ["bench", "--op", "pushpull", "--bytes", str(args.bytes), "-n", "1", "-s", "1"]
    words += ["--repeats", str(args.repeats)]
    if "memory" in args.peers:
        show("memory, before", seconds_of([sys.executable], "memory", ["worker"], args))
    subprocess.run([sys.executable, "-m", "hvdtrain", *words], check=True)
    if "memory" in args.peers:
        show("memory, after", seconds_of([sys.executable], "memory", ["worker"], args))
    if "calls" in args.peers:
        show("calls", seconds_of([sys.executable], "calls", ["server", "worker"], args))
    if "rpc" in args.peers:
        show("plain rpc", seconds_of([sys.executable], "rpc", ["server", "worker"], args))
    if "mxnet" in args.peers:
        for kind in ("dist_async", "dist_sync"):
            seconds = seconds_of(MXNET, kind, ["scheduler", "server", "worker"], args)
            show(f"MXNet {kind}", seconds)


def show(name: str, seconds: list[float]) -> None:
    middle = statistics.median(seconds)
    reach = f"{min(seconds):.3f} to {max(seconds):.3f}, n = {len(seconds)}"
    print(f"{name}: {middle:.3f} s ({reach})", flush=True)


if __name__ == "__main__":
    main()
