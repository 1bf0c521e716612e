"""What a grid will take, told by --dry-run: bytes a step, memory, disk; and what of it is not there."""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from hvdtrain.compare.grid import Planned
from hvdtrain.config import recipes
from hvdtrain.config.run_config import RunConfig
from hvdtrain.data.find import is_name, is_url
from hvdtrain.formatting import format_bytes
from hvdtrain.launch.memory import is_vgg, most_weights_mb, rank_mb
from hvdtrain.numerics.optimizers import vectors_kept

MB = 2**20


def bytes_per_step(config: RunConfig, workers: int) -> float:
    """Payload that all processes together send in a step, uncompressed: what summary.json will measure."""
    exchanged = workers if config.servers else workers - 1  # push and pull of each worker; twice around the ring
    return 2 * exchanged * most_weights_mb(config) * MB


def memory_bytes(run: Planned) -> float:
    """What the ranks of the fullest host need, without activations and message buffers."""
    ranks = max((host.slots for host in run.hosts), default=run.workers + run.config.servers)
    return ranks * rank_mb(run.config, run.workers) * MB


def disk_bytes(config: RunConfig) -> float:
    """What a run leaves: the final and the best weights, and its snapshots, with the optimizer's states."""
    snapshots = 0 if config.snapshot_every == "never" else config.keep_snapshots * (1 + vectors_kept(config))
    return (config.saves("final") + config.saves("best") + snapshots) * most_weights_mb(config) * MB


def forecast_lines(runs: Sequence[Planned], kept: Mapping[str, Path], folder: Path) -> Iterator[str]:
    """A line for each kind of run, one for all together, and one for each thing that is wrong.

    Args:
        kept: the folders of runs that are finished, by name.
    """
    import psutil

    for title, run in {run.title: run for run in runs}.items():
        about = "about" if is_vgg(run.config) else "at most"
        sent = (
            f"sends {about} {format_bytes(bytes_per_step(run.config, run.workers))} a step, " if run.workers > 1 else ""
        )
        where = " on the fullest host" if len(run.hosts) > 1 else ""
        yield f"forecast: {title}: {sent}needs {format_bytes(memory_bytes(run))} of memory at least{where}"
    to_do = [run for run in runs if run.name not in kept]
    disk = sum(disk_bytes(run.config) for run in to_do)
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())
    free = shutil.disk_usage(there).free
    kept_words = f" ({len(kept)} are there already, and stay)" if kept else ""
    about = "about" if all(is_vgg(run.config) for run in runs) else "at most"
    left = f"leave {about} {format_bytes(disk)} in {folder}; {format_bytes(free)} are free"
    yield f"forecast: {len(to_do)} runs to do{kept_words} {left}"
    if disk > free:
        instead = "name another --out, or a smaller --width or --model"
        yield f"too large: {format_bytes(disk)} do not fit in {there}: {instead}"
    local = [run for run in to_do if not run.hosts]
    most, available = max(map(memory_bytes, local), default=0), psutil.virtual_memory().available
    if most > available:
        there_is = f"{format_bytes(available)} are free on this machine"
        yield f"too large: {format_bytes(most)} of memory are needed, and {there_is}"
    yield from _missing(runs[0].config)


def _missing(config: RunConfig) -> Iterator[str]:
    """What a run would not find."""
    dataset, pretrained = config.dataset, config.pretrained
    if not is_name(dataset) and not is_url(dataset) and not Path(dataset).expanduser().is_dir():
        yield f"missing: --dataset {dataset} is neither a folder nor one of {', '.join(recipes.names('datasets'))}"
    if pretrained not in ("", "imagenet") and not Path(pretrained).expanduser().is_file():
        yield f"missing: --pretrained {pretrained} is no file"
