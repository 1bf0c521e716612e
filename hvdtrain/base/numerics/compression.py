"""Codecs of gradients for the wire.

To add a codec, add an entry to CODECS. Names are checked without importing torch.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from hvdtrain.base.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

Encode = Callable[["Tensor", Sequence[int], float], list["Tensor"]]
Decode = Callable[[Sequence["Tensor"], float], "Tensor"]


@dataclass(frozen=True, kw_only=True)
class CodecSpec:
    """A codec of gradients.

    Attributes:
        encode: returns the tensors to send, given a gradient, [n] float32, the lengths of the
            parameters in it, and the codec's number. None for a codec that a mode has for itself,
            which needs all workers together.
        decode: returns the gradient, given these tensors and the number.
        keeps_error: whether what the codec leaves out is added to the next gradient.
        number: what the number is called in the codec's name, as SHARE in `topk:SHARE`; empty: the
            codec has none.
        most: the largest number. The least is above 0.
        wire_bytes: bytes of a weight on the wire; None where that depends on the gradients.
        measured_as: the name, with a number, with which `plan` measures what the codec costs;
            empty: it does not.
        is_tried: whether `plan` tries the codec where no codec is asked for.
    """

    encode: Encode | None = None
    decode: Decode | None = None
    keeps_error: bool = False
    number: str = ""
    most: float = math.inf
    wire_bytes: float | None = None
    measured_as: str = ""
    is_tried: bool = False


def parse(name: str) -> tuple[str, float]:
    """Returns a codec's kind and number, as ("topk", 0.01) for `topk:0.01`.

    The number is 0 for a kind that has none.

    Raises:
        UsageError: there is no such codec.
    """
    kind, _, number = name.partition(":")
    spec = CODECS.get(kind)
    if spec and not spec.number and not number:
        return kind, 0.0
    try:
        value = float(number)
    except ValueError:
        value = 0.0
    if spec and spec.number and 0 < value <= spec.most:
        return kind, value
    raise UsageError(
        f"unknown compression '{name}': choose from {', '.join(names())} (a share in 0 … 1, a "
        "threshold above 0)"
    )


def names() -> list[str]:
    """Returns every codec's name, as `topk:SHARE`."""
    return [f"{kind}:{spec.number}" if spec.number else kind for kind, spec in CODECS.items()]


class Compressor:
    """Encodes the gradients of one bucket, step after step.

    Parameters are encoded one by one. The gradients of layers differ in size by powers of ten, and
    what is sent of a layer must not depend on the other layers in its bucket. A parameter that lies
    in several buckets is cut there.

    What a codec with `keeps_error` leaves out is kept and added to the next gradient (error
    feedback: Seide et al., 2014; Karimireddy et al., 2019, arXiv:1901.09847).

    An element that is NaN or infinite is decoded as such, and so is the element of later gradients.

    Args:
        name: the codec; see `parse`.
        lengths: the number of elements of each parameter in the bucket, in order. Empty if the
            bucket lies within one parameter.
    """

    def __init__(self, name: str, lengths: Sequence[int] = ()) -> None:
        kind, self.number = parse(name)
        spec = CODECS[kind]
        if not spec.encode or not spec.decode:
            raise UsageError(f"{kind} needs all workers together: no worker can encode alone")
        self._encode = spec.encode
        self._decode = spec.decode
        self.keeps_error = spec.keeps_error
        self.lengths = list(lengths)
        self.error: Tensor | None = None

    def encode(self, gradient: "Tensor") -> list["Tensor"]:
        """Returns the tensors to send for a gradient.

        Args:
            gradient: [n] float32. It may be returned itself, or be overwritten.
        """
        if self.error is not None:
            gradient.add_(self.error)
        parts = self._encode(gradient, self.lengths or [len(gradient)], self.number)
        if self.keeps_error:
            self._keep_error(gradient, parts)
        return parts

    def decode(self, parts: Sequence["Tensor"]) -> "Tensor":
        """Returns the gradient, [n] float32, that was sent as these tensors."""
        return self._decode(parts, self.number)

    def _keep_error(self, gradient: "Tensor", parts: Sequence["Tensor"]) -> None:
        import torch

        if self.error is None:
            self.error = torch.empty_like(gradient)
        torch.sub(gradient, self.decode(parts), out=self.error)


def _whole(gradient: "Tensor", _: Sequence[int], __: float) -> list["Tensor"]:
    return [gradient]


def _from_whole(parts: Sequence["Tensor"], _: float) -> "Tensor":
    return parts[0]


def _fp16(gradient: "Tensor", _: Sequence[int], __: float) -> list["Tensor"]:
    return [gradient.half()]


def _bf16(gradient: "Tensor", _: Sequence[int], __: float) -> list["Tensor"]:
    return [gradient.bfloat16()]


def _from_16_bits(parts: Sequence["Tensor"], _: float) -> "Tensor":
    return parts[0].float()


def _int8(gradient: "Tensor", lengths: Sequence[int], _: float) -> list["Tensor"]:
    """Returns codes [n] int8, and scales and lengths of parameters [parameters].

    A parameter's scale is its largest magnitude over 127.
    """
    import torch

    parameters = gradient.split(list(lengths))
    scales = torch.stack([values.abs().max() for values in parameters]).div_(127)
    scales.clamp_(min=torch.finfo(torch.float32).tiny)
    codes = torch.empty(len(gradient), dtype=torch.int8)
    for values, scale, own_codes in zip(
        parameters, scales, codes.split(list(lengths)), strict=True
    ):
        own_codes.copy_((values / scale).round_())
    return [codes, scales, torch.tensor(lengths)]


def _from_int8(parts: Sequence["Tensor"], _: float) -> "Tensor":
    codes, scales, lengths = parts
    gradient = codes.float()
    for values, scale in zip(gradient.split(lengths.tolist()), scales, strict=True):
        values.mul_(scale)
    return gradient


def _topk(gradient: "Tensor", lengths: Sequence[int], share: float) -> list["Tensor"]:
    """Returns the largest elements of each parameter, their indices in the bucket, int32, and n.

    It is this share of a parameter's elements, and at least one.
    """
    import torch

    largest = []
    indices = []
    start = 0
    for values in gradient.split(list(lengths)):
        count = max(1, round(share * len(values)))
        own_indices = values.abs().topk(count, sorted=False).indices
        largest.append(values[own_indices])
        indices.append(own_indices + start)
        start += len(values)
    return [torch.cat(largest), torch.cat(indices).to(torch.int32), torch.tensor(len(gradient))]


def _from_topk(parts: Sequence["Tensor"], _: float) -> "Tensor":
    import torch

    values, indices, n = parts
    return torch.zeros(int(n)).index_copy_(0, indices.long(), values)


def _two_bits(gradient: "Tensor", _: Sequence[int], threshold: float) -> list["Tensor"]:
    """Returns codes, [n / 4] uint8, of four elements each, and n.

    Each element becomes -threshold, 0 or threshold. This is the scheme of MXNet's KVStore.
    """
    import torch

    codes = torch.zeros(-(-len(gradient) // 4) * 4, dtype=torch.uint8)
    own_codes = codes[: len(gradient)]  # without the padding to a whole byte
    is_high = (gradient >= threshold).to(torch.uint8)
    is_low = (gradient <= -threshold).to(torch.uint8)
    own_codes.copy_(is_high - is_low + 1)
    if not gradient.sum().isfinite():  # the fourth code stands for NaN
        own_codes.masked_fill_(~gradient.isfinite(), 3)
    four = codes.view(-1, 4)
    packed = four[:, 0] | four[:, 1] << 2 | four[:, 2] << 4 | four[:, 3] << 6
    return [packed, torch.tensor(len(gradient))]


def _from_two_bits(parts: Sequence["Tensor"], threshold: float) -> "Tensor":
    codes, n = parts
    return _four_values(threshold).index_select(0, codes.int()).flatten()[: int(n)]


@lru_cache
def _four_values(threshold: float) -> "Tensor":
    """Returns the four values that each byte of 2bit stands for, [256, 4] float32."""
    import torch

    values = torch.tensor([-threshold, 0.0, threshold, math.nan])
    return torch.stack([values[torch.arange(256) >> shift & 3] for shift in (0, 2, 4, 6)], 1)


CODECS = {
    "none": CodecSpec(encode=_whole, decode=_from_whole, wire_bytes=4),
    "fp16": CodecSpec(
        encode=_fp16, decode=_from_16_bits, wire_bytes=2, measured_as="fp16", is_tried=True
    ),
    "bf16": CodecSpec(encode=_bf16, decode=_from_16_bits, wire_bytes=2, measured_as="bf16"),
    "int8": CodecSpec(
        encode=_int8, decode=_from_int8, keeps_error=True, measured_as="int8", is_tried=True
    ),
    "topk": CodecSpec(
        encode=_topk,
        decode=_from_topk,
        keeps_error=True,
        number="SHARE",
        most=1,
        measured_as="topk:0.01",
    ),
    "2bit": CodecSpec(
        encode=_two_bits,
        decode=_from_two_bits,
        keeps_error=True,
        number="THRESHOLD",
        most=1e6,
        measured_as="2bit:0.05",
    ),
    "powersgd": CodecSpec(),  # torch's hook, in ddp
}
