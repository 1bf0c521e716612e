"""What has to be equal for a comparison to be fair, why, and the check that refuses where it is not."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from hvdtrain.errors import UsageError
from hvdtrain.report.runs import Run, names

# Every run of a report has these in common. Fields of manifest.json, but for target_accuracy of summary.json.
EVERYWHERE = {
    "hvdtrain": "another version may train or measure differently",
    "model": "the same network is trained",
    "parameters": "the same number of weights is computed and sent",
    "width": "it scales every layer, and with it both computing and traffic",
    "image_size": "it decides the work of every convolution",
    "dropout": "it changes what is learned",
    "augment": "the same random changes to the same images",
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
    "threads_per_worker": "every worker, the baseline's too, computes with the same share of a machine",
    "deterministic": "algorithms that repeat to the bit are slower",
    "device": "a GPU is no match for a CPU",
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


_KIND = "mode, workers and servers"


def _same_start(field: str) -> Callable[[Run], Hashable]:
    """What runs share that share this field too: those that trained for longer saw more samples."""
    length = ("steps", "samples") if field == "samples_digest" else ()
    return lambda run: (run.repeat, *map(run.summary.get, length))


def value(run: Run, field: str) -> Any:
    """A field of the run's manifest or summary as it is compared; None where it was not recorded."""
    at: Any = run.summary | run.manifest
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


def _same(field: str, why: str, members: Iterable[tuple[str, Run]], where: str) -> Any:
    """The one value that all these runs have. UsageError where they have several."""
    found: list[tuple[Any, list[str]]] = []
    for called, run in members:
        this = value(run, field)
        for other, runs in found:
            if other == this:
                runs.append(called)
                break
        else:
            found.append((this, [called]))
    if len(found) > 1:
        values = "; ".join(f"{show(this)!r} in {_list(runs)}" for this, runs in found)
        raise UsageError(f"these runs cannot share a table: {field} differs{where}: {values} ({why})")
    return found[0][0] if found else None


def _list(runs: list[str]) -> str:
    return ", ".join(runs[:3]) + (f" and {len(runs) - 3} more" if len(runs) > 3 else "")
