"""What has to be equal for a comparison to be fair, and why.

`check` refuses runs that differ in one of these fields.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from hvdtrain.base.errors import UsageError
from hvdtrain.base.formatting import some_of
from hvdtrain.reporting.columns import Setting
from hvdtrain.runs.fields import field_value
from hvdtrain.runs.read import Run, display_names, grouped

# Fields that are equal in all runs of a report, each with the reason. They are fields of
# manifest.json, except for target_accuracy and target_loss, which are fields of summary.json.
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
    "target_loss": "the time to reach it is compared",
    "stop_at_target": "a run that stops early has trained for less",
    "environment.computing": (
        "torch, OpenMP, MKL and the C library read them, and compute and allocate accordingly"
    ),
    "script_args": "a script was given the same options",
    "deterministic": "algorithms that repeat to the bit are slower",
    "record": "writing down each push takes the servers' time (compared among runs with servers)",
    "trace": "writing down what every rank did takes time",
    "device": (
        "a GPU is no match for a CPU "
        "(one process may have the GPU of a host where workers have none)"
    ),
    "share_gpu": "workers that share a GPU slow each other down, and exchange through CPU memory",
    "interface": "one network is faster than another (compared among runs over several hosts)",
    "versions": "another release of a library may be faster or slower",
    "hardware.cpu": "another processor computes at another speed",
    "hardware.cores": "processes share the cores of a host",
    "hardware.gpus": (
        "another GPU computes at another speed (compared by model, where GPUs were used)"
    ),
}
# Fields that are equal in all runs of one setting, which are compared with each other. A report may
# have several settings. The number of weights follows from the model, and the schedule's number of
# steps from the batch. One machine may stand beside other settings too: see comparisons.py.
EQUAL_IN_SETTING = {
    "model": "the same network is trained",
    "model_hash": "the same code made it",
    "parameters": "the same number of weights is computed and sent",
    "global_batch": "a step uses equally many samples, however many workers share them",
    "schedule": "the learning rate goes the same way at the same step",
    "slow.asked": "a worker that is made slow holds the others up, or leaves them its share",
}
# Fields that are equal in all runs of one repeat: they start from the same weights and see the same
# samples.
EQUAL_IN_REPEAT = {
    "seed": (
        "it decides initial weights and the order of samples; "
        "--repeat tells runs with other seeds apart"
    ),
    "initial_weights": "training starts from the same point",
    "samples_digest": (
        "exactly the same samples were trained on (compared among runs of equally many)"
    ),
}
# Fields that are equal in all runs of one kind. Such runs have the same options, repeat one
# measurement, and are summarised together.
EQUAL_IN_KIND = {
    "processes": "repeats are of the same thing",
    "backend": "another transport is another measurement; compare transports in two reports",
    "starter": "starters place and bind processes differently",
    "respawns": "a server that may come back keeps all that it has twice, which takes time",
    "elastic": (
        "a step of an elastic ring has one more exchange, "
        "of whether all have all averages; sharded sends more"
    ),
    "hardware.hosts": "memory is faster than a network (the number of hosts is compared)",
    "threads_per_worker": (
        "with more threads a worker computes faster; contenders may differ, as each uses all cores"
    ),
    "hosts.cores_usable": (
        "a control group, or being bound to cores, leaves the processes of a host fewer"
    ),
    "placement": "what processes of one host tell each other crosses no network",
}
# Fields that are equal in all runs whose messages travel alike. The messages of other modes do not
# depend on them.
EQUAL_IN_TRANSPORT = {
    "environment.messages": "what carries the messages reads them, and is faster or slower",
    "environment.servers": "at the servers too, which also compute by them",
}
# Fields that are compared among the runs that have them. Not every run has servers, or has recorded
# which cores a process could use.
_WHERE_RECORDED = {"environment.servers", "record", "hosts.cores_usable"}
# Fields of trainings. Sprints do not have them.
_OF_TRAININGS = {"schedule", "target_accuracy", "target_loss", "stop_at_target", "samples_digest"}
# Fields in which one process on a GPU may differ from workers that all compute on processors. The
# one process has a machine to itself, whose GPUs would be too few for the workers.
_OF_DEVICES = {"device", "hardware.gpus"}
# All other fields may differ: mode, workers, servers and what follows from them are compared;
# repeat, command, started and host names identify a run; dataset is a name, and dataset_hash is
# checked in its place.


class EqualField(NamedTuple):
    """A field that was found equal.

    Attributes:
        field: the name of the field.
        value: the value as text.
        among: the runs that have the value in common.
        why: why the field has to be equal.
    """

    field: str
    value: str
    among: str
    why: str


@dataclass(frozen=True)
class _Rule:
    """Fields that are equal in runs that share something.

    Attributes:
        shared: what the runs share, in words; empty for all runs of a report.
        key: returns what a run shares.
        fields: the fields, each with the reason.
    """

    shared: str
    key: Callable[[Run], Hashable]
    fields: Mapping[str, str]


def _batch_and_model(run: Run) -> Hashable:
    return run.manifest.global_batch, run.manifest.model


def _repeat_and_samples(run: Run) -> Hashable:
    manifest = run.manifest
    return manifest.repeat, manifest.global_batch, run.summary.steps, run.summary.samples


def _transport(run: Run) -> Hashable:
    manifest = run.manifest
    return run.kind.mode, manifest.backend, manifest.starter, field_value(run, "hardware.hosts")


def _in_repeat(field: str) -> dict[str, str]:
    return {field: EQUAL_IN_REPEAT[field]}


_RULES: Sequence[_Rule] = (
    _Rule("", lambda run: None, EQUAL_EVERYWHERE),
    _Rule("setting", Setting.of, EQUAL_IN_SETTING),
    _Rule(
        "global batch and model",
        _batch_and_model,
        {
            "lr": (
                "the learning rate for the global batch decides how far a step goes "
                "(rates may differ that were looked for around the same one, in as many trainings)"
            )
        },
    ),
    _Rule("repeat", lambda run: run.manifest.repeat, _in_repeat("seed")),
    _Rule(
        "repeat and model",
        lambda run: (run.manifest.repeat, run.manifest.model),
        _in_repeat("initial_weights"),
    ),
    _Rule("repeat and global batch", _repeat_and_samples, _in_repeat("samples_digest")),
    _Rule("mode, workers and servers", lambda run: run.kind, EQUAL_IN_KIND),
    _Rule(
        "mode, workers, servers and setting",
        lambda run: (run.kind, Setting.of(run)),
        {"effective_lr": "it decides how far one push moves the weights"},
    ),
    _Rule("mode, backend, starter and number of hosts", _transport, EQUAL_IN_TRANSPORT),
)


def check(runs: Sequence[Run]) -> list[EqualField]:
    """Returns what the finished runs of a report have in common: an entry for each field above.

    Raises:
        UsageError: runs differ in what should be equal. The message names the field, the values and
            the runs.
    """
    finished = [run for run in runs if run.is_finished]
    names = display_names(runs)
    equal = []
    for rule in _RULES:
        groups = list(grouped(finished, rule.key).values())
        compared = sum(len(members) for members in groups if len(members) > 1)
        if rule.shared and not compared:
            continue
        among = "all runs"
        if len(groups) > 1:
            with_another = f"{compared} of {len(finished)} had another to compare with"
            among = f"runs of the same {rule.shared} ({with_another})"
        for field, why in rule.fields.items():
            values = set()
            for members in groups:
                _check_group(field, rule, members, names)
                values.add(format_value(_value_in(field, members)))
            value = values.pop() if len(values) == 1 else "another in each such group"
            equal.append(EqualField(field, value, among, why))
    return equal


def format_value(value: Any) -> str:
    """Returns a value as text for people: hashes shortened, None as `not recorded`."""
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
    is_hash = len(text) >= 32 and text.isalnum()
    return text[:12] + "…" if is_hash else text


def _is_compared(field: str, run: Run) -> bool:
    """Returns whether the field says something of this run."""
    if field == "interface":
        # What stays on one host uses no network.
        return field_value(run, field) not in (None, "lo")
    if field in _OF_TRAININGS:
        return not run.manifest.sprint
    return field not in _WHERE_RECORDED or field_value(run, field) is not None


def _compared_runs(field: str, runs: Sequence[Run]) -> Sequence[Run]:
    """Returns the runs among which a field is compared; the first run if it is compared in none."""
    if field in _OF_DEVICES:
        distributed = [run for run in runs if run.kind.is_distributed]
        if not any(run.on_gpu for run in distributed):
            runs = [run for run in runs if not run.on_gpu] or runs
    return [run for run in runs if _is_compared(field, run)] or runs[:1]


def _value_in(field: str, runs: Sequence[Run]) -> Any:
    """Returns the value of a field that runs have in common."""
    return field_value(_compared_runs(field, runs)[0], field)


def _check_group(field: str, rule: _Rule, runs: Sequence[Run], names: Mapping[Path, str]) -> None:
    """Checks that a field is equal in runs that share something.

    Raises:
        UsageError: the runs have several values.
    """
    runs = _compared_runs(field, runs)
    values = [field_value(run, field) for run in runs]
    first = values[0]
    other = next((value for value in values if value != first), first)
    if other == first:
        return
    why = rule.fields[field]
    if isinstance(first, dict) and isinstance(other, dict):
        # The message names the library, not the whole list of versions.
        entries = first.keys() | other.keys()
        field += "." + min(name for name in entries if first.get(name) != other.get(name))
    names_by_value: dict[str, list[str]] = {}
    for run in runs:
        value = format_value(field_value(run, field))
        names_by_value.setdefault(value, []).append(names[run.folder])
    values_words = "; ".join(
        f"{value!r} in {some_of(with_value, 3)}" for value, with_value in names_by_value.items()
    )
    where = f" among runs of the same {rule.shared}" if rule.shared else ""
    raise UsageError(
        f"these runs cannot share a table: {field} differs{where}: {values_words} ({why})"
    )
