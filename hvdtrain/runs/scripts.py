"""What `--script` takes: which options are the script's own business, and which cannot be had."""

import hashlib
import shlex
from collections.abc import Iterator
from pathlib import Path

from hvdtrain.base.config.run_config import RunConfig, flag
from hvdtrain.base.errors import UsageError

# Options of our own loop. A script has its own model, data, optimizer and length.
_OF_OUR_LOOP = (
    "dataset",
    "skip_bad",
    "label",
    "validation",
    "image_size",
    "model",
    "width",
    "dropout",
    "augment",
    "pretrained",
    "freeze",
    "batch_size",
    "per_worker",
    "lr_scaling",
    "accumulate",
    "epochs",
    "optimizer",
    "lr",
    "lr_around",
    "lr_trainings",
    "looked_for",
    "schedule",
    "step_epochs",
    "step_factor",
    "warmup",
    "momentum",
    "nesterov",
    "weight_decay",
    "shuffle_block",
    "keep_snapshots",
    "log_every",
)
# Options that a script cannot have, by their value, with the reason.
_REFUSED = {
    "compile": "call torch.compile in the script, before prepare",
    "record": "servers cannot replay what a script computes",
    "backup": "a script takes every step itself, and leaves none out",
}
# Options that are hidden in `run --help`: no value other than the default is for a script.
NOT_FOR_SCRIPTS = (*_OF_OUR_LOOP, *_REFUSED, "wait_for", "shares", "snapshot_every")


def check_script(config: RunConfig) -> None:
    """Checks that there is a script to run.

    Raises:
        UsageError: there is none.
    """
    if not Path(config.script).is_file():
        raise UsageError(f"there is no script {config.script}")


def hash_of_script(config: RunConfig) -> str:
    """Returns `sha256:` and 64 hex digits of the script's file."""
    return f"sha256:{hashlib.sha256(Path(config.script).read_bytes()).hexdigest()}"


def script_problems(config: RunConfig) -> Iterator[str]:
    """Yields a line for each option that is not for a script, or lacks one."""
    if not config.script:
        if config.script_args:
            yield "--script-args are for --script: give that too"
        if config.target_loss:
            yield "--target-loss is for --script: our own loop has --target-accuracy"
        return
    if Path(config.script).suffix != ".py":
        yield f"the script {config.script} is no Python file: give FILE.py"
    try:
        shlex.split(config.script_args)
    except ValueError as error:
        yield f"--script-args {config.script_args}: {error}"
    if config.target_loss and config.target_accuracy != RunConfig.target_accuracy:
        yield "--target-accuracy and --target-loss exclude each other: give what the script reports"
    yield from _refused_options(config)


def _refused_options(config: RunConfig) -> Iterator[str]:
    for name in _OF_OUR_LOOP:
        if getattr(config, name) != getattr(RunConfig, name):
            yield f"{flag(name)} does nothing with --script: the script decides that"
    for name, reason in _REFUSED.items():
        if getattr(config, name):
            yield f"{flag(name)} is not for --script: {reason}"
    if config.precision == "bf16":
        yield "--precision bf16 is not for --script: use torch.autocast in the script"
    if config.wait_for == "layer":
        yield "--wait-for layer is not for --script, which may read any weight after a step"
    if config.shares not in ("auto", "equal"):
        yield f"--shares {config.shares} is not for --script, which has its own samples"
    if config.snapshot_every not in ("epoch", "never"):
        yield (
            f"--snapshot-every {config.snapshot_every} is not for --script: call job.save in the "
            "script"
        )
    if config.save == "best":
        yield "--save best is not for --script: call job.save in the script"
