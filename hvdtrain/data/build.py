"""Builds image folders from the recipes in `datasets/`, and finds the folder that a data set's name stands for."""

import fcntl
import hashlib
import importlib
import io
import os
import shutil
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hvdtrain import recipes
from hvdtrain.data.folder import TRAIN, VALIDATION
from hvdtrain.data.recipe import MAKER, Order, Recipe
from hvdtrain.errors import Failure, UsageError, unknown

MANIFEST = "dataset.toml"

Progress = Callable[[int, int], None]  # images written so far, images in all


def build(name: str, out: Path, *, force: bool = False, progress: Progress | None = None, **options: Any) -> Path:
    """Build the data set `name` into the folder `out`, which appears complete or not at all.

    Where `out` already holds this data set with these options, nothing is done. `force` builds it again, and replaces
    another data set, but only what this function built: any other folder is left alone.

    Args:
        options: `seed` and those in the recipe's table [options]; what is left out is as in the recipe.
    Returns:
        the folder, resolved.
    Raises:
        UsageError: unknown name or option, or `out` is in use or cannot be written.
        Failure: the build stopped half way; nothing of it is left.
    """
    order = Recipe.load(name).choose(**options)
    out = out.expanduser().resolve()
    if not force and is_built(order, out):
        return out
    arguments = {key: value for key, value in order.options.items() if key not in ("seed", "flat")}
    source = importlib.import_module(f"hvdtrain.data.{order.recipe.source}")
    total = source.count(**arguments)
    _check_free(out, force)
    try:
        with _locked(out):
            if not force and is_built(order, out):  # by another process, while this one waited
                return out
            with _appearing(out) as folder:
                images = source.images(order.options["seed"], **arguments)
                classes = _write(folder, order, images, total, progress)
                _write_manifest(folder, order.manifest(classes))
                _check_free(out, force)  # again: somebody may have put something there meanwhile
    except OSError as error:
        raise Failure(f"cannot build '{out}': {error.strerror or error}; nothing of it is left") from None
    return out


def is_built(order: Order, out: Path) -> bool:
    """Whether the folder holds exactly what is ordered."""
    return _read_manifest(out).get("key") == order.key


def locate(dataset: str) -> Path:
    """The folder of a data set, resolved: a recipe's name (built into the user's cache on first use) or a folder.

    The name of a recipe comes before a folder of that name; `./NAME` is the folder. Any number of processes may ask
    at once: one builds, the others wait.

    Raises:
        UsageError: neither a name nor a folder; the names are listed. What is in a folder is not looked at.
    """
    if dataset in recipes.names("datasets"):
        order = Recipe.load(dataset).choose()
        return build(dataset, cache_root() / "datasets" / f"{dataset}-{order.key[:12]}")
    try:
        folder = Path(dataset).expanduser()
        if os.sep in dataset or folder.is_dir():
            return folder.resolve()
    except (OSError, RuntimeError) as error:  # a name too long, a home that nobody has, links in a circle
        raise UsageError(f"--dataset {dataset[:80]} cannot be looked at: {error}") from None
    raise UsageError(f"{unknown('data set', dataset, recipes.names('datasets'))}, or give a folder such as ./{dataset}")


def split(names: Sequence[str], validation: float, seed: int, class_name: str) -> tuple[list[str], list[str]]:
    """Draw a class's validation files: round(validation * n) of n, at least one in each part.

    The draw sorts by a hash of seed, class and name, so it needs no random generator whose stream might change, and
    does not depend on the order of the names.

    Returns:
        (training names, validation names), each sorted.
    Raises:
        Failure: fewer than two names.
    """
    if len(names) < 2:
        raise Failure(f"class '{class_name}' has {len(names)} image: a split needs at least two")
    drawn = sorted(names, key=lambda name: hashlib.sha256(f"{seed}/{class_name}/{name}".encode()).digest())
    count = min(max(round(validation * len(names)), 1), len(names) - 1)
    return sorted(drawn[count:]), sorted(drawn[:count])


def png(pixels: Any) -> bytes:
    """A uint8 array [height, width] or [height, width, 3] as a PNG."""
    from PIL import Image

    buffer = io.BytesIO()
    # Level 3 takes half the time of the usual 6 for a tenth more bytes.
    Image.fromarray(pixels).save(buffer, "PNG", compress_level=3)
    return buffer.getvalue()


def _write(
    folder: Path,
    order: Order,
    images: Iterator[tuple[str, str, bytes]],
    total: int,
    progress: Progress | None,
) -> dict[str, dict[str, int]]:
    """Write the images and divide them; returns {class: {part: number of images}}."""
    flat = order.options.get("flat", False)
    names: dict[str, list[str]] = {}
    for done, (class_name, file_name, image) in enumerate(images, start=1):
        place = folder if flat else folder / TRAIN / class_name
        if class_name not in names:
            place.mkdir(parents=True, exist_ok=True)
        with open(place / file_name, "xb") as file:
            file.write(image)
        names.setdefault(class_name, []).append(file_name)
        if progress:
            progress(done, total)
    written = sum(map(len, names.values()))
    if written != total:
        raise Failure(f"{order.recipe.source} gave {written} images instead of {total}")
    if flat:
        return {class_name: {"images": len(files)} for class_name, files in names.items()}
    classes = {}
    for class_name, files in names.items():
        training, validation = split(files, order.recipe.validation, order.options["seed"], class_name)
        (folder / VALIDATION / class_name).mkdir(parents=True)
        for file_name in validation:
            (folder / TRAIN / class_name / file_name).rename(folder / VALIDATION / class_name / file_name)
        classes[class_name] = {"train": len(training), "validation": len(validation)}
    return classes


def _write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    import tomli_w

    (folder / MANIFEST).write_text(tomli_w.dumps(manifest))


def _read_manifest(folder: Path) -> dict[str, Any]:
    """What `dataset.toml` in the folder says if it is one of ours, else nothing."""
    try:
        manifest = tomllib.loads((folder / MANIFEST).read_text())
    except (OSError, ValueError):
        return {}
    return manifest if manifest.get("made_by") == MAKER else {}


def _check_free(out: Path, force: bool) -> None:
    """UsageError unless a folder may be put at `out`."""
    if not out.exists():
        return
    if not out.is_dir():
        raise UsageError(f"'{out}' is a file: name a folder that does not exist yet")
    if out.is_mount() or out == Path.cwd():
        raise UsageError(f"'{out}' itself cannot be replaced: name a new folder inside it")
    if not any(out.iterdir()):
        return
    if not (ours := _read_manifest(out)):
        raise UsageError(f"'{out}' is not empty and was not built by hvdtrain: name another folder, or remove it")
    if not force:
        raise UsageError(
            f"'{out}' holds data set '{ours.get('name')}', built from another recipe or with other options: "
            "name another folder, or replace it with --force"
        )


def cache_root() -> Path:
    """Where built-in data sets are kept, in the folder `datasets`; it need not exist. HVDTRAIN_CACHE moves it."""
    import platformdirs

    return Path(os.environ.get("HVDTRAIN_CACHE") or platformdirs.user_cache_dir("hvdtrain"))


@contextmanager
def _locked(out: Path) -> Iterator[None]:
    """Keep other processes from building the same folder. A process that dies lets go of the lock."""
    path = out.with_name(f".{out.name}.hvdtrain-lock")
    file = _lock(path)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(file)


def _lock(path: Path) -> int:
    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise UsageError(f"cannot write in '{path.parent}': {error.strerror}") from None
        fcntl.flock(file, fcntl.LOCK_EX)
        # Whoever held the lock removed the file when done, and a lock on a removed file excludes nobody.
        if os.fstat(file).st_nlink:
            return file
        os.close(file)


@contextmanager
def _appearing(out: Path) -> Iterator[Path]:
    """A folder to fill, which becomes `out` when the block ends well. Needs the lock."""
    partial, replaced = (out.with_name(f".{out.name}.hvdtrain-{what}") for what in ("partial", "replaced"))
    leftovers = [partial, replaced]
    try:
        for leftover in leftovers:  # of a build that was killed
            shutil.rmtree(leftover, ignore_errors=True)
        partial.mkdir()
        yield partial
        if out.is_dir() and any(out.iterdir()):
            out.rename(replaced)
        partial.rename(out)
    finally:
        for leftover in leftovers:
            shutil.rmtree(leftover, ignore_errors=True)
