"""Codecs of gradients for the wire. Checking a codec's name does not import torch."""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from hvdtrain.base.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

NAMES = ["none", "fp16", "bf16", "int8", "topk:SHARE", "2bit:THRESHOLD", "powersgd"]


def parse(name: str) -> tuple[str, float]:
    """Returns a codec's kind and number, as ("topk", 0.01) for `topk:0.01`.

    The number is 0 for a kind that has none.

    Raises:
        UsageError: there is no such codec.
    """
    kind, _, number = name.partition(":")
    if kind in NAMES and not number:
        return kind, 0.0
    try:
        value = float(number)
    except ValueError:
        value = 0.0
    if (kind == "topk" and 0 < value <= 1) or (kind == "2bit" and 0 < value < 1e6):
        return kind, value
    raise UsageError(
        f"unknown compression '{name}': choose from {', '.join(NAMES)} (a share in 0 … 1, a "
        "threshold above 0)"
    )


class Compressor:
    """Encodes the gradients of one bucket, step after step.

    All codecs are here but powersgd, which needs all workers together.

    Parameters are encoded one by one. The gradients of layers differ in size by powers of ten, and
    what is sent of a layer must not depend on the other layers in its bucket. A parameter that lies
    in several buckets is cut there.

    What int8, topk and 2bit leave out is kept and added to the next gradient (error feedback: Seide
    et al., 2014; Karimireddy et al., 2019, arXiv:1901.09847). fp16 and bf16 round, and keep
    nothing.

    - int8: a byte for each element, and for each parameter a scale, which is its largest magnitude
      over 127.
    - topk:SHARE: that share of each parameter's elements, at least one, by largest magnitude, and
      their indices.
    - 2bit:THRESHOLD: each element becomes -THRESHOLD, 0 or THRESHOLD, four to a byte. This is the
      scheme of MXNet's KVStore.

    An element that is NaN or infinite is decoded as such, and so is the element of later gradients.

    Args:
        name: the codec; see `parse`.
        lengths: the number of elements of each parameter in the bucket, in order. Empty if the
            bucket lies within one parameter.
    """

    def __init__(self, name: str, lengths: Sequence[int] = ()) -> None:
        self.kind, self.number = parse(name)
        self.lengths = list(lengths)
        self.error: Tensor | None = None

    def encode(self, gradient: "Tensor") -> list["Tensor"]:
        """Returns the tensors to send for a gradient.

        Args:
            gradient: [n] float32. It may be returned itself, or be overwritten.
        """
        import torch

        if self.kind == "none":
            return [gradient]
        if self.kind in ("fp16", "bf16"):
            return [gradient.to(torch.float16 if self.kind == "fp16" else torch.bfloat16)]
        if self.error is not None:
            gradient.add_(self.error)
        parameters = gradient.split(self.lengths or [len(gradient)])
        if self.kind == "int8":
            parts = _int8(parameters)
        elif self.kind == "topk":
            parts = _topk(parameters, self.number)
        else:
            parts = _two_bits(gradient, self.number)
        parts.append(torch.tensor(len(gradient)))
        if self.error is None:
            self.error = torch.empty_like(gradient)
        torch.sub(gradient, self.decode(parts), out=self.error)
        return parts

    def decode(self, parts: Sequence["Tensor"]) -> "Tensor":
        """Returns the gradient, [n] float32, that was sent as these tensors."""
        if self.kind == "none":
            return parts[0]
        import torch

        if self.kind in ("fp16", "bf16"):
            return parts[0].float()
        if self.kind == "int8":
            codes, scales, lengths, _ = parts
            gradient = codes.float()
            for values, scale in zip(gradient.split(lengths.tolist()), scales, strict=True):
                values.mul_(scale)
            return gradient
        n = int(parts[-1])
        if self.kind == "topk":
            values, indices, _ = parts
            return torch.zeros(n).index_copy_(0, indices.long(), values)
        return _four_values(self.number).index_select(0, parts[0].int()).flatten()[:n]


def _int8(parameters: Sequence["Tensor"]) -> list["Tensor"]:
    """Returns codes [n] int8, and scales and lengths of parameters [parameters]."""
    import torch

    lengths = [len(values) for values in parameters]
    scales = torch.stack([values.abs().max() for values in parameters]).div_(127)
    scales.clamp_(min=torch.finfo(torch.float32).tiny)
    codes = torch.empty(sum(lengths), dtype=torch.int8)
    for values, scale, own_codes in zip(parameters, scales, codes.split(lengths), strict=True):
        own_codes.copy_((values / scale).round_())
    return [codes, scales, torch.tensor(lengths)]


def _topk(parameters: Sequence["Tensor"], share: float) -> list["Tensor"]:
    """Returns the largest elements and their indices in the bucket, int32."""
    import torch

    largest = []
    indices = []
    start = 0
    for values in parameters:
        count = max(1, round(share * len(values)))
        own_indices = values.abs().topk(count, sorted=False).indices
        largest.append(values[own_indices])
        indices.append(own_indices + start)
        start += len(values)
    return [torch.cat(largest), torch.cat(indices).to(torch.int32)]


def _two_bits(gradient: "Tensor", threshold: float) -> list["Tensor"]:
    """Returns codes, [n / 4] uint8, of four elements each."""
    import torch

    codes = torch.zeros(-(-len(gradient) // 4) * 4, dtype=torch.uint8)
    own_codes = codes[: len(gradient)]  # without the padding to a whole byte
    is_high = (gradient >= threshold).to(torch.uint8)
    is_low = (gradient <= -threshold).to(torch.uint8)
    own_codes.copy_(is_high - is_low + 1)
    if not gradient.sum().isfinite():  # the fourth code stands for NaN
        own_codes.masked_fill_(~gradient.isfinite(), 3)
    four = codes.view(-1, 4)
    return [four[:, 0] | four[:, 1] << 2 | four[:, 2] << 4 | four[:, 3] << 6]


@lru_cache
def _four_values(threshold: float) -> "Tensor":
    """Returns the four values that each byte of 2bit stands for, [256, 4] float32."""
    import torch

    values = torch.tensor([-threshold, 0.0, threshold, math.nan])
    return torch.stack([values[torch.arange(256) >> shift & 3] for shift in (0, 2, 4, 6)], 1)
