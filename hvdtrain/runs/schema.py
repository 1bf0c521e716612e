"""Types of the files in a run folder: manifest.json, summary.json and lines of metrics.rank*.jsonl.

They have the fields that something reads. Any program may have written the files: a field that is
missing, or null, has its default, and a field of another type is an UnreadableFile. A test holds
the writers, `job/recording/manifest.py` and `job/rank/summary.py`, to these fields.
"""

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

from msgspec import Meta, Struct, ValidationError, convert, field, structs
from msgspec import json as fast_json

from hvdtrain.base.config.untrusted import (
    LARGEST_DOCUMENT,
    LARGEST_NUMBER,
    MOST_RANKS,
    parse_json,
    read_lines,
    read_whole,
)
from hvdtrain.runs.launched import Launched
from hvdtrain.runs.membership_log import membership_file

Count = Annotated[int, Meta(ge=0, lt=LARGEST_NUMBER)]
Ranks = Annotated[int, Meta(ge=0, le=MOST_RANKS)]
Figure = Annotated[float, Meta(ge=0, le=1e18)]  # finite; larger than any option times MOST_RANKS
Share = Annotated[float, Meta(ge=0, le=1)]
Loss = float  # may be NaN or infinite: then training diverged, and the file is in order


class UnreadableFile(Exception):
    """Says what is wrong with a file of a run folder."""


class Machine(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The hardware of a host."""

    cpu: str | None = None
    cores: Count | None = None
    cores_usable: Figure | None = None
    memory_gb: Figure | None = None
    gpus: list[str] = []

    @property
    def available_cores(self) -> float | None:
        """The cores that a job may use; all cores if that was not recorded, None if none were."""
        return self.cores if self.cores_usable is None else self.cores_usable


class Hardware(Machine, frozen=True, kw_only=True):
    """The hardware of the first worker's host, and the names of all of the job's hosts."""

    hosts: list[str] = []


class Host(Machine, frozen=True, kw_only=True, omit_defaults=True):
    """One host of the job; see world.host.describe."""

    ranks: list[Count] = []
    machine: str = ""
    threads_per_worker: Count | None = None
    versions: dict[str, str] = {}
    environment: dict[str, str] = {}


class RunStart(Struct, frozen=True, kw_only=True):
    """How and where a run was computed after one of its starts."""

    after_step: Count = 0
    mode: str | None = None
    workers: Ranks | None = None
    servers: Ranks | None = None
    threads_per_worker: Count | None = None
    device: str | None = None
    backend: str | None = None
    interface: str | None = None
    hosts: dict[str, list[Count]] | None = None  # the ranks on each host


class Link(Struct, frozen=True, kw_only=True):
    """The throughput from one host to another, measured before training."""

    sender: str = field(name="from")
    receiver: str = field(name="to")
    gbit_s: Figure


class Network(Struct, frozen=True, kw_only=True):
    """The links between the job's hosts, in both directions."""

    pairs: list[Link] = []


class Slow(Struct, frozen=True, kw_only=True):
    """How workers were slowed down on purpose.

    Attributes:
        asked: the value of --slow.
        achieved: how many times as long each worker computed.
    """

    asked: str = "none"
    achieved: dict[str, Figure] = {}


class BadImages(Struct, frozen=True, kw_only=True):
    """Damaged images that --skip-bad left out: how many, and the first of their names."""

    count: Count
    first: tuple[str, ...] = ()


class Manifest(Struct, frozen=True, kw_only=True):
    """A manifest.json: all that is needed to repeat a run, and to judge whether runs compare."""

    # The mode's name is printed to the terminal, which would obey control characters.
    mode: Annotated[str, Meta(pattern=r"\A[\w-]+\Z")]
    workers: Annotated[int, Meta(ge=1, le=MOST_RANKS)]
    servers: Ranks
    repeat: Count
    hvdtrain: str | None = None
    processes: Count | None = None
    threads_per_worker: Count | None = None
    model: str | None = None
    model_hash: str | None = None
    script: str | None = None  # a user's own loop; None for ours
    script_args: str | None = None
    batch_norm: bool | None = None
    dropout_layers: bool | None = None
    parameters: Count | None = None
    trained_parameters: Count | None = None
    width: float | None = None
    image_size: Count | None = None
    dropout: float | None = None
    augment: str | None = None
    pretrained: str | None = None
    freeze: str | None = None
    precision: str | None = None
    compile: bool | None = None
    accumulate: Count | None = None
    dataset: str | None = None
    dataset_hash: str | None = None
    train_samples: Count | None = None
    validation_samples: Count | None = None
    classes: Count | None = None
    class_names: tuple[str, ...] | None = None
    bad_images: BadImages | None = None
    initial_weights: str | None = None
    global_batch: Count | None = None
    optimizer: str | None = None
    lr: Figure | None = None
    lr_around: Figure = 0.0  # 0 for a rate that was given, and not looked for
    lr_trainings: Count = 0
    effective_lr: Figure | None = None
    schedule: str | None = None
    momentum: float | None = None
    weight_decay: float | None = None
    nesterov: bool | None = None
    push_scale: str | None = None
    look_ahead: Figure | None = None
    shares: str | None = None
    wait_for: str | None = None
    staleness_bound: Count | None = None
    backup: Count | None = None
    respawns: bool = False
    elastic: bool = False
    delay_compensation: float | None = None
    staleness_lr: bool | None = None
    compression: str | None = None
    # Options of the mode and of its messages that are not at their defaults.
    options: dict[str, bool | int | float | str] = {}
    bucket_mb: float | None = None
    seed: int | None = None
    shuffle_block: int = 0
    deterministic: bool | None = None
    record: bool = False
    trace: str = "none"  # or which steps
    stop_at_target: bool | None = None
    sprint: Figure = 0.0  # seconds; 0 for a run that trains
    slow: Slow = Slow()
    device: str | None = None
    share_gpu: bool | None = None
    backend: str | None = None
    interface: str | None = None
    starter: str | None = None
    command: list[str] = []
    started: str | None = None
    versions: dict[str, str] = {}
    environment: dict[str, str] = {}
    server_environment: list[dict[str, str]] = []
    hardware: Hardware = Hardware()
    hosts: dict[str, Host] = {}
    parts: list[RunStart] = []
    network: Network = Network()
    launch: Launched | None = None


class Process(Struct, frozen=True, kw_only=True):
    """The cost of one process of the job while it trained; `samples` is None for a server."""

    cpu_s: Figure
    rank: Count | None = None
    role: str | None = None
    host: str | None = None
    samples: Figure | None = None


class Evaluation(Struct, frozen=True, kw_only=True):
    """One evaluation of the model, after so many samples and seconds of training.

    A script reports a loss, an accuracy or both.
    """

    samples: Figure
    train_s: Figure
    val_loss: Loss | None = None
    val_accuracy: Share | None = None
    step: Count | None = None
    epoch: Count | None = None
    train_loss: Loss | None = None
    train_accuracy: Share | None = None


class Load(Struct, frozen=True, kw_only=True):
    """Other load of a host during the run.

    Attributes:
        cores: the host's cores.
        others_cores: how many cores were busy with other processes.
        stolen_share: the share of time that the hypervisor took.
    """

    cores: Count | None = None
    others_cores: Figure | None = None
    stolen_share: Figure | None = None


class Life(Struct, frozen=True, kw_only=True):
    """One life of a worker: see membership_log.Life.

    Attributes:
        joined: when it began, in seconds since 1970.
        left: when it ended, in seconds since 1970; None if it lasted until the run's end.
        samples: how many samples the worker trained on; None if shares were not leased.
    """

    rank: Count
    incarnation: Count
    joined: Figure
    left: Figure | None = None
    why: str = ""
    samples: Count | None = None
    member: Count | None = None


class Return(Struct, frozen=True, kw_only=True):
    """The return of a server that was killed.

    Attributes:
        lost, returned: times in seconds since 1970.
        lost_updates: by how many versions, over all buckets, workers had newer weights than the
            server after its return.
    """

    rank: Count
    lost: Figure
    returned: Figure
    lost_updates: Count = 0


class Summary(Struct, frozen=True, kw_only=True):
    """A summary.json: the results of a finished run."""

    status: str | None = None
    sprint: Figure = 0.0
    steps: Count | None = None
    samples: Count | None = None
    wall_s: Figure | None = None
    samples_per_s: Figure | None = None
    val_accuracy: Share | None = None
    val_loss: Loss | None = None
    best_val_loss: Loss | None = None
    test_loss: Loss | None = None
    test_accuracy: Share | None = None
    target_accuracy: Share | None = None
    target_loss: Figure | None = None
    time_to_target_s: Figure | None = None
    exposed_comm_fraction: Figure | None = None
    bytes_sent_per_step: Figure | None = None
    rounds: Figure | None = None
    peak_bytes_per_step: Figure | None = None
    worker_distance: Figure | None = None
    staleness_mean: Figure | None = None
    staleness_max: Figure | None = None
    peak_rss_mb: Figure | None = None
    samples_digest: str | None = None
    step_seconds: dict[str, Figure] = {}
    # Processor seconds of a worker's main thread in forward and backward of a step, the mean.
    computing_cpu_seconds: Figure | None = None
    # Percentiles of a worker's steps, without the `skipped` first ones.
    step_time: dict[str, Figure | None] = {}
    processes: list[Process] = []
    load: dict[str, Load] = {}  # by host
    lost_workers: list[Count] = []
    membership: list[Life] = []
    returned_servers: list[Return] = []
    setup_s: Figure | None = None
    evaluations: list[Evaluation] = []


class Step(Struct, frozen=True, kw_only=True):
    """One worker's step.

    Attributes:
        time: when the step ended, in seconds of training.
        samples: how many samples the worker trained on.
        step: the number of the step.
        data_s: seconds of loading data. This part and the next seven add up to `seconds`.
        forward_s: seconds of forward.
        backward_s: seconds of backward.
        comm_s: seconds of waiting for other processes in the step.
        optimizer_s: seconds of the worker's optimizer.
        barrier_s: seconds of waiting for all workers between steps.
        lease_s: seconds until the worker was given a share.
        metrics_s: seconds of writing metrics.
        staleness: the mean staleness of the worker's pushes, where a server tells it.
        loss: None for a step without samples.
        hidden_optimizer_seconds: time of the optimizer beside computing, which is no part of the
            step's time.
        shares: how many shares of the step's global batch the worker had, if shares are leased;
            else 1.
    """

    time: Figure
    samples: Figure
    loss: Loss | None
    step: Count = 0
    data_s: Figure = 0.0
    forward_s: Figure = 0.0
    backward_s: Figure = 0.0
    comm_s: Figure = 0.0
    optimizer_s: Figure = 0.0
    barrier_s: Figure = 0.0
    lease_s: Figure = 0.0
    metrics_s: Figure = 0.0
    hidden_optimizer_seconds: Figure = 0.0
    staleness: Figure | None = None
    shares: Annotated[int, Meta(ge=0, le=10**4)] = 1

    @property
    def seconds(self) -> float:
        """The step's duration, from the end of the step before."""
        phases = self.data_s + self.forward_s + self.backward_s + self.comm_s + self.optimizer_s
        return phases + self.barrier_s + self.lease_s + self.metrics_s


def each_share(steps: Sequence[Step]) -> list[Step]:
    """Returns a worker's steps with one share each.

    A step with several shares becomes as many steps of equal length; a step without shares is
    dropped.
    """
    single_shares = []
    previous_time = 0.0
    for step in steps:
        if step.shares == 1:
            single_shares.append(step)
        elif step.shares > 1:
            figures = {name: getattr(step, name) / step.shares for name in _ADDED_UP}
            for number in range(1, step.shares + 1):
                time = previous_time + (step.time - previous_time) * number / step.shares
                single_shares.append(structs.replace(step, **figures, time=time, shares=1))
        previous_time = step.time
    return single_shares


_ADDED_UP = ("samples", *(name for name in Step.__struct_fields__ if name.endswith("_s")))


class ServerLoad(Struct, frozen=True, kw_only=True):
    """A line of a server's metrics: its counters since it began."""

    applying_s: Figure = 0.0
    queued_s: Figure
    pushes: Count = 0
    time: Figure = 0.0
    cpu_s: Figure = 0.0
    bytes_sent: Figure = 0.0
    bytes_received: Figure = 0.0


_T = TypeVar("_T", Manifest, Summary)
_Line = TypeVar("_Line", Step, ServerLoad, Life)


def from_json(values: dict[str, Any], kind: type[_T]) -> _T:
    """Returns the parsed file as a value, without unknown fields.

    Raises:
        ValidationError: a field is not of its type.
    """
    known = {name: value for name, value in values.items() if value is not None}
    return convert(known, kind, str_keys=True)


def read(folder: Path, kind: type[_T]) -> _T:
    """Returns the checked manifest.json or summary.json of a run folder.

    Raises:
        UnreadableFile: there is no such file, or it is not as a run writes it.
    """
    name = f"{kind.__name__.lower()}.json"
    try:
        value = parse_json(read_whole(folder / name, LARGEST_DOCUMENT))
    except FileNotFoundError:
        raise UnreadableFile(f"it has no {name}") from None
    except (OSError, ValueError) as error:
        raise UnreadableFile(f"its {name} cannot be read ({error})") from None
    if not isinstance(value, dict):
        raise UnreadableFile(f"its {name} holds no object")
    try:
        return from_json(value, kind)
    except ValidationError as error:
        raise UnreadableFile(f"its {name} is not as a run writes it: {error}") from None


def find(folder: Path, kind: type[_T]) -> _T | None:
    """Returns what `read` does; None if the file cannot be read."""
    with contextlib.suppress(UnreadableFile):
        return read(folder, kind)
    return None


def read_rows(file: Path, kind: type[_Line]) -> tuple[list[_Line], int]:
    """Returns the values in a file of JSON lines, and the number of unreadable lines.

    A killed process leaves half a line.
    """
    values = []
    decoder = fast_json.Decoder(kind)
    unreadable = 0
    try:
        for line in read_lines(file):
            try:
                values.append(_decode(line, decoder, kind))
            except (ValueError, RecursionError):  # ValidationError is a ValueError
                unreadable += 1
    except OSError:
        return [], 1
    return values, unreadable


def _decode(line: bytes, decoder: fast_json.Decoder[_Line], kind: type[_Line]) -> _Line:
    try:
        return decoder.decode(line)
    except ValueError:
        return convert(parse_json(line), kind)  # reads NaN too


def read_steps(path: Path) -> tuple[list[Step], int]:
    """Returns the steps in a rank's metrics, and the number of lines that are no step."""
    return read_rows(path, Step)


def read_server_loads(run: Path, rank: int) -> list[ServerLoad]:
    """Returns the lines of a server's metrics."""
    loads, _ = read_rows(run / f"metrics.server{rank}.jsonl", ServerLoad)
    return loads


def read_lives(run: Path) -> list[Life]:
    """Returns the lives of a run's workers, each as the first server recorded it last."""
    lives, _ = read_rows(membership_file(run), Life)
    last = {life.member: life for life in lives}
    return list(last.values())
