"""The wire: the only module of the parameter server that knows torch.distributed.rpc.

A server has an endpoint, a `ps.server.Server` whose methods workers call by name. The traps of rpc, and what is done
about each:

- A handler that blocks takes one of a few threads: methods return at once, or return a future.
- Tensors in flight are not copied: whoever sends one leaves it alone until it is answered.
- Every message is received into new memory, and what costs time there is the page faults of touching it first: memory
  is kept by the process, and messages are small enough to be taken from what is kept (see world.memory).
- Nobody learns that a peer has died: servers keep a call open at every worker and workers at every server, which
  breaks with the peer (see watch).
- A graceful shutdown waits without limit for every peer: ranks leave at a barrier of their own, bounded, and shut down
  hard.
- No authentication, pickle on the wire: whoever reaches the port runs code. Local jobs listen on loopback alone.
"""

import os
import re
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.rpc as rpc
from torch.distributed import PrefixStore
from torch.distributed.rendezvous import register_rendezvous_handler
from torch.distributed.rpc.constants import UNSET_RPC_TIMEOUT
from torch.distributed.rpc.internal import _internal_rpc_pickler
from torch.futures import Future

from hvdtrain.errors import Failure
from hvdtrain.world.place import World
from hvdtrain.world.rendezvous import leave

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.distributed import Store

# TensorPipe's fastest transport between processes of a machine, `shm`, is left out: a thread of each process then polls
# shared memory all the time, on a core that others would compute on. Tensors are copied from process to process all the
# same (its channel `cma`), wherever two share a machine, network namespaces or not, but for OVER_TCP.
TRANSPORTS: dict[str, Any] = {"_transports": ["ibv", "uv"]}
OVER_TCP: dict[str, Any] = {"_transports": ["uv"], "_channels": ["basic"]}
# Bytes of a tensor up to which it is sent within its message: each that travels beside it costs messages of its own.
SMALL = 16 * 2**10
# Times the timeout that waits may take: whoever keeps the others waiting is found to be lost before that.
PATIENCE = 1.5
# How often a watch is answered. TensorPipe sometimes delivers a message only when the next one comes (seen over its
# shared memory, where a process is stopped again and again): a second at most passes until then.
HEARTBEAT_S = 0.25

_endpoint: Any = None  # of this process: handlers are called by name, without an object
_leaving = threading.Event()
_watched: "list[Future[bool]]" = []  # by peers: open until this process leaves, or for a while
_watched_lock = threading.Lock()


def start(world: World, store: "Store", timeout: float, endpoint: object = None) -> None:
    """Join the rpc group as `rank{r}`.

    Args:
        timeout: seconds after which a silent peer is lost.
        endpoint: the object whose methods peers can call, on a server.
    """

    def find(url: str, **_: object) -> "Iterator[tuple[Store, int, int]]":
        yield PrefixStore("rpc", store), world.rank, world.size

    global _endpoint
    _endpoint = endpoint
    _internal_rpc_pickler._register_reducer(torch.Tensor, _reduce)
    register_rendezvous_handler("hvdtrain", find)
    options = rpc.TensorPipeRpcBackendOptions(
        init_method="hvdtrain://", rpc_timeout=PATIENCE * timeout,
        num_worker_threads=min(max(4, len(os.sched_getaffinity(0))), 16),  # more than cores only wake each other up
        **(OVER_TCP if os.environ.get("HVDTRAIN_OVER_TCP") else TRANSPORTS),
    )  # fmt: skip
    rpc.init_rpc(f"rank{world.rank}", rank=world.rank, world_size=world.size, rpc_backend_options=options)
    threading.Thread(target=_answer_watches, args=(HEARTBEAT_S,), daemon=True, name="answers watches").start()


def call(rank: int, method: str, *arguments: object, timeout: float = UNSET_RPC_TIMEOUT) -> "Future[Any]":
    """Call a method of a rank's endpoint; the future holds what it returns. Leave tensors unchanged until then."""
    return rpc.rpc_async(f"rank{rank}", _handle, args=(method, *arguments), timeout=timeout)


def call_later(rank: int, method: str, *arguments: object) -> "Future[Any]":
    """The same for a method that returns a future, whose result it is."""
    return rpc.rpc_async(f"rank{rank}", _handle_later, args=(method, *arguments))


def result(rank: int, future: "Future[Any]") -> Any:
    """What a server answered, when it has. Failure, with its rank, where it broke off, raised, or took too long."""
    try:
        return future.wait()
    except Exception as error:  # a RuntimeError of rpc's, or what the method raised, as its own type
        raise Failure(f"parameter server rank {rank} failed: {_reason(error)}") from error


def ask(server: int, method: str, *arguments: object, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
    """Call a method of a server and wait for what it returns: see result."""
    return result(server, call(server, method, *arguments, timeout=timeout))


def watch(rank: int, timeout: float, ended: Callable[[str], None]) -> None:
    """Have `ended` called, by another thread, when the rank leaves, with nothing, or is lost, with the reason.

    A rank whose process dies is lost at once; one that does not answer for as long as the timeout is lost then.
    """

    def look() -> None:
        rpc.rpc_async(f"rank{rank}", _handle_watch, timeout=timeout).add_done_callback(answered)

    def answered(future: "Future[bool]") -> None:
        try:
            is_leaving = future.value()
        except Exception as error:
            ended(_reason(error))
            return
        ended("") if is_leaving else look()

    look()


def stop(world: World, store: "Store", timeout: float) -> None:
    """Leave the others in order, then shut down without waiting again."""
    _leaving.set()
    leave(world, store, timeout)
    rpc.shutdown(graceful=False)


def _reason(error: BaseException) -> str:
    """What rpc means, in a few words."""
    text = str(error).split("\n\nAt:\n")[0]  # where in rpc itself an answer that is a future went wrong
    line = text.strip().splitlines()[-1].split(" (this error originated at")[0]
    if line.startswith(("EOF", "eof", "ECONNRESET", "EPIPE", "process_vm_readv")):
        return "its connection ended"
    if late := re.search(r"set timeout \((\d+) ms\)", line):
        return f"no answer within {int(late[1]) / 1000:g} s (see --timeout)"
    return line


def _reduce(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What to pickle for a CPU tensor: its bytes if they are few, else its place among those sent beside the message.

    rpc itself has no way to say so, but for the pickler that it uses.
    """
    if 0 < tensor.nbytes <= SMALL:
        content = tensor.detach().reshape(-1).view(torch.uint8).numpy()
        return _restore, (bytearray(content), tensor.dtype, tuple(tensor.shape))
    return _internal_rpc_pickler._tensor_reducer(tensor)


def _restore(content: bytearray, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.frombuffer(content, dtype=dtype).view(shape)


def _handle(method: str, *arguments: object) -> Any:
    return getattr(_endpoint, method)(*arguments)


@rpc.functions.async_execution
def _handle_later(method: str, *arguments: object) -> "Future[Any]":
    return getattr(_endpoint, method)(*arguments)


@rpc.functions.async_execution
def _handle_watch() -> "Future[bool]":
    """Whether this process is about to leave: the answer comes then, or after a while."""
    future: Future[bool] = Future()
    with _watched_lock:
        if _leaving.is_set():
            future.set_result(True)
        else:
            _watched.append(future)
    return future


def _answer_watches(seconds: float) -> None:
    """Answer open watches now and then, and when this process leaves."""
    is_leaving = False
    while not is_leaving:
        is_leaving = _leaving.wait(seconds)
        with _watched_lock:
            open_now = _watched[:]
            _watched.clear()
        for future in open_now:
            future.set_result(is_leaving)
