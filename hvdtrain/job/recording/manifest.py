"""The manifest of a run: all that is needed to repeat it, or to tell if runs may be compared."""

import hashlib
import os
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

from msgspec import structs
from torch import nn

from hvdtrain.base import modes
from hvdtrain.base.numerics.flat import trained
from hvdtrain.base.numerics.optimizers import schedule
from hvdtrain.base.system.own_code import short
from hvdtrain.base.world.host import gpus, hardware, speed_variables, versions
from hvdtrain.base.world.network import use_one_interface
from hvdtrain.base.world.place import RESPAWNS
from hvdtrain.job.buckets.send_queue import with_used_buckets
from hvdtrain.job.coordination.job import Job
from hvdtrain.job.wire.horovod import DEFAULTS
from hvdtrain.models.own import batch_norm_and_dropout
from hvdtrain.runs.launched import Launched, job_command, read_launched
from hvdtrain.runs.request import choice, mode_options


def weights_hash(model: nn.Module) -> str:
    """Returns the blake2b of all tensors of the model, in order, as 32 hexadecimal digits."""
    digest = hashlib.blake2b(digest_size=16)
    for tensor in model.state_dict().values():
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def by_host(ranks: Mapping[int, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Returns the ranks and the description of each host, by its name.

    Args:
        ranks: the description of each rank's host, by rank. Where the ranks of a host differ, the
            lowest rank's value is taken.
    """
    hosts: dict[str, dict[str, Any]] = {}
    for rank, description in sorted(ranks.items()):
        host = hosts.setdefault(description["host"], {"ranks": []})
        host["ranks"].append(rank)
        for name, value in description.items():
            if name != "host":
                host.setdefault(name, value)
    return dict(sorted(hosts.items()))


# The options that the manifest has as they were given.
GIVEN_OPTIONS = (
    "mode",
    "model",
    "dropout",
    "augment",
    "pretrained",
    "freeze",
    "precision",
    "compile",
    "accumulate",
    "dataset",
    "optimizer",
    "lr",
    "lr_around",
    "lr_trainings",
    "momentum",
    "weight_decay",
    "nesterov",
    "backup",
    "delay_compensation",
    "staleness_lr",
    "local_steps",
    "fragments",
    "outer",
    "compression",
    "seed",
    "shuffle_block",
    "repeat",
    "deterministic",
    "record",
    "stop_at_target",
    "sprint",
)


def manifest(
    job: Job,
    backend: str,
    model: nn.Module,
    hosts: dict[str, dict[str, Any]],
    server_environment: Sequence[dict[str, str]],
    trained_on: dict[str, Any],
) -> dict[str, Any]:
    """Returns the manifest of a run. The workers have met, and hold the initial weights.

    Args:
        job: the job.
        backend: what carries the gradients.
        model: the model.
        hosts: the hosts: see by_host.
        server_environment: the variables of each server that change its speed: see
            speed_variables.
        trained_on: the images and the model: dataset_hash, train_samples, validation_samples,
            classes, class_names, image_size, initial_weights, model_hash, bad_images.
    """
    config = job.config
    world = job.world
    launched = read_launched()
    launch = structs.asdict(launched) if launched else {}
    pairs = launch.pop("network", None)
    return {
        "hvdtrain": version("hvdtrain"),
        **{name: getattr(config, name) for name in GIVEN_OPTIONS},
        **{name: short(getattr(config, name)) for name in ("model", "dataset")},
        **batch_norm_and_dropout(model),
        "options": mode_options(config),
        "workers": world.workers,
        "servers": world.servers,
        "processes": world.size,
        "threads_per_worker": job.threads,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "trained_parameters": sum(parameter.numel() for parameter in trained(model)),
        "width": config.effective_width,
        **trained_on,
        "global_batch": config.batch_size,
        "schedule": schedule(config, config.total_steps(trained_on["train_samples"])),
        **_effective_options(job),
        "respawns": bool(os.environ.get(RESPAWNS)),
        "elastic": world.elastic,
        "trace": config.trace_steps if config.trace else "none",
        # At the end of training, results.py fills in the clocks of --trace and, by worker, how many
        # times as long it took to compute.
        "clocks": {},
        "slow": {"asked": config.slow, "achieved": {}},
        "device": job.device.type,
        "share_gpu": config.share_gpu and job.device.type == "cuda",
        "backend": backend,
        "interface": use_one_interface(world),
        "starter": world.starter,
        "launch": launch or None,
        "network": {"pairs": pairs} if pairs else None,
        "command": command(job, launched),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": versions(),
        "environment": (DEFAULTS if "horovod" in backend else {}) | speed_variables(),
        "server_environment": list(server_environment),
        "hardware": hardware() | {"gpus": gpus(), "hosts": list(hosts)},
        "hosts": hosts,
    }


def _effective_options(job: Job) -> dict[str, Any]:
    """Returns the options that the mode and the number of workers decide if they are not given."""
    config = job.config
    workers = job.world.workers
    options = modes.declared(config.mode).options
    push_scale = "mean" if job.world.servers else ""
    if "push_scale" in options:
        push_scale = config.effective_push_scale
    # With scale `mean`, an asynchronous push takes a step of 1/workers of the learning rate.
    lr = config.lr
    if "push_scale" in options and push_scale == "mean" and not config.local_steps:
        lr = config.lr / workers
    outer = config.effective_outer(workers) if config.local_steps else None
    bound = config.staleness if "staleness" in options else None
    look_ahead = 0.0
    if "look_ahead" in options:
        look_ahead = config.effective_look_ahead(workers, bound)
    used = with_used_buckets(config, workers)
    return {
        "effective_lr": lr,
        "push_scale": push_scale,
        "outer_lr": outer.lr if outer else None,
        "outer_momentum": outer.momentum if outer else None,
        "look_ahead": look_ahead,
        "shares": choice(config, "shares"),
        "wait_for": job.wait_for,
        "staleness_bound": bound,
        "bucket_mb": used.bucket_mb if "bucket_mb" in options else None,
    }


def command(job: Job, launched: Launched | None) -> list[str]:
    """Returns the command that starts a job like this one again."""
    world = job.world
    if launched:
        return job_command(job.config, world.workers, launched, job.folder)
    starters = {
        "alone": [],
        "mpirun": ["mpirun", "--oversubscribe", "--bind-to", "none", "-np", str(world.size)],
        "horovodrun": ["horovodrun", "-np", str(world.size)],
        "torchrun": ["torchrun", "--nproc-per-node", str(world.local_size), "--module"],
    }
    starter = starters.get(world.starter, [world.starter])
    return [*starter, "hvdtrain", *sys.argv[1:]]


# What a manifest keeps of each start of the run.
PART = (
    "mode",
    "workers",
    "servers",
    "threads_per_worker",
    "device",
    "backend",
    "interface",
    "started",
)


def part(facts: dict[str, Any], after_step: int) -> dict[str, Any]:
    """Returns the entry of this start of the run in the manifest's `parts`.

    Args:
        facts: the manifest.
        after_step: the step of the snapshot that this start goes on from, or 0.
    """
    kept = {name: facts[name] for name in PART}
    ranks_by_host = {name: host["ranks"] for name, host in facts["hosts"].items()}
    return {"after_step": after_step, **kept, "hosts": ranks_by_host}
