"""What a job is asked to do, as one frozen value. It knows its own fields and how they contradict each other; whether
there is such a mode, model or codec is asked in runs/request.py.
"""

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from hvdtrain.config.option_types import DURATION, ServerNumber, SnapshotEvery, WordOr, option
from hvdtrain.errors import UsageError

DEVICES = ["auto", "cpu", "cuda"]
SAVES = ["none", "best", "final", "all"]
DEFAULT_EPOCHS = 15
DEFAULT_WIDTH = 0.125  # of the default model, which is there to be trained in a minute
OF_LOCAL_STEPS = ("fragments", "outer", "outer_lr", "outer_momentum")  # they say nothing without --local-steps
LENGTHS = {"epochs", "steps", "time_budget", "sprint"}  # how long to train: they exclude each other

# Those of --wire that take new ranks while they are in use. torch's rpc asks all members that it has ever had, and one
# that was killed does not answer.
OPEN_WIRES = ("zmq",)
WIRES = ("rpc", *OPEN_WIRES)


@dataclass(frozen=True)
class RunConfig:
    """Everything that decides what a job computes. Equal configurations train on equal samples.

    The number of workers is not here: the starter decides it, and the same global batch is cut accordingly.
    """

    mode: str = option("single", "How workers are kept in step; see `hvdtrain modes`.", str)
    servers: int = option(
        0, "Parameter servers: the first S ranks serve, the rest work. `equal`: half of the ranks.", ServerNumber(),
        ("--num-servers", "-s"),
    )  # fmt: skip
    dataset: str = option(
        "digits", "A data set's name, a folder with train/ and val/ (or TrainData/ and ValidationData/), Parquet "
        "files in a folder or at a URL, or your own FILE.py:FUNCTION that returns data sets of (tensor, label); "
        "`synthetic`, or --synthetic alone, is noise that costs nothing to read.", str,
    )  # fmt: skip
    skip_bad: bool = option(
        False, "Leave damaged images of a folder out: all are looked at before training, once a host.", bool
    )
    image_size: int = option(
        0, "Side in pixels, of VGGs from 32; `auto`: as most images, 32 to 224.", WordOr("auto", 0, click.IntRange(0))
    )
    model: str = option(
        "vggf", "One of {model}: your own function of the number of classes that returns an nn.Module, or timm's.", str
    )
    width: float = option(
        0.0, f"Scales channels and head; `auto` is {DEFAULT_WIDTH} for vggf, and 1, as published, for others.",
        WordOr("auto", 0.0, click.FloatRange(0, 4, True)),
    )  # fmt: skip
    dropout: float = option(0.0, "Dropout in the head (the VGG paper has 0.5).", click.FloatRange(0, 1, False, True))
    augment: str = option("none", "Random changes to training images: {augment}; see `hvdtrain data show`.", str)
    pretrained: str = option(
        "", "`imagenet` (VGG) or a file of weights; what does not fit is named.", WordOr("none", "", click.STRING)
    )
    freeze: str = option(
        "none", "`features` trains the head alone, on features that stay fixed.", click.Choice(["none", "features"])
    )
    batch_size: int = option(32, "Global batch: the samples of one step, over all workers.", click.IntRange(1), ("-b",))
    per_worker: bool = option(
        False, "--batch-size is each worker's, as in MXNet's dist_sync and torch's DDP, not the global batch.", bool
    )
    accumulate: int = option(
        1, "Passes in which a worker computes its part of a batch, one after the other: less memory.", click.IntRange(1)
    )
    precision: str = option(
        "fp32", "`bf16` computes layers in 16 bits; weights, gradients and optimizer stay float32. `tf32`, on GPUs, "
        "rounds what is multiplied to 11 bits.", click.Choice(["fp32", "tf32", "bf16"]),
    )  # fmt: skip
    compile: bool = option(
        False, "Compile the model first, a minute or more, for faster steps. Servers wait for all of backward.", bool
    )
    epochs: int = option(
        0, f"Passes over the training data; `auto` is {DEFAULT_EPOCHS} where neither steps nor time are given.",
        WordOr("auto", 0, click.IntRange(1)),
    )  # fmt: skip
    steps: int = option(0, "Stop after so many steps instead.", WordOr("none", 0, click.IntRange(1)))
    time_budget: float = option(
        0.0, "Stop after so much training time instead: 90s, 30m, 2h.", WordOr("none", 0.0, DURATION)
    )
    sprint: float = option(
        0.0, "Measure speed alone: warm up, train for 4s, say, and save nothing.", WordOr("none", 0.0, DURATION)
    )
    optimizer: str = option("adam", "One of {optimizer}.", str)
    lr: float = option(3e-4, "Learning rate for the global batch.", click.FloatRange(0, min_open=True))
    lr_scaling: str = option(
        "none", "With --per-worker: --lr is for one worker, and is multiplied by N (`linear`) or √N (`sqrt`) for N.",
        click.Choice(["none", "sqrt", "linear"]),
    )  # fmt: skip
    schedule: str = option(
        "auto", "The learning rate is `constant`; falls as a `cosine` to nearly 0 at the last step (with --time-budget "
        "it is constant); or is multiplied by --step-factor at each `step`, every --step-epochs. `auto` is cosine over "
        "epochs; with --steps it rises over the first 50 and stays, so that --resume may add some.",
        click.Choice(["auto", "cosine", "constant", "step"]),
    )  # fmt: skip
    step_epochs: int = option(30, "For --schedule step: epochs between its steps.", click.IntRange(1))
    step_factor: float = option(
        0.1, "For --schedule step: what the learning rate is multiplied by.", click.FloatRange(0, 1, True)
    )
    warmup: int = option(0, "Steps in which the learning rate rises evenly to what it is then.", click.IntRange(0))
    momentum: float = option(0.9, "Momentum of sgd.", click.FloatRange(0, 1, False, True))
    nesterov: bool = option(False, "Nesterov's momentum for sgd.", bool)
    weight_decay: float = option(0.0, "Weight decay.", click.FloatRange(0))
    push_scale: str = option(
        "softsync", "In ps-async and ps-ssp: `softsync` makes a step of the mean of N pushes, whoever made them; "
        "`mean` of each push, with 1/N of the learning rate; `none` with all of it, as MXNet does. With "
        "--local-steps `softsync` is `mean`.",
        click.Choice(["softsync", "mean", "none"]),
    )  # fmt: skip
    look_ahead: float = option(
        1.0, "In ps-async and ps-ssp with softsync: workers are sent the weights as they will be after so many steps "
        "like the last one, when their gradients count; 0: as they are.", click.FloatRange(0, 4)
    )  # fmt: skip
    staleness: int = option(
        2, "In ps-ssp: how many steps a worker may be ahead of the slowest before it waits.", click.IntRange(0)
    )
    delay_compensation: float = option(
        0.0, "In ps-async and ps-ssp: λ of DC-ASGD, 0.04 in its paper; 0 is off. Servers keep a copy of the weights "
        "for each worker.", click.FloatRange(0),
    )  # fmt: skip
    staleness_lr: bool = option(
        False, "With --push-scale none: divide the learning rate of a push by its staleness, some N - 1.", bool
    )
    backup: int = option(
        0, "In ps-sync: backup workers, whose number of pushes a step does not wait for; those that come late are "
        "dropped.", click.IntRange(0),
    )  # fmt: skip
    shares: str = option(
        "auto", "How a global batch is shared out: `equal`, the same to each worker; `measured`, in lockstep: by how "
        "fast each computes, every second or so anew, for workers that stay slower than others; `leased`, in ps-async "
        "and ps-ssp: a worker takes its next share when it is ready. `auto` leases where it can, else is equal.",
        click.Choice(["auto", "equal", "measured", "leased"]),
    )  # fmt: skip
    wait_for: str = option(
        "auto", "What waits for the weights that a step makes: `layer`, in the next forward each layer for its own, so "
        "that the last of them travel while the first compute; `step`, the end of the step for all. `auto` is layer "
        "with servers, step in a ring.", click.Choice(["auto", "layer", "step"]),
    )  # fmt: skip
    local_steps: int = option(
        0, "Each worker takes so many steps with an optimizer of its own before it sends what they came to, Δ, which "
        "an outer optimizer takes as a gradient (local SGD, DiLoCo). --batch-size is that of a step of all workers.",
        WordOr("none", 0, click.IntRange(0, 10**6)),
    )  # fmt: skip
    fragments: int = option(
        1, "With --local-steps H in lockstep: the weights are cut into so many fragments, of which one is exchanged "
        "every H/F steps, while workers go on for a step (Streaming DiLoCo): as many bytes in all, a lower peak.",
        click.IntRange(1, 10**4),
    )  # fmt: skip
    outer: str = option(
        "nesterov", "With --local-steps, of the outer optimizer: v ← βv + Δ, then θ ← θ - η(Δ + βv); with `sgd` "
        "θ ← θ - ηv.", click.Choice(["nesterov", "sgd"]),
    )  # fmt: skip
    outer_lr: float = option(
        0.0, "With --local-steps: η. `auto` is 1, and 0.7 where β is 0.5 or more.",
        WordOr("auto", 0.0, click.FloatRange(0, 10, True)),
    )  # fmt: skip
    outer_momentum: float = option(
        -1.0, "With --local-steps: β. `auto` is 0 below 4 workers, 0.2 below 8, 0.5 below 16, then 0.6. The first step "
        "of nesterov is (1 + β)ηΔ: do not compare β at the same η.",
        WordOr("auto", -1.0, click.FloatRange(0, 1, False, True)),
    )  # fmt: skip
    compression: str = option(
        "none", "How gradients are sent: {compression}. In allreduce none or fp16, in ddp none or "
        "powersgd. What int8, topk, 2bit and powersgd leave "
        "out of a push goes into the next.", str,
    )  # fmt: skip
    wire: str = option(
        "rpc", "What carries gradients and weights: torch's `rpc`, or ZeroMQ, `zmq`, which unpickles nothing, and "
        "encrypts all with the key that `hvdtrain launch` makes.", click.Choice(WIRES),
    )  # fmt: skip
    ring_transport: str = option(
        "auto", "What carries Horovod's tensors on CPUs, in allreduce and sharded: `mpi`, where mpirun started the "
        "ranks, or `gloo`, elsewhere or on one machine. `auto` is mpi where it can.",
        click.Choice(["auto", "gloo", "mpi"]),
    )  # fmt: skip
    bucket_mb: float = option(
        4.0, "MiB of weights that travel as one message to or from a server.", click.FloatRange(0, 32, True)
    )
    record: bool = option(False, "Servers write down which push was applied when, for `hvdtrain replay`.", bool)
    seed: int = option(0, "Decides initial weights and sample order.", click.IntRange(0, 2**32 - 1))
    shuffle_block: int = option(
        0, "Samples that stay near each other in every epoch, so that few row groups are read at a time: `hvdtrain "
        "data pack` prints how many. `none`: all are shuffled.", WordOr("none", 0, click.IntRange(0, 2**31 - 1)),
    )  # fmt: skip
    repeat: int = option(
        1, "Which repeat of a measurement this is: a report takes means over them.", click.IntRange(1, 10**6)
    )
    threads: int = option(
        0, "Threads a worker computes with; `auto` shares the host's cores.", WordOr("auto", 0, click.IntRange(1, 1024))
    )
    slow: str = option(
        "none", "Make workers slower than they are, by sleeping in proportion to what they compute: `1:4x`, worker 1 "
        "computes four times as long; `all:4x`, every worker; `1:4x@20s-40s` or `@step200-400`, for a while; "
        "`random:6x:p=0.1`, any worker at any step; `jitter:lognormal:0.2`. Join several with +.", str,
    )  # fmt: skip
    device: str = option(
        "auto", "`cuda`: a GPU for each worker of a host; `auto`: that, where there are GPUs.", click.Choice(DEVICES)
    )
    share_gpu: bool = option(
        False, "Workers may share a GPU, to try things out: gradients go through CPU memory, and not NCCL.", bool
    )
    deterministic: bool = option(False, "Use only algorithms that repeat to the bit.", bool)
    target_accuracy: float = option(0.95, "Validation accuracy whose time is reported.", click.FloatRange(0, 1))
    stop_at_target: bool = option(False, "Stop after the first evaluation that reaches --target-accuracy.", bool)
    save: str = option(
        "all", "Models to keep: the `best` by validation loss, the `final` one, `all`, or `none`.", click.Choice(SAVES)
    )
    snapshot_every: str = option(
        "epoch", "When to save all that --resume needs, as SIGTERM does: `epoch`, `never` or 10m, say.", SnapshotEvery()
    )
    keep_snapshots: int = option(2, "How many of the latest snapshots are kept.", click.IntRange(1))
    trace: bool = option(False, "Write what every rank did when to trace.pftrace, which the Perfetto UI opens.", bool)
    trace_steps: str = option("all", "With --trace: the first and the last step to write down, as 100-150.", str)
    log_every: int = option(
        0, "Tell samples/s and accuracy every so many steps too.", WordOr("never", 0, click.IntRange(0))
    )
    timeout: float = option(300.0, "Give up when another rank has been silent for so long.", DURATION)

    def check_values(self) -> None:
        """UsageError where fields hold what no job can use, or contradict each other."""
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if isinstance(value, float) and not math.isfinite(value):
                raise UsageError(f"{flag(f.name)} {value} is not a finite number")
            # Undecodable bytes of a file name: no TOML or JSON can hold them.
            if isinstance(value, str) and any("\ud800" <= c <= "\udfff" for c in value):
                raise UsageError(f"{flag(f.name)} {value!a} is not valid UTF-8: rename it")
        default = RunConfig
        contradictions = {
            "--epochs, --steps, --time-budget and --sprint exclude each other: give one":
                sum(bool(getattr(self, name)) for name in LENGTHS) > 1,
            "--lr-scaling is for --per-worker: without it, workers share one batch":
                self.lr_scaling != "none" and not self.per_worker,
            "--record needs --snapshot-every epoch or never: a snapshot has all read new weights":
                self.record and self.snapshot_every not in ("epoch", "never"),
            "--record is not for --compile or --share-gpu: replay has none of it":
                self.record and (self.compile or self.share_gpu),
            f"--record does not go with --save {self.save}: replay compares with the final weights":
                self.record and not self.sprint and not self.saves("final"),
            "--record is not for --sprint, which keeps no weights that replay could compare with":
                self.record and bool(self.sprint),
            "--share-gpu does nothing with --device cpu": self.share_gpu and self.device == "cpu",
            "--step-epochs and --step-factor are for --schedule step": self.schedule != "step"
                and (self.step_epochs, self.step_factor) != (default.step_epochs, default.step_factor),
            "--nesterov is for --optimizer sgd with --momentum above 0":
                self.nesterov and not (self.optimizer == "sgd" and self.momentum),
            "--outer, --outer-lr and --outer-momentum are for --local-steps": not self.local_steps
                and (self.outer, self.outer_lr, self.outer_momentum)
                != (default.outer, default.outer_lr, default.outer_momentum),
            f"--fragments {self.fragments} is for --local-steps that are a multiple of it, as "
            f"{self.fragments * max(1, round(self.local_steps / self.fragments))}":
                bool(self.local_steps % self.fragments) or self.fragments > max(1, self.local_steps),
            "--local-steps waits for all weights at a round's end: drop --wait-for layer":
                bool(self.local_steps) and self.wait_for == "layer",
            "--shares measured is not for --local-steps: an inner optimizer such as Adam forgets how many samples a "
            "step had": bool(self.local_steps) and self.shares == "measured",
            "--backup is not for --local-steps: H steps of a worker would be dropped":
                bool(self.local_steps and self.backup),
            "--delay-compensation is not for --local-steps: it is of one gradient":
                bool(self.local_steps and self.delay_compensation),
            f"--bucket-mb {self.bucket_mb} is less than 64 KiB, 0.0625: messages would be too many":
                self.bucket_mb < 2**-4,
        }  # fmt: skip
        if problem := next((problem for problem, holds in contradictions.items() if holds), ""):
            raise UsageError(problem)

    def for_workers(self, workers: int) -> "RunConfig":
        """The same as a plain global batch and its learning rate.

        With --per-worker, N workers take N batches at once; scaled linearly, N steps move as far as one
        (Goyal et al., 2017, arXiv:1706.02677, section 2.1), and by the root, gradients' noise stays the same
        (Krizhevsky, 2014, arXiv:1404.5997, section 5).
        """
        if not self.per_worker:
            return self
        factors = {"none": 1.0, "sqrt": workers**0.5, "linear": float(workers)}
        batch_size, lr = self.batch_size * workers, self.lr * factors[self.lr_scaling]
        return dataclasses.replace(self, batch_size=batch_size, lr=lr, per_worker=False, lr_scaling="none")

    def saves(self, model: str) -> bool:
        """Whether the `best` or the `final` model is kept."""
        return not self.sprint and self.save in (model, "all")

    @property
    def falls_as_cosine(self) -> bool:
        """Whether the learning rate does where the number of steps is known; `auto` is decided."""
        return self.schedule == "cosine" or (self.schedule == "auto" and not self.steps)

    @property
    def warm_up_steps(self) -> int:
        """Steps in which the learning rate rises evenly from 0; `auto` is decided."""
        return self.warmup or (50 if self.schedule == "auto" and self.steps else 0)

    @property
    def can_look_ahead(self) -> bool:
        """Whether workers may be sent weights ahead: with pushes averaged, and no other remedy for staleness."""
        return self.taken_push_scale == "softsync" and not self.delay_compensation

    @property
    def taken_push_scale(self) -> str:
        """With --local-steps each Δ is taken as it comes: until N were there, workers would compute theirs twice."""
        return "mean" if self.local_steps and self.push_scale == "softsync" else self.push_scale

    def taken_look_ahead(self, workers: int, staleness: int | None) -> float:
        """How many steps ahead of the weights workers are sent them: none where no gradient comes behind.

        Args:
            staleness: how many steps a worker may be ahead; None: any number.
        """
        return self.look_ahead if self.can_look_ahead and workers > 1 and staleness != 0 else 0.0

    def taken_outer(self, workers: int) -> tuple[float, float]:
        """η and β of the outer optimizer for so many workers, where they are not given as published.

        β is the best of SlowMo (Wang et al., 2020, arXiv:1910.00643) by workers, with its η of 1. From β = 0.5 on η is
        0.7, as in DiLoCo (Douillard et al., 2023, arXiv:2311.08105) and, with this β, MuLoCo (arXiv:2505.23725).
        """
        momentum = self.outer_momentum
        if momentum < 0:
            momentum = next((beta for most, beta in ((3, 0.0), (7, 0.2), (15, 0.5)) if workers <= most), 0.6)
        return self.outer_lr or (1.0 if momentum < 0.5 else 0.7), momentum

    @property
    def taken_width(self) -> float:
        """The width that the model has: `auto` is decided."""
        return self.width or (DEFAULT_WIDTH if self.model == RunConfig.model else 1.0)

    @property
    def snapshot_s(self) -> float:
        """Seconds of training between snapshots, or 0 where time does not decide."""
        if self.sprint or self.snapshot_every in ("epoch", "never"):
            return 0.0
        return DURATION.convert(self.snapshot_every, None, None)

    @property
    def bucket_elements(self) -> int:
        """Weights, float32, that travel as one message at most."""
        return int(self.bucket_mb * 2**20 / 4)

    def total_steps(self, samples: int) -> int | None:
        """How many steps training on so many samples takes, or None where time decides."""
        if self.time_budget or self.sprint:
            return None
        return self.steps or (self.epochs or DEFAULT_EPOCHS) * -(-samples // self.batch_size)

    def to_args(self, whole: bool = False) -> list[str]:
        """The command-line options that give this configuration; what equals its default is left out.

        Args:
            whole: name it too, but for lengths, of which there is one.
        """
        args: list[str] = []
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if isinstance(value, bool):
                args += [flag(f.name) if value else f"--no-{flag(f.name)[2:]}"] if whole or value else []
            elif value != f.default or (whole and f.name not in LENGTHS):
                args += [flag(f.name), str(in_words(f, value))]
        return args

    def write(self, path: Path, **also: Any) -> None:
        """Write the configuration, and what else is to be remembered with it, as TOML."""
        import tomli_w

        values = {f.name: in_words(f, getattr(self, f.name)) for f in dataclasses.fields(self)}
        path.write_text(tomli_w.dumps(values | also), encoding="utf-8")


def in_words(field: dataclasses.Field, value: Any) -> Any:
    """A field's value as a person writes it: `auto` for what stands for it."""
    kind = field.metadata["type"]
    return kind.word if isinstance(kind, WordOr) and value == kind.meaning else value


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")
