"""What a script calls, and the parts below it, in one process."""

import copy
import io

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hvdtrain.base.config.run_config import RunConfig
from hvdtrain.base.errors import Failure, UsageError
from hvdtrain.base.numerics.optimizers import make_optimizer
from hvdtrain.base.system.terminal import Terminal
from hvdtrain.job.buckets.partition import cut
from hvdtrain.job.ps.bucket import BucketWeights
from hvdtrain.job.ps.policy import Update
from hvdtrain.job.rank.command import _misplaced
from hvdtrain.job.rank.script import _run, uneven_batch
from hvdtrain.job.script.handle import ScriptJob
from hvdtrain.job.script.optimizer import HandedIn, take_over
from hvdtrain.job.script.sampler import WorkerSampler
from hvdtrain.job.wire.messages import Push
from hvdtrain.launch.commands import launch
from hvdtrain.runs.request import check, check_elastic, check_joinable
from hvdtrain.tools.evaluate.command import evaluate


def one_step(model, optimizer):
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()


def test_alone_a_script_computes_what_it_did():
    model = nn.Linear(3, 2)
    plain = copy.deepcopy(model)
    one_step(plain, torch.optim.AdamW(plain.parameters(), lr=0.1))
    job = ScriptJob()
    prepared, optimizer = job.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    with job.accumulate():
        pass
    one_step(prepared, optimizer)
    optimizer.synchronize()
    job.finish()
    assert prepared.weight.equal(plain.weight)
    assert (job.rank, job.size, job.mode, job.is_first) == (0, 1, "single", True)
    assert job.mean(torch.tensor([1, 2])).tolist() == [1.0, 2.0] and job.gather("a") == ["a"]
    with pytest.raises(Failure, match="prepare was called twice"):
        job.prepare(model, optimizer)
    with pytest.raises(Failure, match="load comes before prepare"):
        job.load("nothing")
    with pytest.raises(Failure, match="not speed"):
        job.report(speed=3)


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    servers=st.integers(1, 3),
    most=st.integers(1, 30),
    multiple=st.integers(1, 3),
)
def test_no_bucket_spans_a_border(sizes, servers, most, multiple):
    borders = [sum(sizes[:place]) for place in range(1, len(sizes))]
    buckets = cut(sizes, servers, most, multiple=multiple, borders=borders)
    covered = [element for bucket in buckets for element in range(bucket.start, bucket.stop)]
    assert covered == [*range(sum(sizes))]
    assert all(len(bucket.parameters) == 1 for bucket in buckets)
    for server in range(servers):
        numbers = [bucket.number for bucket in buckets if bucket.server == server]
        assert numbers == [*range(len(numbers))]


def test_workers_batches_are_parts_of_those_of_one_process():
    whole = [*WorkerSampler(range(26), 0, 1, seed=7)]
    parts = [[*WorkerSampler(range(26), worker, 3, seed=7)] for worker in range(3)]
    for first in range(0, 24, 6):  # batches of six over three workers
        of_workers = [part[first // 3 : first // 3 + 2] for part in parts]
        together = [place for part in of_workers for place in part]
        assert sorted(together) == sorted(whole[first : first + 6])


@pytest.mark.parametrize(("batch_size", "workers", "fitting"), [(64, 3, 63), (2, 4, 4)])
def test_a_batch_that_workers_cannot_share_evenly_is_told(batch_size, workers, fitting):
    said = uneven_batch(batch_size, workers)
    assert f"each step counts as {batch_size} samples" in said
    assert said.endswith(f"batch_size={fitting} divides evenly")


def test_each_epoch_has_another_order():
    sampler = WorkerSampler(range(20), 0, 2, seed=1)
    first, second = [*sampler], [*sampler]
    assert first != second and sampler.taken == 20
    sampler.set_epoch(0)
    assert [*sampler] == first


def test_a_push_brings_the_settings_of_its_step():
    weights, reference = torch.ones(4), torch.ones(4, requires_grad=True)
    of_job = RunConfig(optimizer="adamw", lr=0.5, weight_decay=0.9)
    ours = BucketWeights(weights.clone(), lambda p: make_optimizer(of_job, p))
    theirs = torch.optim.AdamW([reference], lr=0.1, weight_decay=0.2, betas=(0.5, 0.6), eps=1e-3)
    settings = {"weight_decay": 0.2, "betas": [0.5, 0.6], "eps": 1e-3}
    for step in (1, 2):
        gradient = torch.tensor([1.0, 2.0, 3.0, 4.0]) * step
        push = Push(0, step, step - 1, 0.1, None, None, settings)
        ours.apply(Update(gradient.clone(), 0.1, [push]))
        reference.grad = gradient
        theirs.step()
    torch.testing.assert_close(ours.tensor, reference.detach())


def test_a_script_s_job_is_not_started_again(tmp_path):
    (tmp_path / "a.py").touch()
    words = ["-n", "1", "--retries", "2", "--dry-run", "--", "--script", str(tmp_path / "a.py")]
    with pytest.raises(UsageError, match="^--retries is not for --script"):
        launch.main(words, standalone_mode=False)


def test_a_script_can_not_be_joined():
    of_script = RunConfig(mode="ps-async", servers=1, script="a.py", wire="zmq")
    with pytest.raises(UsageError, match="--respawn is not for --script"):
        check_joinable(of_script, "--respawn", is_elastic=False)
    with pytest.raises(UsageError, match="--elastic is not for --script"):
        check_elastic(RunConfig(mode="ddp", script="a.py"))


def linear():
    return nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda m: torch.optim.RMSprop(m.parameters()), "the optimizer is RMSprop"),
        (lambda m: torch.optim.SGD(m.parameters(), dampening=0.5), "dampening=0.5"),
        (lambda m: torch.optim.Adam(m.parameters(), amsgrad=True), "amsgrad=True"),
        (lambda m: m, "the last it was given is of type Linear"),
        (lambda m: torch.optim.SGD(m.requires_grad_(False).parameters()), "no parameter to train"),
    ],
)
def test_other_optimizers_are_refused(make, said):
    with pytest.raises(Failure, match=said):
        HandedIn(make(linear()))


def test_a_scheduler_made_before_holds_the_same_optimizer():
    optimizer = torch.optim.SGD(linear().parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    taken = []
    own_step = take_over(optimizer, lambda: taken.append(optimizer.param_groups[0]["lr"]), list)
    for _ in range(3):
        optimizer.step()
        scheduler.step()  # a warning would be an error here
    own_step()
    assert taken == [1.0, 0.5, 0.25] and isinstance(optimizer, torch.optim.SGD)
    with pytest.raises(Failure, match="closure"):
        optimizer.step(lambda: 0.0)


def test_groups_and_what_is_frozen_stay_as_they_were_prepared():
    model = linear()
    handed_in = HandedIn(torch.optim.SGD(model.parameters(), lr=0.1))
    handed_in.check_unchanged()
    model.bias.requires_grad_(False)
    with pytest.raises(Failure, match="before prepare"):
        handed_in.check_unchanged()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"script": "train.sh"}, "is no Python file"),
        ({"script_args": "-n 3"}, "--script-args are for --script"),
        ({"script": "a.py", "script_args": "'"}, "No closing quotation"),
        ({"script": "a.py", "model": "vgg16"}, "--model does nothing with --script"),
        ({"script": "a.py", "backup": 1, "mode": "ps-sync", "servers": 1}, "--backup is not for"),
        ({"script": "a.py", "wait_for": "layer", "mode": "allreduce"}, "--wait-for layer"),
        ({"script": "a.py", "width": 0.5}, "--width does nothing with --script"),
        ({"script": "a.py", "log_every": 5}, "--log-every does nothing with --script"),
        ({"script": "a.py", "snapshot_every": "10m"}, "call job.save in the script"),
        ({"script": "a.py", "save": "best"}, "call job.save in the script"),
    ],
)
def test_options_that_are_no_script_s(options, said):
    with pytest.raises(UsageError, match=said):
        check(RunConfig(**options))


@pytest.fixture
def run_here(tmp_path, monkeypatch):
    """Returns a function that runs a script's text; it returns what it failed with and printed."""
    monkeypatch.setattr("sys.argv", [])
    monkeypatch.setattr("sys.path", [])

    def run(text):
        script = tmp_path / "train.py"
        script.write_text(text, encoding="utf-8")
        terminal = Terminal(io.StringIO(), io.StringIO())
        with pytest.raises(Failure) as failed:
            _run(RunConfig(script=str(script)), terminal)
        return failed.value, terminal.err.getvalue()

    return run


@pytest.mark.parametrize(
    ("ends", "code", "said"),
    [
        ("sys.exit(7)", 7, "train.py ended with exit code 7"),
        ("sys.exit(256)", 1, "exit code 256"),
        ("sys.exit('no data')", 1, "train.py ended: no data"),
    ],
)
def test_a_script_ends_its_process_as_python_would(run_here, ends, code, said):
    failure, _ = run_here(f"import sys\n{ends}\n")
    assert failure.exit_code == code and said in str(failure)


def test_the_script_s_own_lines_are_shown_alone(run_here):
    failure, shown = run_here("def f():\n    return 1 / 0\n\nf()\n")
    assert "train.py, line 2 raised ZeroDivisionError" in str(failure)
    assert "line 4, in <module>" in shown and "runpy" not in shown
    failure, shown = run_here("x = 1\ndef f(:\n")
    assert "train.py, line 2 raised SyntaxError" in str(failure)
    assert "def f(:" in shown and "runpy" not in shown and "hvdtrain" not in shown


def test_a_script_that_is_not_there_starts_nothing(tmp_path):
    words = ["-n", "2", "--out", str(tmp_path / "run"), "--", "--mode", "ddp", "--script", "no.py"]
    refused = CliRunner().invoke(launch, words).exception
    assert isinstance(refused, UsageError) and str(refused) == "there is no script no.py"
    assert not (tmp_path / "run").exists()


def test_options_of_hvdtrain_after_the_script_are_noticed():
    assert _misplaced(["--layers", "3", "--mode=ddp"], {"out"}) == "--mode"
    assert not _misplaced(["--mode", "eval"], {"mode"})
    assert not _misplaced(["--out", "weights.pt"], set())


def test_a_script_s_model_is_evaluated_by_the_script_alone(tmp_path):
    (tmp_path / "config.toml").write_text('script = "train.py"\n', encoding="utf-8")
    refused = CliRunner().invoke(evaluate, [str(tmp_path)]).exception
    assert isinstance(refused, UsageError) and "evaluate in the script" in str(refused)
