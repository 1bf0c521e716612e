"""What a job is asked to do: one frozen value, from the command line or a TOML file and back."""

import dataclasses
import math
import re
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from hvdtrain import compression, modes, recipes
from hvdtrain.data import augment
from hvdtrain.errors import UsageError, unknown

MODELS = [f"vgg{depth}{norm}" for depth in (11, 13, 16, 19) for norm in ("", "_bn")] + ["vggf"]
OPTIMIZERS = ["sgd", "adam", "adamw"]
DEVICES = ["auto", "cpu", "cuda"]
DEFAULT_EPOCHS = 15
LENGTHS = {"epochs", "steps", "time_budget"}  # how long to train: they exclude each other
LONGEST_S = 1e9  # 30 years: what every timer below us can count


class Duration(click.ParamType):
    """`90s`, `30m`, `2h` or a number of seconds, as seconds."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if value == 0:  # a default: no limit
            return 0.0
        match = re.fullmatch(r"(\d+(?:\.\d+)?(?:e[+-]?\d+)?)\s*([smh]?)", str(value).strip())
        seconds = float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]] if match else 0.0
        if not 0 < seconds <= LONGEST_S:
            self.fail(f"'{value}' is not a duration such as 90s, 30m or 2h", param, ctx)
        return seconds


class Numbers(click.ParamType):
    """`1,2,4` as a list of whole numbers of at least 1."""

    name = "numbers"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[int]:
        if isinstance(value, list):
            return value
        try:
            numbers = [int(word) for word in value.split(",")]
        except ValueError:
            numbers = [0]
        if min(numbers) < 1:
            self.fail(f"'{value}' is not a list of whole numbers such as 1,2,4", param, ctx)
        return list(dict.fromkeys(numbers))


class Names(click.ParamType):
    """`single,ddp` as a list of different words."""

    name = "names"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[str]:
        words = value if isinstance(value, list) else value.split(",")
        return list(dict.fromkeys(word.strip() for word in words))


def option(default: Any, help: str, type: Any = None, flags: tuple[str, ...] = ()) -> Any:
    """A field of RunConfig that is also a command-line option."""
    return field(default=default, metadata={"help": help, "type": type, "flags": flags})


@dataclass(frozen=True)
class RunConfig:
    """Everything that decides what a job computes. Equal configurations train on equal samples.

    The number of workers is not here: the starter decides it, and the same global batch is cut accordingly.
    """

    mode: str = option("single", "How workers are kept in step; see `hvdtrain modes`.", str)
    servers: int = option(0, "Parameter servers: the first S ranks serve, the rest work.", click.IntRange(0), ("-s",))
    dataset: str = option(
        "digits", "A data set's name, a folder with TrainData/ and ValidationData/, or the URL of packed shards.", str
    )
    image_size: int = option(
        0, "Side in pixels, at least 32; 0 takes the first image's, at most 224.", click.IntRange(0)
    )
    model: str = option("vggf", f"One of {', '.join(MODELS)}.", str)
    width: float = option(0.125, "Scales channels and head; 1 is the published model.", click.FloatRange(0, 4, True))
    dropout: float = option(0.0, "Dropout in the head (the VGG paper has 0.5).", click.FloatRange(0, 1, False, True))
    augment: str = option(
        "none", "Random changes to training images: none, flip, shift-flip or crop-flip; see `hvdtrain data show`.",
        click.Choice(augment.KINDS),
    )  # fmt: skip
    pretrained: str = option("", "`imagenet`, or a file of weights; what does not fit is skipped and named.", str)
    batch_size: int = option(32, "Global batch: the samples of one step, over all workers.", click.IntRange(1), ("-b",))
    epochs: int = option(0, f"Passes over the training data  [default: {DEFAULT_EPOCHS}].", click.IntRange(0))
    steps: int = option(0, "Stop after so many steps instead.", click.IntRange(0))
    time_budget: float = option(0.0, "Stop after so much training time instead: 90s, 30m, 2h.", Duration())
    optimizer: str = option("adam", f"One of {', '.join(OPTIMIZERS)}.", str)
    lr: float = option(3e-4, "Learning rate for the global batch.", click.FloatRange(0, min_open=True))
    schedule: str = option(
        "cosine",
        "How the learning rate goes on: `constant`, or `cosine` down to nearly 0 at the last step. "
        "With --time-budget nobody knows the last step, and it is constant.",
        click.Choice(["cosine", "constant"]),
    )
    warmup: int = option(0, "Steps in which the learning rate rises evenly to what it is then.", click.IntRange(0))
    momentum: float = option(0.9, "Momentum of sgd.", click.FloatRange(0, 1, False, True))
    nesterov: bool = option(False, "Nesterov's momentum for sgd.", bool)
    weight_decay: float = option(0.0, "Weight decay.", click.FloatRange(0))
    push_scale: str = option(
        "mean",
        "In ps-async and ps-ssp: `mean` lets each push count 1/N, so that N pushes move as far as one averaged step; "
        "`none` lets it count whole, as MXNet does.",
        click.Choice(["mean", "none"]),
    )
    staleness: int = option(
        2, "In ps-ssp: how many steps a worker may be ahead of the slowest before it waits.", click.IntRange(0)
    )
    delay_compensation: float = option(
        0.0, "In ps-async and ps-ssp: λ of DC-ASGD, 0.04 in its paper; 0 is off. Servers keep a copy of the weights "
        "for each worker.", click.FloatRange(0),
    )  # fmt: skip
    staleness_lr: bool = option(
        False, "In ps-async and ps-ssp: divide the learning rate of a push by its staleness.", bool
    )
    compression: str = option(
        "none", "How gradients are sent: none, fp16, bf16, int8, topk:SHARE or 2bit:THRESHOLD. In allreduce none or "
        "fp16. What int8, topk and 2bit leave out of a push goes into the next.", str,
    )  # fmt: skip
    bucket_mb: float = option(
        4.0, "MiB of weights that travel as one message to or from a server.", click.FloatRange(0, 32, True)
    )
    record: bool = option(False, "Servers write down which push was applied when, for `hvdtrain replay`.", bool)
    seed: int = option(0, "Decides initial weights and sample order.", click.IntRange(0, 2**32 - 1))
    repeat: int = option(
        1, "Which repeat of a measurement this is: a report takes medians over them.", click.IntRange(1, 10**6)
    )
    threads: int = option(0, "Threads a worker computes with; 0 shares the host's cores.", click.IntRange(0, 1024))
    device: str = option("auto", "auto, cpu or cuda: a rank takes the GPU of its local rank.", str)
    deterministic: bool = option(False, "Use only algorithms that repeat to the bit.", bool)
    target_accuracy: float = option(0.95, "Validation accuracy whose time is reported.", click.FloatRange(0, 1))
    timeout: float = option(300.0, "Give up when another rank has been silent for so long.", Duration())

    def check(self) -> "RunConfig":
        """This configuration, if it can be run at all.

        Raises:
            UsageError: an unknown name (the valid ones are listed) or values that contradict each other.
        """
        for what, value, valid in [
            ("mode", self.mode, modes.names()),
            ("model", self.model, MODELS),
            ("optimizer", self.optimizer, OPTIMIZERS),
            ("device", self.device, DEVICES),
        ]:
            if value not in valid:
                raise unknown(what, value, valid)
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if isinstance(value, float) and not math.isfinite(value):
                raise UsageError(f"{_flag(f.name)} {value} is not a finite number")
            # Undecodable bytes of a file name: no TOML or JSON can hold them.
            if isinstance(value, str) and any("\ud800" <= c <= "\udfff" for c in value):
                raise UsageError(f"{_flag(f.name)} {value!a} is not valid UTF-8: rename it")
        if sum(bool(getattr(self, name)) for name in LENGTHS) > 1:
            raise UsageError("--epochs, --steps and --time-budget exclude each other: give one")
        if self.nesterov and not (self.optimizer == "sgd" and self.momentum):
            raise UsageError("--nesterov is for --optimizer sgd with --momentum above 0")
        for name in self._idle():
            users = ", ".join(mode for mode in modes.names() if _USED_IN[name](mode))
            raise UsageError(f"{_flag(name)} does nothing in --mode {self.mode}: it is for {users}")
        if self.bucket_mb < 2**-4:
            raise UsageError(f"--bucket-mb {self.bucket_mb} is less than 64 KiB, 0.0625: messages would be too many")
        compression.check(self.compression, self.mode)
        if 0 < self.image_size < 32:
            raise UsageError(f"--image-size {self.image_size} is too small: a VGG halves it five times, so at least 32")
        if modes.has_servers(self.mode) and not self.servers:
            raise UsageError(f"--mode {self.mode} needs a server: add --servers 1 and one more rank")
        if self.servers and not modes.has_servers(self.mode):
            raise UsageError(f"--mode {self.mode} has no servers: drop --servers, or choose a ps- mode")
        return self

    def check_workers(self, workers: int) -> None:
        """UsageError where so many workers cannot run this: each needs a sample of every global batch."""
        if self.mode == "single" and workers != 1:
            raise UsageError(f"--mode single is one process, but {workers} were started")
        if self.batch_size < workers:
            raise UsageError(f"a global batch of {self.batch_size} leaves {workers} workers without a sample each")

    def for_mode(self, mode: str, servers: int) -> "RunConfig":
        """The same for another mode, as far as that has a use for it; `servers` if it has any."""
        other = dataclasses.replace(self, mode=mode, servers=servers if modes.has_servers(mode) else 0)
        idle: dict[str, Any] = {name: getattr(RunConfig, name) for name in other._idle()}
        return dataclasses.replace(other, **idle)

    def _idle(self) -> list[str]:
        """Options that were set, and that the mode has no use for."""
        return [
            name
            for name, is_used in _USED_IN.items()
            if getattr(self, name) != getattr(RunConfig, name) and not is_used(self.mode)
        ]

    @property
    def bucket_elements(self) -> int:
        """Weights, float32, that travel as one message at most."""
        return int(self.bucket_mb * 2**20 / 4)

    def check_length(self, samples: int) -> None:
        """UsageError where training on so many samples would be over before the warm-up is."""
        total = self.total_steps(samples)
        if total is not None and self.warmup >= total:
            raise UsageError(f"--warmup {self.warmup} is not over before training is, which has {total} steps")

    def total_steps(self, samples: int) -> int | None:
        """How many steps training on so many samples takes, or None where a time budget decides."""
        if self.time_budget:
            return None
        return self.steps or (self.epochs or DEFAULT_EPOCHS) * -(-samples // self.batch_size)

    def absolute(self) -> "RunConfig":
        """The same with absolute paths, so that it means the same from any folder."""

        def whole(path: str) -> str:
            return str(Path(path).expanduser().absolute())

        from hvdtrain.data.find import is_url

        known = self.dataset in recipes.names("datasets") or is_url(self.dataset)
        return dataclasses.replace(
            self, dataset=self.dataset if known else whole(self.dataset),
            pretrained=self.pretrained if self.pretrained in ("", "imagenet") else whole(self.pretrained),
        )  # fmt: skip

    def to_args(self) -> list[str]:
        """The command-line options that give this configuration; what equals its default is left out."""
        args: list[str] = []
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if value != f.default:
                args += [_flag(f.name)] if value is True else [_flag(f.name), str(value)]
        return args

    def save(self, path: Path, **also: Any) -> None:
        """Write the configuration, and what else is to be remembered with it, as TOML."""
        import tomli_w

        path.write_text(tomli_w.dumps(dataclasses.asdict(self) | also), encoding="utf-8")


# In which modes an option does something; those not named here do something in all.
_USED_IN: dict[str, Callable[[str], bool]] = {
    "push_scale": modes.survives, "delay_compensation": modes.survives, "staleness_lr": modes.survives,
    "staleness": lambda mode: mode == "ps-ssp", "bucket_mb": modes.has_servers, "record": modes.has_servers,
}  # fmt: skip


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def read_config(path: Path) -> dict[str, Any]:
    """The options in a config.toml, by field name.

    Raises:
        UsageError: the file cannot be read, or names an option that there is not, or a value that the command line
            would refuse too.
    """
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise UsageError(f"cannot read the configuration {path}: it is nested too deeply") from None
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, not TOML, a number of too many digits
        raise UsageError(f"cannot read the configuration {path}: {error}") from None
    known = {f.name: f for f in dataclasses.fields(RunConfig)}
    read = {}
    for name, value in values.items():
        if name in ("workers", "job"):  # remembered for the reader; the starter decides them
            continue
        if name not in known:
            raise unknown("option in the configuration", name, list(known))
        expected = type(known[name].default)
        if type(value) is not expected and not (expected is float and type(value) is int):
            raise UsageError(f"{path}: {name} = {value!r} should be of type {expected.__name__}")
        try:
            read[name] = expected(value)
            kind = known[name].metadata["type"]
            if isinstance(kind, click.ParamType) and read[name] != known[name].default:
                kind.convert(str(read[name]), None, None)
        except (click.BadParameter, OverflowError) as error:
            raise UsageError(f"{path}: {name}: {error}") from None
    return read


def run_config(run: Path) -> RunConfig:
    """What a run folder's job was asked to do. UsageError where it is no run folder, or cannot be run like this."""
    if not (run / "config.toml").is_file():
        raise UsageError(f"{run} is not a run folder: it has no config.toml")
    return RunConfig(**read_config(run / "config.toml")).check()


def config_options(*without: str, **defaults: Any) -> Callable[[Callable], Callable]:
    """Decorator: the options of RunConfig as click options, but for some, and some with other defaults."""

    def decorate(command: Callable) -> Callable:
        for f in reversed(dataclasses.fields(RunConfig)):
            if f.name in without:
                continue
            default = defaults.get(f.name, f.default)
            kind = f.metadata["type"]
            command = click.option(
                _flag(f.name), *f.metadata["flags"], f.name, default=default, help=f.metadata["help"],
                is_flag=kind is bool, type=None if kind is bool else kind,
                show_default=default not in (0, 0.0, "", False),
            )(command)  # fmt: skip
        return command

    return decorate
