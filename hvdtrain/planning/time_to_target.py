"""The time to a target on a cluster that one does not have.

A comparison here has measured how many samples its trainings needed until they reached the target.
What a sample takes on the other cluster is predicted. The time to the target is their product.

How many samples a training needs depends on what its steps compute. Modes in lockstep compute the
same on any cluster if the global batch is the same. Steps of asynchronous modes, of local steps and
of lossy codecs depend on the number of workers too.
"""

import itertools
import math
import random
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import click

from hvdtrain.base import modes
from hvdtrain.base.errors import UsageError
from hvdtrain.base.formatting import some_of, with_noun
from hvdtrain.planning.best import (
    SAME_PRICE,
    VALIDATED_GBIT,
    Contest,
    Prices,
    chances,
    one_machine,
)
from hvdtrain.planning.calibration import Calibration
from hvdtrain.planning.check import check_model
from hvdtrain.planning.layout import FINE, Detail
from hvdtrain.planning.predict import Row, codec_of, label
from hvdtrain.planning.scenario import RING_MODES, SERVER_MODES, Scenario, Stragglers
from hvdtrain.planning.units import SlowRules
from hvdtrain.reporting.rule import half_width_of_mean
from hvdtrain.reporting.target import Reach, Target, reach_of, target_of
from hvdtrain.runs.fields import field_value
from hvdtrain.runs.read import Run, find_runs, grouped
from hvdtrain.runs.request import IN_STEP, mathematics

# Of a lockstep mode the options that a prediction knows, beside those that only carry messages.
_KNOWN = {*modes.LOCAL_STEPS, "compression"}
# The share of trainings outside an interval.
_OUTSIDE = 0.1
# The largest logarithm of a factor by which drawn samples differ from the measured ones.
_MOST_DRAWN = 20.0
# What of a calibration's `model` has to be as in the manifest of a training.
_OF_MODEL = ("image_size", "classes", "optimizer")


class Mathematics(NamedTuple):
    """What the steps of a training compute, as far as a prediction knows it.

    Attributes:
        mode: empty for all modes in lockstep.
        local_steps, compression: as a Scenario has them.
        staleness: the bound of ps-ssp; None for other modes.
        slow: who is slow, where workers do not wait for each other.
    """

    mode: str
    local_steps: int = 1
    compression: str = "none"
    staleness: int | None = None
    slow: tuple[Any, ...] = ()

    @property
    def depends_on_workers(self) -> bool:
        return bool(self.mode) or self.local_steps > 1 or self.compression != "none"

    @property
    def words(self) -> str:
        words = self.mode or "modes in lockstep"
        if self.staleness is not None:
            words += f" of staleness {self.staleness}"
        if self.local_steps > 1:
            words += f" with {self.local_steps} local steps"
        if self.compression != "none":
            words += f" with {self.compression}"
        return words


@dataclass(frozen=True)
class Measured:
    """Trainings of one mathematics, with one global batch.

    Attributes:
        of: the contenders that were trained, in words.
        mathematics: what their steps compute.
        workers: of each contender; 0 if the number does not matter.
        global_batch: in samples.
        softsync: whether N pushes make one step of asynchronous modes.
        needed: the samples to the target, one figure for each seed with which it was reached.
            Contenders with the same mathematics and seed count as one training.
        spent_in_vain: the samples of trainings that did not reach the target, one figure for each
            seed.
    """

    of: str
    mathematics: Mathematics
    workers: int
    global_batch: int
    softsync: bool
    needed: Sequence[float]
    spent_in_vain: Sequence[float] = ()

    @property
    def trainings(self) -> int:
        return len(self.needed) + len(self.spent_in_vain)

    @property
    def samples(self) -> float:
        """The samples to the target.

        If some trainings did not reach it, these are the samples of all over the number that did,
        as in a report.
        """
        if self.spent_in_vain:
            return (sum(self.needed) + sum(self.spent_in_vain)) / len(self.needed)
        return statistics.geometric_mean(self.needed)

    @cached_property
    def error_of_mean(self) -> float:
        """The standard error of the logarithm of `samples`; 0 if only one training tells."""
        if len(self.needed) < 2:
            return 0.0
        return statistics.stdev(map(math.log, self.needed)) / math.sqrt(len(self.needed))

    @cached_property
    def half_width(self) -> float:
        """Half the width of the interval in which nine of ten further trainings are, of the
        logarithm; 0 if only one training tells.
        """
        n = len(self.needed)
        if n < 2:
            return 0.0
        logarithms = [math.log(samples) for samples in self.needed]
        return half_width_of_mean(logarithms, _OUTSIDE) * math.sqrt(n + 1)

    @property
    def row(self) -> Row:
        """What --json has of the trainings."""
        factor = math.exp(self.half_width)
        return {
            "of": self.of,
            "workers": self.workers or None,
            "global_batch": self.global_batch,
            "samples": self.samples,
            "samples_low": self.samples / factor,
            "samples_high": self.samples * factor,
            "trainings": self.trainings,
            "reached": len(self.needed),
        }


@dataclass(frozen=True)
class Trainings:
    """All trainings of a comparison that tell samples to its target.

    Attributes:
        folder: of the comparison.
        target: what they were to reach.
        measured: by mathematics and global batch. At least one training of each reached the target.
    """

    folder: Path
    target: Target
    measured: Sequence[Measured]

    def of(self, job: Scenario, global_batch: int) -> Measured | None:
        """Returns the trainings that are nearest to a job; None if its mathematics was not trained.

        Of several settings of one mode, these are those that needed the fewest samples.
        """
        wanted = _of_job(job)
        same = [measured for measured in self.measured if measured.mathematics == wanted]

        def distance(measured: Measured) -> tuple[float, ...]:
            of_batch = abs(math.log(measured.global_batch / global_batch))
            of_workers = abs(math.log(measured.workers / job.workers)) if measured.workers else 0.0
            return of_batch, of_workers, measured.samples

        return min(same, key=distance, default=None)


def _of_job(job: Scenario) -> Mathematics:
    declared = modes.declared(job.mode)
    staleness = job.staleness if "staleness" in declared.options else None
    if declared.lockstep:
        return Mathematics("", job.local_steps, job.compression)
    slow = _slow_among(job.slow, job.workers)
    return Mathematics(job.mode, job.local_steps, job.compression, staleness, slow)


def _slow_among(slow: Stragglers, workers: int) -> tuple[Any, ...]:
    """Returns who is slow among so many workers, as a key."""
    named = sorted(item for item in slow.workers.items() if item[0] < workers)
    return tuple(named), slow.random_factor, slow.random_share


def _of_run(run: Run) -> Mathematics | None:
    """Returns what a run's steps compute; None if no prediction knows the run's options."""
    if run.kind.mode not in modes.names() or run.fragments > 1:
        return None
    declared = modes.declared(run.kind.mode)
    compression = run.manifest.compression or "none"
    if declared.lockstep:
        options = {key: value for key, value in run.manifest.options.items() if key not in _KNOWN}
        if mathematics(run.kind.mode, run.kind.workers, options) != IN_STEP:
            return None
        return Mathematics("", run.local_steps, compression)
    try:
        slow = SlowRules().convert(field_value(run, "slow.asked"), None, None)
    except click.UsageError:
        return None
    staleness = run.manifest.staleness_bound if "staleness" in declared.options else None
    among = _slow_among(slow, run.kind.workers)
    return Mathematics(run.kind.mode, run.local_steps, compression, staleness, among)


def read(folder: Path, calibration: Calibration) -> Trainings:
    """Reads the trainings of a comparison, or of any folder of runs.

    Raises:
        UsageError: no training there had a target, reached it, or was of the calibration's model;
            or they had different targets.
    """
    trained = [run for run in find_runs([folder]) if run.is_finished and reach_of(run)]
    if not trained:
        raise UsageError(
            f"{folder} has no finished training with a target: make some, by hvdtrain compare "
            "--decide-by target --target-accuracy 0.9"
        )
    fitting = _of_model(calibration, trained)
    targets = {target for run in fitting if (target := target_of(run))}
    if len(targets) > 1:
        words = some_of(sorted(target.words for target in targets))
        raise UsageError(f"{folder} has trainings to different targets: {words}")
    [target] = targets
    measured = _measured(fitting)
    if not measured:
        raise UsageError(
            f"no training in {folder} reached {target.words}: compare again with a target that "
            "trainings reach, or with more --epochs"
        )
    return Trainings(folder, target, measured)


def _of_model(calibration: Calibration, runs: Sequence[Run]) -> list[Run]:
    """Returns the runs of the model that was calibrated.

    Raises:
        UsageError: there are none. The message is about the first of the runs.
    """
    fitting = []
    errors = []
    for run in runs:
        try:
            _check_fits(calibration, run)
            fitting.append(run)
        except UsageError as error:
            errors.append(error)
    if not fitting:
        raise errors[0]
    return fitting


def _check_fits(calibration: Calibration, run: Run) -> None:
    check_model(calibration, run)
    for name in _OF_MODEL:
        known = calibration.model.get(name)
        of_run = getattr(run.manifest, name)
        if known and of_run and known != of_run:
            what = name.replace("_", " ")
            raise UsageError(
                f"{run.folder} was trained with {what} {of_run}, the calibration was made with "
                f"{known}: calibrate with the options of the trainings"
            )


def _measured(runs: Sequence[Run]) -> list[Measured]:
    """Returns the trainings by what they compute, as far as some of them reached the target."""
    groups: dict[tuple[Any, ...], list[Run]] = {}
    for run in runs:
        computed = _of_run(run)
        if computed is None or not run.manifest.global_batch:
            continue
        settings: tuple[Any, ...] = ()
        if computed.depends_on_workers:
            settings = mathematics(run.kind.mode, run.kind.workers, run.manifest.options)
            if not computed.mode:
                settings = settings[1:]  # modes in lockstep share local steps and codecs too
        key = (computed, run.manifest.global_batch, run.manifest.lr, settings)
        groups.setdefault(key, []).append(run)
    found = [_of_group(computed, members) for (computed, *_), members in groups.items()]
    return [measured for measured in found if measured.needed]


def _of_group(computed: Mathematics, runs: Sequence[Run]) -> Measured:
    needed = []
    spent_in_vain = []
    for members in grouped(runs, lambda run: run.manifest.seed).values():
        reaches: list[Reach] = [reach for run in members if (reach := reach_of(run))]
        reached = [reach.samples for reach in reaches if reach.is_reached and reach.samples > 0]
        if reached:
            needed.append(statistics.geometric_mean(reached))
        else:
            spent_in_vain.append(statistics.fmean(reach.samples for reach in reaches))
    kind = runs[0].kind
    of = computed.words
    if computed.depends_on_workers:
        of = kind.label if computed.mode else f"{of}, {with_noun(kind.workers, 'worker')}"
    return Measured(
        of=of,
        mathematics=computed,
        workers=kind.workers if computed.depends_on_workers else 0,
        global_batch=runs[0].manifest.global_batch or 0,
        softsync=runs[0].manifest.push_scale == "softsync",
        needed=needed,
        spent_in_vain=spent_in_vain,
    )


@dataclass(frozen=True)
class ContestToTarget(Contest):
    """Rings, servers and one machine, of which the first to reach the target is the best.

    Attributes:
        trainings: what was trained here.
        global_batch: what the workers of any cluster share, in samples; 0 if each worker has the
            calibration's batch.
    """

    trainings: Trainings
    global_batch: int

    def calibration_of(self, job: Scenario) -> Calibration:
        if not self.global_batch:
            return self.calibration
        return self.calibration.with_batch(self._largest_share(job))

    def _largest_share(self, job: Scenario) -> int:
        """Returns the samples of a step that the worker with the most has."""
        return max(1, math.ceil(self.global_batch / _sharing_workers(job)))

    def _evenness(self, job: Scenario) -> float:
        """Returns the samples of a step over those if each worker had the largest share."""
        if not self.global_batch:
            return 1.0
        return self.global_batch / (_sharing_workers(job) * self._largest_share(job))

    def sides(self, hosts: int, prices: Prices = SAME_PRICE) -> list[list[Scenario]]:
        return [[self._as_trained(job) for job in jobs] for jobs in super().sides(hosts, prices)]

    def rate(self, job: Scenario, samples_per_s: float) -> float:
        """Returns targets a second; 0 if the job's mathematics was not trained."""
        measured = self._trained(job)
        if not measured:
            return 0.0
        return self._evenness(job) * samples_per_s / measured.samples

    def predicted(self, job: Scenario, detail: Detail = FINE, is_drawn: bool = True) -> Row:
        """Returns the prediction of a job, with `to_target`: None if it was not trained."""
        job = self._as_trained(job)
        prediction = super().predicted(job, detail, is_drawn)
        for name in ("samples_per_s", "samples_per_s_low", "samples_per_s_high"):
            prediction[name] *= self._evenness(job)
        prediction["to_target"] = self._to_target(job, prediction)
        return prediction

    def chances(self, predictions: Sequence[Row | None]) -> list[float]:
        """Returns how probably each prediction reaches the target first, in the mean of trainings.

        Predictions with the same trainings have the same draw of samples.
        """
        parts = [prediction and prediction["to_target"] for prediction in predictions]

        def draw_samples(draw: random.Random) -> list[float]:
            drawn: dict[tuple[str, int], float] = {}
            samples = []
            for part in parts:
                if not part:
                    samples.append(1.0)
                    continue
                key = part["of"], part["global_batch"]
                if key not in drawn:
                    drawn[key] = _drawn(part, draw)
                samples.append(drawn[key])
            return samples

        seed = self.template.seed
        return chances(seed, self.calibration.model_error, predictions, draw_samples)

    def told(self, hosts: int, predictions: Mapping[str, Row | None]) -> Row:
        figures = super().told(hosts, predictions)
        reasons = figures["not_validated"]
        for name, prediction in predictions.items():
            part = prediction["to_target"] if prediction else None
            figures[f"{name}_s_to_target"] = part["seconds"] if part else None
            for reason in part["not_trained"] if part else []:
                if reason not in reasons:
                    reasons.append(reason)
        return figures

    def map(
        self, workers: Sequence[int], bandwidths: Sequence[float], local_steps: Sequence[int]
    ) -> list[Row]:
        """Returns the places for which each side has trainings."""
        trained = []
        for steps in local_steps:
            template = replace(self.template, local_steps=steps)
            if replace(self, template=template)._has_trained_sides():
                trained.append(steps)
        return super().map(workers, bandwidths, trained)

    def sharing(self, workers: Sequence[int]) -> tuple[list[int], list[int]]:
        """Returns the numbers of workers that can share the global batch, and those for which one
        machine is predicted: one of them if the global batch is the same for all.

        Raises:
            UsageError: no number of workers can.
        """
        if not self.global_batch:
            return list(workers), list(workers)
        of_host = self.template.workers_per_host
        on_whole_hosts = {n: math.ceil(n / of_host) * of_host for n in workers}
        able = [n for n in workers if on_whole_hosts[n] <= self.global_batch]
        if not able:
            raise UsageError(
                f"--workers {min(workers)}: the trainings had a global batch of "
                f"{self.global_batch}, which so many cannot share; with --batch-size each worker "
                "has so many samples"
            )
        return able, [1]

    @property
    def data(self) -> Row:
        """What --json has of the trainings."""
        return {
            "comparison": str(self.trainings.folder),
            "target": self.trainings.target.value,
            "target_of": self.trainings.target.what,
            "global_batch": self.global_batch or None,
            "samples": [measured.row for measured in self.trainings.measured],
        }

    def _has_trained_sides(self) -> bool:
        """Returns whether one mode of each side was trained, beside the slow workers asked about."""
        workers = 1 + max([1, *self.template.slow.workers])
        template = replace(self.template, workers=workers)
        for family in (RING_MODES, SERVER_MODES):
            jobs = [replace(template, mode=name) for name in self.mode_names if name in family]
            if jobs and not any(map(self._trained, jobs)):
                return False
        return self._trained(one_machine(template, workers)) is not None

    def _as_trained(self, job: Scenario) -> Scenario:
        """Returns a job of an asynchronous mode with the trained way in which pushes make steps."""
        measured = self._trained(job)
        return replace(job, softsync=measured.softsync) if measured and not job.in_lockstep else job

    def _trained(self, job: Scenario) -> Measured | None:
        codec = codec_of(self.calibration, job.mode, job.compression)
        return self.trainings.of(replace(job, compression=codec), self._batch_of(job))

    def _batch_of(self, job: Scenario) -> int:
        return self.global_batch or _sharing_workers(job) * self.calibration.batch_per_worker

    def _to_target(self, job: Scenario, prediction: Row) -> Row | None:
        """Returns the time to the target, with the interval of a single training there.

        The interval has both spreads: that of what a sample takes, and that of how many samples a
        training needs.
        """
        measured = self._trained(job)
        if not measured:
            return None
        not_trained = _not_trained(measured, job, self._batch_of(job))
        seconds = measured.samples / prediction["samples_per_s"]
        of_sample = math.log(prediction["samples_per_s_high"] / prediction["samples_per_s"])
        wider = math.exp(math.hypot(of_sample, measured.half_width))
        return {
            "seconds": seconds,
            "low": seconds / wider,
            "high": seconds * wider,
            **measured.row,
            "error_of_mean": measured.error_of_mean,
            "not_trained": not_trained,
            "not_validated": [*self._not_validated_of(job, prediction["hosts"]), *not_trained],
        }

    def _not_validated_of(self, job: Scenario, hosts: int) -> list[str]:
        """Returns what of a job's cluster predictions were hardly ever compared with."""
        _, most_gbit = VALIDATED_GBIT
        gbit = most_gbit if job.replaces else job.bandwidth_gbit
        template = replace(self.template, bandwidth_gbit=gbit)
        return replace(self, template=template, mode_names=[job.mode]).not_validated(hosts)


def _sharing_workers(job: Scenario) -> int:
    """Returns how many workers share a batch: of one machine, those that the machine replaces."""
    return max(job.workers, job.replaces)


def _not_trained(measured: Measured, job: Scenario, global_batch: int) -> list[str]:
    """Returns in what a job differs from the trainings, and whether they tell too little."""
    what = measured.mathematics.words
    reasons = []
    if measured.global_batch != global_batch:
        reasons.append(f"a global batch of {global_batch} (trained with {measured.global_batch})")
    if measured.workers and measured.workers != job.workers:
        workers = with_noun(job.workers, "worker")
        reasons.append(f"{what} on {workers} (trained on {measured.workers})")
    if measured.spent_in_vain:
        reached = f"{len(measured.needed)} of {measured.trainings}"
        reasons.append(f"{what} of whose trainings {reached} reached the target")
    elif measured.trainings < 2:
        reasons.append(f"{what} from one training")
    return reasons


def _drawn(part: Row, draw: random.Random) -> float:
    """Returns the mean samples to the target as other trainings might have given it."""
    freedom = part["reached"] - 1
    if freedom < 1:
        return float(part["samples"])
    # Student's t
    t = draw.gauss(0, 1) / math.sqrt(draw.gammavariate(freedom / 2, 2 / freedom))
    drawn = max(-_MOST_DRAWN, min(_MOST_DRAWN, part["error_of_mean"] * t))
    return float(part["samples"]) * math.exp(drawn)


def contest(
    folder: Path,
    calibration: Calibration,
    template: Scenario,
    mode_names: Sequence[str],
    batch_per_worker: int | None,
) -> ContestToTarget:
    """Returns the contest to the target of a comparison.

    Args:
        folder: of the comparison.
        batch_per_worker: None: all workers share the global batch of the trainings.

    Raises:
        UsageError: see `read`; or no mode was trained, or the trainings have several global batches,
            and nobody says which.
    """
    trainings = read(folder, calibration)
    asked = {"" if modes.declared(name).lockstep else name for name in mode_names}
    if not asked & {measured.mathematics.mode for measured in trainings.measured}:
        trained = some_of(measured.of for measured in trainings.measured)
        raise UsageError(
            f"{folder} has no training of {some_of(mode_names)} that reached {trainings.target.words}, "
            f"but of {trained}"
        )
    batches = sorted({measured.global_batch for measured in trainings.measured})
    if len(batches) > 1 and not batch_per_worker:
        raise UsageError(
            f"{folder} has trainings with global batches of {some_of(map(str, batches))}: say "
            "which samples each worker has, by --batch-size"
        )
    global_batch = 0 if batch_per_worker else batches[0]
    return ContestToTarget(calibration, template, mode_names, trainings, global_batch)


def notes(data: Row, rows: Sequence[Row], places: Sequence[Row]) -> Iterator[str]:
    """Yields what was trained, and what of the rows was not.

    Args:
        data: of the contest.
        rows: its predictions.
        places: its map, whose notes have been told.
    """
    target = f"{data['target_of']} {data['target']:g}"
    for trained in data["samples"]:
        interval = "one training"
        if trained["reached"] > 1:
            interval = f"{trained['samples_low']:,.0f} to {trained['samples_high']:,.0f}"
        yield (
            f"{trained['of']}: {trained['samples']:,.0f} samples to {target} ({interval}), global "
            f"batch {trained['global_batch']}; {trained['reached']} of {trained['trainings']} "
            "trainings reached it"
        )
    without = sorted({label(row) for row in rows if not row["to_target"]})
    if without:
        yield f"Not trained in {data['comparison']}: {some_of(without)}."
    parts = [row["to_target"] for row in rows if row["to_target"]]
    reasons = _all_reasons(parts)
    told = _all_reasons(places)
    if reasons - told:
        yield (
            f"?: predictions of {' or '.join(sorted(reasons))} were hardly ever compared with "
            "measurements."
        )


def _all_reasons(predictions: Sequence[Row]) -> set[str]:
    """Returns why predictions are not validated, each reason once."""
    return set(itertools.chain.from_iterable(one["not_validated"] for one in predictions))
