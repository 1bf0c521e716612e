"""Local steps: a worker takes H of them with an optimizer of its own between two exchanges, of what they came to."""

import base64
from collections.abc import Iterator, Mapping

import torch
from torch import nn

from hvdtrain.config.run_config import RunConfig
from hvdtrain.coordination.group import Group
from hvdtrain.numerics.flat import trained, views
from hvdtrain.numerics.optimizers import COUNT, make_optimizer, restore_state, set_lr, state_of

CHUNK = 2**18  # elements of each vector that a worker gives at once: a value of the store has at most 8 MiB
_OF_WORKER = "worker"  # a vector's name in a snapshot is worker3.exp_avg, say


class LocalSteps:
    """A worker's end of DiLoCo (Douillard et al., 2023, arXiv:2311.08105, algorithm 1). Local SGD (Stich, 2019,
    arXiv:1805.09767) is the same with plain SGD as the outer optimizer, η = 1.

    After H inner steps Δ = θ_outer - θ travels as a gradient does otherwise. The inner optimizer stays as it is. What
    carries Δ writes the new outer weights to `outer`: the outer optimizer is there.

    Args:
        weights: [parameters] float32, the model's own memory, at first the outer weights.

    Attributes:
        every: H.
        steps: of this round: H, or fewer at an epoch's end where shares are leased.
        taken: those that are taken.
        outer: [parameters] float32, on the device of the weights.
        rounds: those that came to their end since this process began.
    """

    def __init__(self, config: RunConfig, model: nn.Module, weights: torch.Tensor) -> None:
        self.every = self.steps = config.local_steps
        self.parameters, self.weights, self.outer = trained(model), weights, weights.clone()
        self.inner = make_optimizer(config, self.parameters)
        self.taken = self.rounds = 0
        self._kept: torch.Tensor | None = None  # the local weights, while the model has the outer ones

    @property
    def is_over(self) -> bool:
        """Whether the last step ended a round, of which the outer weights are not taken yet."""
        return self.taken == self.steps

    @property
    def ends_round(self) -> bool:
        """Whether the next step does."""
        return self.taken == self.steps - 1

    def begin(self, lr: float) -> None:
        """Before a step's forward, with the learning rate of the inner optimizer."""
        set_lr(self.inner, lr)
        if self._kept is not None:
            self.weights.copy_(self._kept)
            self._kept = None

    def begin_round(self) -> None:
        """Go on from the outer weights."""
        self.count_anew()
        self.take_outer()

    def count_anew(self) -> None:
        """The first half of begin_round, before the outer weights are there."""
        self.steps, self.taken = self.every, 0

    def take_outer(self) -> None:
        """The second half of begin_round."""
        self.weights.copy_(self.outer)
        self._kept = None

    def step(self) -> None:
        """Take the inner optimizer's step."""
        self.inner.step()
        self.taken += 1
        self.rounds += self.is_over

    def difference(self) -> torch.Tensor:
        """Δ: [parameters] float32. That of a shorter round counts less: models are averaged by samples (McMahan et
        al., 2017, arXiv:1602.05629, algorithm 1), or a worker that has just begun would pull all to where it is.
        """
        difference = self.outer - self.weights
        return difference if self.steps == self.every else difference.mul_(self.steps / self.every)

    def of_parameters(self) -> list[torch.Tensor]:
        """Δ of each parameter."""
        return views(self.difference(), self.parameters)

    def show_outer(self) -> None:
        """Have the outer weights in the model until the next step begins: to evaluate or save them."""
        if self.is_over:
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
        state["weights"] = local.cpu()
        for start in range(0, len(local), CHUNK):
            given = {name: _as_text(values[start : start + CHUNK]) for name, values in state.items()}
            for worker, texts in group.gather_to_first(given).items():
                yield start, {f"{_OF_WORKER}{worker}.{name}": _of_text(text) for name, text in texts.items()}

    def restore(self, step: int, state: Mapping[str, torch.Tensor], worker: int) -> dict[str, torch.Tensor]:
        """Go on after this step of a snapshot: amid a round, if the step is. What it has of the outer optimizer.

        A worker that the job did not have then begins with the outer weights, and the inner optimizer of another.
        """
        names = [name.partition(".") for name in state if name.startswith(_OF_WORKER)]
        owners, mine = sorted({owner for owner, _, _ in names}), f"{_OF_WORKER}{worker}"
        taken = mine if mine in owners else owners[worker % len(owners)]
        of_worker = {name: state[f"{owner}.{name}"] for owner, _, name in names if owner == taken}
        local = of_worker.pop("weights")
        if COUNT in state:
            of_worker[COUNT] = state[COUNT]
        restore_state(self.inner, self.parameters, of_worker)
        self.taken = step % self.every
        self._kept = self.outer.clone() if taken != mine else local.to(self.outer.device, copy=True)
        return {n: values for n, values in state.items() if n != COUNT and not n.startswith(_OF_WORKER)}


def _as_text(values: torch.Tensor) -> str:
    return base64.b64encode(values.contiguous().numpy().tobytes()).decode()


def _of_text(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.float32)
