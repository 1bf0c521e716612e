"""The wire by torch.distributed.rpc: the only module of the parameter server that knows it.

The traps of rpc, and what is done about each:

- A handler that blocks takes one of a few threads: methods return at once, or return a future.
- Every message is received into new memory, and what costs time there is the page faults of touching it first: memory
  is kept by the process, and messages are small enough to be taken from what is kept (see system.memory).
- A graceful shutdown waits without limit for every peer: ranks leave at a barrier of their own, bounded, and shut down
  hard.
- No authentication, pickle on the wire: whoever reaches the port runs code. Local jobs listen on loopback alone, and
  `wire.zeromq` is a wire without either.
"""

import os
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.rpc as rpc
from torch.distributed import PrefixStore
from torch.distributed.rendezvous import register_rendezvous_handler
from torch.distributed.rpc.internal import _internal_rpc_pickler
from torch.futures import Future

from hvdtrain.wire.messages import INLINE_BYTES
from hvdtrain.wire.requests import Requests, as_future
from hvdtrain.wire.wire import Wire
from hvdtrain.world.place import World

if TYPE_CHECKING:
    from torch.distributed import Store

# TensorPipe's fastest transport between processes of a machine, `shm`, is left out: a thread of each process then polls
# shared memory all the time, on a core that others would compute on. Tensors that do not go by way of wire.shared are
# copied from process to process (its channel `cma`), wherever two share a machine, network namespaces or not, but for
# OVER_TCP.
TRANSPORTS: dict[str, Any] = {"_transports": ["ibv", "uv"]}
OVER_TCP: dict[str, Any] = {"_transports": ["uv"], "_channels": ["basic"]}

_requests: Requests  # of this process: handlers are called by name, without an object


class Rpc(Wire):
    """By torch's rpc. Ranks cannot join it while it is in use."""

    def call(self, rank: int, method: str, *arguments: Any, timeout: float | None = None) -> "Future[Any]":
        seconds = self.patience if timeout is None else timeout
        return rpc.rpc_async(f"rank{rank}", _handle, args=(method, arguments), timeout=seconds)

    def close(self) -> None:
        rpc.shutdown(graceful=False)


def connect(world: World, store: "Store", patience: float, requests: Requests) -> Rpc:
    """Join the rpc group as `rank{r}`.

    Args:
        patience: seconds that joining may take.
        requests: answers the peers.
    """
    global _requests
    _requests = requests
    _internal_rpc_pickler._register_reducer(torch.Tensor, _reduce)
    met = PrefixStore("rpc", store), world.rank, world.size
    register_rendezvous_handler("hvdtrain", lambda url, **_: iter([met]))
    options = rpc.TensorPipeRpcBackendOptions(
        init_method="hvdtrain://", rpc_timeout=patience,
        num_worker_threads=min(max(4, len(os.sched_getaffinity(0))), 16),  # more than cores only wake each other up
        **(OVER_TCP if os.environ.get("HVDTRAIN_OVER_TCP") else TRANSPORTS),
    )  # fmt: skip
    rpc.init_rpc(f"rank{world.rank}", rank=world.rank, world_size=world.size, rpc_backend_options=options)
    return Rpc(requests, patience)


@rpc.functions.async_execution
def _handle(method: str, arguments: tuple[Any, ...]) -> "Future[Any]":
    return as_future(_requests.calls[method](*arguments))


def _reduce(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What to pickle for a CPU tensor: its bytes if they are few, else its place among those sent beside the message.

    rpc itself has no way to say so, but for the pickler that it uses.
    """
    if 0 < tensor.nbytes <= INLINE_BYTES:
        content = tensor.detach().reshape(-1).view(torch.uint8).numpy()
        return _restore, (bytearray(content), tensor.dtype, tuple(tensor.shape))
    return _internal_rpc_pickler._tensor_reducer(tensor)


def _restore(content: bytearray, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.frombuffer(content, dtype=dtype).view(shape)
