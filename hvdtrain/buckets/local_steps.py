"""Local steps: a worker takes H of them with an optimizer of its own between two exchanges, of what they came to."""

import base64
import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from hvdtrain.buckets.partition import Piece, fragment_buckets
from hvdtrain.config.run_config import RunConfig
from hvdtrain.coordination.group import Group
from hvdtrain.coordination.synchroniser import Rounds, Synchroniser
from hvdtrain.numerics.flat import trained
from hvdtrain.numerics.optimizers import COUNT, make_optimizer, restore_state, set_lr, state_of

CHUNK = 2**18  # elements of each vector that a worker gives at once: a value of the store has at most 8 MiB
OF_WORKER = "worker"  # a vector's name in a snapshot is worker3.exp_avg, say
KEPT = 0.5  # see LocalSteps


class LocalSteps:
    """A worker's end of DiLoCo (Douillard et al., 2023, arXiv:2311.08105, algorithm 1). Local SGD (Stich, 2019,
    arXiv:1805.09767) is the same with plain SGD as the outer optimizer, η = 1.

    After H inner steps Δ = θ_outer - θ travels as a gradient does otherwise. The inner optimizer stays as it is. What
    carries Δ writes the new outer weights to `outer`: the outer optimizer is there.

    With --fragments F > 1 that is so of one of F fragments after every H/F steps, while the worker goes on: after τ = 1
    more step θ ← αθ + (1 - α)θ_outer, with α = 0.5, of the fragment's weights (Streaming DiLoCo, Douillard et al.,
    2025, arXiv:2501.18512, algorithm 2). A fragment is of buckets here, not of layers: one of a VGG's layers has most
    of its weights.

    Args:
        weights: [parameters] float32, the model's own memory, at first the outer weights.
        pieces: the buckets in which Δ travels.

    Attributes:
        every: H.
        steps: of this round: H, or fewer at an epoch's end where shares are leased.
        taken: those that are taken.
        outer: [parameters] float32, on the device of the weights.
        fragments: the buckets of each.
        due: buckets whose outer weights the next step begins with: they are awaited before that.
        sent: elements of Δ since this process began.
        distances: see Rounds.
    """

    def __init__(self, config: RunConfig, model: nn.Module, weights: torch.Tensor, pieces: Sequence[Piece]) -> None:
        self.every = self.steps = config.local_steps
        self.parameters, self.weights, self.outer = trained(model), weights, weights.clone()
        self.inner = make_optimizer(config, self.parameters)
        self.pieces, self.fragments = pieces, fragment_buckets(pieces, config.fragments)
        self.taken = self.sent = 0
        self.distances: list[float] = []
        self.due: Sequence[int] = ()
        self._due_later: Sequence[int] = ()  # after one more step
        self._kept: torch.Tensor | None = None  # the local weights, while the model has the outer ones

    @property
    def is_over(self) -> bool:
        """Whether the last step ended a round, of which the outer weights are not taken yet."""
        return self.taken == self.steps

    def leaving(self, taken: int) -> Sequence[int]:
        """The buckets that leave after so many steps of the round."""
        if taken == self.steps:
            return self.fragments[-1]
        number, rest = divmod(taken * len(self.fragments), self.every)
        return self.fragments[number - 1] if number and not rest else ()

    def begin_step(self) -> None:
        """Before a step, and before what is due is awaited."""
        if self.is_over:
            self.steps, self.taken = self.every, 0

    def begin(self, lr: float) -> None:
        """Before a step's forward, with the learning rate of the inner optimizer, when what is due is there."""
        set_lr(self.inner, lr)
        if self._kept is not None:
            self.weights.copy_(self._kept)
            self._kept = None
        self._take(self.due)

    def begin_round(self) -> None:
        """Go on from all outer weights."""
        self.begin_step()
        self._take(self.due)
        self.weights.copy_(self.outer)
        self._kept = None

    def _take(self, numbers: Sequence[int]) -> None:
        """Go on from the outer weights of these buckets."""
        kept, apart, size = KEPT if len(self.fragments) > 1 else 0.0, 0.0, 0.0
        for place in map(self.place, numbers):
            apart += (self.weights[place] - self.outer[place]).square_().sum().item()
            size += self.outer[place].square().sum().item()
            self.weights[place].lerp_(self.outer[place], 1 - kept)
        if size:
            self.distances.append(math.sqrt(apart / size))
        self.due = ()

    @property
    def rounds(self) -> Rounds:
        largest = max(sum(self.pieces[n].stop - self.pieces[n].start for n in numbers) for numbers in self.fragments)
        return Rounds(self.sent / len(self.outer), largest / len(self.outer), self.distances)

    def place(self, number: int) -> slice:
        """Where a bucket lies in the weights."""
        return slice(self.pieces[number].start, self.pieces[number].stop)

    def step(self) -> Sequence[int]:
        """Take the inner optimizer's step; the buckets whose Δ leaves now."""
        self.inner.step()
        self.taken += 1
        leaving = self.leaving(self.taken)
        self.sent += sum(self.pieces[number].stop - self.pieces[number].start for number in leaving)
        self.due, self._due_later = (self._due_later, leaving) if len(self.fragments) > 1 else (leaving, ())
        return leaving

    def difference(self, number: int) -> torch.Tensor:
        """Δ of a bucket: [bucket] float32. That of a shorter round counts less: models are averaged by samples (McMahan
        et al., 2017, arXiv:1602.05629, algorithm 1), or a worker that has just begun would pull all to where it is.
        """
        place = self.place(number)
        difference = self.outer[place] - self.weights[place]
        return difference if self.steps == self.every else difference.mul_(self.steps / self.every)

    def show_outer(self) -> None:
        """Have the outer weights in the model until the next step begins: to evaluate or save them."""
        if self.is_over and len(self.fragments) == 1:
            self.begin_round()
            return
        if self._kept is None:
            self._kept = self.weights.clone()
        self.weights.copy_(self.outer)

    def parts(self, group: Group) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
        """What a snapshot has of all workers' rounds: see Synchroniser.optimizer_parts."""
        local = self.weights if self._kept is None else self._kept
        state = state_of(self.inner, self.parameters)
        if COUNT in state:
            yield 0, {COUNT: state.pop(COUNT)}
        yield from parts_of_workers(group, state | {"weights": local.cpu()})

    def restore(self, step: int, state: Mapping[str, torch.Tensor], worker: int) -> dict[str, torch.Tensor]:
        """Go on after this step of a snapshot: amid a round, if the step is. What it has of the outer optimizer.

        A worker that the job did not have then begins with the outer weights, and the inner optimizer of another.
        """
        names = [name.partition(".") for name in state if name.startswith(OF_WORKER)]
        owners, mine = sorted({owner for owner, _, _ in names}), f"{OF_WORKER}{worker}"
        taken = mine if mine in owners else owners[worker % len(owners)]
        of_worker = {name: state[f"{owner}.{name}"] for owner, _, name in names if owner == taken}
        local = of_worker.pop("weights")
        if COUNT in state:
            of_worker[COUNT] = state[COUNT]
        restore_state(self.inner, self.parameters, of_worker)
        self.taken = step % self.every
        if len(self.fragments) > 1:
            # Of these two steps of the job, where they lie in their rounds.
            before, last = ((k - 1) % self.every + 1 if k > 0 else 0 for k in (step - 1, step))
            self.due, self._due_later = self.leaving(before), self.leaving(last)
        self._kept = self.outer.clone() if taken != mine else local.to(self.outer.device, copy=True)
        return {n: values for n, values in state.items() if n != COUNT and not n.startswith(OF_WORKER)}


def parts_of_workers(group: Group, own: Mapping[str, torch.Tensor]) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
    """What a snapshot has of each worker, part by part, as Synchroniser.optimizer_parts; all call it together.

    Args:
        own: this worker's vectors, all of one length; none where no worker has any.
    """
    for start in range(0, max(map(len, own.values()), default=0), CHUNK):
        chunks = {name: values[start : start + CHUNK].contiguous().numpy() for name, values in own.items()}
        given = {name: base64.b64encode(chunk.tobytes()).decode() for name, chunk in chunks.items()}
        for worker, texts in group.gather_to_first(given).items():
            part = {}
            for name, text in texts.items():
                content = bytearray(base64.b64decode(text))
                part[f"{OF_WORKER}{worker}.{name}"] = torch.frombuffer(content, dtype=torch.float32)
            yield start, part


class LocalSynchroniser(Synchroniser):
    """What rings, servers and a single process share: their workers can take local steps.

    Attributes:
        local: with --local-steps.
    """

    local: LocalSteps | None = None

    @property
    def rounds(self) -> Rounds | None:
        return self.local.rounds if self.local else None

    @property
    def ended_round(self) -> bool:
        return self.local is not None and self.local.is_over
