"""The only module that knows about torch.distributed.rpc. Its traps, and what is done about each:

- A handler that blocks takes one of a few threads: handlers return futures and never wait.
- Tensors in flight are not copied: whoever sends one leaves it alone until the answer is there.
- A graceful shutdown waits without limit for every peer: we part at a barrier of our own, bounded, and shut down hard.
- No authentication, pickle on the wire: whoever reaches the port runs code. Local jobs listen on loopback alone.
"""

import resource
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.distributed.rpc as rpc
from torch.distributed import PrefixStore
from torch.distributed.rendezvous import register_rendezvous_handler
from torch.futures import Future

from hvdtrain.errors import Failure
from hvdtrain.ps.server import Answer, Push, Shard
from hvdtrain.rendezvous import part
from hvdtrain.world import World

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.distributed import Store

Wire = tuple[int, int, torch.Tensor]  # version, staleness, weights

_shard: Shard | None = None  # the one shard of this process: handlers are called by name, without an object
_make_shard: Callable[[torch.Tensor], Shard] | None = None
_heard = threading.Event()  # by a server, from a worker
_leaving = threading.Event()


def start(
    world: World, store: "Store", timeout: float, make_shard: Callable[[torch.Tensor], Shard] | None = None
) -> None:
    """Join the rpc group as `rank{r}`; a server says how its shard is made from the weights it will be given."""
    global _make_shard
    _make_shard = make_shard

    def find(url: str, **_: object) -> "Iterator[tuple[Store, int, int]]":
        yield PrefixStore("rpc", store), world.rank, world.size

    register_rendezvous_handler("hvdtrain", find)
    rpc.init_rpc(
        f"rank{world.rank}", rank=world.rank, world_size=world.size,
        rpc_backend_options=rpc.TensorPipeRpcBackendOptions(init_method="hvdtrain://", rpc_timeout=timeout),
    )  # fmt: skip
    if not world.is_server:
        threading.Thread(target=_keep_in_touch, args=(world.servers, timeout), daemon=True).start()


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


def install(server: int, weights: torch.Tensor) -> None:
    """Give a server the weights of its shard, [shard] float32."""
    rpc.rpc_sync(f"rank{server}", _install, args=(weights,))


def push(server: int, worker: int, step: int, version: int, lr: float, gradient: torch.Tensor) -> "Future[Wire]":
    """Send a gradient for a server's shard; leave it unchanged until the future is done. See server.Push."""
    return rpc.rpc_async(f"rank{server}", _push, args=(worker, step, version, lr, gradient))


def pull(server: int) -> Wire:
    """A server's version, 0, and weights."""
    return rpc.rpc_sync(f"rank{server}", _pull)


def _keep_in_touch(servers: int, timeout: float) -> None:
    """Let the servers hear of this worker while it evaluates or reads images for longer than their timeout."""
    while not _leaving.wait(timeout / 4):
        for server in range(servers):
            rpc.rpc_async(f"rank{server}", _hear)


def rss_mb(server: int) -> float:
    """A server's peak resident memory in MiB."""
    return rpc.rpc_sync(f"rank{server}", _rss_mb)


def _hear() -> None:
    _heard.set()


def _rss_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 2**20


def _install(weights: torch.Tensor) -> None:
    global _shard
    assert _make_shard is not None
    _shard = _make_shard(weights)


@rpc.functions.async_execution
def _push(worker: int, step: int, version: int, lr: float, gradient: torch.Tensor) -> "Future[Wire]":
    _heard.set()
    assert _shard is not None
    wire: Future[Wire] = Future()
    answered = _shard.push(Push(worker, step, version, lr, gradient)).add_done_callback
    answered(lambda done: wire.set_result(_on_wire(done.result())))
    return wire


def _pull() -> Wire:
    _heard.set()
    assert _shard is not None
    return _on_wire(_shard.pull())


def _on_wire(answer: Answer) -> Wire:
    return answer.version, answer.staleness, answer.weights
