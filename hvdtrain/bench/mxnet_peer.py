"""MXNet 1.9.1's KVStore: seconds of each push and pull, as JSON. Runs with Python 3.11, mxnet 1.9.1 and numpy 1.23.5.

    python mxnet_peer.py dist_async|dist_sync WORKERS SERVERS REPEATS BYTES[,BYTES…]

Starts a scheduler, servers and workers on loopback, and ends with them.
"""

import json
import os
import socket
import subprocess
import sys
import time

WARM_UP = 2


def main() -> int:
    workers, servers = int(sys.argv[2]), int(sys.argv[3])
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    shared = {
        "DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": str(port), "DMLC_NODE_HOST": "127.0.0.1",
        "DMLC_NUM_SERVER": str(servers), "DMLC_NUM_WORKER": str(workers),
    }  # fmt: skip
    roles = ["scheduler"] + ["server"] * servers + ["worker"] * workers
    children = [
        subprocess.Popen([sys.executable, *sys.argv], env={**os.environ, **shared, "DMLC_ROLE": role}) for role in roles
    ]
    try:
        return max(child.wait(timeout=1200) for child in children)
    finally:
        for child in children:
            child.kill()


def measure() -> None:
    import numpy

    vars(numpy)["bool"] = bool  # MXNet asks for numpy.bool, deprecated by then
    import mxnet as mx

    repeats, sizes = int(sys.argv[4]), [int(size) for size in sys.argv[5].split(",")]
    if os.environ["DMLC_ROLE"] != "worker":
        mx.kv.create(sys.argv[1])  # serves until all workers are done, and exits
        return
    store = mx.kv.create(sys.argv[1])
    store.set_optimizer(mx.optimizer.SGD(learning_rate=0.1))
    found = []
    for key, size in enumerate(sizes):
        gradient, weights = mx.nd.ones((size // 4,)), mx.nd.zeros((size // 4,))
        store.init(key, gradient)
        times = []
        for _ in range(WARM_UP + repeats):
            store._barrier()
            began = time.perf_counter()
            store.push(key, gradient)
            store.pull(key, out=weights)
            weights.wait_to_read()
            store._barrier()
            times.append(time.perf_counter() - began)
        found.append(times[WARM_UP:])
    if store.rank == 0:
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    if "DMLC_ROLE" in os.environ:
        measure()
    else:
        sys.exit(main())
