"""What the ZeroMQ wire sends and receives, as frames: a header in msgpack, and a frame for each large tensor in it.

Nothing is unpickled. A tensor is sent from its own memory, and read where it was received.
"""

import ctypes
import math
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import torch
import zmq

from hvdtrain.wire.messages import INLINE_BYTES, Answer, Push
from hvdtrain.wire.shared import Parcel

_TENSOR, _PUSH, _ANSWER, _PARCEL = 1, 2, 3, 4  # msgpack's extension types
_NAMED: dict[int, Any] = {_PUSH: Push, _ANSWER: Answer, _PARCEL: Parcel}
_CODES = {kind: code for code, kind in _NAMED.items()}
_AS_THEY_ARE = {int, float, str, bool, type(None)}
_DTYPES = {str(d).removeprefix("torch."): d for d in (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int16, torch.int32,
    torch.int64, torch.bool,
)}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_encode = msgspec.msgpack.Encoder().encode
_NOW, _NOW_AND_MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)  # zmq's own flags take Python time to combine
Frames = Sequence[Any]


def pack(value: Any) -> list[Any]:
    """The header and tensors' memory of a message: numbers, text, lists, dicts, tensors, Push, Answer and Parcel."""
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
        tensors.append(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
    else:  # in the header, without numpy, which takes five times as long
        tensor = value if value.is_cpu and value.is_contiguous() else value.cpu().contiguous()
        inside = ctypes.string_at(tensor.data_ptr(), tensor.nbytes)
    return msgspec.msgpack.Ext(_TENSOR, _encode([_NAMES[value.dtype], list(value.shape), inside]))


def unpack(frames: Frames) -> Any:
    """What was packed, with tensors in the frames' own memory; tuples come back as lists.

    Raises:
        ValueError: it is not what pack makes, or there is no frame.
    """
    try:
        return (_decoder(iter(frames[1:])) if len(frames) > 1 else _decoder_alone).decode(frames[0].buffer)
    except Exception as error:  # of msgspec, torch or ours: anybody may have made these bytes
        raise ValueError(str(error)) from None


def _decoder(tensors: Iterator[Any]) -> "msgspec.msgpack.Decoder[Any]":
    """Reads a header whose large tensors are these."""

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


def _tensor(name: str, shape: list[int], inside: bytes | None, tensors: Iterator[Any]) -> torch.Tensor:
    dtype = _DTYPES[name]
    if not isinstance(inside, bytes | None):
        raise ValueError("a tensor's memory is no bytes")
    memory = bytearray(inside) if inside is not None else next(tensors).buffer
    if len(memory) != math.prod(shape) * dtype.itemsize or min(shape, default=0) < 0:
        raise ValueError("a tensor of another size than its memory")
    if not len(memory):
        return torch.empty(shape, dtype=dtype)
    flat = torch.frombuffer(memory, dtype=dtype)
    return flat if len(shape) == 1 else flat.view(shape)


_decoder_alone = _decoder(iter(()))  # of most messages, which have no large tensor


def receive(socket: "zmq.Socket[bytes]") -> "list[zmq.Frame]":
    """The frames of a message, in the memory that they were received in; none where there is no message.

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
    """Send a message: bytes are copied, and other frames are sent from their own memory.

    Raises:
        zmq.Again: nobody is there who would take it now.
    """
    for frame in frames[:-1]:
        socket.send(frame, _NOW_AND_MORE, copy=type(frame) is bytes)
    socket.send(frames[-1], _NOW, copy=type(frames[-1]) is bytes)
