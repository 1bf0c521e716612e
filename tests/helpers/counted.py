"""Whether a run counted every sample once, whatever happened on its way: from what it wrote down."""

import csv
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.data.sampling import BatchSampler
from hvdtrain.job.ps.journal import DROPPED
from hvdtrain.job.training.step import digest

Key = tuple[str, ...]  # worker, incarnation where there is one, step of its own


@dataclass
class Counts:
    """Of a whole run.

    Attributes:
        samples: that count.
        lost, doubled: samples that should have counted and did not, or did more than once.
        pushed_twice: pushes that one bucket applied twice.
        faults: what else is wrong, a line each.
    """

    samples: int = 0
    lost: int = 0
    doubled: int = 0
    pushed_twice: int = 0
    faults: tuple[str, ...] = ()


def of_steps(run: Path, sampler: BatchSampler, ranks: Sequence[int]) -> Counts:
    """Of a synchronous run: each worker has a line for every step, and the digest is that of all
    samples once.
    """
    summary = json.loads((run / "summary.json").read_text())
    steps, faults = summary["steps"], []
    expected, counted = Counter[int](), Counter[int]()
    for number in range(steps * sampler.workers):
        share = sampler.share(number)
        expected[share.step] += share.counted
    for rank in ranks:
        rows = [
            json.loads(line)
            for line in (run / f"metrics.rank{rank}.jsonl").read_text().splitlines()
        ]
        if (found := [row["step"] for row in rows]) != list(range(1, steps + 1)):
            faults.append(
                f"rank {rank} has {len(found)} lines for {steps} steps, of {len(set(found))} different ones"
            )
        for row in rows:
            counted[row["step"]] += row["samples"]
    total = sum(digest(sampler.share(number)) for number in range(steps * sampler.workers)) % 2**48
    if summary["samples_digest"] != f"{total:012x}":
        faults.append(f"the samples' digest is {summary['samples_digest']}, not {total:012x}")
    if summary["samples"] != expected.total():
        faults.append(f"the summary has {summary['samples']} samples, not {expected.total()}")
    lost, doubled = (expected - counted).total(), (counted - expected).total()
    return Counts(counted.total(), lost, doubled, faults=tuple(faults))


def of_pushes(parts: Sequence[Path], run: Path, sampler: BatchSampler) -> Counts:
    """Of an asynchronous run: each share was applied once, by the ledgers of all its starts.

    A start begins at the snapshot of an earlier one; what that had done after it does not count.

    Args:
        parts: a folder for each start, in order, with its ledgers and leases.
    """
    steps = json.loads((run / "summary.json").read_text())["steps"]
    counts = Counts()
    starts = [start for part in parts if (start := _Start.read(part, sampler.workers)).leases]
    applied: dict[Name, Counter[int]] = {}  # bucket -> how often each share
    for index, start in enumerate(starts):
        until = min([steps, *(later.first_step for later in starts[index + 1 :])]) * sampler.workers
        for name, keys in start.applied.items():
            counts.pushed_twice += sum(times - 1 for times in keys.values())
            if unknown := [key for key in keys if key not in start.leases]:
                counts.faults += (
                    f"start {index + 1}, bucket {name[1]}: {len(unknown)} pushes of no share",
                )
            shares = Counter(start.leases[key] for key in keys.elements() if key in start.leases)
            applied.setdefault(name, Counter()).update(
                {s: n for s, n in shares.items() if s < until}
            )
    first = applied[min(applied)] if applied else Counter[int]()
    for number in range(steps * sampler.workers):
        samples, times = sampler.share(number).counted, first[number]
        counts.samples += samples * times
        counts.lost += samples * (times == 0)
        counts.doubled += samples * max(0, times - 1)
    return counts


Name = tuple[int, int]  # of a bucket: its server, and its number


@dataclass
class _Start:
    """What one start of an asynchronous run wrote down.

    Attributes:
        leases: each push's share.
        applied: by bucket, how often each push was applied there.
        first_step: of the snapshot that it began at.
    """

    leases: dict[Key, int]
    applied: dict[Name, Counter[Key]]
    first_step: int = 0

    @classmethod
    def read(cls, part: Path, workers: int) -> "_Start":
        leases = {_key(row): int(row["share"]) for row in _rows(part / "leases.csv")}
        applied: dict[Name, Counter[Key]] = {}
        for file in part.glob("ledger.server*.csv"):
            server = int(file.name.split(".")[1].removeprefix("server"))
            for row in _rows(file):
                if row["version"] != DROPPED:
                    applied.setdefault((server, int(row["bucket"])), Counter())[_key(row)] += 1
        return cls(leases, applied, min(leases.values(), default=0) // workers)


def _rows(path: Path) -> list[dict[str, str]]:
    """Whole lines alone: a killed server may leave one that it had begun."""
    if not path.is_file():
        return []
    text = path.read_text()
    return list(csv.DictReader(text[: text.rfind("\n") + 1].splitlines()))


def _key(row: dict[str, str]) -> Key:
    return tuple(row[name] for name in ("worker", "incarnation", "step") if name in row)
