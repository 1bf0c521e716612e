"""Measures what a step computes: each layer forward and backward, the optimizer, the codecs.

Times of one thread, which computes backward too, are its processor seconds, so that other work on
this machine counts little. Of several threads they are wall seconds: steps beside other work are
left out, as far as there are others.
"""

import itertools
import math
import statistics
import time
import timeit
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from hvdtrain.base.config.run_config import RunConfig
from hvdtrain.base.numerics.compression import CODECS, Compressor
from hvdtrain.base.numerics.optimizers import make_optimizer
from hvdtrain.base.system.cgroups import usable_cores
from hvdtrain.base.world.load import FOREIGN_SHARE
from hvdtrain.data.folder import ImageFolder
from hvdtrain.data.loader import example
from hvdtrain.job.training.model import initial_model, trial_inputs
from hvdtrain.planning.calibration import LayerCost, Quantity
from hvdtrain.planning.watch import MOST_TIMES, Watch

WARM_UP = 1
LEAST_STEPS = 3
MOST_STEPS = 60
# Images of a step: of one alone batch norm may have no statistics.
FEWEST = 2
# Seconds of a step.
SHORTEST_S = 1e-6
# The optimizer's and codecs' measurements.
VECTOR_MB = 16
FLOATS_PER_MB = 250_000
REPEATS = 4
# The range of quartiles of a normal distribution, in standard deviations.
QUARTILES = 1.349
# The factor by which what more cores add may be off.
SPEEDUP_OFF = 1.15
# Steps are watched for other work in windows of so many seconds.
WINDOW_S = 0.5
# With fewer steps that nothing disturbed, the jitter of steps is a guess.
LEAST_QUIET = 8
UNKNOWN_JITTER = 0.03
Clock = Callable[[], float]


class _Stamps:
    """When each layer with parameters begins forward, and when its gradients are ready.

    Args:
        clock: returns seconds.

    Attributes:
        layers: name and megabytes of each.
        began: of each layer, in the order in which they begin. A layer whose weights another
            layer's forward reads is missing, as nn.MultiheadAttention's `out_proj`: the time of its
            computing is in the layer before.
    """

    def __init__(self, model: nn.Module, clock: Clock) -> None:
        self.clock = clock
        self.layers: list[tuple[str, float]] = []
        self.began: dict[int, float] = {}
        self.gradients: dict[int, float] = {}
        for name, module in model.named_modules():
            own = [weights for weights in module.parameters(recurse=False) if weights.requires_grad]
            if not own:
                continue
            number = len(self.layers)
            module.register_forward_pre_hook(partial(self._begin, number))
            for weights in own:
                weights.register_post_accumulate_grad_hook(partial(self._gradient, number))
            self.layers.append((name, sum(weights.numel() for weights in own) * 4e-6))

    def clear(self) -> None:
        self.began.clear()
        self.gradients.clear()

    def _begin(self, number: int, *_: object) -> None:
        self.began.setdefault(number, self.clock())

    def _gradient(self, number: int, _: torch.Tensor) -> None:
        self.gradients[number] = self.clock()

    def order(self) -> list[int]:
        """Returns the layers in the order of forward.

        A layer of which it is not known follows the one before it by name.
        """
        order = list(self.began)
        for number in range(len(self.layers)):
            if number not in self.began:
                order.insert(order.index(number - 1) + 1 if number else 0, number)
        return order

    def forward_seconds(self, began: float, ended: float) -> list[float]:
        """Returns the seconds of each layer in order(), from the times of the whole forward."""
        begins = [ended]
        for number in reversed(self.order()[1:]):
            begins.insert(0, self.began.get(number, begins[0]))
        begins.insert(0, began)
        return [end - begin for begin, end in itertools.pairwise(begins)]

    def backward_seconds(self, began: float) -> list[float]:
        """Returns the seconds of each layer in order(), from the time when backward began."""
        last = began
        seconds = []
        for number in reversed(self.order()):
            seconds.append(max(0.0, self.gradients[number] - last))
            last = max(last, self.gradients[number])
        return seconds[::-1]


@dataclass(frozen=True)
class _MeasuredStep:
    """What a step took.

    Attributes:
        whole: seconds by the clock of _Stamps.
        wall: wall seconds.
        forward, backward: seconds of each layer in _Stamps.order().
        others: the share of this machine's cores that was busy with other work.
    """

    whole: float
    wall: float
    forward: list[float]
    backward: list[float]
    others: float = 0.0

    @property
    def fixed(self) -> float:
        """Seconds that belong to no layer."""
        return max(0.0, self.whole - sum(self.forward) - sum(self.backward))


@dataclass(frozen=True)
class _Measured:
    """Steps with as many images as there is time for.

    Attributes:
        images: in each step.
        fixed_share: the part of a whole batch's step that does not grow with the batch.
    """

    images: int
    steps: list[_MeasuredStep]
    fixed_share: float

    @property
    def quiet_steps(self) -> list[_MeasuredStep]:
        return [step for step in self.steps if step.others <= FOREIGN_SHARE]


class Profile(NamedTuple):
    """What computing costs, and how well that is known.

    Attributes:
        computing: keys of a Calibration.
        others: the share of this machine that was busy with other work; 0 where enough steps were
            undisturbed.
        jitter_is_known: whether there were enough of these to tell their jitter.
    """

    computing: dict[str, Any]
    others: float
    jitter_is_known: bool


def profile(
    config: RunConfig,
    batch: int,
    data: ImageFolder,
    side: int,
    threads: int,
    budget_s: float,
    say: Callable[[str], None],
) -> Profile:
    """Measures what a Calibration says of computing.

    A batch that would take too long is measured smaller, down to FEWEST images. Computing is taken
    to grow in proportion.

    Args:
        batch: of one worker.
        side: pixels of an image's side.
        threads: of one worker.
        budget_s: seconds that the measuring takes, about; as many again beside other work.
        say: shows the user a line.
    """
    say("layers: forward and backward …")
    model = initial_model(config, len(data.classes), trial_inputs(config, data))
    model.train()
    samples = example(data.train, side, batch)
    torch.set_num_threads(threads)
    stamps = _Stamps(model, time.thread_time if threads == 1 else time.perf_counter)
    # Several threads that other work disturbs are given up soon: one is measured better.
    repeat_s = budget_s if threads == 1 else budget_s / 2
    measured = _measure_layers(model, stamps, samples, budget_s, repeat_s, say)
    steps = measured.quiet_steps
    if threads > 1 and len(steps) < LEAST_STEPS:
        # Threads that wait for one that is not running tell nothing of a machine without the others.
        say("beside other work: one thread is measured, by its processor time …")
        return profile(config, batch, data, side, 1, budget_s / 2, say)
    others = 0.0
    jitter_is_known = len(steps) >= LEAST_QUIET
    jitter = _jitter(steps) if jitter_is_known else UNKNOWN_JITTER
    if len(steps) < LEAST_STEPS:
        # The less disturbed half.
        steps = sorted(measured.steps, key=lambda step: step.others)
        steps = steps[: max(LEAST_STEPS, len(steps) // 2)]
        others = statistics.median(step.others for step in steps)
    scale = 1e3 * batch / measured.images
    layers = []
    for place, number in enumerate(stamps.order()):
        forward_ms = Quantity.of([step.forward[place] * scale for step in steps])
        backward_ms = Quantity.of([step.backward[place] * scale for step in steps])
        layers.append(
            LayerCost(
                *stamps.layers[number],
                forward_ms.give_or_take(1 + others),
                backward_ms.give_or_take(1 + others),
            )
        )
    say("all cores, the optimizer, codecs …")
    vector = nn.Parameter(torch.zeros(VECTOR_MB * FLOATS_PER_MB))
    vector.grad = torch.ones_like(vector)
    machine_speedup, of_more_cores = _more_cores(model, samples[: measured.images], threads, others)
    found = {
        "batch_per_worker": batch,
        "layers": tuple(layers),
        "fixed_ms": Quantity.of([step.fixed for step in steps]).times(1e3).give_or_take(1 + others),
        "step_jitter": round(jitter, 4),
        "batch_fixed_share": round(measured.fixed_share, 4),
        "threads_per_worker": threads,
        "machine_speedup": machine_speedup,
        "of_more_cores": of_more_cores,
        "optimizer_ms_per_mb": _ms_per_mb(make_optimizer(config, [vector]).step),
        "codecs": _codecs(),
    }
    return Profile(found, others, jitter_is_known)


def _jitter(steps: Sequence[_MeasuredStep]) -> float:
    """Returns the standard deviation of the logarithm of steps' times.

    It is from quartiles, which are not moved by a few outliers.
    """
    first, _, third = statistics.quantiles(math.log(step.whole) for step in steps)
    return (third - first) / QUARTILES


def _measure_layers(
    model: nn.Module,
    stamps: _Stamps,
    samples: torch.Tensor,
    budget_s: float,
    repeat_s: float,
    say: Callable[[str], None],
) -> _Measured:
    """Measures steps of a few images, and then of the batch if there is time.

    Args:
        budget_s, repeat_s: seconds that this takes, and how many more beside other work.
    """
    began = time.perf_counter()
    batch = len(samples)
    fewest = min(FEWEST, batch)
    [of_fewest] = _steps(model, stamps, samples[:fewest], began, least=1)
    steps_in_time = budget_s / 4 / max(of_fewest.wall, SHORTEST_S)
    images_in_time = int(fewest * steps_in_time / (WARM_UP + LEAST_STEPS))
    small = max(fewest, min(batch // 4, images_in_time))
    of_small = _steps(model, stamps, samples[:small], began + budget_s / 4)
    # The fastest step: other work delays the others.
    image_s = min(step.wall for step in of_small) / small
    is_in_time = image_s * batch < budget_s / 8
    images = batch if is_in_time else small
    if images < batch:
        say(
            f"layers: {image_s:.1f} s an image and thread: "
            f"{images} of {batch} images a step are measured …"
        )
    if images == small:
        more = _steps(model, stamps, samples[:small], began + budget_s, least=0, repeat_s=repeat_s)
        return _Measured(images, of_small + more, 0.0)
    of_batch = _steps(model, stamps, samples, began + budget_s, repeat_s=repeat_s)
    # What a sample adds is the slope. What is left of a step with no samples is fixed.
    whole = statistics.median(step.whole for step in of_batch)
    whole_of_small = statistics.median(step.whole for step in of_small)
    slope = (1 - whole_of_small / whole) / (batch - small)
    fixed_share = min(1.0, max(0.0, 1 - max(0.0, slope) * batch))
    return _Measured(images, of_batch, fixed_share)


def _steps(
    model: nn.Module,
    stamps: _Stamps,
    samples: torch.Tensor,
    deadline: float,
    least: int = LEAST_STEPS,
    repeat_s: float = 0.0,
) -> list[_MeasuredStep]:
    """Measures steps after a warm-up, until a time.perf_counter() or for `least` steps at least.

    With `repeat_s` measuring goes on for so much longer while few steps were undisturbed.
    """
    labels = torch.zeros(len(samples), dtype=torch.long)
    steps: list[_MeasuredStep] = []
    for _ in range(WARM_UP):
        _step(model, stamps, samples, labels)
    in_window: list[_MeasuredStep] = []
    others = 0.0
    watch = Watch()
    while True:
        late_s = time.perf_counter() - deadline
        number = len(steps) + len(in_window)
        quiet = sum(step.others <= FOREIGN_SHARE for step in steps)
        is_enough = number >= least and (late_s > 0 or number >= MOST_STEPS)
        if is_enough and (quiet >= LEAST_QUIET or late_s > repeat_s):
            break
        in_window.append(_step(model, stamps, samples, labels))
        if watch.seconds > WINDOW_S:
            others = watch.others(others)
            steps += [replace(step, others=others) for step in in_window]
            in_window = []
            watch = Watch()
    others = watch.others(others)
    return steps + [replace(step, others=others) for step in in_window]


def _step(
    model: nn.Module, stamps: _Stamps, samples: torch.Tensor, labels: torch.Tensor
) -> _MeasuredStep:
    stamps.clear()
    clock = stamps.clock
    began = clock()
    wall_began = time.perf_counter()
    inputs = (samples - 0.5) / 0.5 if samples.is_floating_point() else samples
    forward_began = clock()
    scores = model(inputs)
    forward_ended = clock()
    loss = F.cross_entropy(scores, labels)
    backward_began = clock()
    loss.backward()
    model.zero_grad(set_to_none=True)
    loss.item()
    whole = clock() - began
    wall = time.perf_counter() - wall_began
    forward = stamps.forward_seconds(forward_began, forward_ended)
    return _MeasuredStep(whole, wall, forward, stamps.backward_seconds(backward_began))


def _more_cores(
    model: nn.Module, samples: torch.Tensor, threads: int, others: float
) -> tuple[Quantity | None, Quantity | None]:
    """Returns `machine_speedup` and `of_more_cores` of a calibration, by wall time; None beside
    other work, which it is measured twice to avoid.

    Each number of threads has the better of two steps. The model computes with one thread after.
    """

    def step() -> None:
        model(samples).sum().backward()

    cores = max(1, int(usable_cores()))
    for _ in range(MOST_TIMES):
        seconds = dict.fromkeys((1, threads, cores), math.inf)
        watch = Watch()
        for number in (*seconds, *seconds):
            torch.set_num_threads(number)
            seconds[number] = min(seconds[number], timeit.timeit(step, number=1))
        is_quiet = watch.others(others) <= FOREIGN_SHARE
        if is_quiet:
            break
    torch.set_num_threads(1)
    machine_speedup = None
    of_more_cores = None
    if not is_quiet:
        return None, None
    if threads < cores:
        speedup = max(1.0, seconds[threads] / seconds[cores])
        machine_speedup = Quantity.exactly(speedup).give_or_take(SPEEDUP_OFF)
    if cores > 1:
        share = max(0.0, seconds[1] / seconds[cores] - 1) / (cores - 1)
        of_more_cores = Quantity.exactly(share).give_or_take(SPEEDUP_OFF)
    return machine_speedup, of_more_cores


def _ms_per_mb(work: Callable[[], object]) -> Quantity:
    """Returns what work costs that is done to VECTOR_MB."""
    seconds = timeit.repeat(work, timer=time.thread_time, repeat=WARM_UP + REPEATS, number=1)
    return Quantity.of(seconds[WARM_UP:]).times(1e3 / VECTOR_MB)


def _codecs() -> dict[str, dict[str, Quantity]]:
    """Returns what each codec costs: `codecs` of a calibration."""
    costs = {}
    gradient = torch.randn(VECTOR_MB * FLOATS_PER_MB)
    for name in [spec.measured_as for spec in CODECS.values() if spec.measured_as]:
        codec = Compressor(name)
        parts = codec.encode(gradient.clone())
        wire_share = sum(part.nbytes for part in parts) / gradient.nbytes
        costs[name] = {
            "encode_ms_per_mb": _ms_per_mb(partial(codec.encode, gradient)),
            "decode_ms_per_mb": _ms_per_mb(partial(codec.decode, parts)),
            "wire_share": Quantity.exactly(wire_share),
        }
    return costs
