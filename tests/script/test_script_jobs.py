"""Scripts of a user's own in jobs: the weights of one process in lockstep, and what goes wrong."""

import json
import re
from pathlib import Path

import pytest
from helpers.jobs import adds_up, hvdtrain, steps
from helpers.staged import STAGED_RING
from helpers.weights import assert_same_weights_of_script

HERE = Path(__file__).parent
REGRESSION = HERE / "regression.py"
LANGUAGE = HERE / "language.py"


def run_script(out, mode, script, *words, workers=2, options=(), first=""):
    """Runs a script as the ranks of a job; returns what the job printed."""
    servers = int(mode.startswith("ps-"))
    ranks = workers + servers
    started = ["run", "--mode", mode, "--servers", servers, "--threads", 1, "--out", out]
    return hvdtrain(*started, *options, script, *words, ranks=ranks, first=first)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Returns the run of a script as one process, made once for each way to call it."""
    folder = tmp_path_factory.mktemp("alone")
    made = {}

    def run(script, *words):
        key = (script, *words)
        if key not in made:
            made[key] = folder / str(len(made))
            kept = ["--deterministic"]  # what it began with
            done = run_script(made[key], "single", script, *words, workers=1, options=kept)
            assert done.returncode == 0, done.stdout
        return made[key]

    return run


@pytest.mark.parametrize(("mode", "workers"), [("single", 1), ("ddp", 2), ("ps-async", 1)])
def test_workers_of_all_modes_keep_memory(tmp_path, mode, workers):
    # Else glibc maps each large tensor anew, and a mode with another allocator is faster by that.
    done = run_script(tmp_path / "run", mode, HERE / "heap.py", workers=workers)
    assert done.returncode == 0 and "kept: True" in done.stdout, done.stdout


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("allreduce", ()),
        ("allreduce", ("--amid",)),
        ("allreduce", ("--synchronize", "--loose")),
        ("allreduce", ("--channels-last", "--optimizer", "fused")),
        ("allreduce", ("--unused",)),
        ("ddp", ("--one-model",)),
        ("sharded", ("--synchronize",)),
        ("ps-sync", ("--unused", "--clip-own")),
    ],
)
def test_lockstep_modes_have_the_weights_of_one_process(tmp_path, alone, mode, words):
    done = run_script(tmp_path / "run", mode, REGRESSION, *words)
    assert done.returncode == 0, done.stdout
    assert_same_weights_of_script(tmp_path / "run", alone(REGRESSION, *words))
    assert ("no gradient of model 0: extra in this step" in done.stdout) == ("--unused" in words)
    assert ("changes gradients of this worker alone" in done.stdout) == ("--clip-own" in words)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["steps"], summary["samples"]) == (8, 8 * 24)
    assert summary["val_loss"] > 0 and summary["val_accuracy"] is None
    assert [row["step"] for row in steps(tmp_path / "run", int(mode == "ps-sync"))] == [
        *range(1, 9)
    ]


def test_gradients_by_way_of_cpu_memory_give_these_weights_too(tmp_path, alone):
    done = run_script(tmp_path / "run", "allreduce", REGRESSION, first=STAGED_RING)
    assert done.returncode == 0, done.stdout
    assert_same_weights_of_script(tmp_path / "run", alone(REGRESSION))


def test_local_steps_whose_mean_is_taken_each_time_have_them_too_and_a_timeline(tmp_path, alone):
    outer = ("--local-steps", 1, "--outer", "sgd", "--outer-lr", 1, "--outer-momentum", 0)
    run = tmp_path / "run"
    done = run_script(run, "ps-sync", REGRESSION, options=(*outer, "--trace"))
    assert done.returncode == 0, done.stdout
    assert_same_weights_of_script(run, alone(REGRESSION))
    assert (run / "trace.pftrace").stat().st_size


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("allreduce", ("--accumulate", "in-block")),
        ("ddp", ("--accumulate", "by-hand")),
        ("sharded", ("--accumulate", "by-hand")),
    ],
)
def test_a_language_model_accumulates_and_clips(tmp_path, alone, mode, words):
    done = run_script(tmp_path / "run", mode, LANGUAGE, *words)
    assert done.returncode == 0, done.stdout
    assert_same_weights_of_script(tmp_path / "run", alone(LANGUAGE, *words))


def test_the_page_s_example_trains(tmp_path):
    page = (HERE.parent.parent / "hvdtrain/job/script/README.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    script = tmp_path / "train.py"
    script.write_text(example.replace("range(100)", "range(3)"))
    done = run_script(tmp_path / "run", "ps-async", script)
    assert done.returncode == 0, done.stdout
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["samples"] == 3 * 4096 and summary["val_loss"] > 0


def test_bf16_trains_with_servers(tmp_path):
    done = run_script(tmp_path / "run", "ps-sync", LANGUAGE, "--bf16", "--steps", 2)
    assert done.returncode == 0, done.stdout


def test_what_servers_saved_goes_on_in_a_ring(tmp_path, alone):
    saved = tmp_path / "saved.pt"
    first = run_script(tmp_path / "a", "ps-sync", LANGUAGE, "--steps", 3, "--save", saved)
    assert first.returncode == 0, first.stdout
    last = tmp_path / "last.pt"
    then = run_script(tmp_path / "b", "sharded", LANGUAGE, "--load", saved, "--save", last)
    assert then.returncode == 0, then.stdout
    assert_same_weights_of_script(tmp_path / "b", alone(LANGUAGE, "--save", tmp_path / "alone.pt"))


def test_asynchronous_workers_may_end_after_other_numbers_of_steps(tmp_path):
    done = run_script(tmp_path / "run", "ps-async", REGRESSION, "--fault", "early", "--counted")
    assert done.returncode == 0, done.stdout
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert [row["samples"] for row in summary["processes"]] == [None, 7 * 12, 8 * 12]


RAISES = 1 + REGRESSION.read_text().splitlines().index('            raise ValueError("on purpose")')
FAULTS = [
    ("unprepared", 1, "never called prepare"),
    ("unstepped", 1, "never called optimizer.step"),
    ("twice", 2, "prepare was called twice"),
    ("raises", 2, f"regression.py, line {RAISES} raised ValueError: on purpose"),
    ("parameters", 2, "worker 1"),
    ("order", 2, "parameter 0 of worker 1 is 1.bias [2]"),
    ("early", 2, "worker 0 ended after 7 steps"),
    ("second", 2, "had a second gradient before step"),
    ("lonely", 2, "after 2 steps worker 0 waits in a function of the job"),
    ("shapes", 2, "the workers came together with values of different shapes"),
    ("last", 2, "worker 1 has ended after 8 steps, and this worker waits for it in a function"),
]


@pytest.mark.parametrize(("fault", "workers", "said"), FAULTS)
def test_what_goes_wrong_is_a_line_and_nothing_hangs(tmp_path, fault, workers, said):
    words = ("--fault", fault, "--one-model")
    done = run_script(tmp_path / "run", "allreduce", REGRESSION, *words, workers=workers)
    assert done.returncode != 0
    assert said in done.stdout, done.stdout
    if fault == "raises":  # the steps before that are recorded
        taken = [row["step"] for row in steps(tmp_path / "run", 1)]
        assert taken == [1, 2]


def test_a_job_ends_if_a_worker_fails_before_it_calls_init(tmp_path):
    script = tmp_path / "one_alone.py"
    script.write_text(f"open({str(tmp_path / 'taken')!r}, 'x')\nimport hvdtrain\nhvdtrain.init()\n")
    options = ("--wire", "rpc", "--timeout", "3")
    done = run_script(tmp_path / "run", "ps-async", script, options=options)
    assert done.returncode != 0
    assert "one_alone.py, line 1 raised FileExistsError" in done.stdout, done.stdout


def test_an_optimizer_that_servers_lack_is_refused(tmp_path):
    words = ("--optimizer", "lbfgs")
    done = run_script(tmp_path / "run", "single", REGRESSION, *words, workers=1)
    assert done.returncode == 1
    assert "the optimizer is LBFGS: rings and servers both have SGD, Adam, AdamW" in done.stdout


def test_a_script_that_ends_before_its_sprint_has_warmed_up_is_told_so(tmp_path):
    done = run_script(tmp_path / "run", "allreduce", REGRESSION, options=("--sprint", "5s"))
    assert done.returncode == 1
    assert (
        "regression.py ended before its speed was measured: have it train for 6.2 s" in done.stdout
    )


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("early", "worker 0 has ended after 7 steps, and worker 1 waits for it in a function"),
        ("shapes", "the workers came together with values of different shapes"),
    ],
)
def test_asynchronous_workers_that_wait_for_each_other_at_different_places_fail(
    tmp_path, fault, said
):
    words = ("--fault", fault, "--often")
    options = ("--wire", "zmq")
    done = run_script(tmp_path / "run", "ps-async", REGRESSION, *words, options=options)
    assert done.returncode != 0
    assert said in done.stdout, done.stdout


@pytest.mark.parametrize(
    ("mode", "options", "words"),
    [
        ("allreduce", ("--sprint", "0.3s"), ()),
        ("ps-async", ("--sprint", "0.3s", "--local-steps", 4), ()),
        # The round of one worker ends while the other one is in a function.
        ("ps-async", ("--sprint", "0.3s", "--wire", "zmq"), ("--often",)),
        # One worker ends after a part of the sprint.
        ("ps-async", ("--sprint", "2s", "--wire", "zmq"), ("--fault", "ends")),
    ],
)
def test_a_sprint_stops_a_script_between_two_steps(tmp_path, mode, options, words):
    words = ("--steps", 10**6, *words)
    done = run_script(tmp_path / "run", mode, REGRESSION, *words, options=options)
    assert done.returncode == 0, done.stdout
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["samples_per_s"] > 0 and summary["steps"] >= 5
    assert summary["wall_s"] > 0.2 and adds_up(summary)  # the step that ends it is foreseen
    assert all(seconds >= 0 for seconds in summary["step_seconds"].values())
