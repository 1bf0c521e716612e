"""What a step computes, measured here: each layer forward and backward, the optimizer, the codecs."""

import itertools
import math
import statistics
import time
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from hvdtrain import models
from hvdtrain.config.run_config import RunConfig
from hvdtrain.numerics.compression import Compressor
from hvdtrain.numerics.optimizers import make_optimizer
from hvdtrain.plan.calibration import LayerCost, Quantity

WARM_UP, LEAST_STEPS, MOST_STEPS = 1, 3, 60
VECTOR_MB = 16  # of the optimizer's and codecs' measurements
CODECS = ("fp16", "bf16", "int8", "topk:0.01", "2bit:0.05")


def _now() -> float:
    """Processor seconds of this thread: what others do on this machine meanwhile does not count. One thread computes,
    backward too.
    """
    return time.thread_time()


class _Stamps:
    """When each layer with parameters begins forward, and when its gradients are there."""

    def __init__(self, model: nn.Module) -> None:
        self.names: list[str] = []
        self.sizes: list[float] = []
        self.began: list[float] = []
        self.gradients: dict[int, float] = {}
        for name, module in model.named_modules():
            own = [p for p in module.parameters(recurse=False) if p.requires_grad]
            if not own:
                continue
            number = len(self.names)
            self.names.append(name)
            self.sizes.append(sum(p.numel() for p in own) * 4e-6)
            module.register_forward_pre_hook(lambda *_: self.began.append(_now()))
            for p in own:
                p.register_post_accumulate_grad_hook(partial(self._gradient, number))

    def _gradient(self, number: int, _: torch.Tensor) -> None:
        self.gradients[number] = _now()


def profile(config: RunConfig, batch: int, classes: int, side: int, budget_s: float) -> dict[str, Any]:
    """Measure a model's layers with one worker's batch, for about so long: what a Calibration says of computing.

    A batch that would take too long is measured smaller, and computing taken to grow in proportion.
    """
    torch.manual_seed(0)
    model = models.make(config.model, classes, config.taken_width, config.dropout)
    model.train()
    stamps = _Stamps(model)
    small = max(1, batch // 4)
    began = time.perf_counter()
    _steps(model, stamps, small, side, 1)
    second = time.perf_counter()
    _steps(model, stamps, small, side, 1)
    whole_s = (time.perf_counter() - second) * batch / small
    measured = batch if whole_s < budget_s / 4 else small
    rows = _steps(model, stamps, measured, side, MOST_STEPS, began + 0.75 * budget_s)
    totals = [_whole(row) for row in rows]
    fixed_share = 0.0
    if measured == batch > small:
        less = _steps(model, stamps, small, side, MOST_STEPS // 4, began + budget_s)
        other = statistics.median(map(_whole, less))
        whole = statistics.median(totals)
        per_sample = max(0.0, (whole - other) / (batch - small))
        fixed_share = min(1.0, max(0.0, 1 - per_sample * batch / whole))
    scale = 1e3 * batch / measured
    layers = tuple(
        LayerCost(
            name, size, Quantity.of([row["forward"][number] * scale for row in rows]),
            Quantity.of([row["backward"][number] * scale for row in rows]),
        )
        for number, (name, size) in enumerate(zip(stamps.names, stamps.sizes, strict=True))
    )  # fmt: skip
    logs = sorted(math.log(total) for total in totals)
    middle = logs[len(logs) // 4 : -(-3 * len(logs) // 4)]
    jitter = (middle[-1] - middle[0]) / 1.349 if len(logs) >= 4 else 0.0  # quartiles: not moved by a few outliers
    return {
        "batch_per_worker": batch, "layers": layers, "fixed_ms": Quantity.of([row["fixed"] * 1e3 for row in rows]),
        "step_jitter": round(jitter, 4), "batch_fixed_share": round(fixed_share, 4),
    }  # fmt: skip


def _whole(row: dict[str, Any]) -> float:
    """Seconds of a step."""
    return sum(row["forward"]) + sum(row["backward"]) + row["fixed"]


def _steps(
    model: nn.Module, stamps: _Stamps, batch: int, side: int, most: int, deadline: float = 0.0
) -> list[dict[str, Any]]:
    """Seconds of each layer in up to so many steps, warm-up left out."""
    images, labels = torch.rand(batch, 3, side, side), torch.zeros(batch, dtype=torch.long)
    rows: list[dict[str, Any]] = []
    for step in range(WARM_UP + most):
        if len(rows) >= LEAST_STEPS and time.perf_counter() > deadline:
            break
        stamps.began.clear()
        stamps.gradients.clear()
        start = _now()
        inputs = (images - 0.5) / 0.5
        forward = _now()
        scores = model(inputs)
        forward_ended = _now()
        loss = F.cross_entropy(scores, labels)
        backward = _now()
        loss.backward()
        backward_ended = _now()
        model.zero_grad(set_to_none=True)
        loss.item()
        end = _now()
        if step < WARM_UP and most > 1:
            continue
        begins = [forward, *stamps.began[1:], forward_ended]
        ends, last = [], backward
        for number in reversed(range(len(stamps.names))):
            ends.append(max(0.0, stamps.gradients[number] - last))
            last = max(last, stamps.gradients[number])
        rows.append({
            "forward": [b - a for a, b in itertools.pairwise(begins)],
            "backward": ends[::-1],
            "fixed": (forward - start) + (backward - forward_ended) + (backward_ended - last) + (end - backward_ended),
        })  # fmt: skip
    return rows


def optimizer_ms_per_mb(config: RunConfig, repeats: int = 7) -> Quantity:
    p = nn.Parameter(torch.zeros(VECTOR_MB * 250_000))
    p.grad = torch.ones_like(p)
    optimizer = make_optimizer(config, [p])
    seconds = []
    for _ in range(2 + repeats):
        began = _now()
        optimizer.step()
        seconds.append(_now() - began)
    return Quantity.of([1e3 * s / VECTOR_MB for s in seconds[2:]])


def codec_costs(repeats: int = 3) -> dict[str, dict[str, Quantity]]:
    """For each codec: encode and decode in ms per MB of gradient, and bytes on the wire over those of float32."""
    found = {}
    gradient = torch.randn(VECTOR_MB * 250_000 // 4)
    megabytes = gradient.nbytes / 1e6
    for name in CODECS:
        codec, encode, decode, share = Compressor(name), [], [], 1.0
        for _ in range(1 + repeats):
            own = gradient.clone()
            began = _now()
            parts = codec.encode(own)
            between = _now()
            codec.decode(parts)
            decode.append(_now() - between)
            encode.append(between - began)
            share = sum(part.nbytes for part in parts) / gradient.nbytes
        found[name] = {
            "encode_ms_per_mb": Quantity.of([1e3 * s / megabytes for s in encode[1:]]),
            "decode_ms_per_mb": Quantity.of([1e3 * s / megabytes for s in decode[1:]]),
            "wire_share": Quantity(share, share, share),
        }
    return found
