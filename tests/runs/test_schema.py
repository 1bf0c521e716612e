"""What stands in a run folder's files: the writers write fields that readers know, and readers take
nothing else.
"""

import ast
import inspect
import json
import math

import pytest
from helpers.report_runs import manifest, summary
from msgspec import structs

from hvdtrain.base.numerics.clock import PARTS
from hvdtrain.job.rank import summary as rank_summary
from hvdtrain.job.recording import manifest as runs_manifest
from hvdtrain.runs.schema import (
    Manifest,
    Step,
    Summary,
    UnreadableFile,
    from_json,
    read,
    read_steps,
)


def written(module, function):
    """The keys of the dictionaries that the function returns."""
    [found] = [
        node
        for node in ast.parse(inspect.getsource(module)).body
        if getattr(node, "name", "") == function
    ]
    returned = [node.value for node in ast.walk(found) if isinstance(node, ast.Return)]
    return {
        key.value
        for value in returned
        if isinstance(value, ast.Dict)
        for key in value.keys
        if isinstance(key, ast.Constant)
    }


def names(kind):
    return {field.encode_name for field in structs.fields(kind)}


def test_the_writers_write_what_the_schema_has():
    # Beside what these functions return, rank/results.py adds some; the last are not in every
    # version.
    more = {
        "dataset_hash",
        "train_samples",
        "validation_samples",
        "classes",
        "image_size",
        "initial_weights",
        "parts",
    }
    more |= {"model_hash", "batch_norm", "dropout_layers", "script", "script_args"}
    more |= {"bad_images", "class_names"}
    of_manifest = {
        *runs_manifest.GIVEN_OPTIONS,
        *written(runs_manifest, "manifest"),
        *written(runs_manifest, "_effective_options"),
    }
    assert names(Manifest) <= of_manifest | more
    makers = ("summarise", "_of_evaluations", "_of_steps", "_of_rounds", "_of_membership")
    of_summary = set().union(*(written(rank_summary, name) for name in makers))
    assert names(Summary) <= of_summary | {"test_loss", "test_accuracy", "setup_s", "load"}
    of_step = {f"{part}_s" for part in PARTS if part != "refresh"}
    of_row = {"time", "step", "samples", "loss", "staleness", "shares", "hidden_optimizer_seconds"}
    assert of_step | of_row == names(Step)


def test_an_older_versions_files_are_read():
    least = {"mode": "single", "workers": 1, "servers": 0, "repeat": 1}
    assert from_json(least, Manifest).hardware.hosts == []
    assert (
        from_json(least | {"environment": None, "hosts": None, "unknown": 1}, Manifest).hosts == {}
    )
    assert from_json({}, Summary).evaluations == []


@pytest.mark.parametrize(
    "name, values, said",
    [
        ("manifest", {"mode": "single\n"}, r"matching regex .* - at `\$.mode`"),
        ("manifest", {"workers": True}, r"Expected `int`, got `bool` - at `\$.workers`"),
        ("manifest", {"hosts": {"a": {"memory_gb": "much"}}}, r"at `\$.hosts\[...\].memory_gb`"),
        ("manifest", {"repeat": None}, "missing required field `repeat`"),
        ("summary", {"samples_per_s": math.inf}, r"at `\$.samples_per_s`"),
        ("summary", {"wall_s": -1}, r"at `\$.wall_s`"),
        ("summary", {"processes": [{"cpu_s": math.nan}]}, r"at `\$.processes\[0\].cpu_s`"),
    ],
)
def test_what_no_run_writes_is_told_in_one_line(tmp_path, name, values, said):
    of = manifest()
    (tmp_path / f"{name}.json").write_text(
        json.dumps((of if name == "manifest" else summary(of)) | values)
    )
    with pytest.raises(UnreadableFile, match=said) as refused:
        read(tmp_path, Manifest if name == "manifest" else Summary)
    assert "\n" not in str(refused.value)


def test_steps_with_a_loss_that_is_no_number_are_steps(tmp_path):
    path = tmp_path / "metrics.rank0.jsonl"
    lines = [
        {"step": n, "time": 1.0, "samples": 2, "loss": loss, "comm_s": 0.5, "data_s": 0.25}
        for n, loss in enumerate((1.0, math.nan, math.inf, None))
    ]
    path.write_text(
        "".join(json.dumps(line) + "\n" for line in lines)
        + '{"time": 1.0, "sam\n[]\n{"time": -1}\n'
    )
    steps, unreadable = read_steps(path)
    assert ([step.seconds for step in steps], unreadable) == ([0.75] * 4, 3)
    assert math.isnan(steps[1].loss) and steps[3].loss is None
