"""The only module that knows about torch.distributed.rpc. Its traps, and what is done about each:

- A handler that blocks takes one of a few threads: handlers return at once, or a future.
- Tensors in flight are not copied: whoever sends one leaves it alone until the answer is there.
- Every message is received into new memory, and what costs time there is the page faults of touching it first: memory
  is kept by the process, and messages are small enough to be taken from what is kept (see keep_memory).
- Nobody is told that a peer has died: a server keeps a call open at every worker, which breaks with the worker.
- A graceful shutdown waits without limit for every peer: we part at a barrier of our own, bounded, and shut down hard.
- No authentication, pickle on the wire: whoever reaches the port runs code. Local jobs listen on loopback alone.
"""

import ctypes
import os
import re
import resource
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future as LocalFuture
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed.rpc as rpc
from torch.distributed import PrefixStore
from torch.distributed.rendezvous import register_rendezvous_handler
from torch.futures import Future

from hvdtrain.errors import Failure
from hvdtrain.ps.roll import Roll
from hvdtrain.ps.server import Answer, Bucket, Push
from hvdtrain.rendezvous import part
from hvdtrain.world import World

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.distributed import Store

S = TypeVar("S")
T = TypeVar("T")
Wire = tuple[int, int, torch.Tensor]  # version, staleness, weights
Decode = Callable[[Sequence[torch.Tensor]], torch.Tensor]
# TensorPipe takes shared memory wherever two processes share a machine, network namespaces or not.
OVER_TCP: dict[str, Any] = {"_transports": ["uv"], "_channels": ["basic"]}
# Times the timeout that waits may take: whoever keeps the others waiting is found to be lost before that.
PATIENCE = 1.5
QUESTION_S = 5.0  # the longest wait for a reason, when something has failed already
LARGEST_KEPT = 32 * 2**20  # bytes: glibc gives what is larger back to the system, whatever it is told

# Of this process, where it is a server: handlers are called by name, without an object.
_buckets: dict[int, Bucket] = {}
_make_bucket: Callable[[int, torch.Tensor], Bucket] | None = None
_decode: Decode | None = None
_roll = Roll(0)
# Of this process, where it is a worker.
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
    wires = OVER_TCP if os.environ.get("HVDTRAIN_OVER_TCP") else {}
    options = rpc.TensorPipeRpcBackendOptions(init_method="hvdtrain://", rpc_timeout=PATIENCE * timeout, **wires)
    rpc.init_rpc(f"rank{world.rank}", rank=world.rank, world_size=world.size, rpc_backend_options=options)


def serve(make_bucket: Callable[[int, torch.Tensor], Bucket], decode: Decode, roll: Roll) -> dict[int, Bucket]:
    """Make this process a server, and return its buckets, by number. Call it before start: a worker may be faster.

    Args:
        make_bucket: a bucket from its number and the weights it is given.
        decode: a gradient, [bucket] float32, from the tensors that were sent.
        roll: the workers; what they send after they were lost is refused.
    """
    global _make_bucket, _decode, _roll
    _make_bucket, _decode, _roll = make_bucket, decode, roll
    return _buckets


def watch(worker: int, timeout: float, ended: Callable[[str], None]) -> None:
    """Have `ended` called, by another thread, when the worker of this rank is done, with nothing, or lost, with why.

    A worker whose process dies is lost at once; one that does not answer for as long as the timeout is lost then.
    """

    def look() -> None:
        rpc.rpc_async(f"rank{worker}", _stay, args=(timeout / 4,), timeout=timeout).add_done_callback(seen)

    def seen(answer: "Future[bool]") -> None:
        try:
            leaving = answer.value()
        except Exception as error:
            ended(_line(error))
            return
        ended("") if leaving else look()

    look()


def stop(world: World, store: "Store", timeout: float) -> None:
    """Part from the others in order, then shut down without waiting again."""
    _leaving.set()
    part(world, store, timeout)
    rpc.shutdown(graceful=False)


def install(server: int, bucket: int, weights: torch.Tensor) -> None:
    """Give a server a bucket's weights, [bucket] float32."""
    result(server, rpc.rpc_async(f"rank{server}", _install, args=(bucket, weights)))


def restore(server: int, bucket: int, step: int, state: Mapping[str, torch.Tensor]) -> "Future[None]":
    """Have a bucket go on after this step of every worker, its optimizer with this state: see Bucket.restore."""
    return rpc.rpc_async(f"rank{server}", _restore, args=(bucket, step, _own_storage(state)))


def state(server: int, bucket: int) -> "Future[dict[str, torch.Tensor]]":
    """What a bucket's optimizer remembers: see Bucket.optimizer_state."""
    return rpc.rpc_async(f"rank{server}", _state, args=(bucket,))


def push(
    server: int, bucket: int, worker: int, step: int, version: int, lr: float, parts: Sequence[torch.Tensor]
) -> "Future[Wire | None]":
    """Send an encoded gradient, or none; leave it unchanged until the future is done. See server.Push.

    The future holds the answer if the worker may go on at once, else None: then ask with `answer`.
    """
    return rpc.rpc_async(f"rank{server}", _push, args=(bucket, worker, step, version, lr, list(parts)))


def answer(server: int, bucket: int, worker: int) -> "Future[Wire]":
    """The answer to this worker's last push, as soon as it may go on."""
    return rpc.rpc_async(f"rank{server}", _answer, args=(bucket, worker))


def read(server: int, bucket: int, worker: int) -> "Future[Wire]":
    """A bucket's version, 0, and weights, as they are. The worker pushes nothing before it has them."""
    return rpc.rpc_async(f"rank{server}", _read, args=(bucket, worker))


def rest(server: int, worker: int, step: int) -> None:
    """Tell a server that this worker pushes nothing for now, after this step: see server.Policy."""
    result(server, rpc.rpc_async(f"rank{server}", _rest, args=(worker, step)))


def sum_up(world: World, number: int, part: torch.Tensor) -> torch.Tensor:
    """The sum of a small tensor over all workers that are there, each of which calls this with the same number.

    Raises:
        Failure: a worker that is there neither came nor pushed anything for the time that waits may take.
    """
    while True:
        total = rpc.rpc_async("rank0", _sum, args=(world.worker, number, part))
        try:
            return result(0, total)
        except Failure:
            missing, silent = result(0, rpc.rpc_async("rank0", _missing, args=(number,), timeout=QUESTION_S))
            if not missing:
                raise
            if silent:
                ranks = [world.servers + worker for worker in silent]
                raise Failure(f"ranks {ranks} hang: they did not come to where the others wait for them") from None


def rss_mb(server: int) -> float:
    """A server's peak resident memory in MiB."""
    return result(server, rpc.rpc_async(f"rank{server}", _rss_mb))


def host(server: int) -> str:
    """The name of a server's host."""
    return result(server, rpc.rpc_async(f"rank{server}", socket.gethostname))


def result(server: int, done: "Future[T]") -> T:
    """What a server answered, when it has. Failure, with its rank, where it broke off, raised, or took too long."""
    try:
        return done.wait()
    except Exception as error:  # a RuntimeError of rpc's, or what the handler raised, as its own type
        raise Failure(f"parameter server rank {server} failed: {_line(error)}") from error


def _line(error: BaseException) -> str:
    """What rpc means, in a few words."""
    line = str(error).strip().splitlines()[-1].split(" (this error originated at")[0]
    if line.startswith(("eof", "process_vm_readv")):
        return "its connection ended"
    if late := re.search(r"set timeout \((\d+) ms\)", line):
        return f"no answer within {int(late[1]) / 1000:g} s (see --timeout)"
    return line


@rpc.functions.async_execution
def _stay(seconds: float) -> "Future[bool]":
    """Whether this worker is about to leave: the answer comes then, or after so many seconds."""
    answer: Future[bool] = Future()
    threading.Thread(target=lambda: answer.set_result(_leaving.wait(seconds)), daemon=True).start()
    return answer


@rpc.functions.async_execution
def _sum(worker: int, number: int, part: torch.Tensor) -> "Future[torch.Tensor]":
    return _wired(_roll.add(worker, number, part), lambda total: total)


def _missing(number: int) -> tuple[list[int], list[int]]:
    missing = _roll.missing(number)
    return missing, _roll.silent(missing, rpc.get_rpc_timeout())


def _rss_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 2**20


def _install(bucket: int, weights: torch.Tensor) -> None:
    assert _make_bucket is not None
    _buckets[bucket] = _make_bucket(bucket, weights)


def _restore(bucket: int, step: int, state: dict[str, torch.Tensor]) -> None:
    _buckets[bucket].restore(step, state)


def _state(bucket: int) -> dict[str, torch.Tensor]:
    return _buckets[bucket].optimizer_state()


def _own_storage(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The parts of larger tensors alone: rpc would send the whole."""
    return {name: tensor.clone() for name, tensor in state.items()}


def _push(bucket: int, worker: int, step: int, version: int, lr: float, parts: list[torch.Tensor]) -> Wire | None:
    assert _decode is not None
    _roll.heard(worker)
    done = _buckets[bucket].push(Push(worker, step, version, lr, _decode(parts) if parts else None))
    return _on_wire(done.result()) if done.done() else None


@rpc.functions.async_execution
def _answer(bucket: int, worker: int) -> "Future[Wire]":
    return _wired(_buckets[bucket].answer(worker), _on_wire)


def _read(bucket: int, worker: int) -> Wire:
    return _on_wire(_buckets[bucket].read(worker))


def _rest(worker: int, step: int) -> None:
    for bucket in _buckets.values():
        bucket.rest(worker, step)


def _on_wire(fresh: Answer) -> Wire:
    return fresh.version, fresh.staleness, fresh.weights


def _wired(done: "LocalFuture[S]", change: Callable[[S], T]) -> "Future[T]":
    """A future of this process as one that rpc can wait for, its result changed."""
    wired: Future[T] = Future()
    done.add_done_callback(lambda done: wired.set_result(change(done.result())))
    return wired
