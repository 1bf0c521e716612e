"""What has to be equal for a comparison to be fair, and why; the check refuses runs where it is not."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hvdtrain.errors import UsageError
from hvdtrain.formatting import some_of
from hvdtrain.report.columns import Setting
from hvdtrain.runs.fields import field_value
from hvdtrain.runs.read import Run, display_names, grouped

# Fields that are equal in all runs of a report, each with the reason. They are manifest.json's, except for
# target_accuracy, which is summary.json's.
EQUAL_EVERYWHERE = {
    "hvdtrain": "another version may train or measure differently",
    "width": "it scales every layer, and with it both computing and traffic",
    "image_size": "it decides the work of every convolution",
    "dropout": "it changes what is learned",
    "augment": "the same random changes to the same images",
    "freeze": "the same layers are trained",
    "precision": "numbers of fewer bits are faster and less exact",
    "compile": "a compiled model computes faster",
    "accumulate": "a batch in several passes is slower, and leaves batch norm smaller ones",
    "shuffle_block": "samples come in the same order",
    "dataset_hash": "the same images, byte for byte, in the same split",
    "optimizer": "the same update rule, on the workers or on the servers",
    "momentum": "part of the update rule",
    "nesterov": "part of the update rule",
    "weight_decay": "part of the update rule",
    "target_accuracy": "the time to reach it is compared",
    "stop_at_target": "a run that stops early has trained for less",
    "threads_per_worker": "every worker computes with the same share of a machine, which one process alone has all of",
    "environment.computing": "torch, OpenMP, MKL and the C library read them, and compute and allocate accordingly",
    "deterministic": "algorithms that repeat to the bit are slower",
    "record": "writing down each push takes the servers' time (compared among runs with servers)",
    "trace": "writing down what every rank did takes time",
    "device": "a GPU is no match for a CPU",
    "share_gpu": "workers that share a GPU slow each other down, and exchange through CPU memory",
    "interface": "one network is faster than another (compared among runs over several hosts)",
    "versions": "another release of a library may be faster or slower",
    "hardware.cpu": "another processor computes at another speed",
    "hardware.cores": "processes share the cores of a host",
    "hardware.gpus": "another GPU computes at another speed (compared by model, where GPUs were used)",
}
# Fields that are equal in all runs of one setting, which are compared with each other; a report may have several. The
# number of weights follows from the model, and the schedule's number of steps from the batch.
EQUAL_IN_SETTING = {
    "model": "the same network is trained",
    "model_hash": "the same code made it",
    "parameters": "the same number of weights is computed and sent",
    "global_batch": "a step uses equally many samples, however many workers share them",
    "schedule": "the learning rate goes the same way at the same step",
    "slow.asked": "a worker that is made slow holds the others up, or leaves them its share",
}
# Fields that are equal in all runs of one repeat: they start from the same weights and see the same samples.
EQUAL_IN_REPEAT = {
    "seed": "it decides initial weights and the order of samples; --repeat tells runs with other seeds apart",
    "initial_weights": "training starts from the same point",
    "samples_digest": "exactly the same samples were trained on (compared among runs of equally many)",
}
# Fields that are equal in all runs of one kind, which has the same options: they repeat one measurement, and are
# summarised together.
EQUAL_IN_KIND = {
    "processes": "repeats are of the same thing",
    "backend": "another transport is another measurement; compare transports in two reports",
    "starter": "starters place and bind processes differently",
    "respawns": "a server that may come back keeps all that it has twice, which takes time",
    "elastic": "a step of an elastic ring has one more exchange, of whether all have all averages; sharded sends more",
    "hardware.hosts": "memory is faster than a network (the number of hosts is compared)",
    "hosts.cores_usable": "a control group, or being bound to cores, leaves the processes of a host fewer",
    "placement": "what processes of one host tell each other crosses no network",
}
# Fields that are equal in all runs whose messages travel alike; other modes' messages do not depend on them.
EQUAL_IN_TRANSPORT = {
    "environment.messages": "what carries the messages reads them, and is faster or slower",
    "environment.servers": "at the servers too, which also compute by them",
}
# Fields that are compared among the runs that have them: not every run has servers, or says what its processes
# could use.
_WHERE_RECORDED = {"environment.servers", "record", "hosts.cores_usable"}
# Fields of trainings, which runs that measure speed alone do not have.
_OF_TRAININGS = {"schedule", "target_accuracy", "stop_at_target", "samples_digest"}
# All other fields may differ: mode, workers, servers and what follows from them are compared; repeat, command,
# started and host names identify a run; dataset is a name, and dataset_hash is checked in its place.


class EqualField(NamedTuple):
    """A field that was found equal: its value as text, among which runs, and why it has to be equal."""

    field: str
    value: str
    among: str
    why: str


_SEED, _WEIGHTS, _SAMPLES = ({name: why} for name, why in EQUAL_IN_REPEAT.items())
# What runs share that are compared, in words and as a key, and their fields.
_RULES: Sequence[tuple[str, Callable[[Run], Hashable], Mapping[str, str]]] = (
    ("", lambda run: None, EQUAL_EVERYWHERE),
    ("setting", Setting.of, EQUAL_IN_SETTING),
    ("global batch and model", lambda run: (run.manifest.global_batch, run.manifest.model),
     {"lr": "the learning rate for the global batch decides how far a step goes"}),
    ("repeat", lambda run: run.manifest.repeat, _SEED),
    ("repeat and model", lambda run: (run.manifest.repeat, run.manifest.model), _WEIGHTS),
    ("repeat and global batch",
     lambda run: (run.manifest.repeat, run.manifest.global_batch, run.summary.steps, run.summary.samples), _SAMPLES),
    ("mode, workers and servers", lambda run: run.kind, EQUAL_IN_KIND),
    ("mode, workers, servers and setting", lambda run: (run.kind, Setting.of(run)),
     {"effective_lr": "it decides how far one push moves the weights"}),
    ("mode, backend, starter and number of hosts",
     lambda run: (run.kind.mode, run.manifest.backend, run.manifest.starter, field_value(run, "hardware.hosts")),
     EQUAL_IN_TRANSPORT),
)  # fmt: skip


def check(runs: Sequence[Run]) -> list[EqualField]:
    """What the finished runs of a report have in common, an entry for each field above.

    Raises:
        UsageError: runs differ in what should be equal; it names the field, the values and the runs.
    """
    finished, names = [run for run in runs if run.is_finished], display_names(runs)
    equal = []
    for shared, key, fields in _RULES:
        groups = grouped(finished, key)
        compared = sum(len(members) for members in groups.values() if len(members) > 1)
        if shared and not compared:
            continue
        among = f"runs of the same {shared} ({compared} of {len(finished)} had another to compare with)"
        for field, why in fields.items():
            where = f" among runs of the same {shared}" if shared else ""
            values = {format_value(_common_value(field, why, of, names, where)) for of in groups.values()}
            value = values.pop() if len(values) == 1 else "another in each such group"
            equal.append(EqualField(field, value, among if len(groups) > 1 else "all runs", why))
    return equal


def format_value(value: Any) -> str:
    """A value for people: hashes shortened, None as `not recorded`."""
    if value is None:
        return "not recorded"
    if isinstance(value, dict):
        return ", ".join(f"{key} {format_value(value[key])}" for key in sorted(value)) or "none"
    if isinstance(value, list):
        return ", ".join(map(format_value, value)) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return f"{value:,.0f}"
    text = str(value) or "–"
    return text[:12] + "…" if len(text) >= 32 and text.isalnum() else text


def _is_compared(field: str, run: Run) -> bool:
    """Whether the field says something of this run."""
    if field == "interface":  # what stays on one host uses no network
        return field_value(run, field) not in (None, "lo")
    if field == "threads_per_worker":  # one process has a machine to itself
        return run.kind.is_distributed
    if field in _OF_TRAININGS:
        return not run.manifest.sprint
    return field not in _WHERE_RECORDED or field_value(run, field) is not None


def _common_value(field: str, why: str, runs: Sequence[Run], names: Mapping[Path, str], where: str) -> Any:
    """The one value that all these runs have. UsageError where they have several."""
    runs = [run for run in runs if _is_compared(field, run)] or runs[:1]
    first = field_value(runs[0], field)
    other = next((value for run in runs if (value := field_value(run, field)) != first), first)
    if other == first:
        return first
    if isinstance(first, dict) and isinstance(other, dict):  # the message names the library, not the whole list
        entry = min(name for name in first.keys() | other.keys() if first.get(name) != other.get(name))
        field = f"{field}.{entry}"
    different: dict[str, list[str]] = {}
    for run in runs:
        different.setdefault(format_value(field_value(run, field)), []).append(names[run.folder])
    told = "; ".join(f"{value!r} in {some_of(of, 3)}" for value, of in different.items())
    raise UsageError(f"these runs cannot share a table: {field} differs{where}: {told} ({why})")
