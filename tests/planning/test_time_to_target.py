"""The time to a target elsewhere: samples of a comparison's trainings times predicted seconds."""

import json
import math
from statistics import geometric_mean

import pytest
from click.testing import CliRunner
from helpers.report_runs import BATCH, EPOCHS, PER_EPOCH, write
from planning.test_calibration import make
from planning.test_limits import on_perfect_hosts

from hvdtrain.base.errors import UsageError
from hvdtrain.planning.command import plan as command
from hvdtrain.planning.scenario import Scenario
from hvdtrain.planning.time_to_target import contest, read

TARGET = 0.3
GBIT = 1e4
PARAMETERS = make().model["parameters"]
SPREAD = (1.0, 1.02, 0.98, 1.01, 0.99)
MODES = ("allreduce", "ps-sync", "ps-async")


def train(root, mode, workers=1, servers=0, epochs=3.0, factors=SPREAD, **change):
    """Writes trainings that reach TARGET after so many epochs, of six."""
    change = {"parameters": PARAMETERS} | change
    for repeat, factor in enumerate(factors, 1):
        accuracy = TARGET * EPOCHS / (epochs * factor)
        target = {"accuracy": accuracy, "target_accuracy": TARGET}
        write(root, mode, workers, servers, repeat, change=change, **target)
    return root


def compared(folder, of_async=4.0):
    """A comparison in which asynchronous training takes more samples."""
    runs = folder / "runs"
    train(runs, "allreduce", 2)
    train(runs, "ps-sync", 2, 1)
    train(runs, "ps-async", 2, 1, epochs=of_async, push_scale="softsync")
    return folder


def asked(tmp_path, comparison, *words, made=None):
    (made or make()).save(tmp_path / "cal.json")
    words = ["predict", str(tmp_path / "cal.json"), "--to-target", str(comparison), *words]
    done = CliRunner().invoke(command, [*words, "--json", str(tmp_path / "rows.json")])
    if done.exit_code:
        assert isinstance(done.exception, UsageError), done.exception
        assert "\n" not in str(done.exception)
        return str(done.exception), {}
    return " ".join(done.output.split()), json.loads((tmp_path / "rows.json").read_text())


def parts(found):
    return {
        (row["mode"], row["workers"], row["local_steps"]): row["to_target"] for row in found["rows"]
    }


def test_the_time_is_the_samples_measured_here_times_the_seconds_predicted_there(tmp_path):
    comparison = compared(tmp_path / "c")
    words = ["--workers", "2,4", "--servers", "1", "--bandwidth", "1gbit"]
    words += ["--modes", ",".join(MODES)]
    said, found = asked(tmp_path, comparison, *words)
    samples = BATCH * PER_EPOCH * 3 * geometric_mean(SPREAD)
    for row in found["rows"]:
        part = row["to_target"]
        assert part["seconds"] == pytest.approx(part["samples"] / row["samples_per_s"])
        assert part["low"] < part["seconds"] < part["high"]
        # The workers share the global batch of the trainings.
        assert row["workers"] * row["batch_per_worker"] == BATCH
        of_sample = math.log(row["samples_per_s_high"] / row["samples_per_s"])
        of_samples = math.log(part["samples_high"] / part["samples"])
        both = math.log(part["high"] / part["seconds"])
        assert both == pytest.approx(math.hypot(of_sample, of_samples))
    by_job = parts(found)
    assert by_job["allreduce", 2, 1]["samples"] == pytest.approx(samples)
    assert by_job["ps-sync", 4, 1]["samples"] == by_job["single", 1, 1]["samples"]
    assert by_job["ps-async", 2, 1]["samples"] == pytest.approx(4 / 3 * samples)
    # Contenders in lockstep with the same seed are one training.
    assert by_job["allreduce", 2, 1]["trainings"] == 5
    assert found["to_target"]["target"] == TARGET and found["to_target"]["global_batch"] == BATCH
    assert "The soonest at the target, and how probably" in said
    assert "modes in lockstep: 960 samples to accuracy 0.3" in said


def place(comparison, made, mode):
    """The place of the map with two hosts where messages cost nothing."""
    template = Scenario("single", bandwidth_gbit=GBIT)
    return contest(comparison, made.on_hosts(16), template, ["allreduce", mode], None).place(2)


def test_who_steps_faster_and_needs_more_samples_is_later(tmp_path):
    """Where steps vary, workers that do not wait for each other step faster."""
    made = on_perfect_hosts(step_jitter=0.3, bandwidth_gbit=GBIT)
    even = place(compared(tmp_path / "even", of_async=3.0), made, "ps-async")
    later = place(compared(tmp_path / "later", of_async=5.5), made, "ps-async")
    assert even["p_servers"] > 0.8 and later["p_servers"] < 0.01 < 0.8 < later["p_ring"]
    assert later["servers_s_to_target"] == pytest.approx(5.5 / 3 * even["servers_s_to_target"])
    for name in ("ring", "servers"):
        assert later[f"{name}_samples_per_s"] == even[f"{name}_samples_per_s"]


def test_what_trainings_vary_by_makes_the_answer_less_sure(tmp_path):
    """Where both sides compute the same, the same samples are drawn for both."""
    made = on_perfect_hosts(bandwidth_gbit=GBIT)

    def p_ring(mode, spread):
        root = tmp_path / f"{mode}-{spread}"
        factors = [math.exp(spread * z) for z in (-1, -0.5, 0, 0.5, 1)]
        train(root, "allreduce", 2, factors=factors)
        if mode == "ps-async":
            train(root, mode, 2, 1, epochs=3.6, factors=factors, push_scale="softsync")
        return place(root, made, mode)["p_ring"]

    assert p_ring("ps-async", 0.02) > 0.9 > 0.8 > p_ring("ps-async", 0.5) > 0.5
    assert p_ring("ps-sync", 0.02) == p_ring("ps-sync", 0.5)


def test_asynchronous_modes_and_local_steps_on_other_workers_are_marked(tmp_path):
    comparison = compared(tmp_path / "c")
    options = {"options": {"local_steps": 8}}
    train(tmp_path / "h" / "runs", "allreduce", 2, epochs=3.5, **options)
    for run in (tmp_path / "h" / "runs").iterdir():
        run.rename(comparison / "runs" / f"h8-{run.name}")
    words = ["--workers", "2,4", "--servers", "1", "--bandwidth", "1gbit"]
    words += ["--modes", ",".join(MODES)]
    said, found = asked(tmp_path, comparison, *words, "--local-steps", "1,8,16")
    by_job = parts(found)
    assert by_job["allreduce", 4, 1]["not_validated"] == []
    assert by_job["ps-async", 2, 1]["not_validated"] == []
    assert by_job["ps-async", 4, 1]["not_trained"] == ["ps-async on 4 workers (trained on 2)"]
    assert by_job["allreduce", 2, 8]["samples"] == pytest.approx(
        3.5 / 3 * by_job["allreduce", 2, 1]["samples"]
    )
    # Servers in lockstep compute the same with as many local steps.
    assert by_job["ps-sync", 2, 8]["samples"] == by_job["allreduce", 2, 8]["samples"]
    assert by_job["ps-sync", 4, 8]["not_trained"]
    assert by_job["allreduce", 2, 16] is None and by_job["ps-async", 2, 8] is None
    assert f"Not trained in {comparison}: allreduce ×2 H 16" in said
    assert {place["local_steps"] for place in found["map"]} == {1, 8}
    unsure = {place["workers"] for place in found["map"] if place["not_validated"]}
    assert unsure <= {4} and "?" in said


def test_asynchronous_trainings_count_beside_the_slow_worker_that_they_had(tmp_path):
    comparison = compared(tmp_path / "c")
    words = ["--workers", "2", "--servers", "1", "--bandwidth", "1gbit", "--slow", "1:4x"]
    words += ["--modes", "allreduce,ps-async"]
    said, found = asked(tmp_path, comparison, *words)
    assert parts(found)["ps-async", 2, 1] is None and parts(found)["allreduce", 2, 1]
    assert f"Not trained in {comparison}: ps-async ×2+1" in said and not found["map"]
    slowed = train(tmp_path / "s", "ps-async", 2, 1, epochs=5.0, slow={"asked": "1:4x"})
    for run in slowed.iterdir():
        run.rename(comparison / "runs" / f"slow-{run.name}")
    _, found = asked(tmp_path, comparison, *words)
    of_slow = parts(found)["ps-async", 2, 1]
    assert of_slow["samples"] == pytest.approx(5 / 3 * parts(found)["allreduce", 2, 1]["samples"])
    assert not of_slow["not_validated"] and found["map"]


def test_another_global_batch_and_few_trainings_are_marked(tmp_path):
    comparison = compared(tmp_path / "c")
    words = ["--workers", "2", "--servers", "1", "--bandwidth", "1gbit"]
    words += ["--modes", "allreduce,ps-sync"]
    said, found = asked(tmp_path, comparison, *words, "--batch-size", str(BATCH))
    reason = f"a global batch of {2 * BATCH} (trained with {BATCH})"
    assert parts(found)["allreduce", 2, 1]["not_validated"] == [reason]
    assert "RING?" in said or "SERVERS?" in said or " ? " in said
    one = train(tmp_path / "one", "allreduce", 2, factors=(1.0,))
    _, found = asked(tmp_path, one, *words)
    assert parts(found)["ps-sync", 2, 1]["not_validated"] == ["modes in lockstep from one training"]
    some = train(tmp_path / "some", "allreduce", 2, factors=(1.0, 1.0, 3.0))
    _, found = asked(tmp_path, some, *words)
    part = parts(found)["allreduce", 2, 1]
    assert part["samples"] == BATCH * PER_EPOCH * (3 + 3 + EPOCHS) / 2
    assert part["not_validated"] == [
        "modes in lockstep of whose trainings 2 of 3 reached the target"
    ]


def test_what_cannot_be_is_refused_in_a_line(tmp_path):
    comparison = compared(tmp_path / "c")
    assert "no training of ps-ssp" in asked(tmp_path, comparison, "--modes", "ps-ssp")[0]
    refused, _ = asked(tmp_path, comparison, "--workers", "128")
    assert f"a global batch of {BATCH}, which so many cannot share" in refused
    assert "give one of them" in asked(tmp_path, comparison, "--hosts", "2")[0]
    other = make(model={"name": "vgg16", "parameters": 10})
    assert "has a model of" in asked(tmp_path, comparison, made=other)[0]
    larger = make(model={"parameters": PARAMETERS, "image_size": 64})
    assert "trained with image size 32" in asked(tmp_path, comparison, made=larger)[0]
    never = train(tmp_path / "never", "allreduce", 2, epochs=50)
    assert f"no training in {never} reached 0.3" in asked(tmp_path, never)[0]
    two = train(compared(tmp_path / "two") / "runs" / "..", "ddp", 2, global_batch=2 * BATCH)
    for run in two.glob("ddp*"):
        run.rename(two / "runs" / run.name)
    refused, _ = asked(tmp_path, tmp_path / "two")
    assert f"global batches of {BATCH}, {2 * BATCH}: say which" in refused
    sprints = tmp_path / "sprints"
    write(sprints, "allreduce", 2, change={"sprint": 2.0})
    with pytest.raises(UsageError, match="no finished training with a target"):
        read(sprints, make())
