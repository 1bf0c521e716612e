"""The grid of runs that `hvdtrain compare` makes: every one planned and checked before the first begins."""

import dataclasses
import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hvdtrain import modes
from hvdtrain.config.run_config import RunConfig
from hvdtrain.errors import UsageError
from hvdtrain.launch.hosts import Host, allocate
from hvdtrain.runs.request import check, check_workers, for_mode


@dataclass(frozen=True)
class Axes:
    """What a grid spans; every combination is a run, but that `single` has one worker, and that rings have no servers.

    Attributes:
        batches: each as --batch-size, so of a worker with --per-worker.
    """

    modes: Sequence[str]
    workers: Sequence[int] = (2,)
    servers: Sequence[int] = (1,)
    models: Sequence[str] = (RunConfig.model,)
    batches: Sequence[int] = (RunConfig.batch_size,)
    repeats: int = 1


@dataclass(frozen=True)
class Planned:
    """One run of the grid.

    Attributes:
        config: of its own global batch and learning rate, whatever they were given as.
        where: model and batch, as far as the grid spans them: `vgg16-b64-` or empty.
        hosts: with the slots that it takes; empty on this machine.
    """

    config: RunConfig
    workers: int
    where: str = ""
    hosts: tuple[Host, ...] = ()
    launcher: str = "local"

    @property
    def name(self) -> str:
        servers = f"-s{self.config.servers}" if self.config.servers else ""
        return f"{self.where}{self.config.mode}-w{self.workers}{servers}-r{self.config.repeat}"

    @property
    def title(self) -> str:
        servers = f", {self.config.servers} server(s)" if self.config.servers else ""
        where = f"{self.where.strip('-').replace('-', ' ')}: " if self.where else ""
        return f"{where}{self.config.mode} with {self.workers} worker(s){servers}"

    def command(self, out: Path) -> str:
        """What a shell does the same run with."""
        if self.workers + self.config.servers == 1:
            return shlex.join(["hvdtrain", "train", *self.config.to_args(), "--out", str(out)])
        words = ["hvdtrain", "launch", "-n", str(self.workers)]
        words += ["-s", str(self.config.servers)] if self.config.servers else []
        if self.hosts:
            hosts = ",".join(f"{host.name}:{host.slots}" for host in self.hosts)
            words += ["--launcher", self.launcher, "-H", hosts]
        options = dataclasses.replace(self.config, servers=0).to_args()
        return shlex.join([*words, "--out", str(out), "--", *options])


def plan(config: RunConfig, axes: Axes, hosts: Sequence[Host] = (), launcher: str = "local") -> list[Planned]:
    """Every run, in order: all of a repeat before the next, so that a drifting machine drifts for all modes alike.

    Args:
        hosts: where runs of more than one process go; the baseline stays here.

    Raises:
        UsageError: a run that could not be carried out.
    """
    cores = len(os.sched_getaffinity(0))
    most = max([1, *(n for mode in axes.modes for n in _possible_workers(mode, axes.workers))])
    threads = config.threads or max(1, cores // most)
    if config.seed + axes.repeats > 2**32:
        raise UsageError(f"--seed {config.seed} with {axes.repeats} repeats goes beyond {2**32 - 1}, the largest seed")
    runs = []
    for repeat in range(1, axes.repeats + 1):
        for model, batch, mode, workers, servers in _combinations(axes):
            run = dataclasses.replace(
                for_mode(config, mode, servers), model=model, batch_size=batch, threads=threads,
                seed=config.seed + repeat - 1, repeat=repeat,
            )  # fmt: skip
            run = check(run).for_workers(workers)
            check_workers(run, workers)
            where = f"{model}-" if len(axes.models) > 1 else ""
            where += f"b{batch}-" if len(axes.batches) > 1 else ""
            ranks = workers + run.servers
            used = tuple(allocate(hosts, ranks)) if hosts and ranks > 1 else ()
            runs.append(Planned(run, workers, where, used, launcher if used else "local"))
    return runs


def _combinations(axes: Axes) -> Iterator[tuple[str, int, str, int, int]]:
    """Model, batch, mode, workers, servers."""
    for model in axes.models:
        for batch in axes.batches:
            for mode in axes.modes:
                for workers in _possible_workers(mode, axes.workers):
                    for servers in axes.servers if modes.declared(mode).has_servers else [0]:
                        yield model, batch, mode, workers, servers


def _possible_workers(mode: str, workers: Sequence[int]) -> Sequence[int]:
    most = modes.declared(mode).max_workers
    return [most] if most else workers


def dry_run_lines(runs: Sequence[Planned], folder: Path) -> list[str]:
    """For --dry-run: each run with what it differs in from others, and the command that does it alone."""
    each = [{"mode": run.config.mode, "workers": run.workers} | dataclasses.asdict(run.config) for run in runs]
    differing = [name for name in each[0] if len({values[name] for values in each}) > 1 and name != "seed"]
    lines = []
    for number, (run, values) in enumerate(zip(runs, each, strict=True), 1):
        what = ", ".join(f"{name.replace('_', ' ')} {values[name]}" for name in differing if values[name])
        lines += [f"[{number}/{len(runs)}] {run.name}: {what or 'the only run'}"]
        lines += [f"    {run.command(folder / 'runs' / run.name)}"]
    return lines
