"""What has to be equal for a comparison to be fair, why, and the check that refuses where it is not."""

import math
import re
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hvdtrain.errors import UsageError
from hvdtrain.report.runs import Run, names
from hvdtrain.report.tables import results, scales_weakly

# Every run of a report has these in common. Fields of manifest.json, but for target_accuracy of summary.json.
EVERYWHERE = {
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
    "threads_per_worker": "every worker, the baseline's too, computes with the same share of a machine",
    "deterministic": "algorithms that repeat to the bit are slower",
    "device": "a GPU is no match for a CPU",
    "share_gpu": "workers that share a GPU slow each other down, and exchange through CPU memory",
    "versions": "another release of a library may be faster or slower",
    "hardware.cpu": "another processor computes at another speed",
    "hardware.cores": "processes share the cores of a host",
    "hardware.gpus": "another GPU computes at another speed (compared by model, where GPUs were used)",
}
# Runs of one repeat start from the same point and see the same samples.
IN_A_REPEAT = {
    "seed": "it decides initial weights and the order of samples; --repeat tells runs with other seeds apart",
    "initial_weights": "training starts from the same point",
    "samples_digest": "exactly the same samples were trained on (compared among runs of equally many)",
}
# Runs of one kind are repeats of one measurement: their median is taken.
IN_A_KIND = {
    "processes": "a median is over repeats of the same thing",
    "backend": "another transport is another measurement; compare transports in two reports",
    "starter": "starters place and bind processes differently",
    "push_scale": "it decides how far one push moves the weights",
    "effective_lr": "it decides how far one push moves the weights",
    "staleness_bound": "it decides how far workers drift apart, and how long they wait",
    "delay_compensation": "it changes the gradients that servers apply",
    "staleness_lr": "it changes how far one push moves the weights",
    "compression": "it changes both what is sent and what is learned",
    "bucket_mb": "the size of messages decides how fast they travel",
    "hardware.hosts": "memory is faster than a network (the number of hosts is compared)",
}
# What a grid spans: runs that differ here may be in one report, in tables of their own.
SPANNED = ("model", "global_batch", "lr")
_NOT_IN_A_GRID = {*SPANNED, "parameters", "schedule"}  # a model's weights, and the steps to the last, follow
# How learning rates may go with the number of workers, where the global batch grows with it: exponent and words.
LR_RULES = {
    0.0: "the same",
    0.5: "grows with the root of the number of workers",
    1.0: "grows with the number of workers",
}
# All else may differ: mode, workers, servers and what follows from them are what is compared; repeat,
# command, started and host names identify a run; dataset is a name, and dataset_hash is what it stands for.


@dataclass(frozen=True)
class Equal:
    """A field that was found equal: its value as text, among which runs, and why it has to be."""

    field: str
    value: str
    among: str
    why: str


def check(runs: Sequence[Run]) -> list[Equal]:
    """What the finished runs have in common, one entry for each field above.

    Raises:
        UsageError: runs differ in what should be equal; it names the field, the values and the runs.
    """
    called = names(runs)
    done = [(called[run.folder], run) for run in runs if run.done]
    equal = [_everywhere(field, why, done) for field, why in EVERYWHERE.items()]
    equal += [_in_parts(field, why, done, "repeat", _same_start(field)) for field, why in IN_A_REPEAT.items()]
    if len({run.kind for _, run in done}) < len(done):
        equal += [_in_parts(field, why, done, _KIND, lambda run: run.kind) for field, why in IN_A_KIND.items()]
    return equal


def check_grid(runs: Sequence[Run]) -> list[Equal]:
    """What the finished runs of a grid have in common: all but SPANNED, and what follows from it.

    Raises:
        UsageError: they differ in something else, or their learning rates follow none of LR_RULES.
    """
    called = names(runs)
    done = [(called[run.folder], run) for run in runs if run.done]
    equal = [_everywhere(field, why, done) for field, why in EVERYWHERE.items() if field not in _NOT_IN_A_GRID]
    equal.append(replace(_everywhere("schedule.form", EVERYWHERE["schedule"], done), field="schedule"))
    equal.append(_in_parts("seed", IN_A_REPEAT["seed"], done, "repeat", lambda run: run.repeat))
    start = IN_A_REPEAT["initial_weights"]
    equal.append(_in_parts("initial_weights", start, done, "repeat and model", lambda r: (r.repeat, value(r, "model"))))
    kinds = {field: why for field, why in IN_A_KIND.items() if field != "effective_lr"}
    equal += [_in_parts(field, why, done, _KIND, lambda run: run.kind) for field, why in kinds.items()]
    return [*equal, _lr_rule(done)]


def _lr_rule(done: Sequence[tuple[str, Run]]) -> Equal:
    """How learning rates go with the workers. UsageError where they follow no rule."""
    why = EVERYWHERE["lr"]
    rules = LR_RULES if scales_weakly(results([run for _, run in done])) else {0.0: LR_RULES[0.0]}
    for exponent, words in rules.items():
        bases = [(run.manifest.get("lr") or 0.0) / run.kind.workers**exponent for _, run in done]
        if all(math.isclose(base, bases[0], rel_tol=1e-6) for base in bases):
            return Equal("lr", words, "all runs", why)
    ways = "the root of the number of workers, or with it, where the global batch grows with them"
    raise UsageError(f"{_differing('lr', why, done, '')}; it may grow with {ways}")


_KIND = "mode, workers and servers"


def _same_start(field: str) -> Callable[[Run], Hashable]:
    """What runs share that share this field too: those that trained for longer saw more samples."""
    length = ("steps", "samples") if field == "samples_digest" else ()
    return lambda run: (run.repeat, *map(run.summary.get, length))


def value(run: Run, field: str) -> Any:
    """A field of the run's manifest or summary as it is compared; None where it was not recorded."""
    at: Any = run.summary | run.manifest
    if field == "schedule.form":  # without the number of steps, which follows from the batch
        return re.sub(r"over \d+ steps", "to the last step", str(at.get("schedule")))
    for part in field.split("."):
        at = at.get(part) if isinstance(at, dict) else None
    if field == "hardware.hosts":
        return len(at) if isinstance(at, list) else None
    if field == "hardware.gpus":  # one worker sees one GPU of four: the models count, not how many
        used = str(run.manifest.get("device")).startswith("cuda") and isinstance(at, list)
        return sorted(set(map(str, at))) if used else []
    return at


def show(value: Any) -> str:
    """A value for a reader: hashes shortened, None as `not recorded`."""
    if value is None:
        return "not recorded"
    if isinstance(value, dict):
        return ", ".join(f"{key} {show(value[key])}" for key in sorted(value)) or "none"
    if isinstance(value, list):
        return ", ".join(map(show, value)) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    text = str(value) or "–"
    return text[:12] + "…" if len(text) >= 32 and text.isalnum() else text


def _everywhere(field: str, why: str, done: Sequence[tuple[str, Run]]) -> Equal:
    if field == "versions":  # name the library, not the whole list
        for library in sorted({name for _, run in done for name in run.manifest.get("versions", {})}):
            _same(f"versions.{library}", why, done, "")
    return Equal(field, show(_same(field, why, done, "")), "all runs", why)


def _in_parts(
    field: str, why: str, done: Sequence[tuple[str, Run]], common: str, part: Callable[[Run], Hashable]
) -> Equal:
    parts: dict[Hashable, list[tuple[str, Run]]] = {}
    for called, run in done:
        parts.setdefault(part(run), []).append((called, run))
    values = [show(_same(field, why, members, f" among runs of the same {common}")) for members in parts.values()]
    compared = sum(len(members) for members in parts.values() if len(members) > 1)
    among = f"runs of the same {common} ({compared} of {len(done)} had another to compare with)"
    return Equal(field, values[0] if len(set(values)) == 1 else "another in each such group", among, why)


def _same(field: str, why: str, members: Sequence[tuple[str, Run]], where: str) -> Any:
    """The one value that all these runs have. UsageError where they have several."""
    found = _values(field, members)
    if len(found) > 1:
        raise UsageError(_differing(field, why, members, where))
    return found[0][0] if found else None


def _differing(field: str, why: str, members: Sequence[tuple[str, Run]], where: str) -> str:
    values = "; ".join(f"{show(this)!r} in {_list(runs)}" for this, runs in _values(field, members))
    return f"these runs cannot share a table: {field} differs{where}: {values} ({why})"


def _values(field: str, members: Sequence[tuple[str, Run]]) -> list[tuple[Any, list[str]]]:
    """The different values of a field, each with the runs that have it."""
    found: list[tuple[Any, list[str]]] = []
    for called, run in members:
        this = value(run, field)
        for other, runs in found:
            if other == this:
                runs.append(called)
                break
        else:
            found.append((this, [called]))
    return found


def _list(runs: list[str]) -> str:
    return ", ".join(runs[:3]) + (f" and {len(runs) - 3} more" if len(runs) > 3 else "")
