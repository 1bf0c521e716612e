"""The best ring, the best servers and one machine on so many hosts, or for so much money: how fast
each is, and how probably the fastest.
"""

import itertools
import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from hvdtrain.base import modes
from hvdtrain.base.modes import Mode
from hvdtrain.base.numerics.compression import CODECS
from hvdtrain.planning import parallel
from hvdtrain.planning.bounds import least_step_s
from hvdtrain.planning.calibration import Calibration
from hvdtrain.planning.layout import COARSE, FINE, ROUGH, Detail
from hvdtrain.planning.predict import (
    DRAWS,
    VALIDATED_GBIT,
    VALIDATED_HOSTS,
    Row,
    codec_of,
    is_lone,
    label,
    row,
    simulate,
    simulated_speed,
    speed,
)
from hvdtrain.planning.scenario import RING_MODES, SERVER_MODES, Scenario

# The number of uses of some hosts that are shown.
SHOWN = 8
# The number of jobs that are simulated better: the fastest in a rough simulation.
PROMISING = 3
# For a side so many times as slow as another the calibration is not drawn: it does not win.
HOPELESS = 4
# The part of the model's error that a ring and servers share, and the part that each has alone:
# README.md, "How the simulation works".
SHARED = 0.5
OWN = 0.87
# Draws of which one is the fastest.
SAMPLED = 2000
# From this probability on it is asked what the answer hangs on.
SURE = 0.8
# The jitter of a quiet machine's steps, and the factor by which a figure is taken to be another.
QUIET_JITTER = 0.02
ANOTHER = 2.0
# A job that leads by less is not surely the fastest.
CLEAR_LEAD = 1.05
# The rate of a job that does nothing.
LEAST_SPEED = 1e-9
NAMES = ("ring", "servers", "one_machine")


class Prices(NamedTuple):
    """What an hour of a worker's host and of a server's host costs."""

    host: float = 1.0
    server: float = 1.0

    @property
    def basis(self) -> str:
        """What the sides have the same number of: `workers`, `hosts`, or money, `price`."""
        if not self.server:
            return "workers"
        return "hosts" if self.server == self.host else "price"


SAME_PRICE = Prices()


class HostUse(NamedTuple):
    """A way to use hosts: some for workers, and servers `shared` or `dedicated`."""

    worker_hosts: int
    servers: int
    placement: str


@dataclass(frozen=True)
class Contest:
    """Rings, servers and one machine, as a calibration has them.

    Attributes:
        template: all that the jobs have in common. With the compression `none` codecs that both
            rings and servers can send are tried too.
        mode_names: the modes that take part.
    """

    calibration: Calibration
    template: Scenario
    mode_names: Sequence[str]

    def sides(self, hosts: int, prices: Prices) -> list[list[Scenario]]:
        """Returns the jobs of rings on so many hosts, and those of servers for the same money."""
        rings = self._declared(RING_MODES)
        servers = self._declared(SERVER_MODES)
        codecs = self._codecs([family for family in (rings, servers) if family])
        of_rings = [HostUse(hosts, 0, "dedicated")]
        of_servers = _uses_with_servers(hosts, prices)
        # Where runs corrected what servers cost over one wire, no other is tried: it would be
        # judged otherwise.
        return [
            self._jobs(rings, codecs, of_rings, [self.template.wire]),
            self._jobs(servers, codecs, of_servers, self.calibration.wires),
        ]

    def _declared(self, family: Sequence[str]) -> list[Mode]:
        """Returns the modes of a family that take part."""
        return [modes.declared(name) for name in family if name in self.mode_names]

    def _codecs(self, families: Sequence[Sequence[Mode]]) -> list[str]:
        """Returns the codecs that are tried: the template's, or none and what all families can
        send.
        """
        codecs = [self.template.compression]
        if self.template.compression != "none":
            return codecs
        for codec in [kind for kind, spec in CODECS.items() if spec.is_tried]:
            is_known = codec in self.calibration.codecs
            if is_known and all(_can_send(family, codec) for family in families):
                codecs.append(codec)
        return codecs

    def _jobs(
        self,
        family: Sequence[Mode],
        codecs: Sequence[str],
        uses: Sequence[HostUse],
        wires: Sequence[str],
    ) -> list[Scenario]:
        """Returns a job for each mode, codec, use of hosts and wire."""
        codecs_of_modes = []
        for mode, codec in itertools.product(family, codecs):
            of_mode = mode.name, codec_of(self.calibration, mode.name, codec)
            if of_mode not in codecs_of_modes:
                codecs_of_modes.append(of_mode)
        jobs = []
        for (name, codec), use, wire in itertools.product(codecs_of_modes, uses, wires):
            has_local_steps = "local_steps" in modes.declared(name).options
            job = replace(
                self.template,
                mode=name,
                local_steps=self.template.local_steps if has_local_steps else 1,
                workers=use.worker_hosts * self.template.workers_per_host,
                servers=use.servers,
                placement=use.placement,
                compression=codec,
                wire=wire,
            )
            jobs.append(job)
        return jobs

    def ranked(self, jobs: Iterable[Scenario], detail: Detail) -> list[tuple[float, Scenario]]:
        """Returns jobs with their rates, the fastest first.

        A job of which one worker does nearly all has 0.
        """
        rates = []
        for job in jobs:
            calibration = self.calibration_of(job)
            simulated = simulate(calibration.with_costs(job), detail=detail)
            rate = 0.0
            if not is_lone(job.workers, simulated.busiest_share):
                rate = self.rate(job, simulated_speed(calibration, job, simulated))
            rates.append((rate, job))
        return sorted(rates, key=lambda of_job: -of_job[0])

    # What a contest about something else than samples a second has otherwise

    def calibration_of(self, job: Scenario) -> Calibration:
        """Returns the calibration with which a job is simulated."""
        return self.calibration

    def rate(self, job: Scenario, samples_per_s: float) -> float:
        """Returns the figure of which the largest is the best; 0 of a job that cannot be the best."""
        return samples_per_s

    def predicted(self, job: Scenario, detail: Detail = FINE, is_drawn: bool = True) -> Row:
        """Returns the prediction of a job; see predict.row."""
        return row(self.calibration_of(job), job, detail, is_drawn)

    def chances(self, predictions: Sequence[Row | None]) -> list[float]:
        """Returns how probably each prediction is the best."""
        return chances(self.template.seed, self.calibration.model_error, predictions)

    def told(self, hosts: int, predictions: Mapping[str, Row | None]) -> Row:
        """Returns the figures of each side in a place of the map, and why it is not validated."""
        figures: Row = {}
        for name, prediction in predictions.items():
            for figure in ("samples_per_s", "samples_per_s_low", "samples_per_s_high"):
                figures[f"{name}_{figure}"] = prediction and prediction[figure]
        figures["not_validated"] = self.not_validated(hosts)
        return figures

    def _promising(self, jobs: Sequence[Scenario]) -> list[Scenario]:
        """Returns the PROMISING fastest jobs in a rough simulation, the fastest first.

        A job is not simulated if it cannot be among them.
        """
        most = [self._most(job) for job in jobs]
        found: list[tuple[float, int]] = []
        for number in sorted(range(len(jobs)), key=lambda number: -most[number]):
            if len(found) == PROMISING and most[number] < found[-1][0]:
                break
            [(rate, _)] = self.ranked([jobs[number]], ROUGH)
            found.append((rate, number))
            # Of equally fast jobs the first counts.
            found.sort(key=lambda of_job: (-of_job[0], of_job[1]))
            del found[PROMISING:]
        return [jobs[number] for _, number in found]

    def _most(self, job: Scenario) -> float:
        """Returns the rate that no simulation of a job exceeds."""
        calibration = self.calibration_of(job)
        least_s = least_step_s(calibration.with_costs(job)) / calibration.bias.get(job.mode, 1.0)
        return self.rate(job, speed(calibration, job, least_s)) if least_s else math.inf

    def place(self, hosts: int, prices: Prices = SAME_PRICE, detail: Detail = FINE) -> Row:
        """Returns a place of the map: the best of each side, and how probably each is the fastest
        of all.
        """
        workers = hosts * self.template.workers_per_host
        fastest = self._fastest_of_each(hosts, prices, detail)
        least = max(rate for rate, _ in fastest.values()) / HOPELESS
        predictions: dict[str, Row | None] = dict.fromkeys(NAMES)
        for name, (rate, job) in fastest.items():
            predictions[name] = self.predicted(job, detail, is_drawn=rate > least)
        probabilities = self.chances(list(predictions.values()))
        place: Row = {
            "workers": workers,
            "hosts": hosts,
            "bandwidth_gbit": self.template.bandwidth_gbit,
            "local_steps": self.template.local_steps,
            "basis": prices.basis,
        }
        for name, chance in zip(NAMES, probabilities, strict=True):
            place[f"p_{name}"] = chance
        for name, prediction in predictions.items():
            place[name] = prediction and label(prediction)
        place |= self.told(hosts, predictions)
        ring = predictions["ring"]
        servers = predictions["servers"]
        place["ratio"] = None
        if ring and servers:
            place["ratio"] = ring["samples_per_s"] / servers["samples_per_s"]
        place["others_share"] = self.calibration.others_share
        place["hangs_on"] = []
        if max(probabilities) >= SURE:
            place["hangs_on"] = self._hangs_on([job for _, job in fastest.values()])
        return place

    def not_validated(self, hosts: int) -> list[str]:
        """Returns what of this place predictions were hardly ever compared with."""
        reasons = []
        if hosts > VALIDATED_HOSTS:
            reasons.append(f"more than {VALIDATED_HOSTS} hosts")
        least_gbit, most_gbit = VALIDATED_GBIT
        if self.template.bandwidth_gbit > most_gbit:
            reasons.append(f"more than {most_gbit:g} Gbit/s")
        if self.template.bandwidth_gbit < least_gbit:
            reasons.append(f"less than {least_gbit:g} Gbit/s")
        has_asynchronous = any(not modes.declared(name).lockstep for name in self.mode_names)
        if has_asynchronous and self.template.slow.random_share:
            reasons.append("random stragglers in asynchronous modes")
        if self.calibration.device != "cpu":
            reasons.append("GPUs")
        return reasons

    def _hangs_on(self, jobs: Sequence[Scenario]) -> list[str]:
        """Returns the figures that decide which of these jobs is the fastest.

        Another value of one of them alone would leave the fastest job without a clear lead.

        Args:
            jobs: the fastest of each side.
        """
        [(_, fastest), *_] = self.ranked(jobs, ROUGH)
        leader = jobs.index(fastest)
        found = []
        for name, others in self._with_other_figures().items():
            if any(other._lead(jobs, leader) < CLEAR_LEAD for other in others):
                found.append(name)
        for times in (1 / ANOTHER, ANOTHER):
            gbit = times * self.template.bandwidth_gbit
            on_another = [replace(job, bandwidth_gbit=gbit) for job in jobs]
            if "bandwidth" not in found and self._lead(on_another, leader) < CLEAR_LEAD:
                found.append("bandwidth")
        return found

    def _lead(self, jobs: Sequence[Scenario], leader: int) -> float:
        """Returns the rate of one of some jobs over the best of the others, roughly simulated."""
        rates = {jobs.index(job): rate for rate, job in self.ranked(jobs, ROUGH)}
        of_leader = rates.pop(leader)
        return of_leader / max([LEAST_SPEED, *rates.values()])

    def _with_other_figures(self) -> dict[str, "list[Contest]"]:
        """Returns contests by what is another in them."""
        calibration = self.calibration
        jitter = calibration.step_jitter
        of_jitter = []
        for another in (min(QUIET_JITTER, jitter), ANOTHER * jitter):
            of_jitter.append(replace(calibration, step_jitter=another))
        of_messages = []
        of_servers = [name for name in calibration.transports if name.startswith("ps")]
        of_rings = [name for name in calibration.transports if name not in of_servers]
        for names, times in itertools.product((of_servers, of_rings), (1 / ANOTHER, ANOTHER)):
            of_messages.append(calibration.with_messages(names, times))
        found = {"jitter": of_jitter, "message costs": of_messages}
        return {
            name: [replace(self, calibration=another) for another in calibrations]
            for name, calibrations in found.items()
        }

    def _fastest_of_each(
        self, hosts: int, prices: Prices, detail: Detail
    ) -> dict[str, tuple[float, Scenario]]:
        """Returns the fastest job of each side with its rate; a side may have none."""
        alone = one_machine(self.template, hosts * self.template.workers_per_host)
        fastest = {}
        for name, jobs in zip(NAMES, [*self.sides(hosts, prices), [alone]], strict=True):
            ranked = self.ranked(self._promising(jobs), min(detail, COARSE))
            if ranked and ranked[0][0]:
                fastest[name] = ranked[0]
        return fastest

    def map(
        self, workers: Sequence[int], bandwidths: Sequence[float], local_steps: Sequence[int]
    ) -> list[Row]:
        """Returns a place for each number of a ring's workers, bandwidth and number of local
        steps.
        """
        asked = []
        for n, gbit, steps in itertools.product(workers, bandwidths, local_steps):
            hosts = -(-n // self.template.workers_per_host)
            if hosts > 1:
                template = replace(self.template, bandwidth_gbit=gbit, local_steps=steps)
                asked.append((replace(self, template=template), hosts))
        return parallel.each(_place, asked)

    def splits(self, hosts: int, prices: Prices) -> list[Row]:
        """Returns predictions with their `price` an hour and of a million samples, the fastest
        first.

        They are the best uses of the hosts, the best of each mode and compression, and one machine.
        """
        ranked = self.ranked(itertools.chain(*self.sides(hosts, prices)), ROUGH)
        jobs = [job for _, job in ranked]
        best_of_kinds: dict[tuple[str, str], Scenario] = {}
        for job in jobs:
            best_of_kinds.setdefault((job.mode, job.compression), job)
        shown = [*jobs[:SHOWN], *best_of_kinds.values()]
        chosen = [job for job in jobs if job in shown]
        chosen.append(one_machine(self.template, hosts * self.template.workers_per_host))
        predictions = []
        for job in chosen:
            prediction = row(self.calibration, job)
            worker_hosts = prediction["worker_hosts"]
            server_hosts = prediction["hosts"] - worker_hosts
            price = worker_hosts * prices.host + server_hosts * prices.server
            prediction["price"] = price
            prediction["price_per_million"] = price / 3.6e-3 / prediction["samples_per_s"]
            predictions.append(prediction)
        return sorted(predictions, key=lambda prediction: -prediction["samples_per_s"])


def _place(asked: tuple[Contest, int]) -> Row:
    """Returns a place of the map, for a contest on so many hosts."""
    contest, hosts = asked
    return contest.place(hosts)


def _can_send(family: Sequence[Mode], codec: str) -> bool:
    return any(mode.can_send(codec) for mode in family)


def one_machine(template: Scenario, workers: int) -> Scenario:
    """Returns the job of one machine, with all cores, in place of so many workers."""
    return replace(
        template,
        mode="single",
        workers=1,
        servers=0,
        replaces=workers,
        compression="none",
        local_steps=1,
    )


def _uses_with_servers(hosts: int, prices: Prices) -> list[HostUse]:
    """Returns the uses with servers that the price of so many workers' hosts pays for.

    The numbers are powers of two and a few near the ends, so that there are few. Servers beside workers
    cost nothing, and take the workers' links and cores. Where hosts of servers cost nothing either,
    there are workers on all hosts, and at most as many servers.
    """
    tried = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, hosts, hosts // 2, hosts * 3 // 4, hosts - 1}
    counts = sorted(count for count in tried if 0 < count <= hosts)
    if not prices.server:
        both = itertools.product(counts, ("shared", "dedicated"))
        return [HostUse(hosts, servers, placement) for servers, placement in both]
    uses = [HostUse(hosts, servers, "shared") for servers in counts]
    for worker_hosts in counts:
        servers = int((hosts - worker_hosts) * prices.host / prices.server + 1e-9)
        if servers > 0:
            uses.append(HostUse(worker_hosts, min(servers, 4 * hosts), "dedicated"))
    return uses


def chances(
    seed: int,
    model_error: float,
    predictions: Sequence[Row | None],
    draw_samples: Callable[[random.Random], Sequence[float]] | None = None,
) -> list[float]:
    """Returns how probably each prediction has most samples a second, or most targets a second.

    Draws are of the calibration, the same for all, and of the model's error.

    Args:
        draw_samples: returns the samples to the target of each prediction, drawn anew; None: samples
            a second decide.
    """
    draw = random.Random(f"{seed} chances")
    wins = [0] * len(predictions)
    for _ in range(SAMPLED):
        number = draw.randrange(DRAWS)
        shared_error = draw.gauss(0, SHARED * model_error)
        speeds = []
        for prediction in predictions:
            beyond = prediction["beyond"] if prediction else 0.0
            error = shared_error + draw.gauss(0, OWN * model_error + beyond)
            speeds.append(_drawn_speed(prediction, number, error))
        if draw_samples:
            samples = draw_samples(draw)
            speeds = [speed / needed for speed, needed in zip(speeds, samples, strict=True)]
        wins[speeds.index(max(speeds))] += 1
    return [won / SAMPLED for won in wins]


def _drawn_speed(prediction: Row | None, number: int, error: float) -> float:
    """Returns samples a second by a draw of the calibration and a logarithm of the model's error.

    The model has no error where one machine is alone.
    """
    if not prediction:
        return 0.0
    drawn_step_s = prediction["drawn_step_s"][number]
    samples_per_s = prediction["samples_per_s"] * prediction["step_s"] / drawn_step_s
    return samples_per_s if prediction["mode"] == "single" else samples_per_s * math.exp(error)
