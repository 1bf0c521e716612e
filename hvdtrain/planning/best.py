"""The best ring, the best servers and one machine on so many hosts, or for so much money: how fast, how probably."""

import itertools
import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from hvdtrain import modes
from hvdtrain.planning.calibration import Calibration
from hvdtrain.planning.layout import COARSE, FINE, ROUGH, Detail
from hvdtrain.planning.predict import DRAWS, Row, codec_of, is_lone, label, row, simulate, speed
from hvdtrain.planning.scenario import RING_MODES, SERVER_MODES, Scenario

COMPRESSIONS = ("fp16", "int8")  # tried beside none, where both sides can send it
SHOWN = 8  # uses of some hosts
PROMISING = 3  # of the fastest, simulated roughly
HOPELESS = 4  # times as slow as another: how probably it is the fastest need not be drawn
# Of the model's error, what a ring and servers share, and what each has for itself: README.md, "Checked on hosts …"
SHARED, OWN = 0.5, 0.87
SAMPLED = 2000
NAMES = ("ring", "servers", "one_machine")
Prices = tuple[float, float]  # of a worker's host and of a server's, an hour


@dataclass(frozen=True)
class Contest:
    """Rings, servers and one machine, as a calibration has them.

    Attributes:
        asked: with one compression, or `none`: then those are tried as well that both families can send.
        names: of the modes that take part.
    """

    calibration: Calibration
    asked: Scenario
    names: Sequence[str]

    def sides(self, hosts: int, prices: Prices) -> list[list[Scenario]]:
        """What rings can do with so many hosts, and what servers can for the same money."""
        families = [[modes.declared(name) for name in of if name in self.names] for of in (RING_MODES, SERVER_MODES)]
        codecs = [self.asked.compression]
        if self.asked.compression == "none":
            known = [codec for codec in COMPRESSIONS if codec in self.calibration.codecs]
            codecs += [codec for codec in known if all(any(m.can_send(codec) for m in of) for of in families if of)]
        # Where runs corrected what servers cost over one wire, no other is tried: it would be judged otherwise.
        sides = []
        for of, places in zip(families, ([(hosts, 0, "dedicated")], _places(hosts, prices)), strict=True):
            sent = dict.fromkeys((m.name, codec_of(self.calibration, m.name, codec)) for m in of for codec in codecs)
            sides.append([
                replace(
                    self.asked, mode=mode, workers=n * self.asked.workers_per_host, servers=servers,
                    placement=placement, compression=codec, wire=wire,
                )
                for mode, codec in sent
                for n, servers, placement in places
                for wire in (self.calibration.wires if servers else [self.asked.wire])
            ])  # fmt: skip
        return sides

    def ranked(self, jobs: Iterable[Scenario], detail: Detail) -> list[tuple[float, Scenario]]:
        """With their samples a second, the fastest first; 0 of those of which one worker does nearly all."""
        found = []
        for job in jobs:
            outcome = simulate(self.calibration.scenario(job), detail=detail)
            is_cluster = not is_lone(job.workers, outcome.busiest_share)
            found.append((speed(self.calibration, job, outcome.step_s) if is_cluster else 0.0, job))
        return sorted(found, key=lambda one: -one[0])

    def place(self, hosts: int, prices: Prices = (1.0, 1.0), detail: Detail = FINE) -> Row:
        """A place of the map: the best of each side, and how probably each is the fastest of all."""
        workers, best = hosts * self.asked.workers_per_host, []
        for jobs in (*self.sides(hosts, prices), [machine(self.asked, workers)]):
            promising = [job for _, job in self.ranked(jobs, ROUGH)[:PROMISING]]
            best.append(self.ranked(promising, min(detail, COARSE))[:1])
        least = max(samples for of in best for samples, _ in of) / HOPELESS
        rows: dict[str, Row | None] = dict.fromkeys(NAMES)
        for name, of in zip(NAMES, best, strict=True):
            for samples, job in of:
                if samples:
                    rows[name] = row(self.calibration, job, detail, samples > least)
        found: Row = {
            "workers": workers, "hosts": hosts, "bandwidth_gbit": self.asked.bandwidth_gbit,
            "local_steps": self.asked.local_steps,
            "basis": {0.0: "workers", prices[0]: "hosts"}.get(prices[1], "price"),
        }  # fmt: skip
        chances = _chances(self.asked.seed, self.calibration.model_error, list(rows.values()))
        found |= {f"p_{name}": p for name, p in zip(NAMES, chances, strict=True)}
        found |= {name: of and label(of) for name, of in rows.items()}
        found |= {f"{name}_samples_per_s": of and of["samples_per_s"] for name, of in rows.items()}
        ring, servers = rows["ring"], rows["servers"]
        found["ratio"] = ring["samples_per_s"] / servers["samples_per_s"] if ring and servers else None
        return found

    def map(self, workers: Sequence[int], bandwidths: Sequence[float], local_steps: Sequence[int]) -> list[Row]:
        """A place for each number of workers that a ring has, bandwidth and number of local steps."""
        places = []
        for n, gbit, steps in itertools.product(workers, bandwidths, local_steps):
            hosts = -(-n // self.asked.workers_per_host)
            if hosts > 1:
                job = replace(self.asked, bandwidth_gbit=gbit, local_steps=steps)
                places.append(replace(self, asked=job).place(hosts))
        return places

    def splits(self, hosts: int, prices: Prices) -> list[Row]:
        """Rows with their `price` an hour and of a million samples, the fastest first: the best uses, the best of each
        mode and compression, one machine.
        """
        order = [job for _, job in self.ranked(itertools.chain(*self.sides(hosts, prices)), ROUGH)]
        of_kinds = {(job.mode, job.compression): job for job in reversed(order)}
        chosen = [job for job in order if job in order[:SHOWN] or job in of_kinds.values()]
        rows = []
        for job in (*chosen, machine(self.asked, hosts * self.asked.workers_per_host)):
            at = row(self.calibration, job)
            price = at["worker_hosts"] * prices[0] + (at["hosts"] - at["worker_hosts"]) * prices[1]
            rows.append(at | {"price": price, "price_per_million": price / 3.6e-3 / at["samples_per_s"]})
        return sorted(rows, key=lambda one: -one["samples_per_s"])


def machine(asked: Scenario, workers: int) -> Scenario:
    """One machine, with all its cores, in place of so many workers."""
    return replace(asked, mode="single", workers=1, servers=0, replaces=workers, compression="none", local_steps=1)


def _places(hosts: int, prices: Prices) -> list[tuple[int, int, str]]:
    """(worker hosts, servers, placement) that what so many workers' hosts cost pays for: few of each kind, powers of
    two and the ends. Servers beside workers cost nothing, and take their links and cores. Where hosts of servers cost
    nothing either, there are workers on all, and at most as many servers.
    """
    tried = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, hosts, hosts // 2, hosts * 3 // 4, hosts - 1}
    counts = sorted(count for count in tried if 0 < count <= hosts)
    if not prices[1]:
        return [(hosts, servers, placement) for servers in counts for placement in ("shared", "dedicated")]
    places = [(hosts, servers, "shared") for servers in counts]
    for worker_hosts in counts:
        servers = int((hosts - worker_hosts) * prices[0] / prices[1] + 1e-9)
        if servers > 0:
            places.append((worker_hosts, min(servers, 4 * hosts), "dedicated"))
    return places


def _chances(seed: int, model_error: float, rows: Sequence[Row | None]) -> list[float]:
    """How probably each has most samples a second: by draws of the calibration and of the model's error."""
    draw, wins = random.Random(f"{seed} chances"), [0] * len(rows)
    for _ in range(SAMPLED):
        number, shared = draw.randrange(DRAWS), draw.gauss(0, SHARED * model_error)
        speeds = []
        for of in rows:
            own = draw.gauss(0, OWN * model_error + (of["beyond"] if of else 0.0))
            error = shared + own if of and of["mode"] != "single" else 0.0
            samples = of["samples_per_s"] * of["step_s"] / of["drawn_step_s"][number] if of else 0.0
            speeds.append(samples * math.exp(error))
        wins[speeds.index(max(speeds))] += 1
    return [won / SAMPLED for won in wins]
