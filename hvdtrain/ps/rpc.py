"""The only module that knows about torch.distributed.rpc. Its traps, and what is done about each:

- A handler that blocks takes one of a few threads: handlers return at once, or a future.
- Tensors in flight are not copied: whoever sends one leaves it alone until the answer is there.
- Every message is received into new memory, and what costs time there is the page faults of touching it first: memory
  is kept by the process, and messages are small enough to be taken from what is kept (see keep_memory).
- A graceful shutdown waits without limit for every peer: we part at a barrier of our own, bounded, and shut down hard.
- No authentication, pickle on the wire: whoever reaches the port runs code. Local jobs listen on loopback alone.
"""

import ctypes
import os
import resource
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.rpc as rpc
from torch.distributed import PrefixStore
from torch.distributed.rendezvous import register_rendezvous_handler
from torch.futures import Future

from hvdtrain.errors import Failure
from hvdtrain.ps.server import Answer, Bucket, Push
from hvdtrain.rendezvous import part
from hvdtrain.world import World

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.distributed import Store

Wire = tuple[int, int, torch.Tensor]  # version, staleness, weights
Decode = Callable[[Sequence[torch.Tensor]], torch.Tensor]
# TensorPipe takes shared memory wherever two processes share a machine, network namespaces or not.
OVER_TCP: dict[str, Any] = {"_transports": ["uv"], "_channels": ["basic"]}
LARGEST_KEPT = 32 * 2**20  # bytes: glibc gives what is larger back to the system, whatever it is told

# Of this process, where it is a server: handlers are called by name, without an object.
_buckets: dict[int, Bucket] = {}
_make_bucket: Callable[[int, torch.Tensor], Bucket] | None = None
_decode: Decode | None = None
_heard = threading.Event()  # by a server, from a worker
_leaving = threading.Event()


def keep_memory() -> None:
    """Keep freed memory in this process, for the next message: glibc's mallopt(3), where there is one."""
    m_trim_threshold, m_mmap_threshold, m_arena_max = -1, -3, -8
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt:
        mallopt(m_mmap_threshold, LARGEST_KEPT)
        mallopt(m_trim_threshold, 2**31 - 1)
        mallopt(m_arena_max, 1)  # what one thread frees is for all


def start(world: World, store: "Store", timeout: float) -> None:
    """Join the rpc group as `rank{r}`."""

    def find(url: str, **_: object) -> "Iterator[tuple[Store, int, int]]":
        yield PrefixStore("rpc", store), world.rank, world.size

    keep_memory()
    register_rendezvous_handler("hvdtrain", find)
    rpc.init_rpc(
        f"rank{world.rank}", rank=world.rank, world_size=world.size,
        rpc_backend_options=rpc.TensorPipeRpcBackendOptions(
            init_method="hvdtrain://", rpc_timeout=timeout, **(OVER_TCP if os.environ.get("HVDTRAIN_OVER_TCP") else {})
        ),
    )  # fmt: skip
    if not world.is_server:
        threading.Thread(target=_keep_in_touch, args=(world.servers, timeout), daemon=True).start()


def serve(make_bucket: Callable[[int, torch.Tensor], Bucket], decode: Decode) -> None:
    """Make this process a server. Call it before start: a worker may be faster.

    Args:
        make_bucket: a bucket from its number and the weights it is given.
        decode: a gradient, [bucket] float32, from the tensors that were sent.
    """
    global _make_bucket, _decode
    _make_bucket, _decode = make_bucket, decode


def stop(world: World, store: "Store", timeout: float) -> None:
    """Part from the others in order, then shut down without waiting again."""
    _leaving.set()
    part(world, store, timeout)
    rpc.shutdown(graceful=False)


def serve_until_done(world: World, store: "Store", timeout: float) -> None:
    """Return when every worker is done.

    Raises:
        Failure: no worker was heard for as long as the timeout.
    """
    last = time.monotonic()
    workers = [f"done/{rank}" for rank in range(world.servers, world.size)]
    while not store.check(workers):
        if _heard.wait(timeout=0.2):
            _heard.clear()
            last = time.monotonic()
        elif time.monotonic() - last > timeout:
            silent = [rank for rank in range(world.servers, world.size) if not store.check([f"done/{rank}"])]
            raise Failure(f"no worker was heard for {timeout:.0f} s; ranks {silent} are not done (see --timeout)")


def install(server: int, bucket: int, weights: torch.Tensor) -> None:
    """Give a server a bucket's weights, [bucket] float32."""
    rpc.rpc_sync(f"rank{server}", _install, args=(bucket, weights))


def push(
    server: int, bucket: int, worker: int, step: int, version: int, lr: float, parts: Sequence[torch.Tensor]
) -> "Future[Wire | None]":
    """Send an encoded gradient; leave it unchanged until the future is done. See server.Push.

    The future holds the answer if the worker may go on at once, else None: then ask with `answer`.
    """
    return rpc.rpc_async(f"rank{server}", _push, args=(bucket, worker, step, version, lr, list(parts)))


def answer(server: int, bucket: int, worker: int) -> "Future[Wire]":
    """The answer to this worker's last push, as soon as it may go on."""
    return rpc.rpc_async(f"rank{server}", _answer, args=(bucket, worker))


def read(server: int, bucket: int) -> "Future[Wire]":
    """A bucket's version, 0, and weights, as they are."""
    return rpc.rpc_async(f"rank{server}", _read, args=(bucket,))


def rest(server: int, worker: int) -> None:
    """Tell a server that this worker pushes nothing for now: see server.Policy."""
    rpc.rpc_sync(f"rank{server}", _rest, args=(worker,))


def rss_mb(server: int) -> float:
    """A server's peak resident memory in MiB."""
    return rpc.rpc_sync(f"rank{server}", _rss_mb)


def _keep_in_touch(servers: int, timeout: float) -> None:
    """Let the servers hear of this worker while it evaluates or reads images for longer than their timeout."""
    while not _leaving.wait(timeout / 4):
        for server in range(servers):
            rpc.rpc_async(f"rank{server}", _hear)


def _hear() -> None:
    _heard.set()


def _rss_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 2**20


def _install(bucket: int, weights: torch.Tensor) -> None:
    assert _make_bucket is not None
    _buckets[bucket] = _make_bucket(bucket, weights)


def _push(bucket: int, worker: int, step: int, version: int, lr: float, parts: list[torch.Tensor]) -> Wire | None:
    _heard.set()
    assert _decode is not None
    done = _buckets[bucket].push(Push(worker, step, version, lr, _decode(parts)))
    return _on_wire(done.result()) if done.done() else None


@rpc.functions.async_execution
def _answer(bucket: int, worker: int) -> "Future[Wire]":
    _heard.set()
    wire: Future[Wire] = Future()
    _buckets[bucket].answer(worker).add_done_callback(lambda done: wire.set_result(_on_wire(done.result())))
    return wire


def _read(bucket: int) -> Wire:
    _heard.set()
    return _on_wire(_buckets[bucket].read())


def _rest(worker: int) -> None:
    _heard.set()
    for bucket in _buckets.values():
        bucket.rest(worker)


def _on_wire(fresh: Answer) -> Wire:
    return fresh.version, fresh.staleness, fresh.weights
