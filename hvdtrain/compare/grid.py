"""The grid of runs that `hvdtrain compare` makes: every one planned and checked before the first begins."""

import dataclasses
import itertools
import re
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hvdtrain import modes
from hvdtrain.config.option_types import EQUAL
from hvdtrain.config.run_config import RunConfig
from hvdtrain.errors import UsageError
from hvdtrain.formatting import with_noun
from hvdtrain.launch.hosts import Host, allocate
from hvdtrain.numerics.slowdown import among_workers
from hvdtrain.runs.launched import Launched, launch_command
from hvdtrain.runs.request import check, check_workers, for_mode
from hvdtrain.system.cgroups import usable_cores


@dataclass(frozen=True)
class Axes:
    """What a grid spans; every combination is a run, but that `single` has one worker, and that rings have no servers.

    Attributes:
        servers: EQUAL stands for as many as there are workers.
        batches: each as --batch-size, so of a worker with --per-worker.
        slows: each as --slow; one process is made slow where that names no other worker than its own.
        variants: in how workers wait for slow ones, of the modes that have a choice: `staleness` of ps-ssp, `backup` of
            ps-sync, each with its values.
    """

    modes: Sequence[str]
    workers: Sequence[int] = (2,)
    servers: Sequence[int | str] = (1,)
    models: Sequence[str] = (RunConfig.model,)
    batches: Sequence[int] = (RunConfig.batch_size,)
    repeats: int = 1
    slows: Sequence[str] = (RunConfig.slow,)
    variants: Mapping[str, Sequence[int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Planned:
    """One run of the grid.

    Attributes:
        config: of its own global batch and learning rate, whatever they were given as.
        where: model and batch, as far as the grid spans them: `vgg16-b64-` or empty.
        hosts: with the slots that it takes; empty on this machine.
        variant: likewise of those that Axes names: `-backup1` or empty.
    """

    config: RunConfig
    workers: int
    where: str = ""
    hosts: tuple[Host, ...] = ()
    launcher: str = "local"
    variant: str = ""

    @property
    def name(self) -> str:
        servers = f"-s{self.config.servers}" if self.config.servers else ""
        return f"{self.where}{self.config.mode}-w{self.workers}{servers}{self.variant}-r{self.config.repeat}"

    @property
    def title(self) -> str:
        servers = f", {with_noun(self.config.servers, 'server')}" if self.config.servers else ""
        where = f"{self.where.strip('-').replace('-', ' ')}: " if self.where else ""
        variant = self.variant.replace("-", " ")
        return f"{where}{self.config.mode}{variant} with {with_noun(self.workers, 'worker')}{servers}"

    def command(self, out: Path, secrets: Collection[str] = ()) -> str:
        """What a shell does the same run with; secrets: the names of variables that its ranks are given."""
        if self.workers + self.config.servers == 1 and not self.hosts:
            return shlex.join(["hvdtrain", "train", *self.config.to_args(), "--out", str(out)])
        launched = Launched(self.launcher, tuple(map(str, self.hosts)))
        return shlex.join(launch_command(self.config, self.workers, launched, out, secrets))


def plan(
    config: RunConfig, axes: Axes, hosts: Sequence[Host] = (), launcher: str = "local",
    cores: Mapping[str, float] | None = None,
) -> list[Planned]:  # fmt: skip
    """Every run, in order: all of a repeat before the next, so that a drifting machine drifts for all modes alike, and
    each repeat begins with another mode, so that none is always the first.

    Args:
        hosts: where runs go, the baseline too: the launching machine may be another one.
        cores: that ranks may use on each host. Where nobody knows them, each rank finds its own share.

    Raises:
        UsageError: a run that could not be carried out.
    """
    if config.seed + axes.repeats > 2**32:
        raise UsageError(f"--seed {config.seed} with {axes.repeats} repeats goes beyond {2**32 - 1}, the largest seed")
    runs = []
    for repeat in range(1, axes.repeats + 1):
        turn = (repeat - 1) % len(axes.modes)
        rotated = dataclasses.replace(axes, modes=[*axes.modes[turn:], *axes.modes[:turn]])
        for model, batch, slow, mode, workers, servers, variant in _combinations(rotated):
            run = dataclasses.replace(
                for_mode(config, mode, servers), model=model, batch_size=batch, slow=slow,
                seed=config.seed + repeat - 1, repeat=repeat, **variant,
            )  # fmt: skip
            run = check(run).for_workers(workers)
            check_workers(run, workers)
            where = f"{model}-" if len(axes.models) > 1 else ""
            where += f"b{batch}-" if len(axes.batches) > 1 else ""
            where += f"slow-{re.sub('[^0-9a-z.]+', '_', slow)}-" if len(axes.slows) > 1 else ""
            several = "".join(f"-{name}{value}" for name, value in variant.items() if len(axes.variants[name]) > 1)
            used = tuple(allocate(hosts, workers, run.servers)) if hosts else ()
            runs.append(Planned(run, workers, where, used, launcher if used else "local", several))
    threads = config.threads or min(_threads(run, cores) for run in runs)
    return [dataclasses.replace(run, config=dataclasses.replace(run.config, threads=threads)) for run in runs]


def _threads(run: Planned, cores: Mapping[str, float] | None) -> int:
    """How many threads each worker of a run can have to itself, 0 where nobody knows. All runs of a comparison take the
    least of any: with more, runs of fewer workers would be faster for that alone.
    """
    if not run.hosts:
        return max(1, int(usable_cores() // run.workers))
    return min(max(1, int(cores[host.name] // host.slots)) for host in run.hosts) if cores else 0


def _combinations(axes: Axes) -> Iterator[tuple[str, int, str, str, int, int, dict[str, Any]]]:
    """Model, batch, slow, mode, workers, servers, options of its variant; each once."""
    seen = set()
    for model, batch, slow, mode in itertools.product(axes.models, axes.batches, axes.slows, axes.modes):
        for workers in _possible_workers(mode, axes.workers):
            is_baseline = modes.declared(mode).max_workers == 1
            own = among_workers(slow, 1) if is_baseline else slow
            for servers in _servers(axes, workers) if modes.declared(mode).has_servers else [0]:
                for variant in _variants(axes, mode):
                    run = model, batch, own, mode, workers, servers, variant
                    if str(run) not in seen:
                        yield run
                    seen.add(str(run))


def _servers(axes: Axes, workers: int) -> list[int]:
    return list(dict.fromkeys(workers if servers == EQUAL else int(servers) for servers in axes.servers))


def _variants(axes: Axes, mode: str) -> list[dict[str, Any]]:
    names = [name for name in axes.variants if name in modes.declared(mode).options]
    return [dict(zip(names, values, strict=True)) for values in itertools.product(*(axes.variants[n] for n in names))]


def _possible_workers(mode: str, workers: Sequence[int]) -> Sequence[int]:
    most = modes.declared(mode).max_workers
    return [most] if most else workers


def dry_run_lines(runs: Sequence[Planned], folder: Path, secrets: Collection[str] = ()) -> list[str]:
    """For --dry-run: each run with what it differs in from others, and the command that does it alone.

    Args:
        secrets: as Planned.command.
    """
    each = [{"mode": run.config.mode, "workers": run.workers} | dataclasses.asdict(run.config) for run in runs]
    differing = [name for name in each[0] if len({values[name] for values in each}) > 1 and name != "seed"]
    lines = []
    for number, (run, values) in enumerate(zip(runs, each, strict=True), 1):
        what = ", ".join(f"{name.replace('_', ' ')} {values[name]}" for name in differing if values[name])
        lines += [f"[{number}/{len(runs)}] {run.name}: {what or 'the only run'}"]
        lines += [f"    {run.command(folder / 'runs' / run.name, secrets)}"]
    return lines
