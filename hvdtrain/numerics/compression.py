"""How a gradient is written for the wire, and read again. Torch is imported by what computes, not to check a name."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hvdtrain.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

NAMES = ["none", "fp16", "bf16", "int8", "topk:SHARE", "2bit:THRESHOLD"]


def parse(name: str) -> tuple[str, float]:
    """The kind and its number (0 where it takes none): ("topk", 0.01) from `topk:0.01`. UsageError for others."""
    kind, _, number = name.partition(":")
    if kind in ("none", "fp16", "bf16", "int8") and not number:
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
    """Encodes the gradients of one bucket, step after step.

    What int8, topk and 2bit leave out is kept and added to the next gradient (error feedback: Seide et al., 2014;
    Karimireddy et al., 2019, arXiv:1901.09847). fp16 and bf16 round, and keep nothing.

    - int8: a scale, the largest magnitude over 127, and a byte an element.
    - topk:SHARE: the elements of largest magnitude, that share of all, and their places.
    - 2bit:THRESHOLD: each element is -THRESHOLD, 0 or THRESHOLD, four to a byte: the scheme of MXNet's KVStore.
    """

    def __init__(self, name: str) -> None:
        self.kind, self.number = parse(name)
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
        parts = {"int8": _int8, "topk": _topk, "2bit": _two_bits}[self.kind](gradient, self.number)
        parts.append(torch.tensor(len(gradient)))
        if self.error is None:
            self.error = torch.empty_like(gradient)
        torch.sub(gradient, self.decode(parts), out=self.error)
        return parts

    def decode(self, parts: Sequence["Tensor"]) -> "Tensor":
        """The gradient, [n] float32, that was sent as these parts."""
        import torch

        if self.kind == "none":
            return parts[0]
        if self.kind in ("fp16", "bf16"):
            return parts[0].float()
        if self.kind == "int8":
            return parts[0].float().mul_(parts[1])
        n = int(parts[-1])
        if self.kind == "topk":
            return torch.zeros(n).index_copy_(0, parts[1].long(), parts[0])
        codes = torch.stack([parts[0] >> shift & 3 for shift in (0, 2, 4, 6)], 1).flatten()[:n]
        return codes.float().sub_(1).mul_(self.number)


def _int8(gradient: "Tensor", _: float) -> list["Tensor"]:
    import torch

    scale = (gradient.abs().max() / 127).clamp_(min=torch.finfo(torch.float32).tiny)
    return [(gradient / scale).round_().to(torch.int8), scale]


def _topk(gradient: "Tensor", share: float) -> list["Tensor"]:
    import torch

    places = gradient.abs().topk(max(1, round(share * len(gradient))), sorted=False).indices
    return [gradient[places], places.to(torch.int32)]


def _two_bits(gradient: "Tensor", threshold: float) -> list["Tensor"]:
    import torch

    codes = torch.zeros(-(-len(gradient) // 4) * 4, dtype=torch.uint8)
    codes[: len(gradient)] = (gradient >= threshold).to(torch.uint8) - (gradient <= -threshold).to(torch.uint8) + 1
    four = codes.view(-1, 4)
    return [four[:, 0] | four[:, 1] << 2 | four[:, 2] << 4 | four[:, 3] << 6]
