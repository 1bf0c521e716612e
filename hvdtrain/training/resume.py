"""Going on with a run: which of its snapshots, whether it may be taken, and what is to be made of the folder."""

import shutil
import socket
import zlib
from pathlib import Path

from hvdtrain.config.file import read_config
from hvdtrain.config.run_config import RunConfig
from hvdtrain.config.untrusted import parse_json, read_whole
from hvdtrain.coordination.group import Group
from hvdtrain.data.folder import ImageFolder
from hvdtrain.errors import Failure, UsageError
from hvdtrain.models.own import code_hash
from hvdtrain.numerics.clock import PARTS
from hvdtrain.runs.folder import CONFIG
from hvdtrain.runs.metrics import cut_after
from hvdtrain.runs.request import changed_for_good, of_another_job
from hvdtrain.runs.snapshot import Snapshot, latest, mapped, roll_back
from hvdtrain.training.history import is_over
from hvdtrain.world.host import boot_id


def find(run: Path, config: RunConfig, data: ImageFolder, is_chief: bool) -> Snapshot | None:
    """The snapshot that the run goes on from, or None where there is none yet.

    Args:
        data: with its known_hash.
        is_chief: the first worker reads it whole, reports damaged ones, and sees that the images are the same. The
            others find what can be found without that, so that they end with it, and have the snapshot from `share`.

    Raises:
        UsageError: it is of another model, data set, order or optimizer, each difference named, or not one is whole.
    """
    snapshot = latest(run, print if is_chief else lambda line: None, check=is_chief)
    if not snapshot:
        if kept := [name for name in ("summary.json", "snapshots/final.safetensors") if (run / name).exists()]:
            raise UsageError(
                f"{run} has no snapshot to go on from, and {kept[0]} would be lost: train anew, elsewhere "
                "(--snapshot-every epoch lets a run go on)"
            )
        return None
    for name, kind in (("step", int), ("config", dict), ("dataset_hash", str), ("tally", dict)):
        if not isinstance(snapshot.state.get(name), kind):
            raise UsageError(f"{snapshot.folder} is no snapshot of a run: its state has no {name}")
    if len(snapshot.state["tally"].get("seconds", [])) != len(PARTS):
        raise UsageError(f"{snapshot.folder} divides time into other parts than this version: train anew, elsewhere")
    saved = snapshot.state["config"]
    different = changed_for_good(saved, config)
    if is_chief and snapshot.state["dataset_hash"] != data.known_hash:
        different.append(f"{config.dataset} holds other images than {saved.get('dataset', RunConfig.dataset)} did")
    if is_chief and snapshot.state.get("model_hash") != code_hash(config.model):
        different.append(f"{config.model} is other code than {saved.get('model')} was")
    if different:
        raise of_another_job(snapshot.folder, different)
    return snapshot if is_chief else None


def share(run: Path, found: Snapshot | None, group: Group) -> Snapshot | None:
    """The snapshot that the first worker has found, on every worker; all call it together.

    It has been read against its checksums on the first worker's host. On every other one the first worker there does
    that, and the rest map the same files, so that no host reads them more than once.

    Raises:
        Failure: a host does not read what the first worker's does; on all workers.
    """
    host = zlib.crc32(f"{socket.gethostname()} {boot_id()}".encode())
    there, rows = group.all_gather([found.step if found else -1, host])
    step, hosts = int(rows[0, 0]), rows[:, 1].tolist()
    if step < 0:
        return None
    problem = None
    if found is None:
        is_first = there[hosts.index(host)] == group.worker
        try:
            found = mapped(run, step, check=is_first)
        except Failure as error:
            problem = error
    there, failed = group.all_gather([problem is not None])
    if failed.any():
        first = there[int(failed[:, 0].argmax())]
        raise Failure(group.sentence(f"{socket.gethostname()}: {problem}" if group.worker == first else ""))
    return found


def is_finished(run: Path, config: RunConfig, samples: int | None) -> bool:
    """Whether the run has trained for as long as is asked. UsageError where something else is asked of it.

    Args:
        samples: training images; None: as many as the run's manifest says.
    """
    if (run / "summary.json").is_file() and (different := changed_for_good(read_config(run / CONFIG), config)):
        raise of_another_job(run, different)
    try:
        summary = parse_json(read_whole(run / "summary.json"))
        if samples is None:
            samples = int(parse_json(read_whole(run / "manifest.json"))["train_samples"])
        return is_over(config, samples, summary["steps"], summary["wall_s"], summary["evaluations"])
    except (OSError, ValueError, KeyError, TypeError, OverflowError):  # there is none, or one that nobody can read
        return False


def prepare_folder(run: Path, snapshot: Snapshot | None, ranks: range) -> None:
    """Make a run folder as it was at the snapshot, or at the beginning.

    Args:
        ranks: those that write metrics, and cut them themselves. Servers go on with theirs, where there is a snapshot.
    """
    (run / "summary.json").unlink(missing_ok=True)
    shutil.rmtree(run / "trace", ignore_errors=True)  # of a start that was killed while it put its trace together
    if snapshot:
        roll_back(run, snapshot)
    for path in run.glob("metrics.server*.jsonl") if not snapshot else ():
        path.unlink()
    for path in run.glob("metrics.rank*.jsonl"):
        if path.name not in {f"metrics.rank{rank}.jsonl" for rank in ranks}:
            cut_after(path, snapshot.step if snapshot else 0)
