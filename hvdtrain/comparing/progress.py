"""Which runs of a comparison are done, which have failed, and which are left."""

import re
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from hvdtrain.comparing.grid import Planned
from hvdtrain.runs.read import Run

# What differs between two messages about the same failure: ranks, and files of logs.
_PLACE = re.compile(r"\b(rank|process) \d+\b|\(see [^)]*\)")


@dataclass
class Progress:
    """How far the runs of a comparison are.

    Attributes:
        kept: names of the planned runs that an earlier call has finished. They stay as they are.
        finished: the finished runs of the folder, by name. The search's sprints are not among them,
            nor are sprints that were set aside.
        started: how many runs this call has started, also those that are not in `finished`.
        made: names of the runs that this call has started. A sprint that was set aside is not among
            them, since it is to be done again.
        sprints: how often each contender has sprinted in the search.
        failed: the contender of each failed run, by the run's name.
        shared_reason: why two contenders failed alike before anything worked. Then nothing more is
            started, since the others would fail too. Empty if it is not so.
    """

    kept: Collection[str] = ()
    finished: dict[str, Run] = field(default_factory=dict)
    started: int = 0
    made: set[str] = field(default_factory=set)
    sprints: Counter[str] = field(default_factory=Counter)
    failed: dict[str, str] = field(default_factory=dict)
    shared_reason: str = ""
    _reasons: set[str] = field(default_factory=set)

    # What happens

    def start(self, run: Planned) -> None:
        """Counts a run that begins."""
        self.started += 1
        self.made.add(run.name)

    def start_sprint(self, run: Planned) -> None:
        """Counts a sprint of the search that begins."""
        self.started += 1
        self.sprints[run.contender] += 1

    def fail(self, run: Planned, reason: str, has_worked: bool) -> None:
        """Notes that a run failed.

        Args:
            run: the run.
            reason: why it failed.
            has_worked: whether another run has worked.
        """
        self.failed[run.name] = run.contender
        words = _PLACE.sub("", reason)
        if words in self._reasons and not has_worked:
            self.shared_reason = reason
        self._reasons.add(words)

    def set_aside(self, run: Planned) -> None:
        """Notes that a finished sprint does not count, and is to be done again."""
        self.made.discard(run.name)
        del self.finished[run.name]

    # How far it is

    @property
    def done(self) -> set[str]:
        """Names of the runs that are not started any more, also failed ones."""
        return {*self.kept, *self.made}

    def is_to_start(self, run: Planned) -> bool:
        """Returns whether a run can be started: a contender that failed once is not tried again."""
        return not self.shared_reason and not self._has_failed(run)

    def left(self, runs: Sequence[Planned]) -> list[Planned]:
        """Returns which of the planned runs are left."""
        done = self.done
        return [run for run in runs if run.name not in done and not self._has_failed(run)]

    def sprints_left(self, sprints: Sequence[Planned]) -> list[Planned]:
        """Returns which of the search's sprints are left."""
        made = self.sprints.copy()
        left = []
        for sprint in sprints:
            if made[sprint.contender]:
                made[sprint.contender] -= 1
            elif not self._has_failed(sprint):
                left.append(sprint)
        return left

    def _has_failed(self, run: Planned) -> bool:
        return run.contender in self.failed.values()
