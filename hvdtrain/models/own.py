"""Models of a user's function, and models of timm by name.

They are tried before anything depends on them. A model that cannot be trained here as its user
would expect is refused, in a line that names the parameter.
"""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parameter import is_lazy

from hvdtrain.base.errors import UsageError
from hvdtrain.base.numerics.flat import trained
from hvdtrain.base.system import own_code
from hvdtrain.base.system.own_code import TIMM, described, told

# Arguments that a function may take beside the number of classes, with usual values.
_SIZES = {"image_size": 224, "channels": 3}
# What to do about a parameter without a gradient.
WITHOUT_GRADIENT = (
    "where a layer is left out in some steps (LayerDrop, mixture of experts), add its output times "
    "0, `x + 0 * layer(x)`; freeze what is never used (requires_grad_(False))"
)
# Types of buffers that can be hashed for the manifest, and sent by every mode.
BUFFERS = {
    torch.float32,
    torch.float64,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.int8,
    torch.bool,
}


def make_own(name: str, classes: int, inputs: torch.Tensor) -> nn.Module:
    """Makes the model that `--model` names, on the CPU, and tries it.

    Args:
        name: The value of `--model`.
        classes: The number of classes.
        inputs: Two samples as in a batch, [2, …].

    Raises:
        UsageError: This is no model, or it cannot be trained here. The message names the parameter.
    """
    build = _builder(name)
    sizes = _sizes(build, inputs, name)
    with told("--model", name, "failed to build"):
        model = _call(build, classes, **sizes)
    if not isinstance(model, nn.Module):
        raise UsageError(f"--model {name} returned {_kind(model)}, and not an nn.Module")
    if any(isinstance(part, torch.jit.ScriptModule) for part in model.modules()):
        raise UsageError(
            f"--model {name} is compiled by torch.jit, which hides its layers: "
            "return it as it was before"
        )
    if any(is_lazy(p) for p in model.parameters()):
        model.eval()
        with told("--model", name, "failed in forward"):
            model(inputs)
    _check_tensors(name, model)
    return tried(name, model, inputs, classes)


def tried(name: str, model: nn.Module, inputs: torch.Tensor, classes: int) -> nn.Module:
    """Runs forward and backward with these inputs, and returns the model, unchanged.

    Raises:
        UsageError: Forward or backward fails, or a parameter cannot be trained.
    """
    with _unchanged(model):
        _try(name, model, inputs, classes)
    return model.train()


@functools.cache
def count_parameters(name: str) -> int:
    """Returns how many weights the model has; 0 if it cannot be built on the meta device."""
    try:
        build = _builder(name)
        sizes = {key: _SIZES[key] for key in _accepted_sizes(build)}
        with torch.device("meta"):
            model = _call(build, 1000, **sizes)
            return sum(p.numel() for p in model.parameters() if not is_lazy(p))
    except Exception:
        # A user's code may fail in any way where tensors have no values. If something is really
        # wrong, ranks report it.
        return 0


def code_hash(name: str) -> str | None:
    """Returns the hash of a model's code, for the manifest; None for models of a family here."""
    if name.startswith(TIMM):
        import timm

        return f"timm {timm.__version__}"
    return own_code.code_hash(name)


def batch_norm_and_dropout(model: nn.Module) -> dict[str, bool]:
    """Returns whether the model has batch norm, and whether it has dropout.

    With batch norm results depend on the number of workers, with dropout on chance.
    """
    layers = list(model.modules())
    return {
        "batch_norm": any(isinstance(layer, _BatchNorm) for layer in layers),
        "dropout_layers": any(isinstance(layer, _DropoutNd) and layer.p > 0 for layer in layers),
    }


def why_not_trained(model: nn.Module, inputs: torch.Tensor) -> str:
    """Returns why forward in training fails on this batch, in a line; empty if it does not.

    The model stays as it is.
    """
    with _unchanged(model), torch.no_grad():
        model.train()
        try:
            scores = model(inputs)
        except Exception as error:  # a user's code may raise any
            return described(error)
    if scores.ndim != 2 or len(scores) != len(inputs):
        return f"it returns {_kind(scores)} for one of shape {list(inputs.shape)}"
    return ""


def read_early(model: nn.Module, inputs: torch.Tensor) -> str:
    """Returns a parameter that is read before the forward of the layer that owns it, or empty.

    To wait for a layer's weights when its forward begins is too late then. nn.MultiheadAttention's
    `out_proj` is such a parameter.

    Args:
        model: The model.
        inputs: Two samples as in a batch, [2, …].
    """

    def are_read_early(parameters: list[nn.Parameter]) -> bool:
        """Sets parameters to NaN until their layers begin; returns whether scores have a NaN."""
        kept = {p: p.detach().clone() for p in parameters}
        restore = partial(_restore, kept)
        hooks = [module.register_forward_pre_hook(restore) for module in model.modules()]
        try:
            for p in parameters:
                p.data.fill_(torch.nan)
            return bool(model(inputs).isnan().any())
        finally:
            for hook in hooks:
                hook.remove()
            for p, values in kept.items():
                p.data.copy_(values)

    with _unchanged(model), torch.no_grad():
        model.train()
        if not are_read_early(trained(model)):
            return ""
        for name, p in model.named_parameters():
            if p.requires_grad and are_read_early([p]):
                return name
        return "a parameter"


def _restore(kept: dict[nn.Parameter, torch.Tensor], module: nn.Module, inputs: Any) -> None:
    """Restores the values of a module's parameters, as a hook before forward."""
    for p in module.parameters(recurse=False):
        if p in kept:
            p.data.copy_(kept[p])


@contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """Restores torch's random numbers and the model's buffers and mode after the block."""
    was_training = model.training
    before = {key: value.clone() for key, value in model.named_buffers()}
    with torch.random.fork_rng(devices=[]):
        yield
    model.train(was_training)
    for key, buffer in model.named_buffers():
        if key in before:
            buffer.copy_(before[key])


def _builder(name: str) -> Callable[..., Any]:
    return _timm(name) if name.startswith(TIMM) else own_code.load(name, "--model")


def _timm(name: str) -> Callable[..., nn.Module]:
    """Returns a function that makes a model of timm. Raises UsageError if there is none."""
    try:
        import timm
    except ImportError:
        raise UsageError(
            f"--model {name} needs timm, which is not installed: `uv pip install timm`"
        ) from None
    known = name.removeprefix(TIMM)
    if known not in timm.list_models():
        similar = ", ".join(timm.list_models(f"*{known}*")[:5])
        hint = f"; it has {similar}" if similar else ""
        raise UsageError(f"--model {name}: timm {timm.__version__} has no such model{hint}")

    def build(classes: int, channels: int) -> nn.Module:
        return timm.create_model(known, num_classes=classes, in_chans=channels)

    return build


def _sizes(build: Callable[..., Any], inputs: torch.Tensor, name: str) -> dict[str, int]:
    """Returns the arguments that the function takes beside the number of classes."""
    accepted = _accepted_sizes(build)
    if accepted and inputs.ndim != 4:
        raise UsageError(
            f"--model {name} takes {accepted[0]}: samples of shape {list(inputs.shape[1:])} are no "
            "images"
        )
    return {key: inputs.shape[-1] if key == "image_size" else inputs.shape[1] for key in accepted}


def _call(build: Callable[..., Any], classes: int, **sizes: int) -> Any:
    """Calls a function with the number of classes, and with sizes by name.

    The number of classes goes to the parameter `num_classes` or `classes`, else to the first
    parameter. If the first has a default and others are passed on, as in torchvision's resnet18, it
    goes as `num_classes`.
    """
    by_name = _parameters(build)
    for name in ("num_classes", "classes"):
        if name in by_name:
            return build(**{name: classes}, **sizes)
    parameters = list(by_name.values())
    passes_on = any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters)
    if passes_on and parameters[0].default is not parameters[0].empty:
        return build(num_classes=classes, **sizes)
    return build(classes, **sizes)


def _accepted_sizes(build: Callable[..., Any]) -> list[str]:
    """Returns which of _SIZES the function takes, by name."""
    return [key for key in _SIZES if key in _parameters(build)]


def _parameters(build: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Returns a function's parameters by name; none of a function that is not written in Python."""
    try:
        return inspect.signature(build).parameters
    except ValueError:
        return {}


def _check_tensors(name: str, model: nn.Module) -> None:
    """Checks that all parameters and buffers can be sent, averaged and saved.

    Raises:
        UsageError: One of them cannot, or there are no parameters to train.
    """
    to_train = {key: p for key, p in model.named_parameters() if p.requires_grad}
    if not to_train:
        raise UsageError(f"--model {name} has no parameters to train")
    for key, p in model.named_parameters():
        _check_parameter(f"--model {name}: parameter {key}", p)
    name_at: dict[int, str] = {}  # by address in memory
    for key, p in to_train.items():
        first = name_at.setdefault(p.untyped_storage().data_ptr(), key)
        if first != key and p.numel():
            raise UsageError(
                f"--model {name}: parameters {first} and {key} share memory and are two: "
                "make them one nn.Parameter"
            )
    for key, buffer in model.named_buffers():
        if buffer.dtype not in BUFFERS:
            raise UsageError(
                f"--model {name}: buffer {key} is {_words(buffer.dtype)}: make it float32 or int64"
            )


def _check_parameter(what: str, parameter: nn.Parameter) -> None:
    """Raises UsageError unless a parameter is float32 on the CPU, and dense."""
    if parameter.device.type != "cpu":
        raise UsageError(f"{what} is on {parameter.device}: build it on the CPU")
    if parameter.dtype != torch.float32:
        raise UsageError(
            f"{what} is {_words(parameter.dtype)}: weights are float32 here, and --precision bf16 "
            "computes in 16 bits"
        )
    if parameter.layout != torch.strided:
        raise UsageError(f"{what} is {_words(parameter.layout)}, and not a dense tensor")


def _try(name: str, model: nn.Module, inputs: torch.Tensor, classes: int) -> None:
    """Runs forward in evaluation and in training, and backward. Raises UsageError if one fails."""
    scores = inputs
    for training in (False, True):
        model.train(training)
        with told("--model", name, f"failed in forward of a batch of shape {list(inputs.shape)}"):
            scores = model(inputs)
        when = "in training" if training else "in evaluation"
        if not isinstance(scores, torch.Tensor) or scores.shape != (len(inputs), classes):
            raise UsageError(
                f"--model {name} returns {_kind(scores)} {when}: return scores, a tensor of shape "
                f"[batch, {classes}]"
            )
    to_train = {key: p for key, p in model.named_parameters() if p.requires_grad}
    with told("--model", name, "failed in backward"):
        total = scores.float().sum()
        gradients = torch.autograd.grad(total, list(to_train.values()), allow_unused=True)
    for key, gradient in zip(to_train, gradients, strict=True):
        if gradient is None:
            raise UsageError(
                f"--model {name}: parameter {key} has no part in the scores, and rings and "
                f"servers need a gradient of all that is trained at every step: {WITHOUT_GRADIENT}"
            )
        if gradient.layout != torch.strided:
            raise UsageError(
                f"--model {name}: parameter {key} has sparse gradients: use sparse=False"
            )


def _kind(value: Any) -> str:
    """Describes a value for a message, such as `a tensor of shape [2, 10]`."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)}"
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}"


def _words(value: object) -> str:
    """Returns `bfloat16` for torch.bfloat16."""
    return str(value).removeprefix("torch.")
