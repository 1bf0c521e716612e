"""How a gradient is written for the wire, and read again. Torch is imported by what computes, not to check a name."""

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING

from hvdtrain.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

NAMES = ["none", "fp16", "bf16", "int8", "topk:SHARE", "2bit:THRESHOLD", "powersgd"]


def parse(name: str) -> tuple[str, float]:
    """The kind and its number (0 where it takes none): ("topk", 0.01) from `topk:0.01`. UsageError for others."""
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
        f"unknown compression '{name}': choose from {', '.join(NAMES)} (a share in 0 … 1, a threshold above 0)"
    )


class Compressor:
    """Encodes the gradients of one bucket, step after step, in any way but powersgd, which takes all workers together.

    Parameters are encoded one by one: the gradients of layers differ in size by powers of ten, and what a layer sends
    is not to depend on which others share its bucket. A parameter that lies in several buckets is cut there.

    What int8, topk and 2bit leave out is kept and added to the next gradient (error feedback: Seide et al., 2014;
    Karimireddy et al., 2019, arXiv:1901.09847). fp16 and bf16 round, and keep nothing.

    - int8: a parameter's scale, its largest magnitude over 127, and a byte an element.
    - topk:SHARE: a parameter's elements of largest magnitude, that share of all, at least one, and their places.
    - 2bit:THRESHOLD: each element is -THRESHOLD, 0 or THRESHOLD, four to a byte: the scheme of MXNet's KVStore.

    A gradient that is NaN or infinite is so, or NaN, when it is read too, and from then on.

    Args:
        lengths: elements of each parameter in the bucket, in order; none where all are one's.
    """

    def __init__(self, name: str, lengths: Sequence[int] = ()) -> None:
        self.kind, self.number = parse(name)
        self.lengths = list(lengths)
        self.error: Tensor | None = None

    def encode(self, gradient: "Tensor") -> list["Tensor"]:
        """What to send for a gradient, [n] float32. It may be the gradient itself; else the gradient is used up."""
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
        else:
            parts = _topk(parameters, self.number) if self.kind == "topk" else _two_bits(gradient, self.number)
        parts.append(torch.tensor(len(gradient)))
        if self.error is None:
            self.error = torch.empty_like(gradient)
        torch.sub(gradient, self.decode(parts), out=self.error)
        return parts

    def decode(self, parts: Sequence["Tensor"]) -> "Tensor":
        """The gradient, [n] float32, that was sent as these parts."""
        if self.kind == "none":
            return parts[0]
        import torch

        if self.kind in ("fp16", "bf16"):
            return parts[0].float()
        if self.kind == "int8":
            gradient = parts[0].float()
            for own, scale in zip(gradient.split(parts[2].tolist()), parts[1], strict=True):
                own.mul_(scale)
            return gradient
        n = int(parts[-1])
        if self.kind == "topk":
            return torch.zeros(n).index_copy_(0, parts[1].long(), parts[0])
        return _four_values(self.number).index_select(0, parts[0].int()).flatten()[:n]


def _int8(parameters: Sequence["Tensor"]) -> list["Tensor"]:
    import torch

    scales = torch.stack([own.abs().max() for own in parameters]).div_(127)
    scales.clamp_(min=torch.finfo(torch.float32).tiny)
    codes = torch.empty(sum(map(len, parameters)), dtype=torch.int8)
    for own, scale, code in zip(parameters, scales, codes.split([len(own) for own in parameters]), strict=True):
        code.copy_((own / scale).round_())
    return [codes, scales, torch.tensor([len(own) for own in parameters])]


def _topk(parameters: Sequence["Tensor"], share: float) -> list["Tensor"]:
    import torch

    places = [own.abs().topk(max(1, round(share * len(own))), sorted=False).indices for own in parameters]
    starts = accumulate((len(own) for own in parameters), initial=0)
    values = torch.cat([own[at] for own, at in zip(parameters, places, strict=True)])
    return [values, torch.cat([at + start for at, start in zip(places, starts, strict=False)]).to(torch.int32)]


def _two_bits(gradient: "Tensor", threshold: float) -> list["Tensor"]:
    import torch

    codes = torch.zeros(-(-len(gradient) // 4) * 4, dtype=torch.uint8)
    own = codes[: len(gradient)]
    own.copy_((gradient >= threshold).to(torch.uint8) - (gradient <= -threshold).to(torch.uint8) + 1)
    if not gradient.sum().isfinite():  # the fourth code is for what is no number
        own.masked_fill_(~gradient.isfinite(), 3)
    four = codes.view(-1, 4)
    return [four[:, 0] | four[:, 1] << 2 | four[:, 2] << 4 | four[:, 3] << 6]


@lru_cache
def _four_values(threshold: float) -> "Tensor":
    """What each byte of two bits stands for, [256, 4] float32."""
    import torch

    values = torch.tensor([-threshold, 0.0, threshold, math.nan])
    return torch.stack([values[torch.arange(256) >> shift & 3] for shift in (0, 2, 4, 6)], 1)
