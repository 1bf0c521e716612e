"""The policies of simulated servers: the ones that the mode's real servers have.

A policy (`hvdtrain.job.ps.policy.Policy`) decides when pushes are applied and when workers go on.
A simulation knows of a mode with servers what its policy decides, and nothing else.
"""

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

from hvdtrain.base import modes
from hvdtrain.base.config.run_config import RunConfig
from hvdtrain.job.ps.policy import Policy, PolicyDecision
from hvdtrain.job.wire.messages import Push
from hvdtrain.planning.scenario import Scenario

# A policy counts so many workers at most. Of more, each that it counts stands for several.
MOST_COUNTED = 64


class _NoGradient:
    """A gradient without elements: whatever is computed with it is the gradient itself.

    A simulation asks when pushes are applied, and not what they come to. It does without torch.
    """

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._itself

    def _itself(self, *_: object, **__: object) -> "_NoGradient":
        return self

    # Named, since they are asked for at each push.
    add_ = clone = div_ = _itself
    __add__ = __radd__ = __iadd__ = __sub__ = __rsub__ = __isub__ = _itself
    __mul__ = __rmul__ = __imul__ = __truediv__ = __itruediv__ = __neg__ = _itself


_NO_GRADIENT: Any = _NoGradient()


class GroupPolicies:
    """The policies of a job whose workers are simulated in groups. A group pushes at once.

    A policy counts the workers of a group one by one. Where that would be many, or all groups are
    alike, it counts several workers as one.

    Args:
        sizes: the number of workers of each group.

    Attributes:
        members: of each group, the numbers of its workers in the policies.
        updates_each: how many updates of the job an update of a policy stands for.
    """

    def __init__(self, scenario: Scenario, sizes: Sequence[int]) -> None:
        workers = sum(sizes)
        in_one = math.gcd(*sizes)
        if workers > MOST_COUNTED * in_one:
            in_one = -(-workers // MOST_COUNTED)
        self.members: list[range] = []
        counted = 0
        for size in sizes:
            first = counted
            counted += max(1, round(size / in_one))
            self.members.append(range(first, counted))
        self._counted = counted
        self._mode = scenario.mode
        self._config = RunConfig(
            mode=scenario.mode,
            staleness=scenario.staleness,
            push_scale="softsync" if scenario.softsync else "none",
            local_steps=scenario.local_steps if scenario.local_steps > 1 else 0,
        )
        self.updates_each = 1
        if in_one > 1:
            of_counted = _pushes_of_an_update(self._mode, counted, self._config)
            of_all = _pushes_of_an_update(self._mode, workers, self._config)
            self.updates_each = max(1, round(in_one * of_counted / of_all))

    def make(self) -> Policy:
        """Returns the policy of a piece."""
        return _make_policy(self._mode, self._counted, self._config)


def accept(policy: Policy, worker: int, step: int, read: int, version: int) -> PolicyDecision:
    """Has a policy take a push.

    Args:
        worker: the worker's number in the policy.
        read: the version of the weights that the gradient was computed with.
        version: the version of the weights now.
    """
    lr = 1.0
    push = Push(worker, step, read, lr, None)
    return policy.accept(push, _NO_GRADIENT, version)


def _make_policy(mode: str, workers: int, config: RunConfig) -> Policy:
    policy: Policy = modes.load(mode).make_policy(workers, config)
    return policy


@cache
def _pushes_of_an_update(mode: str, workers: int, config: RunConfig) -> int:
    """Returns how many pushes the first update is made of, where all workers push once."""
    policy = _make_policy(mode, workers, config)
    for worker in range(workers):
        decision = accept(policy, worker, step=1, read=0, version=0)
        if decision.updates:
            return len(decision.updates[0].pushes)
    return workers
