"""The configuration of a job as one frozen value.

It knows which of its fields contradict each other. Whether there is such a mode, model or codec is
checked in runs/request.py.
"""

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import click

from hvdtrain.base.config.option_types import (
    DURATION,
    NumberOfThreads,
    ServerNumber,
    SnapshotEvery,
    WordOr,
    option,
)
from hvdtrain.base.config.untrusted import LARGEST_NUMBER, control_character, is_utf8
from hvdtrain.base.config.writing import write_whole
from hvdtrain.base.errors import UsageError

DEVICES = ["auto", "cpu", "cuda"]
SAVES = ["none", "best", "final", "all"]
DEFAULT_EPOCHS = 10
# What a schedule in words has before the steps in which the learning rate rises.
WARM_UP = ", warm-up over "
# The default model's width, with which it trains in a minute.
DEFAULT_WIDTH = 0.125
# Options that do nothing without --local-steps.
OF_LOCAL_STEPS = ("fragments", "outer", "outer_lr", "outer_momentum")
# Options for the length of training, which exclude each other.
LENGTHS = {"epochs", "steps", "time_budget", "sprint"}

# Values of --wire with which new ranks can join a running job. torch's rpc asks all members that it
# ever had, and a killed member does not answer.
OPEN_WIRES = ("zmq",)
WIRES = ("rpc", *OPEN_WIRES)


class OuterSettings(NamedTuple):
    """What the outer optimizer of --local-steps steps with: η and β."""

    lr: float
    momentum: float


@dataclass(frozen=True)
class RunConfig:
    """Everything that decides what a job computes. Equal configurations train on equal samples.

    The number of workers is not here: the starter decides it, and the same global batch is cut
    accordingly.
    """

    mode: str = option(
        "single", "The mode of training, such as allreduce; see `hvdtrain modes`.", str
    )
    servers: int = option(
        0,
        "Parameter servers: the first S ranks serve, the rest work. `equal`: half of the ranks.",
        ServerNumber(),
        ("--num-servers", "-s"),
    )
    dataset: str = option(
        "digits",
        "A data set's name, a folder with train/ and val/ (or TrainData/ and ValidationData/), "
        "Parquet files in a folder or at a URL, or your own FILE.py:FUNCTION that returns data "
        "sets of (tensor, label); `synthetic`, or --synthetic alone, is noise that costs nothing "
        "to read.",
        str,
    )
    skip_bad: bool = option(
        False,
        "Leave damaged images out: all images are checked before training, once on each host.",
        bool,
    )
    label: str = option(
        "",
        "Parquet files: the column of classes. Needed unless it is called `label` or is the only "
        "one with ClassLabels.",
        str,
    )
    validation: float = option(
        0.0,
        "Parquet files: the share of each class's training images to validate on, where there is "
        "no validation part.",
        WordOr("none", 0.0, click.FloatRange(0, 0.9, True)),
    )
    image_size: int = option(
        0,
        "Side of the images in pixels; VGGs need at least 32. `auto`: the median of the images' "
        "shorter sides, but at least 32 and at most 224.",
        WordOr("auto", 0, click.IntRange(0)),
    )
    model: str = option(
        "vggf",
        "One of {model}. FILE.py:FUNCTION, or MODULE:FUNCTION such as torchvision.models:resnet18, "
        "names a function that takes the number of classes and returns an nn.Module. timm:NAME is "
        "a model of timm.",
        str,
    )
    width: float = option(
        0.0,
        f"Scales channels and head; `auto` is {DEFAULT_WIDTH} for vggf, and 1, as published, for "
        "others.",
        WordOr("auto", 0.0, click.FloatRange(0, 4, True)),
    )
    dropout: float = option(
        0.0, "Dropout in the head (the VGG paper has 0.5).", click.FloatRange(0, 1, False, True)
    )
    augment: str = option(
        "none", "Random changes to training images: {augment}; see `hvdtrain data show`.", str
    )
    pretrained: str = option(
        "",
        "`imagenet` (VGG) or a file of weights; what does not fit is named.",
        WordOr("none", "", click.STRING),
    )
    freeze: str = option(
        "none",
        "`features` trains the head alone, on features that stay fixed.",
        click.Choice(["none", "features"]),
    )
    batch_size: int = option(
        32, "Global batch: the samples of one step, over all workers.", click.IntRange(1), ("-b",)
    )
    per_worker: bool = option(
        False,
        "--batch-size is each worker's, as in MXNet's dist_sync and torch's DDP, not the global "
        "batch.",
        bool,
    )
    accumulate: int = option(
        1,
        "Passes in which a worker computes its part of a batch, one after the other: less memory.",
        click.IntRange(1),
    )
    precision: str = option(
        "fp32",
        "`bf16` computes layers in 16 bits; weights, gradients and optimizer stay float32. "
        "`tf32`, on GPUs, rounds what is multiplied to 11 bits. A script calls torch.autocast instead "
        "of `bf16`.",
        click.Choice(["fp32", "tf32", "bf16"]),
    )
    compile: bool = option(
        False,
        "Compile the model first, a minute or more, for faster steps. The next forward then waits "
        "for all weights: --wait-for layer has no effect.",
        bool,
    )
    epochs: int = option(
        0,
        f"Passes over the training data; `auto` is {DEFAULT_EPOCHS} where neither steps nor time "
        "are given.",
        WordOr("auto", 0, click.IntRange(1)),
    )
    steps: int = option(
        0,
        "Stop after this many steps, instead of --epochs.",
        WordOr("none", 0, click.IntRange(1)),
    )
    time_budget: float = option(
        0.0,
        "Stop after this much training time, instead of --epochs: 90s, 30m, 2h.",
        WordOr("none", 0.0, DURATION),
    )
    sprint: float = option(
        0.0,
        "Measure speed alone: warm up, train for so long (for example 4s), and save nothing.",
        WordOr("none", 0.0, DURATION),
    )
    optimizer: str = option("adam", "One of {optimizer}.", str)
    lr: float = option(
        3e-4, "Learning rate for the global batch.", click.FloatRange(0, min_open=True)
    )
    lr_around: float = option(
        0.0,
        "Set by `compare` if it has searched for --lr: the rate at which the search began. Runs with "
        "different learning rates are compared only if all of them were found by a search.",
        WordOr("none", 0.0, click.FloatRange(0, min_open=True)),
    )
    lr_trainings: int = option(
        0, "Set by `compare`: how many trainings the search for --lr had.", click.IntRange(0)
    )
    looked_for: str = option(
        "",
        "Set by `compare`: the other options that it has searched for together with --lr.",
        WordOr("none", "", click.STRING),
    )
    lr_scaling: str = option(
        "none",
        "With --per-worker: --lr is for one worker. For N workers it is multiplied by N (`linear`) "
        "or √N (`sqrt`).",
        click.Choice(["none", "sqrt", "linear"]),
    )
    schedule: str = option(
        "auto",
        "The learning rate is `constant`; falls as a `cosine` to nearly 0 at the last step (with "
        "--time-budget it is constant); or is multiplied by --step-factor at each `step`, every "
        "--step-epochs. `auto` is cosine over epochs; with --steps it rises over the first 50 "
        "steps and then stays constant, so that --resume may add steps.",
        click.Choice(["auto", "cosine", "constant", "step"]),
    )
    step_epochs: int = option(
        30, "For --schedule step: epochs between its steps.", click.IntRange(1)
    )
    step_factor: float = option(
        0.1,
        "For --schedule step: what the learning rate is multiplied by.",
        click.FloatRange(0, 1, True),
    )
    warmup: int = option(
        0,
        "Steps in which the learning rate rises evenly to the schedule's value.",
        click.IntRange(0),
    )
    momentum: float = option(0.9, "Momentum of sgd.", click.FloatRange(0, 1, False, True))
    nesterov: bool = option(False, "Nesterov's momentum for sgd.", bool)
    weight_decay: float = option(0.0, "Weight decay.", click.FloatRange(0))
    push_scale: str = option(
        "softsync",
        "In ps-async and ps-ssp with N workers, how a push counts: `softsync`: the mean of N "
        "pushes, of any workers, is one step; `mean`: each push is a step, with 1/N of the learning "
        "rate; `none`: each push is a step with the whole learning rate, as in MXNet. With --local-steps "
        "`softsync` is `mean`.",
        click.Choice(["softsync", "mean", "none"]),
    )
    look_ahead: float = option(
        1.0,
        "In ps-async and ps-ssp with softsync: servers send the weights as they would be after this "
        "many more steps like the last one, because a gradient is applied some steps later. 0: as "
        "they are.",
        click.FloatRange(0, 4),
    )
    staleness: int = option(
        2,
        "In ps-ssp: how many steps a worker may be ahead of the slowest before it waits.",
        click.IntRange(0),
    )
    delay_compensation: float = option(
        0.0,
        "In ps-async and ps-ssp: λ of DC-ASGD, 0.04 in its paper; 0 is off. Servers keep a copy "
        "of the weights for each worker.",
        click.FloatRange(0),
    )
    staleness_lr: bool = option(
        False,
        "With --push-scale none: divide the learning rate of a push by its staleness, about N - 1.",
        bool,
    )
    backup: int = option(
        0,
        "In ps-sync: the number of backup workers, B. A step does not wait for its last B pushes, "
        "and drops them.",
        click.IntRange(0),
    )
    shares: str = option(
        "auto",
        "How a global batch is shared out: `equal`, the same to each worker; `measured`, in modes "
        "whose workers take each step together (lockstep): in proportion to each worker's speed, "
        "measured about every second, which helps if a worker is always slower; `leased`, in "
        "ps-async and ps-ssp: a worker takes its next share when it is ready. `auto` is leased where "
        "that is possible, else equal.",
        click.Choice(["auto", "equal", "measured", "leased"]),
    )
    wait_for: str = option(
        "auto",
        "When the next forward waits for new weights. `layer`: each layer waits only for its own "
        "weights, and the weights of later layers arrive while it computes. `step`: the forward "
        "begins when all weights are there. `auto` is layer with servers, step in a ring.",
        click.Choice(["auto", "layer", "step"]),
    )
    local_steps: int = option(
        0,
        "Each worker takes this many steps with an inner optimizer between two exchanges. Then it "
        "sends the difference of the weights, Δ, which an outer optimizer takes as a gradient "
        "(local SGD, DiLoCo). --batch-size is the global batch of one step.",
        WordOr("none", 0, click.IntRange(0, 10**6)),
    )
    fragments: int = option(
        1,
        "With --local-steps H in lockstep: the weights are cut into F fragments. One is "
        "exchanged every H/F steps, while workers take another step (Streaming DiLoCo). As many "
        "bytes are sent in all, but fewer at once.",
        click.IntRange(1, 10**4),
    )
    outer: str = option(
        "nesterov",
        "With --local-steps: the outer optimizer, one of {outer}. v ← βv + Δ, then with `nesterov` "
        "θ ← θ - η(Δ + βv), with `sgd` θ ← θ - ηv.",
        str,
    )
    outer_lr: float = option(
        0.0,
        "With --local-steps: the outer learning rate η. `auto` is 1, and 0.7 where β is 0.5 or "
        "more.",
        WordOr("auto", 0.0, click.FloatRange(0, 10, True)),
    )
    outer_momentum: float = option(
        -1.0,
        "With --local-steps: the outer momentum β. `auto` is 0 below 4 workers, 0.2 below 8, 0.5 "
        "below 16, then 0.6. The first step of nesterov is (1 + β)ηΔ: another β needs another η.",
        WordOr("auto", -1.0, click.FloatRange(0, 1, False, True)),
    )
    compression: str = option(
        "none",
        "How gradients are sent: {compression}. allreduce takes `none` or `fp16`, ddp `none` or "
        "`powersgd`, sharded only `none`, servers all but `powersgd`. With fewer than 16 bits, the "
        "part of a push that is lost is added to the next push.",
        str,
    )
    wire: str = option(
        "rpc",
        "What carries gradients and weights: torch's `rpc`, or ZeroMQ, `zmq`, which unpickles "
        "nothing, and encrypts all with the key that `hvdtrain launch` makes.",
        click.Choice(WIRES),
    )
    ring_transport: str = option(
        "auto",
        "What carries Horovod's tensors on CPUs, in allreduce and sharded: `mpi` (if mpirun started "
        "the ranks) or `gloo` (with mpirun only on one machine). `auto` is mpi where that "
        "is possible.",
        click.Choice(["auto", "gloo", "mpi"]),
    )
    bucket_mb: float = option(
        4.0,
        "MiB (2^20 bytes) of weights in a bucket. A bucket is one message to or from a server; in a "
        "ring it is averaged as one (ddp has torch's own buckets). Buckets for servers have at most "
        "16 MiB divided by the number of workers. This limit is never below 0.5 MiB.",
        click.FloatRange(0, 32, True),
    )
    record: bool = option(
        False, "Servers write down which push was applied when, for `hvdtrain replay`.", bool
    )
    seed: int = option(0, "Decides initial weights and sample order.", click.IntRange(0, 2**32 - 1))
    shuffle_block: int = option(
        0,
        "Shuffles in blocks of this many samples, so that few row groups are read at a time. "
        "`hvdtrain data pack` prints the number. `none`: all samples are shuffled.",
        WordOr("none", 0, click.IntRange(0, 2**31 - 1)),
    )
    repeat: int = option(
        1,
        "Which repeat of a measurement this is: a report takes means over them.",
        click.IntRange(1, 10**6),
    )
    threads: int = option(
        0,
        "Threads a worker computes with; `auto` shares the host's cores, `-1` leaves one core of each "
        "worker's share free, for messages or a server.",
        WordOr("auto", 0, NumberOfThreads()),
    )
    slow: str = option(
        "none",
        "Make workers slower than they are, by sleeping in proportion to what they compute: "
        "`1:4x`, worker 1 computes four times as long; `all:4x`, every worker; `1:4x@20s-40s` or "
        "`@step200-400`, for a while; `random:6x:p=0.1`, any worker at any step; "
        "`jitter:lognormal:0.2`. Join several with +.",
        str,
    )
    device: str = option(
        "auto",
        "`cuda`: one GPU for each worker of a host. `auto`: `cuda` where there are GPUs.",
        click.Choice(DEVICES),
    )
    share_gpu: bool = option(
        False,
        "Workers may share a GPU, to try things out: gradients go through CPU memory, and not "
        "NCCL.",
        bool,
    )
    deterministic: bool = option(False, "Use only algorithms that repeat bit for bit.", bool)
    target_accuracy: float = option(
        0.95,
        "Validation accuracy to reach: the time until then is reported.",
        click.FloatRange(0, 1),
    )
    target_loss: float = option(
        0.0,
        "With --script, in place of an accuracy: the loss to reach, as the script reports it; the "
        "time until then is reported.",
        WordOr("none", 0.0, click.FloatRange(0, min_open=True)),
    )
    stop_at_target: bool = option(
        False,
        "Stop after the first evaluation that reaches --target-accuracy; with --script, after the "
        "first job.report that does.",
        bool,
    )
    save: str = option(
        "all",
        "Models to keep: the `best` by validation loss (not of a script), the `final` one, `all`, or "
        "`none`.",
        click.Choice(SAVES),
    )
    snapshot_every: str = option(
        "epoch",
        "When to save a snapshot for --resume: after each `epoch`, `never`, or at an interval such "
        "as `10m` (a number alone is in seconds). A SIGTERM saves one too.",
        SnapshotEvery(),
    )
    keep_snapshots: int = option(2, "How many of the latest snapshots are kept.", click.IntRange(1))
    trace: bool = option(
        False, "Write a timeline of every rank to trace.pftrace, which the Perfetto UI opens.", bool
    )
    trace_steps: str = option(
        "all", "With --trace: the first and the last step to write down, as 100-150.", str
    )
    log_every: int = option(
        0,
        "Also print samples/s and accuracy every N steps.",
        WordOr("never", 0, click.IntRange(0)),
    )
    timeout: float = option(
        300.0, "A rank is lost when it has been silent for this long.", DURATION
    )
    script: str = option(
        "",
        "Your own training script in place of our loop: FILE.py, which calls hvdtrain.init and "
        "prepare. Arguments after -- go to the script.",
        WordOr("none", "", click.STRING),
    )
    script_args: str = option(
        "",
        "Arguments of the script, split as by a shell.",
        WordOr("none", "", click.STRING),
    )

    def check_values(self) -> None:
        """Checks fields for values that no job can use, or that contradict each other.

        Raises:
            UsageError: there are such values.
        """
        for field in dataclasses.fields(self):
            _check_value(flag(field.name), getattr(self, field.name))
        problem = next(self._contradictions(), "")
        if problem:
            raise UsageError(problem)

    def _contradictions(self) -> Iterator[str]:
        default = RunConfig
        if sum(bool(getattr(self, name)) for name in LENGTHS) > 1:
            yield "--epochs, --steps, --time-budget and --sprint exclude each other: give one"
        if self.lr_scaling != "none" and not self.per_worker:
            yield "--lr-scaling is for --per-worker: without it, workers share one batch"
        if self.record:
            yield from self._record_contradictions()
        if self.share_gpu and self.device == "cpu":
            yield "--share-gpu does nothing with --device cpu"
        steps = (self.step_epochs, self.step_factor)
        if self.schedule != "step" and steps != (default.step_epochs, default.step_factor):
            yield "--step-epochs and --step-factor are for --schedule step"
        if self.nesterov and not (self.optimizer == "sgd" and self.momentum):
            yield "--nesterov is for --optimizer sgd with --momentum above 0"
        yield from self._local_steps_contradictions()
        if self.bucket_mb < 2**-4:
            yield (
                f"--bucket-mb {self.bucket_mb} is less than 64 KiB, 0.0625: "
                "messages would be too many"
            )

    def _record_contradictions(self) -> Iterator[str]:
        if self.snapshot_every not in ("epoch", "never"):
            yield (
                "--record needs --snapshot-every epoch or never: at other snapshots all workers "
                "read new weights, which replay cannot repeat"
            )
        if self.compile or self.share_gpu:
            yield "--record is not for --compile or --share-gpu: replay has none of it"
        if not self.sprint and not self.saves("final"):
            yield (
                f"--record does not go with --save {self.save}: "
                "replay compares with the final weights"
            )
        if self.sprint:
            yield (
                "--record is not for --sprint, which keeps no weights that replay could compare "
                "with"
            )

    def _local_steps_contradictions(self) -> Iterator[str]:
        default = RunConfig
        outer = (self.outer, self.outer_lr, self.outer_momentum)
        default_outer = (default.outer, default.outer_lr, default.outer_momentum)
        if not self.local_steps and outer != default_outer:
            yield "--outer, --outer-lr and --outer-momentum are for --local-steps"
        is_multiple = self.local_steps % self.fragments == 0
        if not is_multiple or self.fragments > max(1, self.local_steps):
            nearest = self.fragments * max(1, round(self.local_steps / self.fragments))
            yield (
                f"--fragments {self.fragments} is for --local-steps that are a multiple of it, "
                f"as {nearest}"
            )
        if not self.local_steps:
            return
        if self.wait_for == "layer":
            yield "--local-steps waits for all weights at a round's end: drop --wait-for layer"
        if self.shares == "measured":
            yield (
                "--shares measured is not for --local-steps: an inner optimizer such as Adam "
                "forgets how many samples a step had"
            )
        if self.backup:
            yield "--backup is not for --local-steps: H steps of a worker would be dropped"
        if self.delay_compensation:
            yield "--delay-compensation is not for --local-steps: it corrects single gradients"

    def for_workers(self, workers: int) -> "RunConfig":
        """Returns the configuration with a plain global batch and its learning rate.

        With --per-worker, N workers take N batches at once. With linear scaling a step moves as far
        as N steps did (Goyal et al., 2017, arXiv:1706.02677, section 2.1). With the root, the noise
        of gradients stays the same (Krizhevsky, 2014, arXiv:1404.5997, section 5).
        """
        if not self.per_worker:
            return self
        factors = {"none": 1.0, "sqrt": workers**0.5, "linear": float(workers)}
        return dataclasses.replace(
            self,
            batch_size=self.batch_size * workers,
            lr=self.lr * factors[self.lr_scaling],
            per_worker=False,
            lr_scaling="none",
        )

    def saves(self, model: str) -> bool:
        """Returns whether the `best` or the `final` model is saved."""
        return not self.sprint and self.save in (model, "all")

    @property
    def falls_as_cosine(self) -> bool:
        """Whether the learning rate falls as a cosine if the number of steps is known."""
        return self.schedule == "cosine" or (self.schedule == "auto" and not self.steps)

    @property
    def warm_up_steps(self) -> int:
        """The number of steps in which the learning rate rises evenly from 0."""
        if self.warmup:
            return self.warmup
        return 50 if self.schedule == "auto" and self.steps else 0

    @property
    def can_look_ahead(self) -> bool:
        """Whether servers may send weights ahead of their time.

        They may if pushes are averaged, and there is no other remedy for staleness.
        """
        return self.effective_push_scale == "softsync" and not self.delay_compensation

    @property
    def effective_push_scale(self) -> str:
        """The push scale, which is `mean` for softsync with --local-steps.

        Each Δ is applied as it comes. If servers waited for N of them, workers would compute
        another Δ from the same weights.
        """
        if self.local_steps and self.push_scale == "softsync":
            return "mean"
        return self.push_scale

    def effective_look_ahead(self, workers: int, staleness: int | None) -> float:
        """Returns how many steps ahead servers send weights; 0 if no gradient can be stale.

        Args:
            staleness: how many steps a worker may be ahead of the slowest; None for any number.
        """
        can_be_stale = workers > 1 and staleness != 0
        return self.look_ahead if self.can_look_ahead and can_be_stale else 0.0

    def effective_outer(self, workers: int) -> OuterSettings:
        """Returns the settings of the outer optimizer, by default as published for so many workers.

        β is the best of SlowMo (Wang et al., 2020, arXiv:1910.00643) by workers, with η = 1 as
        there. From β = 0.5 on η is 0.7, as in DiLoCo (Douillard et al., 2023, arXiv:2311.08105)
        and, with this β, MuLoCo (arXiv:2505.23725).
        """
        momentum = self.outer_momentum
        if momentum < 0:
            momentum = _published_momentum(workers)
        lr = self.outer_lr or (1.0 if momentum < 0.5 else 0.7)
        return OuterSettings(lr, momentum)

    @property
    def effective_width(self) -> float:
        """The model's width. The default depends on the model; a script has none."""
        if self.script:
            return 0.0
        return self.width or (DEFAULT_WIDTH if self.model == RunConfig.model else 1.0)

    def threads_of(self, cores: float) -> int:
        """Returns the threads that a worker computes with.

        Args:
            cores: the worker's share of its host's cores.
        """
        if self.threads > 0:
            return self.threads
        left_free = -self.threads
        return max(1, int(cores) - left_free)

    @property
    def snapshot_s(self) -> float:
        """The seconds of training between snapshots; 0 if time does not decide."""
        if self.sprint or self.snapshot_every in ("epoch", "never"):
            return 0.0
        return DURATION.convert(self.snapshot_every, None, None)

    @property
    def bucket_elements(self) -> int:
        """The largest number of float32 weights that travel as one message."""
        return int(self.bucket_mb * 2**20 / 4)

    @property
    def target_of(self) -> str:
        """What is to reach the target: `accuracy` or `loss`."""
        return "loss" if self.target_loss else "accuracy"

    def reaches_target(self, accuracy: float | None, loss: float | None) -> bool:
        """Returns whether an evaluation reaches the target."""
        if self.target_loss:
            return loss is not None and loss <= self.target_loss
        return accuracy is not None and accuracy >= self.target_accuracy

    def total_steps(self, samples: int) -> int | None:
        """Returns how many steps training takes; None if time decides.

        Args:
            samples: the size of the training set.
        """
        if self.time_budget or self.sprint:
            return None
        if self.steps:
            return self.steps
        steps_per_epoch = -(-samples // self.batch_size)
        return (self.epochs or DEFAULT_EPOCHS) * steps_per_epoch

    def to_args(self, whole: bool = False) -> list[str]:
        """Returns the command-line options that give this configuration.

        Args:
            whole: include options at their defaults too, except for lengths, which exclude each
                other.
        """
        args: list[str] = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            option = flag(field.name)
            if isinstance(value, bool):
                if value:
                    args.append(option)
                elif whole:
                    args.append(f"--no-{option[2:]}")
            elif value != field.default or (whole and field.name not in LENGTHS):
                args += [option, str(in_words(field, value))]
        return args

    def write(self, path: Path, **also: Any) -> None:
        """Writes the configuration as TOML.

        Args:
            also: further values that the file is to have.
        """
        import tomli_w

        values = {
            field.name: in_words(field, getattr(self, field.name))
            for field in dataclasses.fields(self)
        }
        write_whole(path, tomli_w.dumps(values | also))


def _published_momentum(workers: int) -> float:
    for most_workers, momentum in ((3, 0.0), (7, 0.2), (15, 0.5)):
        if workers <= most_workers:
            return momentum
    return 0.6


def _check_value(option: str, value: Any) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise UsageError(f"{option} {value} is not a finite number")
    if isinstance(value, int | float) and value >= LARGEST_NUMBER:
        raise UsageError(f"{option} {value} is too large: give a number below {LARGEST_NUMBER:g}")
    if not isinstance(value, str):
        return
    if not is_utf8(value):  # no TOML or JSON can hold it
        raise UsageError(f"{option} {value!a} is not valid UTF-8: rename it")
    if control_character(value):
        raise UsageError(f"{option} {value!a} has a control character: rename it")


def in_words(field: dataclasses.Field, value: Any) -> Any:
    """Returns a field's value as a person writes it, as `auto` for the value that means it."""
    kind = field.metadata["type"]
    if isinstance(kind, WordOr) and value == kind.meaning:
        return kind.word
    return value


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")
