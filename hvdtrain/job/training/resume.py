"""Resuming a run: finding its snapshot, checking it, and making the folder as it was then."""

import dataclasses
import shutil
import socket
import zlib
from pathlib import Path

from hvdtrain.base.config.file import read_config
from hvdtrain.base.config.run_config import RunConfig
from hvdtrain.base.config.untrusted import LARGEST_DOCUMENT, parse_json, read_whole
from hvdtrain.base.errors import Failure, UsageError
from hvdtrain.base.numerics.clock import PARTS
from hvdtrain.base.world.host import boot_id
from hvdtrain.data.folder import ImageFolder
from hvdtrain.job.coordination.group import Group
from hvdtrain.job.recording.metrics import cut_after
from hvdtrain.job.recording.snapshot import Snapshot, latest, mapped, roll_back
from hvdtrain.job.training.history import is_over
from hvdtrain.models.own import code_hash
from hvdtrain.runs.folder import CONFIG
from hvdtrain.runs.request import another_job_error, fixed_options_changed

# What would be lost if a run without a snapshot began again.
RESULTS = ("summary.json", "snapshots/final.safetensors")
# What the state of a snapshot has at least, and of which type.
NEEDED = {"step": int, "config": dict, "dataset_hash": str, "tally": dict}


def find(run: Path, config: RunConfig, data: ImageFolder, is_chief: bool) -> Snapshot | None:
    """Returns the snapshot that the run goes on from; None if there is none yet.

    The first worker reads the snapshot whole, reports damaged ones, and checks that the images are
    the same. The other workers find the faults that can be found without that, so that all end
    together. They return None, and get the snapshot by `share`.

    Args:
        run: the run folder.
        config: the configuration to go on with.
        data: the images, with their known_hash.
        is_chief: whether this is the first worker.

    Raises:
        UsageError: the snapshot is of another model, data set, order or optimizer (the error names
            each difference), or no snapshot is whole.
    """
    snapshot = latest(run, print if is_chief else lambda line: None, check=is_chief)
    if not snapshot:
        _check_nothing_is_lost(run)
        return None
    _check_state(snapshot)
    saved = snapshot.state["config"]
    different = fixed_options_changed(saved, config)
    if is_chief and snapshot.state["dataset_hash"] != data.known_hash:
        different.append(
            f"{config.dataset} holds other images than "
            f"{saved.get('dataset', RunConfig.dataset)} did"
        )
    if is_chief and snapshot.state.get("model_hash") != code_hash(config.model):
        different.append(f"{config.model} is other code than {saved.get('model')} was")
    if different:
        raise another_job_error(snapshot.folder, different)
    return snapshot if is_chief else None


def _check_nothing_is_lost(run: Path) -> None:
    """Checks that a run without a snapshot can begin again.

    Raises:
        UsageError: there are results, which would be lost.
    """
    for name in RESULTS:
        if (run / name).exists():
            raise UsageError(
                f"{run} has no snapshot to go on from, and {name} would be lost: "
                "train anew, elsewhere (--snapshot-every epoch lets a run go on)"
            )


def _check_state(snapshot: Snapshot) -> None:
    """Checks that a snapshot has the state of a run.

    Raises:
        UsageError: it has not, or another version wrote it.
    """
    for name, kind in NEEDED.items():
        if not isinstance(snapshot.state.get(name), kind):
            raise UsageError(f"{snapshot.folder} is no snapshot of a run: its state has no {name}")
    if len(snapshot.state["tally"].get("seconds", [])) != len(PARTS):
        raise UsageError(
            f"{snapshot.folder} is from another version, which divides a step's time differently: "
            "train anew in another folder"
        )


def share(run: Path, found: Snapshot | None, group: Group) -> Snapshot | None:
    """Returns the snapshot that the first worker has found, on every worker.

    All workers call this together. The first worker has read the snapshot against its checksums. On
    every other host the first worker there does so, and the others map the same files, so that no
    host reads them more than once. Each worker reads its own state.

    Args:
        run: the run folder.
        found: the snapshot, on the first worker; None on the others.
        group: the workers.

    Raises:
        Failure: a host does not read what the first worker's host reads. It is raised on all
            workers.
    """
    host = zlib.crc32(f"{socket.gethostname()} {boot_id()}".encode())
    workers, rows = group.all_gather([found.step if found else -1, host])
    step = int(rows[0, 0])
    hosts = rows[:, 1].tolist()
    if step < 0:
        return None
    problem = None
    try:
        if found is None:
            is_first_of_host = workers[hosts.index(host)] == group.worker
            found = mapped(run, step, check=is_first_of_host)
        own = found.own_state(group.worker, check=host != hosts[0])
        found = dataclasses.replace(found, own=own)
    except Failure as error:
        problem = error
    workers, failed = group.all_gather([problem is not None])
    if failed.any():
        first_failed = workers[int(failed[:, 0].argmax())]
        own_sentence = ""
        if group.worker == first_failed:
            own_sentence = f"{socket.gethostname()}: {problem}"
        raise Failure(group.sentence(own_sentence))
    return found


def is_finished(run: Path, config: RunConfig, samples: int | None) -> bool:
    """Returns whether the run has trained for as long as the configuration says.

    Args:
        run: the run folder.
        config: the configuration to go on with.
        samples: the number of training images; None for the number in the run's manifest.

    Raises:
        UsageError: the run has ended, with another configuration.
    """
    summary_file = run / "summary.json"
    if summary_file.is_file():
        different = fixed_options_changed(read_config(run / CONFIG), config)
        if different:
            raise another_job_error(run, different)
    try:
        summary = parse_json(read_whole(summary_file, LARGEST_DOCUMENT))
        if samples is None:
            manifest = parse_json(read_whole(run / "manifest.json", LARGEST_DOCUMENT))
            samples = int(manifest["train_samples"])
        return is_over(config, samples, summary["steps"], summary["wall_s"], summary["evaluations"])
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        # There is no file, or nobody can read it.
        return False


def prepare_folder(run: Path, snapshot: Snapshot | None, ranks: range) -> None:
    """Makes a run folder as it was at the snapshot, or at the beginning.

    Args:
        run: the run folder.
        snapshot: the snapshot; None for the beginning.
        ranks: the ranks of workers. They write metrics, and cut the files of their ranks.
    """
    (run / "summary.json").unlink(missing_ok=True)
    # A start that was killed while it merged its trace has left the folder.
    shutil.rmtree(run / "trace", ignore_errors=True)
    if snapshot:
        roll_back(run, snapshot)
    else:
        # After a snapshot, servers continue their files.
        for path in run.glob("metrics.server*.jsonl"):
            path.unlink()
    cut_by_workers = {f"metrics.rank{rank}.jsonl" for rank in ranks}
    last_step = snapshot.step if snapshot else 0
    for path in run.glob("metrics.rank*.jsonl"):
        if path.name not in cut_by_workers:
            cut_after(path, last_step)
