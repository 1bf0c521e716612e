"""The wire by torch.distributed.rpc, the only module that imports it.

The traps of rpc, and what is done about each:

- A handler that blocks takes one of a few threads: methods return at once, or return a future.
- Every message is received into new memory, whose first use costs page faults. The process keeps
  its memory, and messages are small enough to be received into kept memory (see system.memory).
- A graceful shutdown waits without limit for every peer: ranks leave by a bounded barrier instead,
  and shut down hard.
- There is no authentication, and messages are pickled: whoever reaches the port runs code. Local
  jobs listen on loopback alone; `wire.zeromq` is a wire with neither problem.
"""

import os
import warnings
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.rpc as rpc
from torch.distributed import PrefixStore
from torch.distributed.rendezvous import register_rendezvous_handler
from torch.distributed.rpc.internal import _internal_rpc_pickler
from torch.futures import Future

from hvdtrain.base.world.place import World
from hvdtrain.job.wire.heartbeat import wait_for_ranks, while_served
from hvdtrain.job.wire.messages import INLINE_BYTES
from hvdtrain.job.wire.requests import Requests, as_future
from hvdtrain.job.wire.wire import Wire

if TYPE_CHECKING:
    from torch.distributed import Store

# TensorPipe's fastest transport between processes of a machine, `shm`, is left out: with it, a
# thread of each process polls shared memory all the time, on a core that others would compute on.
# Tensors that do not go through wire.shared are copied from process to process (TensorPipe's
# channel `cma`) where two share a machine, in network namespaces too, except with OVER_TCP.
TRANSPORTS: dict[str, Any] = {"_transports": ["ibv", "uv"]}
NO_LIMIT = 0  # seconds: what rpc takes for no timeout
OVER_TCP: dict[str, Any] = {"_transports": ["uv"], "_channels": ["basic"]}

_requests: Requests  # of this process: rpc calls functions, which have no object


class Rpc(Wire):
    """Calls by torch's rpc. Ranks cannot join it while it is in use."""

    def call(
        self, rank: int, method: str, *arguments: Any, timeout: float | None = None
    ) -> "Future[Any]":
        limit = timeout or NO_LIMIT
        return rpc.rpc_async(f"rank{rank}", _handle, args=(method, arguments), timeout=limit)

    def close(self) -> None:
        rpc.shutdown(graceful=False)


@while_served()
def connect(world: World, store: "Store", timeout: float, requests: Requests) -> Rpc:
    """Joins the rpc group as `rank{r}`.

    Args:
        world: where this rank is.
        store: the store that all ranks share.
        timeout: seconds after which a silent rank is lost, and that init_rpc may take then.
        requests: answers the peers.
    """
    global _requests
    _requests = requests
    _internal_rpc_pickler._register_reducer(torch.Tensor, _reduce)
    # init_rpc waits for all ranks too, but does not notice if one has ended.
    store.set(f"wire/{world.rank}", "")
    others = {rank: f"wire/{rank}" for rank in range(world.size) if rank != world.rank}
    wait_for_ranks(store, others, timeout)
    met = PrefixStore("rpc", store), world.rank, world.size
    register_rendezvous_handler("hvdtrain", lambda url, **_: iter([met]))
    cores = len(os.sched_getaffinity(0))
    options = rpc.TensorPipeRpcBackendOptions(
        init_method="hvdtrain://",
        rpc_timeout=timeout,
        num_worker_threads=min(max(4, cores), 16),  # more than cores only wake each other up
        **(OVER_TCP if os.environ.get("HVDTRAIN_OVER_TCP") else TRANSPORTS),
    )
    name = f"rank{world.rank}"
    with warnings.catch_warnings():
        # init_rpc itself gathers objects in a way that torch has deprecated.
        warnings.filterwarnings("ignore", message="You are using a Backend")
        rpc.init_rpc(name, rank=world.rank, world_size=world.size, rpc_backend_options=options)
    return Rpc(requests)


@rpc.functions.async_execution
def _handle(method: str, arguments: tuple[Any, ...]) -> "Future[Any]":
    return as_future(_requests.calls[method](*arguments))


def _reduce(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Returns how to pickle a CPU tensor: as bytes if it is small, else beside the message.

    rpc has no option for this, but for the pickler that it uses.
    """
    if 0 < tensor.nbytes <= INLINE_BYTES:
        content = tensor.detach().reshape(-1).view(torch.uint8).numpy()
        return _restore, (bytearray(content), tensor.dtype, tuple(tensor.shape))
    return _internal_rpc_pickler._tensor_reducer(tensor)


def _restore(content: bytearray, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.frombuffer(content, dtype=dtype).view(shape)
