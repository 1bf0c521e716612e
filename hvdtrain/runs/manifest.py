"""Everything needed to repeat a run, and to tell whether two runs may be compared."""

import hashlib
import os
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

from msgspec import structs
from torch import nn

from hvdtrain import modes
from hvdtrain.coordination.job import Job
from hvdtrain.models.own import batch_norm_and_dropout
from hvdtrain.numerics.flat import trained
from hvdtrain.numerics.optimizers import schedule
from hvdtrain.runs.launched import Launched, job_command, read_launched
from hvdtrain.runs.request import choice, mode_options
from hvdtrain.system.own_code import short
from hvdtrain.wire.horovod import DEFAULTS
from hvdtrain.world.host import gpus, hardware, speed_variables, versions
from hvdtrain.world.network import use_one_interface
from hvdtrain.world.place import RESPAWNS


def weights_hash(model: nn.Module) -> str:
    """blake2b over every tensor of the model, in order, as 32 hexadecimal digits."""
    digest = hashlib.blake2b(digest_size=16)
    for tensor in model.state_dict().values():
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def by_host(ranks: Mapping[int, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """What is known of each host, by its name: its ranks, and what these say, the first of them first."""
    hosts: dict[str, dict[str, Any]] = {}
    for rank in sorted(ranks):
        host = hosts.setdefault(ranks[rank]["host"], {"ranks": []})
        host["ranks"].append(rank)
        for name, value in ranks[rank].items():
            host.setdefault(name, value)
    return {name: {field: value for field, value in hosts[name].items() if field != "host"} for name in sorted(hosts)}


# Options that the manifest has as they are.
AS_ASKED = (
    "mode", "model", "dropout", "augment", "pretrained", "freeze", "precision", "compile", "accumulate", "dataset",
    "optimizer", "lr", "momentum", "weight_decay", "nesterov", "backup", "delay_compensation", "staleness_lr",
    "local_steps", "fragments", "outer", "compression", "seed", "shuffle_block", "repeat", "deterministic", "record",
    "stop_at_target", "sprint",
)  # fmt: skip


def manifest(
    job: Job, backend: str, model: nn.Module, hosts: dict[str, dict[str, Any]],
    server_environment: Sequence[dict[str, str]], seen: dict[str, Any],
) -> dict[str, Any]:  # fmt: skip
    """The manifest of a run whose workers all hold the initial weights.

    Args:
        backend: what carries the gradients.
        hosts: see by_host.
        server_environment: of each server, see speed_variables.
        seen: what else identifies the job: dataset_hash, train_samples, validation_samples, classes, image_size,
            initial_weights, model_hash, bad_images.
    """
    config, world = job.config, job.world
    launched = read_launched()
    launch = structs.asdict(launched) if launched else {}
    pairs = launch.pop("network", None)
    return {
        "hvdtrain": version("hvdtrain"),
        **{name: getattr(config, name) for name in AS_ASKED},
        **{name: short(getattr(config, name)) for name in ("model", "dataset")},
        **batch_norm_and_dropout(model),
        "options": mode_options(config),
        "workers": world.workers,
        "servers": world.servers,
        "processes": world.size,
        "threads_per_worker": job.threads,
        "parameters": sum(p.numel() for p in model.parameters()),
        "trained_parameters": sum(p.numel() for p in trained(model)),
        "width": config.taken_width,
        **seen,
        "global_batch": config.batch_size,
        "schedule": schedule(config, config.total_steps(seen["train_samples"])),
        **_options_taken(job),
        "respawns": bool(os.environ.get(RESPAWNS)),
        "elastic": world.elastic,
        "trace": config.trace_steps if config.trace else "none",
        "clocks": {},  # of --trace, at the end
        "slow": {"asked": config.slow, "achieved": {}},  # by worker, at the end: how many times as long it computed
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


def _options_taken(job: Job) -> dict[str, Any]:
    """Options whose value the mode and the number of workers decide, where they were left open."""
    config, world, options = job.config, job.world, modes.declared(job.config.mode).options
    push_scale = config.taken_push_scale if "push_scale" in options else "mean" if world.servers else ""
    bound = config.staleness if "staleness" in options else None
    outer_lr, outer_momentum = config.taken_outer(world.workers) if config.local_steps else (None, None)
    is_step = "push_scale" in options and push_scale == "mean" and not config.local_steps  # each push is a step
    return {
        "effective_lr": config.lr / world.workers if is_step else config.lr,
        "push_scale": push_scale,
        "outer_lr": outer_lr,
        "outer_momentum": outer_momentum,
        "look_ahead": config.taken_look_ahead(world.workers, bound) if "look_ahead" in options else 0.0,
        "shares": choice(config, "shares"),
        "wait_for": job.wait_for,
        "staleness_bound": bound,
        "bucket_mb": config.bucket_mb if "bucket_mb" in options else None,
    }


def command(job: Job, launched: Launched | None) -> list[str]:
    """What starts a job like this one again."""
    world = job.world
    if launched:
        return job_command(job.config, world.workers, launched, job.folder)
    starter = {
        "alone": [],
        "mpirun": ["mpirun", "--oversubscribe", "--bind-to", "none", "-np", str(world.size)],
        "horovodrun": ["horovodrun", "-np", str(world.size)],
        "torchrun": ["torchrun", "--nproc-per-node", str(world.local_size), "--module"],
    }.get(world.starter, [world.starter])
    return [*starter, "hvdtrain", *sys.argv[1:]]


# Of the manifest, what each start of a run is remembered by.
PART = ("mode", "workers", "servers", "threads_per_worker", "device", "backend", "interface", "started")


def part(facts: dict[str, Any], after_step: int) -> dict[str, Any]:
    """What the manifest says of this start of the run; `ranks` are those of each host."""
    ranks = {name: host["ranks"] for name, host in facts["hosts"].items()}
    return {"after_step": after_step, **{name: facts[name] for name in PART}, "hosts": ranks}
