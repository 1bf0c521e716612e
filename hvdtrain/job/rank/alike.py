"""A check that all workers start with the same code, weights and images, before the first step."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from hvdtrain.base.errors import Failure
from hvdtrain.base.formatting import printable
from hvdtrain.base.system.terminal import Terminal
from hvdtrain.base.world.host import describe, differences, gpus, speed_variables
from hvdtrain.data.bad_images import lines_of_bad, summary_of
from hvdtrain.data.folder import ImageFolder
from hvdtrain.job.coordination.job import Job
from hvdtrain.job.coordination.synchroniser import Synchroniser
from hvdtrain.job.recording.manifest import by_host, manifest, part, weights_hash
from hvdtrain.job.recording.snapshot import Snapshot
from hvdtrain.job.training.saver import MANIFEST
from hvdtrain.models.own import code_hash
from hvdtrain.runs.folder import write_json

MOST_NAMED = 20_000  # classes that a manifest names
# What must be equal on all workers, and what is said of workers that differ from the first.
_ALIKE = (
    ("code", "have another --model or --script file than that"),
    ("weights", "do not start from the weights"),
    ("images", "have other data than that"),
)


def begin(
    job: Job,
    data: ImageFolder,
    side: int,
    model: nn.Module,
    sync: Synchroniser,
    resumed: Snapshot | None,
    terminal: Terminal,
) -> None:
    """Checks that all workers start alike. The first one writes the manifest, and tells of images.

    All workers call this together.

    Args:
        job: the job.
        data: the images that this worker trains on, with their known_hash.
        side: the side of the images, in pixels.
        model: the model, with the weights that this worker starts from.
        sync: how this worker is connected.
        resumed: the snapshot that training goes on from, if any.
        terminal: where the user is told.

    Raises:
        Failure: some worker has other code, weights or images than the first one.
    """
    own = {
        "code": code_hash(job.config.model),
        "weights": weights_hash(model),
        "images": data.known_hash,
        "host": own_host(job),
    }
    before = resumed.state if resumed else {}
    trained_on = {
        "dataset_hash": before.get("dataset_hash") or own["images"],
        "image_size": side,
        "classes": len(data.classes),
        "class_names": _class_names(data),
        "train_samples": len(data.train),
        "validation_samples": len(data.validation),
        "initial_weights": before.get("initial_weights", f"blake2b:{own['weights']}"),
        "model_hash": own["code"],
        "bad_images": summary_of(data.bad),
    }
    write_manifest(job, sync, model, own, trained_on, terminal, resumed=resumed)
    if job.world.is_chief:
        _tell_of_images(data, terminal)


def own_host(job: Job) -> dict[str, Any]:
    """Returns what the manifest says of this worker's host."""
    host = describe()
    host |= {"gpus": gpus(), "threads_per_worker": job.threads, "environment": speed_variables()}
    return host


def write_manifest(
    job: Job,
    sync: Synchroniser,
    model: nn.Module,
    own: Mapping[str, Any],
    trained_on: dict[str, Any],
    terminal: Terminal,
    resumed: Snapshot | None = None,
    told: Mapping[str, Any] = {},
) -> None:
    """Checks that all workers start alike. The first one writes the manifest.

    All workers call this together.

    Args:
        job: the job.
        sync: how this worker is connected.
        model: the model, with the weights that this worker starts from.
        own: what this worker has: `code`, `weights`, `images` and `host`.
        trained_on: see recording.manifest.manifest.
        terminal: where the user is told.
        resumed: the snapshot that training goes on from, if any.
        told: entries of the manifest that the configuration does not know.

    Raises:
        Failure: some worker has other code, weights or images than the first one.
    """
    world = job.world
    of_workers = sync.group.gather_to_first(own)
    of_ranks = {world.servers + worker: facts for worker, facts in of_workers.items()}
    problem = sync.group.sentence(_difference(of_ranks))
    if problem:
        raise Failure(problem)
    if not world.is_chief:
        return
    of_servers = sync.ask_servers("host")
    # The manifest has the workers' environment for each host, and the servers' for each server.
    server_environment = [facts.pop("environment") for facts in of_servers]
    host_of_worker = {rank: facts["host"] for rank, facts in of_ranks.items()}
    host_of_server = dict(enumerate(of_servers))
    hosts = by_host(host_of_worker | host_of_server)
    for line in differences(hosts):
        print(f"hosts differ: {line}", file=terminal.out, flush=True)
    before = resumed.state if resumed else {}
    facts = manifest(job, sync.backend, model, hosts, server_environment, trained_on) | dict(told)
    first_step = resumed.step if resumed else 0
    facts["parts"] = [*before.get("parts", []), part(facts, first_step)]
    write_json(job.folder / MANIFEST, facts)


def _class_names(data: ImageFolder) -> list[str] | None:
    """Returns the names of the classes for the manifest; None if they are too many for it."""
    if len(data.classes) > MOST_NAMED:
        return None
    return [printable(name) for name in data.classes]


def _difference(of_ranks: Mapping[int, Mapping[str, Any]]) -> str:
    """Returns a line that says which workers differ from the first; empty if none does.

    Args:
        of_ranks: what each worker starts with, by rank.
    """
    if not of_ranks:
        return ""
    first = min(of_ranks)
    for name, problem in _ALIKE:
        expected = of_ranks[first][name]
        different = [rank for rank, facts in of_ranks.items() if facts[name] != expected]
        if different:
            return f"ranks {different} {problem} of rank {first}"
    return ""


def _tell_of_images(data: ImageFolder, terminal: Terminal) -> None:
    """Tells which files of the data set are not trained on."""
    for line in data.notes:
        print(f"note: {line}", file=terminal.out, flush=True)
    for line in lines_of_bad(data.bad):
        print(line, file=terminal.out, flush=True)
