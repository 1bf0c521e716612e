"""What has to be equal for a comparison to be fair, and why; the check refuses runs where it is not."""

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hvdtrain.errors import UsageError
from hvdtrain.report.results import result_rows, scales_weakly
from hvdtrain.runs.fields import field_value
from hvdtrain.runs.read import Run, display_names

# Fields that are equal in all runs of a comparison, each with the reason. They are manifest.json's, except for
# target_accuracy, which is summary.json's.
EQUAL_EVERYWHERE = {
    "hvdtrain": "another version may train or measure differently",
    "model": "the same network is trained",
    "parameters": "the same number of weights is computed and sent",
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
    "train_samples": "an epoch is equally long",
    "validation_samples": "accuracy is measured on equally many images",
    "classes": "the task is equally hard",
    "global_batch": "a step uses equally many samples, however many workers share them",
    "lr": "the learning rate for the global batch decides how far a step goes",
    "schedule": "the learning rate goes the same way at the same step",
    "optimizer": "the same update rule, on the workers or on the servers",
    "momentum": "part of the update rule",
    "nesterov": "part of the update rule",
    "weight_decay": "part of the update rule",
    "target_accuracy": "the time to reach it is compared",
    "stop_at_target": "a run that stops early has trained for less",
    "threads_per_worker": "every worker computes with the same share of a machine, which one process alone has all of",
    "environment.computing": "torch, OpenMP, MKL and the C library read them, and compute and allocate accordingly",
    "environment.servers_computing": "servers compute and allocate by them (compared among runs with servers)",
    "slow.asked": "a worker that is made slow holds the others up, or leaves them its share",
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
    "effective_lr": "it decides how far one push moves the weights",
    "respawns": "a server that may come back keeps all that it has twice, which takes time",
    "hardware.hosts": "memory is faster than a network (the number of hosts is compared)",
    "hosts.cores_usable": "a control group, or being bound to cores, leaves the processes of a host fewer",
    "placement": "what processes of one host tell each other crosses no network",
}
# Fields that are equal in all runs whose messages travel alike; other modes' messages do not depend on them.
EQUAL_IN_TRANSPORT = {
    "environment.messages": "what carries the messages reads them, and is faster or slower",
    "environment.servers_messages": "at the servers too",
}
# Fields that are compared among the runs that have them: not every run has servers, or says what its processes
# could use.
_WHERE_THERE = {
    "environment.servers_computing", "environment.servers_messages", "record", "hosts.cores_usable",
}  # fmt: skip
# Fields of trainings, which runs that measure speed alone do not have.
_OF_TRAININGS = {"schedule", "schedule.form", "target_accuracy", "stop_at_target", "samples_digest"}
# What columns.Setting has: runs that differ here may be in one report, each compared with its like. The number of
# weights follows from the model, and the schedule's number of steps from the batch.
_MAY_DIFFER_IN_GRID = {"model", "global_batch", "lr", "slow.asked", "parameters", "schedule"}
# How learning rates may depend on the number of workers, where the global batch grows with it: exponent and words.
LR_RULES = {
    0.0: "the same",
    0.5: "grows with the root of the number of workers",
    1.0: "grows with the number of workers",
}
# All other fields may differ: mode, workers, servers and what follows from them are compared; repeat, command,
# started and host names identify a run; dataset is a name, and dataset_hash is checked in its place.


@dataclass(frozen=True)
class EqualField:
    """A field that was found equal: its value as text, among which runs, and why it has to be equal."""

    field: str
    value: str
    among: str
    why: str


def check(runs: Sequence[Run]) -> list[EqualField]:
    """What the finished runs of a comparison have in common, one entry for each field above.

    Raises:
        UsageError: runs differ in what should be equal; it names the field, the values and the runs.
    """
    finished = _finished_with_names(runs)
    equal = [_equal(field, why, finished) for field, why in EQUAL_EVERYWHERE.items()]
    equal += [_equal(field, why, finished, "repeat", _repeat_key(field)) for field, why in EQUAL_IN_REPEAT.items()]
    return equal + _measured_alike(finished, EQUAL_IN_KIND)


def check_grid(runs: Sequence[Run]) -> list[EqualField]:
    """What the finished runs of several comparisons have in common: all but their setting and what follows from it.

    Raises:
        UsageError: they differ in something else, or their learning rates follow none of LR_RULES.
    """
    finished = _finished_with_names(runs)
    equal = [_equal(f, why, finished) for f, why in EQUAL_EVERYWHERE.items() if f not in _MAY_DIFFER_IN_GRID]
    equal.append(replace(_equal("schedule.form", EQUAL_EVERYWHERE["schedule"], finished), field="schedule"))
    for field, among, key in (
        ("seed", "repeat", lambda run: run.repeat),
        ("initial_weights", "repeat and model", lambda run: (run.repeat, run.manifest.model)),
    ):
        equal.append(_equal(field, EQUAL_IN_REPEAT[field], finished, among, key))
    in_kind = {field: why for field, why in EQUAL_IN_KIND.items() if field != "effective_lr"}
    return [*equal, *_measured_alike(finished, in_kind), _lr_rule(finished)]


def _finished_with_names(runs: Sequence[Run]) -> list[tuple[str, Run]]:
    names = display_names(runs)
    return [(names[run.folder], run) for run in runs if run.is_finished]


def _lr_rule(finished: Sequence[tuple[str, Run]]) -> EqualField:
    """How learning rates depend on the number of workers. UsageError where they follow no rule."""
    why = EQUAL_EVERYWHERE["lr"]
    rules = LR_RULES if scales_weakly(result_rows([run for _, run in finished])) else {0.0: LR_RULES[0.0]}
    for exponent, words in rules.items():
        bases = [(run.manifest.lr or 0.0) / run.kind.workers**exponent for _, run in finished]
        if all(math.isclose(base, bases[0], rel_tol=1e-6) for base in bases):
            return EqualField("lr", words, "all runs", why)
    ways = "the root of the number of workers, or with it, where the global batch grows with them"
    raise UsageError(f"{_difference_message('lr', why, finished, '')}; it may grow with {ways}")


def _repeat_key(field: str) -> Callable[[Run], Hashable]:
    """What runs have to share for the field to be equal: the repeat, and for the samples seen their number too."""
    length = ("steps", "samples") if field == "samples_digest" else ()
    return lambda run: (run.repeat, *(getattr(run.summary, name) for name in length))


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
    if isinstance(value, int):
        return f"{value:,}"
    text = str(value) or "–"
    return text[:12] + "…" if len(text) >= 32 and text.isalnum() else text


def _measured_alike(finished: Sequence[tuple[str, Run]], in_kind: Mapping[str, str]) -> list[EqualField]:
    """What is equal in runs of one kind, and in those whose messages travel alike, where there are several."""

    def transport(run: Run) -> Hashable:
        return run.kind.mode, run.manifest.backend, run.manifest.starter, field_value(run, "hardware.hosts")

    equal: list[EqualField] = []
    for fields, shared, key in (
        (in_kind, "mode, workers and servers", lambda run: run.kind),
        (EQUAL_IN_TRANSPORT, "mode, backend, starter and number of hosts", transport),
    ):
        if len({key(run) for _, run in finished}) < len(finished):
            equal += [_equal(field, why, finished, shared, key) for field, why in fields.items()]
    return equal


def _equal(
    field: str, why: str, finished: Sequence[tuple[str, Run]], shared: str = "",
    key: Callable[[Run], Hashable] = lambda run: None,
) -> EqualField:  # fmt: skip
    """Check a field within groups of runs that have the same key, which the words `shared` describe; or in all runs."""
    if field == "interface":  # what stays on one host uses no network
        finished = [item for item in finished if field_value(item[1], field) not in (None, "lo")] or finished[:1]
    if field in _OF_TRAININGS:
        finished = [item for item in finished if not item[1].manifest.sprint] or finished[:1]
    if field == "threads_per_worker":  # one process has a machine to itself
        finished = [item for item in finished if item[1].kind.is_distributed] or finished[:1]
    if field in _WHERE_THERE:
        finished = [item for item in finished if field_value(item[1], field) is not None] or finished[:1]
    groups: dict[Hashable, list[tuple[str, Run]]] = {}
    for name, run in finished:
        groups.setdefault(key(run), []).append((name, run))
    where = f" among runs of the same {shared}" if shared else ""
    values = [format_value(_common_value(field, why, members, where)) for members in groups.values()]
    compared = sum(len(members) for members in groups.values() if len(members) > 1)
    among = f"runs of the same {shared} ({compared} of {len(finished)} had another to compare with)"
    value = values[0] if len(set(values)) == 1 else "another in each such group"
    return EqualField(field, value, among if shared else "all runs", why)


def _common_value(field: str, why: str, members: Sequence[tuple[str, Run]], where: str) -> Any:
    """The one value that all these runs have. UsageError where they have several."""
    found = _distinct_values(field, members)
    if len(found) > 1:
        raise UsageError(_difference_message(_part_that_differs(field, found), why, members, where))
    return found[0][0] if found else None


def _part_that_differs(field: str, found: Sequence[tuple[Any, Sequence[str]]]) -> str:
    """The field, or of tables the first entry that differs: the message names the library, not the whole list."""
    tables = [value for value, _ in found if isinstance(value, dict)]
    names = sorted({name for table in tables for name in table}) if len(tables) == len(found) else []
    return next((f"{field}.{name}" for name in names if any(t.get(name) != tables[0].get(name) for t in tables)), field)


def _difference_message(field: str, why: str, members: Sequence[tuple[str, Run]], where: str) -> str:
    found = _distinct_values(field, members)
    values = "; ".join(f"{format_value(value)!r} in {_name_some(names)}" for value, names in found)
    return f"these runs cannot share a table: {field} differs{where}: {values} ({why})"


def _distinct_values(field: str, members: Sequence[tuple[str, Run]]) -> list[tuple[Any, list[str]]]:
    """The different values of a field, each with the names of the runs that have it."""
    found: list[tuple[Any, list[str]]] = []
    for name, run in members:
        value = field_value(run, field)
        names = next((names for other, names in found if other == value), None)
        if names is None:
            found.append((value, names := []))
        names.append(name)
    return found


def _name_some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
