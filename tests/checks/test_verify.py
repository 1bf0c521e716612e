"""The proof: synchronous modes compute what one process computes."""

import contextlib
import dataclasses

import numpy as np
import pytest
from click.testing import CliRunner
from helpers.forked import Forked
from helpers.forked_jobs import fork_ranks_here

from hvdtrain.base.config.run_config import RunConfig
from hvdtrain.base.errors import Failure, UsageError
from hvdtrain.launch.hosts import Host
from hvdtrain.tools.checks import verify
from hvdtrain.tools.checks.verify import CHECKED, SYNCHRONOUS, compare_with_single

pytestmark = pytest.mark.xdist_group("verify")  # what one process came to is computed once


@pytest.fixture(scope="module")
def checked(few_digits):
    """What the command trains, on fewer images: of 92 the fourth batch of the epoch has five, which
    three or four workers cannot share evenly, and the fifth step begins a new epoch.
    """
    return dataclasses.replace(CHECKED, dataset=str(few_digits), batch_size=29)


@pytest.fixture(scope="module")
def references():
    """What one process came to, by configuration: tests share it."""
    return {}


@pytest.fixture
def forked(monkeypatch, references):
    """Ranks are forked; the README's command launches them. What is put into the list, each rank
    runs first.
    """
    first = []
    train = verify._train

    def train_or_recall(config, *more):
        if config.mode != "single":
            return train(config, *more)
        if config not in references:
            references[config] = train(config, *more)
        return references[config]

    @contextlib.contextmanager
    def running(command, log):
        ranks = int(command.argv[command.argv.index("-np") + 1])
        job = Forked(ranks, command.argv[command.argv.index("train") :], first="\n".join(first))
        try:
            yield job
        finally:
            log.write_text(job.printed.read_text())
            job.close()

    monkeypatch.setattr(verify, "launched_job", running)
    monkeypatch.setattr(verify, "_train", train_or_recall)
    return first


@pytest.mark.timeout(400)
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    ("modes", "optimizer", "workers", "options"),
    [
        (SYNCHRONOUS, "sgd", [3], {}),
        (["allreduce", "ps-sync"], "adam", [1], {}),
        (["ps-ssp"], "adam", [4], {}),
        (["allreduce", "sharded"], "adam", [2], {"wait_for": "layer"}),
        (["sharded"], "adam", [4], {}),
        (["ps-sync"], "adam", [2], {"wait_for": "step"}),
        (["allreduce"], "adam", [3], {"shares": "measured"}),
    ],
)
def test_synchronous_modes_give_the_weights_of_one_process_on_the_global_batch(
    modes, optimizer, workers, options, checked, tmp_path
):
    results = list(
        compare_with_single(
            modes, workers, tmp_path, options, optimizers=[optimizer], checked=checked
        )
    )
    assert len(results) == len(modes) * len(workers)
    assert not [result.line for result in results if not result.same]
    for result in results:
        assert ("18 buckets on 2 servers" in result.line) == bool(result.config.servers)
        assert ("17 buckets  " in result.line) == (result.config.mode in ("allreduce", "sharded"))


@pytest.mark.main_job
def test_the_readmes_command(monkeypatch):
    fork_ranks_here(monkeypatch)
    done = CliRunner().invoke(verify.verify, ["--modes", "ps-sync", "--workers", "2"])
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    assert [line.split()[0] for line in lines[:-1]] == ["same", "same"]
    assert lines[-1] == "all 2 agree with one process on the global batch"


# A policy that is wrong in one of the buckets of the second server: it goes twice as far.
WRONG_IN_ONE_BUCKET = """
import os
from hvdtrain.job.modes.ps_sync import Synchronous
accept, first = Synchronous.accept, []
def wrong(self, push, gradient, version):
    first[:] = first or [self]
    return accept(self, push._replace(lr=2 * push.lr) if self is first[0] else push, gradient, version)
if os.environ.get("RANK") == "1":
    Synchronous.accept = wrong
"""


@pytest.mark.timeout(100)
def test_a_policy_that_is_wrong_in_one_of_many_buckets_is_found(forked, checked, tmp_path):
    forked.append(WRONG_IN_ONE_BUCKET)
    [result] = compare_with_single(["ps-sync"], [2], tmp_path, optimizers=["sgd"], checked=checked)
    assert result.samples and not result.same
    assert result.line.startswith("DIFFERS")


@pytest.mark.timeout(100)
@pytest.mark.usefixtures("forked")
def test_a_policy_that_lets_workers_go_on_too_early_is_found(checked, tmp_path, monkeypatch):
    monkeypatch.setitem(verify.MADE_SYNCHRONOUS, "ps-ssp", {"staleness": 100, "shares": "equal"})
    [result] = compare_with_single(["ps-ssp"], [4], tmp_path, optimizers=["adam"], checked=checked)
    assert result.samples and not result.same


def test_other_samples_are_found_whatever_the_weights_are(tmp_path, monkeypatch):
    weights = np.ones(3)
    monkeypatch.setattr(verify, "_train", lambda config, *more: (weights, config.mode))
    monkeypatch.setattr(verify, "_initial", lambda config: (np.zeros(3), {"weight": 3}))
    [result] = compare_with_single(["allreduce"], [2], tmp_path, optimizers=["sgd"])
    assert result.distance == 0 and not result.same
    assert result.line.startswith("DIFFERS") and result.line.endswith(", other samples")


def refused(*words):
    result = CliRunner().invoke(verify.verify, words)
    return f"{result.exception} {' '.join(result.output.replace('│', '').split())}"


def test_ranks_get_the_variables_that_are_named(tmp_path, monkeypatch):
    def stop(launcher, job, **more):
        raise Failure(f"ranks get {job.secrets}")

    monkeypatch.setattr(verify, "prepare", stop)
    monkeypatch.setenv("MY_TOKEN", "t0ken")
    assert "ranks get {'MY_TOKEN': 't0ken'}" in refused("--env", "MY_TOKEN")
    with pytest.raises(Failure, match="ranks get {'MY_TOKEN'"):
        verify._train(
            verify.CHECKED,
            2,
            tmp_path / "of hosts",
            [Host("a", 2)],
            "ssh",
            {"MY_TOKEN": "t0ken"},
            (),
        )


def test_what_cannot_be_checked_is_refused_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="has batch norm: that differs between workers by nature"):
        verify._initial(RunConfig(model="vgg11_bn", width=1 / 16))
    assert "'ps-async' is not one of 'allreduce', 'ddp'" in refused("--modes", "ps-async")
    assert "--launcher is for hosts" in refused("--launcher", "mpi")
    assert "--env NOT_SET_HERE: there is no variable of this name here" in refused(
        "--env", "NOT_SET_HERE"
    )
    few = refused("--modes", "ps-sync", "--workers", "1,4", "-H", "a:1,b:2")
    assert "4 workers need 4 slots, and there are 1 on a + 2 on b" in few
    assert list(tmp_path.iterdir()) == []
