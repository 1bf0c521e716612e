"""How a script's gradients come together, and its optimizer's step is taken.

In `single` and `ddp` torch has averaged the gradients when backward ends. In `allreduce` Horovod
averages them bucket by bucket. In both, the script's own optimizer then takes the step. In
`sharded` and with servers the optimizer runs elsewhere, and what comes back are weights. With
--local-steps gradients stay where they are, and the script's own optimizer takes every step.

Gradients leave as backward computes them where the script lets them: see Bucketed.
"""

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from hvdtrain.base.config.run_config import RunConfig
from hvdtrain.base.errors import Failure
from hvdtrain.base.formatting import some_of
from hvdtrain.base.numerics.flat import flatten_weights, views
from hvdtrain.job.buckets.local_rounds import BucketCarrier, LeasingCarrier, LocalRounds
from hvdtrain.job.buckets.partition import borders_of_whole
from hvdtrain.job.script.optimizer import HandedIn

# Of what Horovod averages: the largest first bucket, and the largest part of all gradients that
# another bucket of several parameters has, if that is more.
FIRST_BUCKET_MB = 0.25
LARGEST_PART = 1 / 3


class Gradients(ABC):
    """The gradients of a script's step.

    Attributes:
        own_step: takes the step of the script's own optimizer.
        updates_here: whether `step` takes it. If not, the mode updates the weights.
        hooked: the parameters for each of whose gradients `on_gradient` is called.
        on_gradient: called when a gradient was computed, before it is sent.
    """

    own_step: Callable[[], None]
    on_gradient: Callable[[], None]
    updates_here = True
    hooked: Sequence[torch.Tensor] = ()

    def set_accumulating(self, accumulating: bool) -> None:  # noqa: B027
        """Sets whether another backward pass of the same step follows."""

    def begin_forward(self) -> None:  # noqa: B027
        """Notes that a forward pass with gradients begins."""

    @abstractmethod
    def synchronize(self) -> None:
        """Brings the gradients together before the step, for the script to look at or clip.

        Where servers have the optimizer, the gradients stay this worker's own.
        """

    @abstractmethod
    def step(self) -> None:
        """Takes the optimizer's step; blocks until the model has the new weights."""


class InBackward(Gradients):
    """Gradients that torch's reducer averages within backward, or that are one process's own.

    Args:
        sync: of the mode, prepared.
    """

    def __init__(self, sync: Any) -> None:
        self.sync = sync
        self.check = sync.gradient_check
        self._is_synchronized = False

    def set_accumulating(self, accumulating: bool) -> None:
        self.sync.set_accumulating(accumulating)

    def begin_forward(self) -> None:
        # A backward without a step is over: the next one may bring the same gradients again.
        if self.check and self.check.has_begun:
            self.check.end_backward()

    def synchronize(self) -> None:
        if not self._is_synchronized:
            self.sync.wait()
        self._is_synchronized = True

    def step(self) -> None:
        self.synchronize()
        self._is_synchronized = False
        self.own_step()


class InRounds(Gradients):
    """Gradients that stay with this worker.

    After a round of local steps the change of the weights is sent instead.

    Args:
        sync: of the mode. It is to be prepared after this.
    """

    def __init__(self, sync: LocalRounds) -> None:
        self.sync = sync
        self._has_begun = False
        self._begun = 0
        sync.inner_optimizer = _OwnOptimizer(self)

    def begin_forward(self) -> None:
        """Begins a step, of a new round with the outer weights, which are waited for."""
        if self._has_begun:
            return
        self._has_begun = True
        self._begun += 1
        self.sync.begin(self._begun, 0.0)

    def synchronize(self) -> None:
        self.begin_forward()

    def step(self) -> None:
        self.synchronize()
        self._has_begun = False
        self.sync.update()


class _OwnOptimizer:
    """The script's optimizer as LocalSteps knows one. Its settings are the script's business."""

    param_groups: Sequence[dict[str, Any]] = ()

    def __init__(self, gradients: Gradients) -> None:
        self._gradients = gradients

    def step(self) -> None:
        self._gradients.own_step()


def call_through(model: nn.Module, wrapper: nn.Module) -> None:
    """Makes a call of the model go through its wrapper, such as DistributedDataParallel.

    The model stays what the script knows: its attributes, and the names in its state_dict.
    """
    kind = type(model)
    is_within = False

    def call(self: nn.Module, *inputs: Any, **named: Any) -> Any:
        nonlocal is_within
        if is_within:
            return kind.__call__(self, *inputs, **named)
        is_within = True
        try:
            return wrapper(*inputs, **named)
        finally:
            is_within = False

    model.__class__ = type(kind.__name__, (kind,), {"__call__": call})


class Bucketed(Gradients):
    """Gradients that travel in buckets of the mode's Exchange.

    In the first step all gradients are sent when the script calls `step` or `synchronize`. Later
    they are sent during backward, if the first step has shown that this is safe: each parameter had
    one gradient, outside of `accumulate`, and the script did not change it.

    Args:
        sync: of the mode, connected.
        holder: has the optimizer's trained parameters, in the order of the flat vector.
        handed_in: the script's optimizer.
        tell: shows the user a line.

    Attributes:
        is_early: whether gradients leave as backward computes them.
    """

    def __init__(
        self,
        sync: Any,
        holder: nn.Module,
        names: Sequence[str],
        handed_in: HandedIn,
        tell: Callable[[str], None],
    ) -> None:
        self.sync: BucketCarrier = sync
        self.handed_in = handed_in
        self.names = names
        self.tell = tell
        self.parameters = handed_in.parameters
        self.weights = self.exchanged_weights(holder)
        sizes = [p.numel() for p in self.parameters]
        borders = handed_in.borders()
        sync.carry(sizes, self.weights)
        self.exchange = sync.exchange
        for lane in self.exchange.lanes:
            lane.group = bisect_right(borders, lane.bucket.start)
        self.is_early = False
        self.may_be_early = True
        self._accumulating = False
        self._has_begun = False
        self._is_synchronized = False
        # Of each parameter with a gradient, outside of accumulate: how that was then, or None where
        # it leaves as early as it can.
        self._came: dict[int, tuple[int, int] | None] = {}
        self._sent: set[int] = set()
        self._sent_with: Any = None  # the settings of the step that has begun
        self._told_of_missing = False
        self.hooked = self.parameters
        for number, parameter in enumerate(self.parameters):
            parameter.register_post_accumulate_grad_hook(partial(self._take, number))

    def exchanged_weights(self, holder: nn.Module) -> torch.Tensor:
        """Returns the weights that come back, [elements], in the parameters' own memory."""
        return flatten_weights(holder)

    def set_accumulating(self, accumulating: bool) -> None:
        self._accumulating = accumulating

    def _take(self, number: int, parameter: torch.Tensor) -> None:
        """Notes that a parameter has its gradient, as a hook of it, and sends it if that is early."""
        self.on_gradient()
        if self._accumulating:
            return
        if number in self._came:
            self._refuse_second(number)
            self.may_be_early = False
        if self.is_early:
            self._came[number] = None
            self.take_early(number)
        else:
            self._came[number] = _state_of(parameter.grad)

    def _refuse_second(self, number: int) -> None:
        if self._came[number] is None or number in self._sent:
            raise Failure(
                f"{self.names[number]} had a second gradient before step, and the first has been "
                "sent: have all backward passes of a step but the last in `with job.accumulate():`"
            )

    def take_early(self, number: int) -> None:
        """Sends a parameter's gradient, which backward has just computed."""
        self._begin()
        self.send(number)

    def _begin(self) -> None:
        """Begins to send a step's gradients, if it has not begun."""
        if self._has_begun:
            return
        self._has_begun = True
        self._sent_with = self.handed_in.settings()
        self.sync.begin_carrying(self._sent_with, len(self.exchange.lanes), True)

    def send(self, number: int) -> None:
        """Sends a parameter's gradient. The step has begun."""
        gradient = self.leaving(number).contiguous()
        self.exchange.bucketer.put(number, gradient)

    def leaving(self, number: int) -> torch.Tensor:
        """Returns a parameter's gradient, which is sent now.

        Before the script calls `step`, the parameter has none from now on: the script would see a
        gradient that is being averaged.
        """
        parameter = self.parameters[number]
        gradient = parameter.grad
        if gradient is None:
            gradient = torch.zeros_like(parameter)
        if gradient.layout != torch.strided:
            raise Failure(f"{self.names[number]} has sparse gradients: use sparse=False")
        self._sent.add(number)
        if self.is_early:
            parameter.grad = None
        return gradient

    def _send_rest(self) -> None:
        """Sends what has not left yet; a parameter without a gradient sends zeros."""
        if len(self._sent) == len(self.parameters):
            return
        missing = [
            self.names[number]
            for number, p in enumerate(self.parameters)
            if p.grad is None and number not in self._sent
        ]
        if missing and not self._told_of_missing:
            self._told_of_missing = True
            self.tell(
                f"no gradient of {some_of(missing)} in this step: it counts as zero, and weight "
                "decay and momentum still move the weight; freeze it to leave it out"
            )
        self._note_changes()
        self._begin()
        # In the order in which backward computed them, as on workers whose gradients leave early:
        # see Exchange.
        others = [number for number in range(len(self.parameters)) if number not in self._came]
        for number in [*self._came, *others]:
            if number not in self._sent:
                self.send(number)

    def _note_changes(self) -> None:
        """Has gradients leave at `step` from now on, if the script has changed some before."""
        changed = [
            self.names[number]
            for number, before in self._came.items()
            if before is not None and _state_of(self.parameters[number].grad) != before
        ]
        if not (changed and self.may_be_early):
            return
        self.may_be_early = False
        self.tell(
            f"the script changes gradients of this worker alone ({some_of(changed, 3)}) between "
            "backward and step: to clip the mean over the workers, call optimizer.synchronize() "
            "before"
        )

    def _end(self) -> None:
        self.is_early = self.may_be_early
        self._has_begun = False
        self._is_synchronized = False
        self._came.clear()
        self._sent.clear()


def _state_of(gradient: torch.Tensor | None) -> tuple[int, int]:
    """Returns what differs once a gradient was changed, or another has taken its place."""
    if gradient is None:
        return 0, 0
    return gradient.data_ptr(), gradient._version


def buckets_for_averages(config: RunConfig, handed_in: HandedIn) -> tuple[RunConfig, list[int]]:
    """Returns the configuration, and where buckets begin, whose gradients Horovod averages.

    No parameter is divided between buckets: a gradient that has a bucket to itself is averaged
    where it lies, and others are copied together. The bucket of the first parameters leaves when
    backward is over, so it is small: the smaller it is, the less is waited for.
    """
    sizes = [p.numel() for p in handed_in.parameters]
    elements = sum(sizes)
    first = min(config.bucket_elements, int(FIRST_BUCKET_MB * 2**20 / 4))
    most = min(config.bucket_elements, max(first, int(LARGEST_PART * elements)))
    borders = borders_of_whole(sizes, first, most)
    undivided = replace(config, bucket_mb=max(config.bucket_mb, 4 * elements / 2**20))
    return undivided, borders


class Averaged(Bucketed):
    """Gradients that Horovod averages, for the script's own optimizer.

    A gradient that backward has computed is only counted. With the last one of a bucket, all
    gradients of the bucket leave.
    """

    def __init__(self, sync: Any, *arguments: Any) -> None:
        sync.only_averages = True
        super().__init__(sync, *arguments)
        # Of each parameter: the number of its bucket. One without elements, which no bucket has,
        # comes with the first.
        self._bucket_of = [(of or [0])[0] for of in self.exchange.bucketer.of_parameter]
        self._buckets = [self._whole_bucket(lane.number) for lane in self.exchange.lanes]

    def _whole_bucket(self, place: int) -> "_WholeBucket":
        numbers = [number for number, of in enumerate(self._bucket_of) if of == place]
        memory = self.exchange.bucketer.memory(place)
        if memory is None and len(numbers) > 1:
            elements = self.exchange.lanes[place].bucket.elements
            memory = torch.empty(elements, device=self.weights.device)
        return _WholeBucket(numbers, [self.parameters[number] for number in numbers], memory)

    def exchanged_weights(self, holder: nn.Module) -> torch.Tensor:
        """Returns a placeholder of the weights' length, whose elements share their memory.

        No weights come back, and parameters stay where they are. In a flat vector most of
        them would begin off the boundaries that kernels are fast at.
        """
        elements = sum(p.numel() for p in self.parameters)
        return torch.empty(1, device=self.parameters[0].device).expand(elements)

    def take_early(self, number: int) -> None:
        bucket = self._buckets[self._bucket_of[number]]
        bucket.missing -= 1
        if not bucket.missing:
            self._begin()
            self.send(number)

    def send(self, number: int) -> None:
        """Sends all gradients of the parameter's bucket. The step has begun."""
        place = self._bucket_of[number]
        bucket = self._buckets[place]
        bucket.missing = len(bucket.numbers)
        gradients = [self.leaving(number) for number in bucket.numbers]
        self.exchange.send(place, bucket.gather(gradients))

    def synchronize(self) -> None:
        if self._is_synchronized:
            return
        self._is_synchronized = True
        self._send_rest()
        self.sync.refresh()
        for bucket, lane in zip(self._buckets, self.exchange.lanes, strict=True):
            bucket.take_average(lane.sent)
            del lane.sent  # the script may free it

    def step(self) -> None:
        self.synchronize()
        self._end()
        self.own_step()


class _WholeBucket:
    """The gradients of a bucket of whole parameters.

    Args:
        numbers: the parameters' numbers.
        parameters: the parameters.
        memory: [bucket] float32, where gradients of several parameters are gathered. None where
            there is one parameter, whose gradient stays where it lies.

    Attributes:
        numbers: the same.
        missing: how many gradients have not come yet in this step, where they leave early.
    """

    def __init__(
        self,
        numbers: Sequence[int],
        parameters: list[nn.Parameter],
        memory: torch.Tensor | None,
    ) -> None:
        self.numbers = numbers
        self.missing = len(numbers)
        self._parameters = parameters
        self._memory = memory
        # What is sent, in the parameters' shapes.
        self._sent = [] if memory is None else views(memory, parameters)

    def gather(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        """Returns these gradients, one of each parameter, together: [bucket] float32."""
        if self._memory is None:
            self._sent = [gradients[0].contiguous()]
            return self._sent[0].view(-1)
        torch._foreach_copy_(self._sent, gradients)
        return self._memory

    def take_average(self, average: torch.Tensor) -> None:
        """Makes the parts of the average, [bucket] float32, the parameters' gradients."""
        is_there = average.data_ptr() == self._sent[0].data_ptr()  # averaged where it lay
        if not is_there:
            parts = views(average, self._parameters)
            torch._foreach_copy_(self._sent, parts)
        for parameter, gradient in zip(self._parameters, self._sent, strict=True):
            if not parameter.is_contiguous():
                # In channels_last, say: fused kernels need the parameter's memory layout.
                gradient = torch.empty_like(parameter).copy_(gradient)
            parameter.grad = gradient
        if self._memory is None:  # the script may free it
            self._sent = []


class Carried(Bucketed):
    """Gradients that the mode takes the optimizer's step with: in `sharded`, and on servers.

    Settings that the script changes between backward and `step`, and gradients that it clips, have
    to leave when it calls `step`.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.updates_here = False

    def synchronize(self) -> None:
        if self._sent:
            raise Failure(
                "synchronize was called in this step and not in the first one, so that gradients "
                "have left already: call it in every step, or hvdtrain.init(early=False)"
            )
        self.may_be_early = False
        has_servers = isinstance(self.sync, LeasingCarrier)
        if self._is_synchronized or has_servers:
            return
        self._is_synchronized = True
        of_all = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        flat = torch.cat([gradient.flatten().cpu() for gradient in of_all])
        mean = self.sync.mean_over_workers(flat).to(self.weights.device)
        for parameter, average in zip(self.parameters, views(mean, self.parameters), strict=True):
            parameter.grad = average

    def step(self) -> None:
        if self._has_begun and self._sent_with != self.handed_in.settings():
            self.may_be_early = False
            self.tell(
                "param_groups changed between backward and step, when gradients had left with "
                "the former settings: from the next step on they leave when step is called"
            )
        self._send_rest()
        self.exchange.wait_for_all()
        self._end()
