"""The ZeroMQ wire's messages as frames.

The first frame is a header in msgpack; each large tensor is in a frame after it, or in several.
Nothing is unpickled. A tensor is sent from the sender's memory, and read where it was received.
"""

import ctypes
import math
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import torch
import zmq

from hvdtrain.job.wire.messages import INLINE_BYTES, FreshWeights, Push
from hvdtrain.job.wire.shared import Parcel

_TENSOR, _PUSH, _WEIGHTS, _PARCEL = 1, 2, 3, 4  # msgpack's extension types
_NAMED: dict[int, Any] = {_PUSH: Push, _WEIGHTS: FreshWeights, _PARCEL: Parcel}
_CODES = {kind: code for code, kind in _NAMED.items()}
_AS_THEY_ARE = {int, float, str, bool, type(None)}
_DTYPES = {
    str(d).removeprefix("torch."): d
    for d in (
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.int8,
        torch.uint8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.bool,
    )
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
PIECE = 2**28  # bytes of a frame at most, below sockets.LARGEST: a larger tensor is cut
_encode = msgspec.msgpack.Encoder().encode
# As ints, since zmq's flags take time to combine.
_NOW = int(zmq.NOBLOCK)
_NOW_AND_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
Frames = Sequence[Any]


def pack(value: Any) -> list[Any]:
    """Returns a message's frames: the header, and the memory of large tensors.

    Args:
        value: of numbers, text, lists, dicts, tensors, Push, FreshWeights and Parcel.
    """
    tensors: list[Any] = []
    header = _encode(_prepared(value, tensors))
    return [header, *tensors]


def _prepared(value: Any, tensors: list[Any]) -> Any:
    if isinstance(value, torch.Tensor):
        return _prepared_tensor(value, tensors)
    if isinstance(value, list | tuple):
        each = [one if type(one) in _AS_THEY_ARE else _prepared(one, tensors) for one in value]
        code = _CODES.get(type(value))
        return each if code is None else msgspec.msgpack.Ext(code, _encode(each))
    if isinstance(value, dict):
        return {key: _prepared(one, tensors) for key, one in value.items()}
    return value


def _prepared_tensor(value: torch.Tensor, tensors: list[Any]) -> msgspec.msgpack.Ext:
    inside = None
    if value.nbytes > INLINE_BYTES:
        content = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
        tensors += [content[start : start + PIECE] for start in range(0, len(content), PIECE)]
    else:  # in the header; numpy would take five times as long
        tensor = value if value.is_cpu and value.is_contiguous() else value.cpu().contiguous()
        inside = ctypes.string_at(tensor.data_ptr(), tensor.nbytes)
    return msgspec.msgpack.Ext(_TENSOR, _encode([_NAMES[value.dtype], list(value.shape), inside]))


def unpack(frames: Frames) -> Any:
    """Returns what was packed, with tensors in the frames' memory. Tuples come back as lists.

    Raises:
        ValueError: `pack` does not make such frames, or there is none.
    """
    decoder = _decoder_alone
    if len(frames) > 1:
        decoder = _decoder(iter(frames[1:]))
    try:
        return decoder.decode(frames[0])
    except Exception as error:  # of msgspec, torch or ours: anybody may have made these bytes
        raise ValueError(str(error)) from None


def _decoder(tensors: Iterator[Any]) -> "msgspec.msgpack.Decoder[Any]":
    """Returns a decoder of a header whose large tensors are in these frames."""

    def extension(code: int, data: memoryview) -> Any:
        content = decoder.decode(data)
        if code == _TENSOR:
            name, shape, inside = content
            return _tensor(name, shape, inside, tensors)
        if code not in _NAMED:
            raise ValueError(f"an extension of type {code}")
        return _NAMED[code](*content)

    decoder = msgspec.msgpack.Decoder(ext_hook=extension)
    return decoder


def _tensor(
    name: str, shape: list[int], inside: bytes | None, tensors: Iterator[Any]
) -> torch.Tensor:
    dtype = _DTYPES[name]
    if not isinstance(inside, bytes | None):
        raise ValueError("a tensor's memory is no bytes")
    size = math.prod(shape) * dtype.itemsize
    memory = bytearray(inside) if inside is not None else _joined(size, tensors)
    if len(memory) != size or min(shape, default=0) < 0:
        raise ValueError("a tensor of another size than its memory")
    if not len(memory):
        return torch.empty(shape, dtype=dtype)
    flat = torch.frombuffer(memory, dtype=dtype)
    return flat if len(shape) == 1 else flat.view(shape)


def _joined(size: int, tensors: Iterator[Any]) -> Any:
    """Returns a tensor's memory: its one frame, or a copy of all its frames."""
    pieces = []
    left = size
    for frame in tensors:
        pieces.append(memoryview(frame))
        left -= len(frame)
        if left <= 0:
            break
    return pieces[0] if len(pieces) == 1 else bytearray().join(pieces)


_decoder_alone = _decoder(iter(()))  # for most messages, which have no large tensor


def receive(socket: "zmq.Socket[bytes]") -> "list[zmq.Frame]":
    """Returns the frames of a message, as they were received; empty where there is no message.

    This and `send` do what zmq's recv_multipart and send_multipart do, in a third of the time.
    """
    try:
        frames = [socket.recv(_NOW, copy=False)]
    except zmq.Again:
        return []
    while frames[-1].more:
        frames.append(socket.recv(copy=False))
    return frames


def send(socket: "zmq.Socket[bytes]", frames: Frames) -> None:
    """Sends a message: bytes are copied, and other frames are sent from their memory.

    Raises:
        zmq.Again: no peer can take it now.
    """
    for frame in frames[:-1]:
        socket.send(frame, _NOW_AND_MORE, copy=type(frame) is bytes)
    socket.send(frames[-1], _NOW, copy=type(frames[-1]) is bytes)
