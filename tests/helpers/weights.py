"""Comparing what jobs have trained, but for what rounding leaves: it is another on another
processor.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

from hvdtrain import models
from hvdtrain.data.find import find_dataset
from hvdtrain.job.training.model import initial_model, trial_inputs
from hvdtrain.runs.request import read_run_config
from hvdtrain.tools.checks.agreement import TOLERANCE, distance, flat
from hvdtrain.tools.checks.smooth import WIDTH, without_kinks

# Options of a job whose weights are compared: it has a model without kinks, and a learning rate
# with which it gets far.
SMOOTH, SMOOTH_CNN, SMOOTH_BATCH_NORM = (
    ["--model", model, "--width", "auto", "--schedule", "constant"]
    for model in (
        "hvdtrain.tools.checks.smooth:vgg",
        "helpers.weights:cnn",
        "helpers.weights:batch_norm",
    )
)


def cnn(classes: int) -> nn.Module:
    return without_kinks(models.make("cnn", classes, 1 / 4))


def batch_norm(classes: int) -> nn.Module:
    return without_kinks(models.make("vgg11_bn", classes, WIDTH))


def assert_same_weights(run: Path, other: Path) -> None:
    """Asserts that the jobs with these run folders came to the same weights, and to the same
    statistics where the model has any, but for what rounding leaves.
    """
    tensors, reference = (
        load_file(folder / "snapshots" / "final.safetensors") for folder in (run, other)
    )
    parameters, statistics = initial(other)
    for start in filter(None, (parameters, statistics)):
        assert_close(tensors, reference, start, optimizer_of(run))


def assert_same_weights_of_script(run: Path, other: Path) -> None:
    """Asserts the same of jobs of a script, of which the other was asked to be --deterministic:
    then it keeps what it began with.
    """
    tensors, reference, start = (
        load_file(folder / "snapshots" / f"{name}.safetensors")
        for folder, name in ((run, "final"), (other, "final"), (other, "initial"))
    )
    assert tensors.keys() == reference.keys() == start.keys()
    assert_close(tensors, reference, start, optimizer_of(run))


def optimizer_of(run: Path) -> str:
    return json.loads((run / "manifest.json").read_text())["optimizer"]


def assert_close(tensors, reference, start, optimizer: str) -> None:
    """Asserts that training moved what is in `start` to the same, in `tensors` and `reference`."""
    vectors = [as_vector(named, start) for named in (tensors, reference, start)]
    apart = distance(*vectors, optimizer)
    assert apart <= TOLERANCE, f"{apart:.1e} of the way trained, where {TOLERANCE:.0e} may be"


def initial(run: Path) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Returns the parameters and the statistics that the job began with, by name."""
    config = read_run_config(run)
    data = find_dataset(config.dataset)
    model = initial_model(config, len(data.classes), trial_inputs(config, data))
    statistics = {
        name: values for name, values in model.named_buffers() if values.is_floating_point()
    }
    return {name: p.detach() for name, p in model.named_parameters()}, statistics


def as_vector(tensors, names):
    return flat({name: tensors[name].numpy() for name in names}, names)
