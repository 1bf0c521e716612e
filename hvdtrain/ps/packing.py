"""What the ZeroMQ wire sends, as frames: a header in msgpack, and a frame for each large tensor in it.

Nothing is unpickled. A tensor is sent from its own memory, and read where it was received.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import torch

from hvdtrain.ps.messages import Answer, Push
from hvdtrain.ps.shared import Parcel

SMALL = 16 * 2**10  # bytes of a tensor up to which it travels in the header: another frame would cost more
_TENSOR, _PUSH, _ANSWER, _PARCEL = 1, 2, 3, 4  # msgpack's extension types
_NAMED: dict[int, Any] = {_PUSH: Push, _ANSWER: Answer, _PARCEL: Parcel}
_DTYPES = {str(d).removeprefix("torch."): d for d in (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int16, torch.int32,
    torch.int64, torch.bool,
)}  # fmt: skip
_encode = msgspec.msgpack.Encoder().encode
Frames = Sequence[Any]


def pack(value: Any) -> list[Any]:
    """The header and tensors' memory of a message: numbers, text, lists, dicts, tensors, and Push and Answer."""
    tensors: list[Any] = []
    header = _encode(_prepared(value, tensors))
    return [header, *tensors]


def _prepared(value: Any, tensors: list[Any]) -> Any:
    if isinstance(value, torch.Tensor):
        flat, name = value.detach().contiguous().reshape(-1), str(value.dtype).removeprefix("torch.")
        memory = flat.view(torch.uint8).numpy() if value.nbytes else b""
        inside = bytes(memory) if value.nbytes <= SMALL else None  # a frame more costs more
        if inside is None:
            tensors.append(memory)
        return msgspec.msgpack.Ext(_TENSOR, _encode([name, list(value.shape), inside]))
    for code, kind in _NAMED.items():
        if isinstance(value, kind):
            return msgspec.msgpack.Ext(code, _encode([_prepared(field, tensors) for field in value]))
    if isinstance(value, list | tuple):
        return [_prepared(one, tensors) for one in value]
    if isinstance(value, dict):
        return {key: _prepared(one, tensors) for key, one in value.items()}
    return value


def unpack(frames: Frames) -> Any:
    """What was packed, with tensors in the frames' own memory; tuples come back as lists.

    Raises:
        ValueError: it is not what pack makes.
    """
    tensors = iter(frames[1:])

    def extension(code: int, data: memoryview) -> Any:
        content = decoder.decode(data)
        if code == _TENSOR:
            name, shape, inside = content
            return _tensor(name, shape, inside, tensors)
        if code not in _NAMED:
            raise ValueError(f"an extension of type {code}")
        return _NAMED[code](*content)

    decoder = msgspec.msgpack.Decoder(ext_hook=extension)
    try:
        return decoder.decode(frames[0].buffer)
    except Exception as error:  # of msgspec, torch or ours: anybody may have made these bytes
        raise ValueError(str(error)) from None


def _tensor(name: str, shape: list[int], inside: bytes | None, tensors: Iterator[Any]) -> torch.Tensor:
    dtype = _DTYPES[name]
    if not isinstance(inside, bytes | None):
        raise ValueError("a tensor's memory is no bytes")
    memory = bytearray(inside) if inside is not None else next(tensors).buffer
    if len(memory) != math.prod(shape) * dtype.itemsize or any(side < 0 for side in shape):
        raise ValueError("a tensor of another size than its memory")
    return torch.frombuffer(memory, dtype=dtype).view(shape) if len(memory) else torch.empty(shape, dtype=dtype)
