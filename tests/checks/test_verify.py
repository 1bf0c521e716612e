"""The proof: synchronous modes compute what one process computes."""

import contextlib

import pytest
from helpers.forked import Forked

from hvdtrain.checks import verify
from hvdtrain.checks.verify import SYNCHRONOUS, compare_with_single


@pytest.fixture
def forked(monkeypatch):
    """Ranks are forked; the README's command launches them."""

    @contextlib.contextmanager
    def running(launcher, ranks, program, log):
        job = Forked(ranks, program[program.index("train") :])
        try:
            yield job
        finally:
            log.write_text(job.printed.read_text())
            job.close()

    monkeypatch.setattr(verify, "local_job", running)


@pytest.mark.timeout(400)
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(("optimizer", "workers"), [("sgd", [2, 4]), ("adam", [1])])
def test_synchronous_modes_give_the_weights_of_one_process_on_the_global_batch(optimizer, workers):
    results = list(compare_with_single(SYNCHRONOUS, workers, [optimizer]))
    assert len(results) == 3 * len(workers)
    assert not [result.line for result in results if not result.same]


@pytest.mark.timeout(100)
@pytest.mark.usefixtures("forked")
def test_a_run_that_differs_is_found(monkeypatch):
    """Against a reference with another seed, nothing can agree."""
    train = verify._train
    monkeypatch.setattr(
        verify, "_train",
        lambda config, workers, out: train(
            verify.dataclasses.replace(config, seed=1 if config.mode == "single" else 0), workers, out
        ),
    )  # fmt: skip
    [result] = compare_with_single(["allreduce"], [2], ["sgd"])
    assert not result.same
    assert not result.samples
    assert result.line.startswith("DIFFERS")
