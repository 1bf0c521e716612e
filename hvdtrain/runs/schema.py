"""What stands in the files of a run folder, as types: manifest.json, summary.json and the lines of metrics.rank*.jsonl.
These are the fields that something reads.

Any program may have written them: a field that is missing, or null, has its default, and one of another type is an
UnreadableFile. A test holds the writers, `runs/manifest.py` and `rank/summary.py`, to these fields.
"""

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

from msgspec import Meta, Struct, ValidationError, convert, field, structs
from msgspec import json as fast_json

from hvdtrain.config.untrusted import parse_json, read_whole
from hvdtrain.coordination.membership_log import membership_file
from hvdtrain.runs.launched import Launched

Count = Annotated[int, Meta(ge=0, lt=10**12)]
Figure = Annotated[float, Meta(ge=0, le=1e18)]  # finite
Share = Annotated[float, Meta(ge=0, le=1)]
Loss = float  # NaN and infinity are losses: training diverged, and the file is not at fault


class UnreadableFile(Exception):
    """What is wrong with a file of a run folder."""


class Machine(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a host has."""

    cpu: str | None = None
    cores: Count | None = None
    cores_usable: Figure | None = None
    memory_gb: Figure | None = None
    gpus: list[str] = []


class Hardware(Machine, frozen=True, kw_only=True):
    """What the first worker's host has; `hosts` are the names of all of the job's."""

    hosts: list[str] = []


class Host(Machine, frozen=True, kw_only=True, omit_defaults=True):
    """What is known of one host of the job; see world.host.describe."""

    ranks: list[Count] = []
    threads_per_worker: Count | None = None
    versions: dict[str, str] = {}
    environment: dict[str, str] = {}


class RunStart(Struct, frozen=True, kw_only=True):
    """How and where the run was computed after one of its starts."""

    after_step: Count = 0
    mode: str | None = None
    workers: Count | None = None
    servers: Count | None = None
    threads_per_worker: Count | None = None
    device: str | None = None
    backend: str | None = None
    interface: str | None = None
    hosts: dict[str, list[Count]] | None = None  # the ranks on each


class Link(Struct, frozen=True, kw_only=True):
    """What was measured between two hosts before training."""

    sender: str = field(name="from")
    receiver: str = field(name="to")
    gbit_s: Figure


class Network(Struct, frozen=True, kw_only=True):
    """The links between the job's hosts, both ways."""

    pairs: list[Link] = []


class Slow(Struct, frozen=True, kw_only=True):
    """How workers were made slow: what was asked for, and by worker how many times as long each computed."""

    asked: str = "none"
    achieved: dict[str, Figure] = {}


class Manifest(Struct, frozen=True, kw_only=True):
    """Everything needed to repeat a run, and to tell whether two runs may be compared: manifest.json."""

    # A mode's name goes to the terminal, where control characters would be obeyed.
    mode: Annotated[str, Meta(pattern=r"\A[\w-]+\Z")]
    workers: Annotated[int, Meta(ge=1, lt=10**12)]
    servers: Count
    repeat: Count
    hvdtrain: str | None = None
    processes: Count | None = None
    threads_per_worker: Count | None = None
    model: str | None = None
    model_hash: str | None = None
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
    initial_weights: str | None = None
    global_batch: Count | None = None
    optimizer: str | None = None
    lr: Figure | None = None
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
    options: dict[str, bool | int | float | str] = {}  # of the mode and its messages, where not the default
    bucket_mb: float | None = None
    seed: int | None = None
    shuffle_block: int = 0
    deterministic: bool | None = None
    record: bool = False
    trace: str = "none"  # or which steps
    stop_at_target: bool | None = None
    sprint: Figure = 0.0  # seconds, of a run that measures speed alone
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
    """What one process of the job cost while it trained; `samples` is None of a server."""

    cpu_s: Figure
    rank: Count | None = None
    role: str | None = None
    host: str | None = None
    samples: Figure | None = None


class Evaluation(Struct, frozen=True, kw_only=True):
    """What the model had learned after so many samples and seconds of training."""

    samples: Figure
    train_s: Figure
    val_loss: Loss
    val_accuracy: Share
    step: Count | None = None
    epoch: Count | None = None
    train_loss: Loss | None = None
    train_accuracy: Share | None = None


class Load(Struct, frozen=True, kw_only=True):
    """What else a host did beside the run: how many cores were busy with it, and which share of time was stolen."""

    cores: Count | None = None
    others_cores: Figure | None = None
    stolen_share: Figure | None = None


class Life(Struct, frozen=True, kw_only=True):
    """One life of a worker: see coordination.membership_log. Times are in seconds since 1970; `left` is None where the
    run ended it. `samples` are those that it trained on, None where shares were not leased.
    """

    rank: Count
    incarnation: Count
    joined: Figure
    left: Figure | None = None
    why: str = ""
    samples: Count | None = None
    member: Count | None = None


class Return(Struct, frozen=True, kw_only=True):
    """A server that was killed and came back. Times are in seconds since 1970; `lost_updates` is by how many versions
    workers had newer weights, over all buckets, than it came back with.
    """

    rank: Count
    lost: Figure
    returned: Figure
    lost_updates: Count = 0


class Summary(Struct, frozen=True, kw_only=True):
    """What a finished run came to: summary.json."""

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
    step_time: dict[str, Figure | None] = {}  # percentiles of a worker's steps, the `skipped` first ones left out
    processes: list[Process] = []
    load: dict[str, Load] = {}  # by host
    lost_workers: list[Count] = []
    membership: list[Life] = []
    returned_servers: list[Return] = []
    setup_s: Figure | None = None
    evaluations: list[Evaluation] = []


class Step(Struct, frozen=True, kw_only=True):
    """One worker's step; `time` is in seconds of training since it began, `loss` None where there were no samples.

    Where shares are leased, `shares` says how many of the step's were this worker's; the others have one of each step.
    """

    time: Figure
    samples: Figure
    loss: Loss | None
    data_s: Figure = 0.0
    forward_s: Figure = 0.0
    backward_s: Figure = 0.0
    comm_s: Figure = 0.0
    optimizer_s: Figure = 0.0
    barrier_s: Figure = 0.0
    lease_s: Figure = 0.0
    metrics_s: Figure = 0.0
    staleness: Figure | None = None
    shares: Annotated[int, Meta(ge=0, le=10**4)] = 1

    @property
    def seconds(self) -> float:
        """How long it took, from the end of the step before."""
        phases = self.data_s + self.forward_s + self.backward_s + self.comm_s + self.optimizer_s
        return phases + self.barrier_s + self.lease_s + self.metrics_s


def each_share(steps: Sequence[Step]) -> list[Step]:
    """What a worker did, a share after the other: of a step of which it had several, each as long as the others."""
    shares, before = [], 0.0
    for step in steps:
        if step.shares == 1:
            shares.append(step)
        else:
            figures = {name: getattr(step, name) / step.shares for name in _ADDED_UP} if step.shares else {}
            for number in range(1, step.shares + 1):
                time = before + (step.time - before) * number / step.shares
                shares.append(structs.replace(step, **figures, time=time, shares=1))
        before = step.time
    return shares


_ADDED_UP = ("samples", *(name for name in Step.__struct_fields__ if name.endswith("_s")))


class ServerLoad(Struct, frozen=True, kw_only=True):
    """A line of a server's metrics: what it has counted since it began."""

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
    """The parsed file as a value. ValidationError where a field is not of its type; unknown fields are left out."""
    known = {name: value for name, value in values.items() if value is not None}
    return convert(known, kind, str_keys=True)


def read(folder: Path, kind: type[_T]) -> _T:
    """The checked manifest.json or summary.json of a run folder."""
    name = f"{kind.__name__.lower()}.json"
    try:
        value = parse_json(read_whole(folder / name))
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
    """As `read`; None where it cannot be."""
    with contextlib.suppress(UnreadableFile):
        return read(folder, kind)
    return None


def read_lines(file: Path, kind: type[_Line]) -> tuple[list[_Line], int]:
    """What stands in a file of JSON lines, and how many are no such line: a killed process leaves half a one."""
    try:
        lines = read_whole(file).splitlines()
    except OSError:
        return [], 1
    values, decoder, unreadable = [], fast_json.Decoder(kind), 0
    for line in lines:
        try:
            try:
                values.append(decoder.decode(line))
            except ValueError:
                values.append(convert(parse_json(line), kind))  # which reads NaN too
        except (ValueError, RecursionError):  # ValidationError is a ValueError
            unreadable += 1
    return values, unreadable


def read_steps(path: Path) -> tuple[list[Step], int]:
    """The steps in a rank's metrics, and how many lines are no step."""
    return read_lines(path, Step)


def read_server_loads(run: Path, rank: int) -> list[ServerLoad]:
    """A server's metrics."""
    return read_lines(run / f"metrics.server{rank}.jsonl", ServerLoad)[0]


def read_lives(run: Path) -> list[Life]:
    """The lives of a run's workers, each as the first server wrote it down last."""
    return list({life.member: life for life in read_lines(membership_file(run), Life)[0]}.values())
