"""The search before a comparison, which finds each side at its best.

Both sides are searched among as many settings and in the same time. The search is made of sprints
that do not count in the answer: settings are chosen by some runs and judged by others. In each
round every setting that is left sprints once, in shuffled order. `elimination.py` says which
settings are left out then.

The short search, before every comparison, has two rounds. It has the settings that were asked for,
and of the side with fewer settings as many more as make both sides equal. Over several hosts one
machine sprints too, in the first round. If it does more than twice the samples/s of every setting,
the short search has one round: the answer is one machine, whichever setting stands for a side, and
over a slow link a sprint takes long. `compare --tune 10m` is the long search: it has more settings
and more rounds.
"""

import itertools
import math
import random
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hvdtrain.base import modes
from hvdtrain.base.formatting import with_noun
from hvdtrain.comparing.comparison_state import ComparisonState
from hvdtrain.comparing.elimination import (
    SpeedRatio,
    Spread,
    compare_speeds,
    least_rounds,
    pooled_spread,
)
from hvdtrain.comparing.forecast import expected_seconds, total_seconds
from hvdtrain.comparing.grid import SPANNED, Planned
from hvdtrain.comparing.settings import VARIED, is_distributed, machines_by_side, sides_by_task
from hvdtrain.runs.read import grouped

# The seconds of a search's sprint.
SPRINT_S = 1.0
# A setting below this part of its side's best samples/s is not repeated.
FAR_BEHIND = 0.7
# If one machine does more than so many times the samples/s of every setting, one round is enough.
PLAINLY_AHEAD = 2.0
# The settings of each side, by the side's name.
Sides = Mapping[str, Sequence[Planned]]
# Does sprints in a folder of that name. Returns the samples/s of each contender; a contender whose
# sprint failed has 0 or is missing.
RunSprints = Callable[[Sequence[Planned], str], Mapping[str, float]]


@dataclass(frozen=True)
class Search:
    """Which settings are tried before a comparison, and for how long.

    In the end one setting stands for all settings of its group that cannot be told apart: the one
    that seems faster. To repeat all of them would take several times as long. A setting that nobody
    asked for stays only if it seems the fastest of its side.

    Attributes:
        compared: options of which several values were asked for, such as `wire` or `servers`.
            Settings that differ in them are all repeated, unless they are far behind.
        seconds: the time of a long search, of which each side has an equal part; 0 for the short
            search.
        before_whole_runs: whether whole runs follow, and no sprints. Then no setting is left out
            for being far behind.
    """

    compared: Collection[str] = ()
    seconds: float = 0.0
    before_whole_runs: bool = False

    def group(self, run: Planned) -> Hashable:
        """Returns the key of the group in which one fastest setting is chosen."""
        config = run.config
        values = []
        for name in SPANNED:
            if name in self.compared or name not in VARIED:
                values.append(getattr(config, name))
        servers = config.servers if "servers" in self.compared else None
        return (run.side, config.mode, *values, servers)

    def settings_to_try(
        self, contenders: Sequence[Planned], state: ComparisonState
    ) -> dict[str, list[Planned]]:
        """Returns the settings of each side that sprint.

        If a search has tried all settings before, none sprints. A setting that it has not tried
        sprints beside the settings that were not left out.
        """
        to_try: dict[str, list[Planned]] = {}
        for sides_of_task in sides_by_task(contenders):
            every = list(itertools.chain(*sides_of_task.values()))
            has_new = not all(map(state.was_tried, every))
            has_choice = any(len(settings) > 1 for settings in sides_of_task.values())
            if has_new and has_choice:
                to_try |= _without_left_out(sides_of_task, state)
        for side, machines in machines_by_side(contenders).items():
            if len(machines) > 1 and not all(map(state.was_tried, machines)):
                to_try |= _without_left_out({side: machines}, state)
        return to_try

    def certain_sprints(
        self, contenders: Sequence[Planned], state: ComparisonState
    ) -> list[Planned]:
        """Returns the sprints that the search is sure to make."""
        to_try = self.settings_to_try(contenders, state)
        one_round = [run.sprint(SPRINT_S) for run in itertools.chain(*to_try.values())]
        return one_round * _least_rounds(to_try)

    def expected_to_stay(
        self, contenders: Sequence[Planned], state: ComparisonState
    ) -> list[Planned]:
        """Returns the contenders that are repeated, as far as it is known.

        Until the search has ended, the first setting of each group stands for the one that will be
        found, and settings that nobody asked for are not expected.
        """
        to_try = self.settings_to_try(contenders, state)
        undecided = {run.contender for run in itertools.chain(*to_try.values())}
        first_of_group: dict[Hashable, Planned] = {}
        for run in contenders:
            if run.contender in undecided and not run.is_extra:
                first_of_group.setdefault(self.group(run), run)
        likely = {run.contender for run in first_of_group.values()}
        unlikely = undecided - likely
        return [run for run in contenders if run.contender not in unlikely]

    def run(
        self, contenders: Sequence[Planned], state: ComparisonState, run_sprints: RunSprints
    ) -> list[str]:
        """Does the sprints, and notes in the state what was tried and what is left out.

        Args:
            contenders: the contenders, also those that nobody asked for.
            state: of the comparison.
            run_sprints: does the sprints of a round.

        Returns:
            A line about what was tried, if anything was, and one for each contender that is left
            out.
        """
        to_try = self.settings_to_try(contenders, state)
        lines = []
        if to_try:
            machines = list(itertools.chain(*machines_by_side(contenders).values()))
            running = _RunningSearch(self, to_try, machines, state, run_sprints)
            rounds = running.run()
            if not any(running.speeds.values()):  # all sprints have failed
                return []
            numbers = [
                f"{with_noun(len(settings), 'setting')} of {side}"
                for side, settings in to_try.items()
            ]
            words = with_noun(rounds, "round")
            lines.append(f"tried: {' and '.join(numbers)}, in {words} of sprints")
        for run in contenders:
            why = state.left_out(run)
            if why:
                lines.append(f"left out: {run.contender}: {why}")
        return lines


def _without_left_out(settings_by_side: Sides, state: ComparisonState) -> dict[str, list[Planned]]:
    """Returns the settings of each side that no search has left out."""
    return {
        side: [run for run in settings if not state.left_out(run)]
        for side, settings in settings_by_side.items()
    }


def _least_rounds(settings_by_side: Sides) -> int:
    """Returns how many rounds there are at least."""
    return least_rounds([len(settings) for settings in settings_by_side.values()])


def _always_stays(run: Planned) -> bool:
    """Returns whether a setting stays whatever its speed: one process, from which scaling is told."""
    return run.is_one_process and not run.is_extra


class _Behind(NamedTuple):
    """A setting that seems slower than the one that is to stand for it.

    Attributes:
        run: the setting.
        ahead: the setting that seems faster.
        rivals: how many settings the slower one may be left out for.
        rule: why one of them is enough.
    """

    run: Planned
    ahead: Planned
    rivals: int
    rule: str


class _RunningSearch:
    """A search while it lasts.

    Args:
        search: says what is searched.
        to_try: the settings of each side. There is one at least.
        machines: the contenders that stand for one machine.
        state: of the comparison.
        run_sprints: does the sprints of a round.

    Attributes:
        every: all settings that are tried.
        left: the settings of each side that is not decided and that are not left out.
        machines: the contenders that stand for one machine, of tasks that use several hosts; empty
            in a long search. Those that are not searched sprint in the first round only.
        requested_modes: the modes that were asked for, each with its side.
        speeds: samples/s of each contender, a figure a round.
        spent_s: about how long the sprints of each side took.
        rounds: how many rounds there were.
        earlier_rounds: how many rounds earlier searches in this folder had.
        decided: contenders on which an earlier search has decided.
    """

    def __init__(
        self,
        search: Search,
        to_try: Sides,
        machines: Sequence[Planned],
        state: ComparisonState,
        run_sprints: RunSprints,
    ) -> None:
        self.search = search
        self.state = state
        self.run_sprints = run_sprints
        self.left = {side: list(settings) for side, settings in to_try.items()}
        self.every = list(itertools.chain(*to_try.values()))
        self.requested_modes = {
            (run.side, run.config.mode) for run in self.every if not run.is_extra
        }
        self.machines = [] if search.seconds else self._machines_beside_hosts(machines)
        self.speeds: dict[str, list[float]] = {
            run.contender: [] for run in (*self.every, *self.machines)
        }
        self.spent_s = dict.fromkeys(to_try, 0.0)
        self.rounds = 0
        self.earlier_rounds = state.rounds()
        self.decided = {run.contender for run in self.every if state.was_tried(run)}

    def run(self) -> int:
        """Does all rounds, and notes which settings stay.

        A setting that was asked for and whose first sprint failed is tried again by a later search.

        Returns:
            How many rounds there were.
        """
        draw = random.Random(self.every[0].config.seed)
        least = _least_rounds(self.left)
        while runs := self._runs_of_next_round(least):
            self.rounds += 1
            if self.rounds == 1:
                runs = [*runs, *(run for run in self.machines if run not in runs)]
            self._sprint(draw.sample(runs, len(runs)))
            if self.rounds == 1 and self.machines:
                self._decide_where_one_machine_is_ahead()
            if self.rounds >= least:
                self._leave_out_slower()
        self._leave_one_of_each_group()
        for run in self.every:
            has_sprinted = bool(self.speeds[run.contender])
            if has_sprinted:
                self.state.keep(run)
        self.state.save()
        return self.rounds

    def _machines_beside_hosts(self, machines: Sequence[Planned]) -> list[Planned]:
        """Returns the contenders that stand for one machine, of tasks that use several hosts."""
        tasks = {run.where for run in self.every if len(run.hosts) > 1}
        return [run for run in machines if run.where in tasks]

    def _runs_of_next_round(self, least: int) -> list[Planned]:
        """Returns the settings that sprint next.

        After the rounds that there are at least, a side sprints only if one of its groups has
        several settings left, and the side's part of the time is enough for another round.
        """
        if self.rounds < least or not self.left:
            return list(itertools.chain(*self.left.values()))
        seconds_of_side = self.search.seconds / len(self.left)
        runs = []
        for side, settings in self.left.items():
            groups = grouped(settings, self.search.group).values()
            is_undecided = any(len(group) > 1 for group in groups)
            sprints = [run.sprint(SPRINT_S) for run in settings]
            cost_s = total_seconds(sprints, self.state)
            if is_undecided and self.spent_s[side] + cost_s <= seconds_of_side:
                runs += settings
        return runs

    def _sprint(self, runs: Sequence[Planned]) -> None:
        """Has each setting sprint once. A setting whose sprint fails is not tried again."""
        sprints = [run.sprint(SPRINT_S) for run in runs]
        for sprint in sprints:
            if sprint.side in self.spent_s:
                self.spent_s[sprint.side] += expected_seconds(sprint, self.state)
        speeds = self.run_sprints(sprints, f"pilot/{self.earlier_rounds + self.rounds}")
        for run in runs:
            speed = speeds.get(run.contender)
            if speed:
                self.speeds[run.contender].append(speed)
            elif run in self.left.get(run.side, ()):
                self.left[run.side].remove(run)
        self.state.save()

    def _spread(self) -> Spread:
        """Returns the spread that the sprints of all settings that are left have in common."""
        tables = []
        for settings in self.left.values():
            tables.append({run.contender: self.speeds[run.contender] for run in settings})
        return pooled_spread(tables)

    # Where the answer is plain

    def _decide_where_one_machine_is_ahead(self) -> None:
        """Ends the search of the tasks in which one machine is plainly ahead of every setting."""
        speed_of_machine: dict[str, float] = {}
        for machine in self.machines:
            speed = max(self.speeds[machine.contender], default=0.0)
            speed_of_machine[machine.where] = max(speed, speed_of_machine.get(machine.where, 0.0))
        distributed = [run for run in itertools.chain(*self.left.values()) if is_distributed(run)]
        for where, settings in grouped(distributed, lambda run: run.where).items():
            fastest = max(self.speeds[run.contender][0] for run in settings)
            if speed_of_machine.get(where, 0.0) > PLAINLY_AHEAD * fastest:
                for side in {run.side for run in settings}:
                    self._leave_out_by_one_sprint(self.left.pop(side))

    def _leave_out_by_one_sprint(self, settings: Sequence[Planned]) -> None:
        """Leaves one setting of each requested mode that is not far behind the best of its side."""
        for behind in self._behind(settings):
            self._leave_out_by_point(behind.run, behind.ahead)
        best = self._fastest(settings)
        for run in settings:
            if not self.state.left_out(run) and self._ratio_of_first(run, best) < FAR_BEHIND:
                self._leave_out_by_point(run, best)

    def _ratio_of_first(self, run: Planned, ahead: Planned) -> float:
        return self.speeds[run.contender][0] / self.speeds[ahead.contender][0]

    def _leave_out_by_point(self, run: Planned, ahead: Planned) -> None:
        """Leaves out a setting that one sprint shows behind another, unless it was kept before."""
        if run.contender in self.decided:
            return
        ratio = self._ratio_of_first(run, ahead)
        self.state.leave_out(
            run,
            f"{ratio:.2f} times the samples/s of {ahead.contender}, in one sprint of each: one "
            f"machine did more than {PLAINLY_AHEAD:g} times the samples/s of either",
        )

    # Who is shown to be slower

    def _leave_out_slower(self) -> None:
        """Leaves out the settings that are shown to be slower."""
        spread = self._spread()
        for side, settings in self.left.items():
            staying = []
            for run in settings:
                why = self._why_slower(run, settings, spread)
                if why:
                    self.state.leave_out(run, why)
                else:
                    staying.append(run)
            self.left[side] = staying

    def _why_slower(self, run: Planned, settings: Sequence[Planned], spread: Spread) -> str:
        """Returns by which rule and figures a setting is left out; empty if it stays.

        A setting stays if an earlier search has decided so, and if _always_stays.

        Args:
            run: the setting.
            settings: all settings of its side that are left.
            spread: of all sprints.
        """
        if _always_stays(run) or run.contender in self.decided:
            return ""
        others = [other for other in settings if other is not run]
        rivals = [other for other in others if self._can_stand_for(other, run)]
        if rivals:
            fastest = self._fastest(rivals)
            ratio = self._compare(run, fastest, spread, len(rivals))
            if ratio.high < 1:
                rule = f"slower than the fastest of {with_noun(len(rivals) + 1, 'setting')}"
                return self._reason(ratio, fastest, rule)
        if others and not self.search.before_whole_runs:
            fastest = self._fastest(others)
            ratio = self._compare(run, fastest, spread, len(others))
            if ratio.high < FAR_BEHIND:
                rule = f"less than {FAR_BEHIND} times the best of its side"
                return self._reason(ratio, fastest, rule)
        return ""

    def _can_stand_for(self, other: Planned, run: Planned) -> bool:
        """Returns whether another setting, if it is faster, can stand for this one.

        It can if both are in the same group. A setting that the search has added can be replaced by
        any lockstep setting of its side, if it is in lockstep too.
        """
        if self.search.group(other) == self.search.group(run):
            return True
        both_in_lockstep = all(modes.declared(one.config.mode).lockstep for one in (other, run))
        return run.is_extra and both_in_lockstep

    def _fastest(self, settings: Sequence[Planned]) -> Planned:
        return max(settings, key=lambda run: math.prod(self.speeds[run.contender]))

    def _compare(self, run: Planned, ahead: Planned, spread: Spread, rivals: int) -> SpeedRatio:
        """Returns the ratio of a setting's speed to the speed of the one ahead."""
        speeds = self.speeds[run.contender]
        return compare_speeds(speeds, self.speeds[ahead.contender], spread, rivals)

    def _reason(self, ratio: SpeedRatio, ahead: Planned, rule: str) -> str:
        """Returns why a setting is left out, with figures."""
        figures = (
            f"{ratio.ratio:.2f} times the samples/s of {ahead.contender}, at most {ratio.high:.2f}"
        )
        sprints = with_noun(len(self.speeds[ahead.contender]), "sprint")
        return f"{figures}, in {sprints} of each: {rule}"

    # Who cannot be told apart

    def _leave_one_of_each_group(self) -> None:
        """Keeps one setting of each group. Of the added settings only the fastest stays."""
        spread = self._spread()
        for settings in self.left.values():
            if not settings:  # the sprints of all have failed
                continue
            for behind in self._behind(settings):
                self._leave_out_behind(behind, spread)

    def _behind(self, settings: Sequence[Planned]) -> Iterator[_Behind]:
        """Yields the settings of a side that seem slower than what stands for them."""
        fastest_of_side = self._fastest(settings)
        for group in grouped(settings, self.search.group).values():
            fastest = self._fastest(group)
            rule = "they cannot be told apart, and the one that seems faster stands for both"
            for run in group:
                if run is not fastest:
                    yield _Behind(run, fastest, len(group) - 1, rule)
            is_requested = (fastest.side, fastest.config.mode) in self.requested_modes
            if fastest is not fastest_of_side and not is_requested:
                rule = "nobody asked for it, and it does not seem the fastest of its side"
                yield _Behind(fastest, fastest_of_side, len(settings) - 1, rule)

    def _leave_out_behind(self, behind: _Behind, spread: Spread) -> None:
        """Leaves out a setting that seems slower than another, unless an earlier search kept it."""
        run = behind.run
        if _always_stays(run) or run.contender in self.decided:
            return
        ratio = self._compare(run, behind.ahead, spread, behind.rivals)
        self.state.leave_out(run, self._reason(ratio, behind.ahead, behind.rule))
