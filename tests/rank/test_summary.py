"""What a run's summary says of all workers together."""

import pytest
import torch
from helpers.workers import on_each

from hvdtrain.base.config.run_config import RunConfig
from hvdtrain.base.numerics.clock import PARTS
from hvdtrain.base.world.place import World
from hvdtrain.data.sampling import BatchSampler
from hvdtrain.job.coordination.job import Job
from hvdtrain.job.coordination.store_group import StoreGroup
from hvdtrain.job.rank.summary import HostLoads, Measured, summarise
from hvdtrain.job.recording.metrics import Recorder
from hvdtrain.job.rings.local_update import LocalUpdate
from hvdtrain.job.training.history import History
from hvdtrain.job.training.step import digest


@pytest.mark.timeout(60)
def test_the_summary_of_176_workers_has_the_digest_of_one(tmp_path):
    """2**48 times 176 is more than a float64 counts in whole numbers."""
    row = {"step": 1, "time": 2.0, "samples": 704, "loss": 1.0, "accuracy": 0.5}

    def summaries(workers):
        def run(group, world):
            worker = world.worker
            job = Job(
                RunConfig(mode="ddp", batch_size=704), world, tmp_path, torch.device("cpu"), 1
            )
            recorder = Recorder(tmp_path / str(workers), worker, is_chief=False)
            seen = (
                sum(
                    digest(share) for share in BatchSampler(7_200, 704, 3, worker, workers).epoch(1)
                )
                % 2**48
            )
            recorder.step(row | {"samples": 704 // workers}, dict.fromkeys(PARTS, 1.0), seen, None)
            last = {"step": 1, "train_s": 2.0, "val_accuracy": 0.9, "val_loss": 0.1}
            history = History([last], step=1, samples=704, wall_s=2.0)
            sync = LocalUpdate(job, group)
            summary = summarise(job, sync, recorder, history, Measured(0, [1.0], HostLoads(sync)))
            recorder.close()
            return summary

        (tmp_path / str(workers)).mkdir()
        first, *others = on_each(workers, run)
        assert not any(others)
        return first

    alone, many = summaries(1), summaries(176)
    assert many["samples_digest"] == alone["samples_digest"]
    assert [process["rank"] for process in many["processes"]] == list(range(176))
    assert (alone["samples"], alone["samples_per_s"], alone["steps"]) == (704, 352.0, 1)
    assert alone["time_to_target_s"] is None
    [load] = many["load"].values()  # of the one host that they all have
    assert load["cores"] > 0 and load["others_cores"] >= 0


def test_a_run_whose_only_worker_has_come_for_its_last_evaluation_has_a_summary(tmp_path):
    """Those that had trained were killed in that."""
    world = World("mpirun", 0, 1, 0, 1)
    job = Job(RunConfig(mode="ddp"), world, tmp_path, torch.device("cpu"), 1)
    history = History(
        [{"step": 3, "val_accuracy": 0.9, "val_loss": 0.1}], step=3, samples=96, wall_s=2.0
    )
    sync = LocalUpdate(job, StoreGroup(world))
    recorder = Recorder(tmp_path, 0, is_chief=False)
    measured = Measured(0, [0.0], HostLoads(sync))
    summary = summarise(job, sync, recorder, history, measured)
    recorder.close()
    assert (summary["status"], summary["steps"], summary["samples_per_s"]) == ("done", 3, 48.0)
    not_known = [summary[name] for name in ("exposed_comm_fraction", "staleness_mean")]
    assert (
        [*not_known, None]
        == [None] * 3
        == [summary["step_time"][f"p{share}_s"] for share in (50, 95, 99)]
    )
