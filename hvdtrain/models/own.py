"""Models that are not ours: a user's function, or timm's by its name. They are tried before anything depends on them.

What cannot be trained here as everybody would expect is refused in a line that names the parameter.
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

from hvdtrain.errors import UsageError
from hvdtrain.numerics.flat import trained
from hvdtrain.system import own_code
from hvdtrain.system.own_code import TIMM, told

# Of buffers: what the manifest's hash of weights and all that carries tensors can read.
_SIZES = {"image_size": 224, "channels": 3}  # what a function may take, and what is usual
BUFFERS = {torch.float32, torch.float64, torch.float16, torch.int64, torch.int32, torch.uint8, torch.int8, torch.bool}


def make_own(name: str, classes: int, inputs: torch.Tensor) -> nn.Module:
    """The model that `--model` names, on the CPU, tried: its weights are as its function has drawn them.

    Args:
        inputs: [2, …], as batches have them.

    Raises:
        UsageError: it is none, or cannot be trained here; the line names the parameter.
    """
    build = _builder(name)
    wanted = _wanted(build, inputs, name)
    with told("--model", name, "failed to build"):
        model = _call(build, classes, **wanted)
    if not isinstance(model, nn.Module):
        raise UsageError(f"--model {name} returned {_kind(model)}, and not an nn.Module")
    if any(isinstance(part, torch.jit.ScriptModule) for part in model.modules()):
        raise UsageError(f"--model {name} is compiled by torch.jit, which hides its layers: return it as it was before")
    if any(is_lazy(p) for p in model.parameters()):
        model.eval()
        with told("--model", name, "failed in forward"):
            model(inputs)
    _check_tensors(name, model)
    return tried(name, model, inputs, classes)


def tried(name: str, model: nn.Module, inputs: torch.Tensor, classes: int) -> nn.Module:
    """The model, once it has been forward and back with these inputs. UsageError where that is not as it should be."""
    with _unchanged(model):
        _try(name, model, inputs, classes)
    return model.train()


@functools.cache
def count_parameters(name: str) -> int:
    """How many weights the model has; 0 where it cannot be built without its data, or in no memory."""
    try:
        build = _builder(name)
        with torch.device("meta"):
            model = _call(build, 1000, **{key: size for key, size in _SIZES.items() if key in _asked(build)})
            return sum(p.numel() for p in model.parameters() if not is_lazy(p))
    except Exception:  # whatever a user's code does where tensors have no values; what is wrong ranks say
        return 0


def code_hash(name: str) -> str | None:
    """What says that two runs had the same model's code; None for ours."""
    if name.startswith(TIMM):
        import timm

        return f"timm {timm.__version__}"
    return own_code.code_hash(name)


def batch_norm_and_dropout(model: nn.Module) -> dict[str, bool]:
    """Which of the two the model has: with either its mathematics depends on the number of workers, or on chance."""
    layers = list(model.modules())
    return {
        "batch_norm": any(isinstance(layer, _BatchNorm) for layer in layers),
        "dropout_layers": any(isinstance(layer, _DropoutNd) and layer.p > 0 for layer in layers),
    }


def read_early(model: nn.Module, inputs: torch.Tensor) -> str:
    """A parameter that forward reads before the forward of the layer that has it, or empty: waiting for a layer's
    weights when its forward begins is then too late. nn.MultiheadAttention's `out_proj` is one.
    """

    def reads(parameters: list[nn.Parameter]) -> bool:
        """Whether forward still has a NaN from one of these, each of which is mended when its layer begins."""
        kept = {p: p.detach().clone() for p in parameters}
        hooks = [module.register_forward_pre_hook(partial(_mend, kept)) for module in model.modules()]
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
        if not reads(trained(model)):
            return ""
        return next((name for name, p in model.named_parameters() if p.requires_grad and reads([p])), "a parameter")


def _mend(kept: dict[nn.Parameter, torch.Tensor], module: nn.Module, inputs: Any) -> None:
    for p in module.parameters(recurse=False):
        if p in kept:
            p.data.copy_(kept[p])


@contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """Have torch's random numbers, and the model's statistics, as they were."""
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
    try:
        import timm
    except ImportError:
        raise UsageError(f"--model {name} needs timm, which is not installed: `uv pip install timm`") from None
    known = name.removeprefix(TIMM)
    if known not in timm.list_models():
        near = ", ".join(timm.list_models(f"*{known}*")[:5])
        raise UsageError(f"--model {name}: timm {timm.__version__} has no such model{near and f'; it has {near}'}")

    def build(classes: int, channels: int) -> nn.Module:
        return timm.create_model(known, num_classes=classes, in_chans=channels)

    return build


def _wanted(build: Callable[..., Any], inputs: torch.Tensor, name: str) -> dict[str, int]:
    """What the function takes beside the number of classes, with its values."""
    asked = _asked(build)
    if asked and inputs.ndim != 4:
        raise UsageError(f"--model {name} takes {asked[0]}: samples of shape {list(inputs.shape[1:])} are no images")
    return {key: inputs.shape[-1] if key == "image_size" else inputs.shape[1] for key in asked}


def _call(build: Callable[..., Any], classes: int, **sizes: int) -> Any:
    """Call the function with the number of classes: by its name, or where none of its parameters has one as the first;
    where that may be left out and others are passed on, as in torchvision's resnet18, as num_classes.
    """
    parameters = list(_parameters(build).values())
    for name in ("num_classes", "classes"):
        if name in _parameters(build):
            return build(**{name: classes}, **sizes)
    passes_on = any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters)
    if passes_on and parameters[0].default is not parameters[0].empty:
        return build(num_classes=classes, **sizes)
    return build(classes, **sizes)


def _asked(build: Callable[..., Any]) -> list[str]:
    """Which of _SIZES the function takes, by their names."""
    return [key for key in _SIZES if key in _parameters(build)]


def _parameters(build: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(build).parameters
    except ValueError:  # it is not written in Python
        return {}


def _check_tensors(name: str, model: nn.Module) -> None:
    """UsageError for parameters and buffers that cannot be sent, averaged and saved as they are."""
    named = {key: p for key, p in model.named_parameters() if p.requires_grad}
    if not named:
        raise UsageError(f"--model {name} has no parameters to train")
    for key, p in model.named_parameters():
        if p.device.type != "cpu":
            raise UsageError(f"--model {name}: parameter {key} is on {p.device}: build it on the CPU")
        if p.dtype != torch.float32:
            raise UsageError(
                f"--model {name}: parameter {key} is {_words(p.dtype)}: weights are float32 here, and "
                "--precision bf16 computes in 16 bits"
            )
        if p.layout != torch.strided:
            raise UsageError(f"--model {name}: parameter {key} is {_words(p.layout)}, and not a dense tensor")
    memory: dict[int, str] = {}
    for key, p in named.items():
        first = memory.setdefault(p.untyped_storage().data_ptr(), key)
        if first != key and p.numel():
            raise UsageError(
                f"--model {name}: parameters {first} and {key} share memory and are two: make them one nn.Parameter"
            )
    for key, buffer in model.named_buffers():
        if buffer.dtype not in BUFFERS:
            raise UsageError(f"--model {name}: buffer {key} is {_words(buffer.dtype)}: make it float32 or int64")


def _try(name: str, model: nn.Module, inputs: torch.Tensor, classes: int) -> None:
    """Go forward as a test does and as training does, and back."""
    scores = inputs
    for training in (False, True):
        model.train(training)
        with told("--model", name, f"failed in forward of a batch of shape {list(inputs.shape)}"):
            scores = model(inputs)
        when = "in training" if training else "in evaluation"
        if not isinstance(scores, torch.Tensor) or scores.shape != (len(inputs), classes):
            raise UsageError(
                f"--model {name} returns {_kind(scores)} {when}: return scores, a tensor of shape [batch, {classes}]"
            )
    named = {key: p for key, p in model.named_parameters() if p.requires_grad}
    with told("--model", name, "failed in backward"):
        gradients = torch.autograd.grad(scores.float().sum(), list(named.values()), allow_unused=True)
    for key, gradient in zip(named, gradients, strict=True):
        if gradient is None:
            raise UsageError(
                f"--model {name}: parameter {key} has no part in the scores: freeze it with requires_grad_(False), or "
                "leave it out"
            )
        if gradient.layout != torch.strided:
            raise UsageError(f"--model {name}: parameter {key} has sparse gradients: use sparse=False")


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)}"
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}"


def _words(value: object) -> str:
    """`bfloat16`, of torch.bfloat16."""
    return str(value).removeprefix("torch.")
