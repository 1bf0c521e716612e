"""What a step computes, measured here: each layer forward and backward, the optimizer, the codecs.

Processor seconds of one thread, which computes backward too: what others do on this machine does not count.
"""

import itertools
import math
import statistics
import time
import timeit
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from hvdtrain.config.run_config import RunConfig
from hvdtrain.data.folder import ImageFolder
from hvdtrain.data.loader import example
from hvdtrain.numerics.compression import Compressor
from hvdtrain.numerics.optimizers import make_optimizer
from hvdtrain.planning.calibration import LayerCost, Quantity
from hvdtrain.rank.work import initial_model, trial_inputs
from hvdtrain.system.cgroups import usable_cores

WARM_UP, LEAST_STEPS, MOST_STEPS = 1, 3, 60
VECTOR_MB, REPEATS = 16, 4  # of the optimizer's and codecs' measurements
CODECS = ("fp16", "bf16", "int8", "topk:0.01", "2bit:0.05")
_now = time.thread_time


class _Stamps:
    """When each layer with parameters begins forward, and when its gradients are there.

    Attributes:
        layers: name and megabytes of each.
        began: of each layer, in the order in which they begin. One whose weights another layer's forward reads is not
            there, as nn.MultiheadAttention's `out_proj`: its computing counts as that of the layer before.
    """

    def __init__(self, model: nn.Module) -> None:
        self.layers: list[tuple[str, float]] = []
        self.began: dict[int, float] = {}
        self.gradients: dict[int, float] = {}
        for name, module in model.named_modules():
            if parameters := [p for p in module.parameters(recurse=False) if p.requires_grad]:
                module.register_forward_pre_hook(partial(self._begin, len(self.layers)))
                for p in parameters:
                    p.register_post_accumulate_grad_hook(partial(self._gradient, len(self.layers)))
                self.layers.append((name, sum(p.numel() for p in parameters) * 4e-6))

    def _begin(self, number: int, *_: object) -> None:
        self.began.setdefault(number, _now())

    def _gradient(self, number: int, _: torch.Tensor) -> None:
        self.gradients[number] = _now()

    def order(self) -> list[int]:
        """The layers as forward comes to them; those of which it is not known follow the one before them by name."""
        order = list(self.began)
        for number in range(len(self.layers)):
            if number not in self.began:
                order.insert(order.index(number - 1) + 1 if number else 0, number)
        return order


def profile(config: RunConfig, batch: int, data: ImageFolder, side: int, budget_s: float) -> dict[str, Any]:
    """What a Calibration says of computing, with one worker's batch of images of so many pixels a side, measured for
    about so long. A batch that would take too long is measured smaller; computing is taken to grow in proportion.
    """
    model = initial_model(config, len(data.classes), trial_inputs(config, data))
    model.train()
    samples = example(data.train, side, batch)
    stamps = _Stamps(model)
    small = max(1, batch // 4)
    began = time.perf_counter()
    of_small = [row["whole"] for row in _steps(model, stamps, samples[:small], began + budget_s / 4)]
    measured = batch if of_small[-1] * batch / small < budget_s / 8 else small
    rows = _steps(model, stamps, samples[:measured], began + budget_s)
    whole = [row["whole"] for row in rows]
    fixed_share = 0.0
    if measured == batch > small:
        # What a sample adds is the slope; what is left of a step at no samples is fixed.
        slope = (1 - statistics.median(of_small) / statistics.median(whole)) / (batch - small)
        fixed_share = min(1.0, max(0.0, 1 - max(0.0, slope) * batch))
    scale = 1e3 * batch / measured
    layers = tuple(
        LayerCost(
            *stamps.layers[number],
            Quantity.of([row["forward"][place] * scale for row in rows]),
            Quantity.of([row["backward"][place] * scale for row in rows]),
        )
        for place, number in enumerate(stamps.order())
    )
    fixed = [max(0.0, row["whole"] - sum(row["forward"]) - sum(row["backward"])) for row in rows]
    first, _, third = statistics.quantiles(map(math.log, whole))  # not moved by a few outliers
    vector = nn.Parameter(torch.zeros(VECTOR_MB * 250_000))
    vector.grad = torch.ones_like(vector)
    return {
        "batch_per_worker": batch, "layers": layers, "fixed_ms": Quantity.of(fixed).times(1e3),
        "step_jitter": round((third - first) / 1.349, 4), "batch_fixed_share": round(fixed_share, 4),
        "machine_speedup": _of_all_cores(model, samples[:measured]),
        "optimizer_ms_per_mb": _ms_per_mb(make_optimizer(config, [vector]).step),
        "codecs": _codecs(),
    }  # fmt: skip


def _of_all_cores(model: nn.Module, samples: torch.Tensor) -> Quantity:
    """How many times as fast all cores compute as one thread, by wall time: the best of two steps of each."""
    cores = max(1, round(usable_cores()))
    seconds: dict[int, float] = {1: math.inf, cores: math.inf}
    for threads in (1, cores) * 2:
        torch.set_num_threads(threads)
        seconds[threads] = min(seconds[threads], timeit.timeit(lambda: model(samples).sum().backward(), number=1))
    torch.set_num_threads(1)
    return Quantity.exactly(max(1.0, seconds[1] / seconds[cores])).give_or_take(1.15)


def _steps(model: nn.Module, stamps: _Stamps, samples: torch.Tensor, deadline: float) -> list[dict[str, Any]]:
    """Seconds of steps after a warm-up, and of their layers in stamps.order(), until a time.perf_counter()."""
    labels = torch.zeros(len(samples), dtype=torch.long)
    rows: list[dict[str, Any]] = []
    for step in range(WARM_UP + MOST_STEPS):
        if len(rows) >= LEAST_STEPS and time.perf_counter() > deadline:
            break
        stamps.began.clear()
        stamps.gradients.clear()
        start = _now()
        inputs = (samples - 0.5) / 0.5 if samples.is_floating_point() else samples
        forward = _now()
        scores = model(inputs)
        forward_ended = _now()
        loss = F.cross_entropy(scores, labels)
        last = _now()
        loss.backward()
        model.zero_grad(set_to_none=True)
        loss.item()
        end = _now()
        if step < WARM_UP:
            continue
        order, begins = stamps.order(), [forward_ended]
        for number in reversed(order[1:]):
            begins.insert(0, stamps.began.get(number, begins[0]))
        begins.insert(0, forward)
        backward = []
        for number in reversed(order):
            backward.append(max(0.0, stamps.gradients[number] - last))
            last = max(last, stamps.gradients[number])
        seconds = [b - a for a, b in itertools.pairwise(begins)]
        rows.append({"whole": end - start, "forward": seconds, "backward": backward[::-1]})
    return rows


def _ms_per_mb(act: Callable[[], object]) -> Quantity:
    """What something costs that is done to VECTOR_MB."""
    seconds = timeit.repeat(act, timer=_now, repeat=WARM_UP + REPEATS, number=1)
    return Quantity.of(seconds[WARM_UP:]).times(1e3 / VECTOR_MB)


def _codecs() -> dict[str, dict[str, Quantity]]:
    costs = {}
    gradient = torch.randn(VECTOR_MB * 250_000)
    for name in CODECS:
        codec = Compressor(name)
        parts = codec.encode(gradient.clone())
        costs[name] = {
            "encode_ms_per_mb": _ms_per_mb(partial(codec.encode, gradient)),
            "decode_ms_per_mb": _ms_per_mb(partial(codec.decode, parts)),
            "wire_share": Quantity.exactly(sum(part.nbytes for part in parts) / gradient.nbytes),
        }
    return costs
