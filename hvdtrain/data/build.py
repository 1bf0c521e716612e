"""Builds image folders from the recipes in `datasets/`."""

import os
import tomllib
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hvdtrain.data import image
from hvdtrain.data.archive import HASHED, Member, digest
from hvdtrain.data.folder import TEST, TRAIN, VALIDATION
from hvdtrain.data.place import appearing, locked
from hvdtrain.data.recipe import Order, Recipe
from hvdtrain.data.select import Item, by_class, choose_labels, divide
from hvdtrain.data.sources import Source, open_source
from hvdtrain.errors import Failure, UsageError

MANIFEST = "dataset.toml"
MAKER = "hvdtrain data build"  # signs the folders that may be replaced
FOLDERS = {"train": TRAIN, "validation": VALIDATION, "test": TEST}
BATCH = 16  # images that a thread takes at once: handing over each costs as much as copying it
SPLIT_NOTES = {
    "by-angle": "An arc of neighbouring views of every object is held out: only those at its two ends have near "
    "duplicates in training.",
    "by-object": "Whole objects are held out: no object of the validation images is seen in training.",
}

Progress = Callable[[int, int], None]  # images written so far, images in all
Planned = tuple[Item, Path]  # an image and where it goes, relative to the folder


def build(
    name: str, out: Path, *, force: bool = False, progress: Progress | None = None, place: Path | None = None,
    **options: Any,
) -> Path:  # fmt: skip
    """Build the data set `name` into the folder `out`, which appears complete or not at all.

    Where `out` already holds this data set with these options, nothing is done. `force` builds it again, and replaces
    another data set, but only what this function built: any other folder is left alone.

    Args:
        place: the archive or folder to take the images from, where the recipe's source takes them from one.
        options: `seed` and those in the recipe's table [options]; what is left out is as in the recipe.
    Returns:
        the folder, resolved.
    Raises:
        UsageError: unknown name or option, or `out` is in use or cannot be written.
        Failure: the build stopped half way; nothing of it is left.
    """
    order = Recipe.load(name).choose(**options)
    out = out.expanduser().resolve()
    if place and (out == place or out in place.parents or place in out.parents):
        raise UsageError(
            f"--out '{out}' and what the images come from, '{place}', lie in each other: name another folder"
        )
    if not force and place is None and is_built(order, out):
        return out
    source = open_source(order.recipe, order.options, place)
    identity = source.identity if place else ""
    if not force and is_built(order, out, identity):
        return out
    _check_free(out, force)
    planned, classes = plan(order, source)
    try:
        with locked(out):
            if not force and is_built(order, out, identity):  # by another process, while this one waited
                return out
            with appearing(out) as folder:
                _write(folder, order, source, planned, progress)
                _write_manifest(folder, order, place, identity, classes)
                _check_free(out, force)  # again: somebody may have put something there meanwhile
    except OSError as error:
        raise Failure(f"cannot build '{out}': {error.strerror or error}; nothing of it is left") from None
    return out


def is_built(order: Order, out: Path, identity: str = "") -> bool:
    """Whether the folder holds exactly what is ordered, of the images that this identity stands for, and all of it."""
    found = read_manifest(out)
    return (found.get("key"), found.get("input", {}).get("identity", "")) == (order.key, identity) and _is_whole(out)


def _is_whole(out: Path) -> bool:
    """Whether every class has as many files as it was built with."""
    try:
        return all(
            len(os.listdir(out / FOLDERS[part] / name if part in FOLDERS else out)) >= count
            for name, parts in read_manifest(out)["classes"].items()
            for part, count in parts.items()
        )
    except (OSError, TypeError):
        return False


def plan(order: Order, source: Source) -> tuple[list[Planned], dict[str, dict[str, int]]]:
    """Which images are taken, in the source's order, with the place of each; and {class: {part: images}}."""
    chosen = order.options
    labels = choose_labels(source.labels, source.titles, order.wanted, chosen.get("num_classes", 0), chosen["seed"])
    items = source.items(labels)
    if chosen.get("flat"):
        images = {label: {"images": sum(item.label == label for item in items)} for label in labels}
        return [(item, Path(item.name)) for item in items], images
    goes: dict[int, Path] = {}
    classes = {}
    for name, own in by_class(items, order.grouping).items():
        parts = divide(
            name, own, how=chosen.get("split", "random"), validation=order.recipe.validation,
            test=chosen.get("test_fraction", 0.0), seed=chosen["seed"],
            most={"train": chosen.get("train_per_class", 0), "validation": chosen.get("val_per_class", 0)},
        )  # fmt: skip
        for part, members in parts.items():
            goes |= {id(item): Path(FOLDERS[part], name, item.name) for item in members}
        classes[name] = {part: len(members) for part, members in parts.items() if members}
    if len(classes) < 2:
        raise UsageError(f"{len(classes)} class would be left: there is nothing to tell apart")
    return [(item, goes[id(item)]) for item in items if id(item) in goes], classes


def _write(
    folder: Path, order: Order, source: Source, planned: list[Planned], progress: Progress | None
) -> None:  # fmt: skip
    """Read one image after the other, and check, shrink and write them on all cores."""
    link, side = order.options.get("link", "copy"), order.options.get("resize", 0)
    for parent in {path.parent for _, path in planned}:
        (folder / parent).mkdir(parents=True, exist_ok=True)
    items = [item for item, _ in planned]
    if link != "copy":
        if not all(getattr(item.handle, "path", None) for item in items):
            raise UsageError(f"--link {link} needs images that lie in a folder: give --source FOLDER")

    def finish(path: Path, found: bytes | Member) -> None:
        content = found if isinstance(found, bytes) else found.read()
        called = f"{path.parent.name}/{path.name}"
        if side:
            content = image.shrink(content, side, called)
        else:
            image.check(content, called)
        if link != "copy":
            assert isinstance(found, Member) and found.path
            (path.hardlink_to if link == "hard" else path.symlink_to)(found.path.resolve())
            return
        with path.open("xb") as file:
            file.write(content)

    def finish_all(batch: list[tuple[Path, bytes | Member]]) -> None:
        for path, found in batch:
            finish(path, found)

    cores = len(os.sched_getaffinity(0))
    under_way: deque[Future[None]] = deque()
    batch: list[tuple[Path, bytes | Member]] = []
    with ThreadPoolExecutor(cores, thread_name_prefix="images") as pool:
        try:
            for done, ((_, path), found) in enumerate(zip(planned, source.contents(items), strict=True), 1):
                batch.append((folder / path, found))
                if len(batch) == BATCH or done == len(planned):
                    under_way.append(pool.submit(finish_all, batch))
                    batch = []
                if len(under_way) > 2 * cores:
                    under_way.popleft().result()
                if progress:
                    progress(done, len(planned))
            while under_way:
                under_way.popleft().result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _write_manifest(
    folder: Path, order: Order, place: Path | None, identity: str, classes: dict[str, dict[str, int]]
) -> None:
    """`dataset.toml`: where the images come from, under which licence, how they were chosen and split."""
    import tomli_w

    recipe, options = order.recipe, order.options
    percent, how = round(100 * recipe.validation), options.get("split", "random")
    split = f"{100 - percent} % training, {percent} % validation, drawn {how} within each class where the source has no"
    split = f"{split} parts of its own. {SPLIT_NOTES.get(how, recipe.note)}".strip()
    given: dict[str, Any] = {"identity": identity}
    if place:
        given["name"] = place.name
        if place.is_file() and place.stat().st_size <= HASHED:
            given["sha256"] = digest(place).hex()
    else:
        given |= recipe.origin
    manifest = {
        "made_by": MAKER,
        "key": order.key,
        "name": recipe.name,
        "title": recipe.title,
        "source": recipe.source,
        "licence": recipe.licence,
        "citation": recipe.citation,
        "split": "none: one flat folder" if options.get("flat") else split,
        "images": sum(sum(parts.values()) for parts in classes.values()),
        "seed": options["seed"],
        "options": {name: value for name, value in options.items() if name != "seed"},
        "input": given,
        "classes": classes,
    }
    (folder / MANIFEST).write_text(tomli_w.dumps(manifest))


def read_manifest(folder: Path) -> dict[str, Any]:
    """What `dataset.toml` in the folder says if it is one of ours, else nothing."""
    try:
        manifest = tomllib.loads((folder / MANIFEST).read_text())
    except (OSError, ValueError):
        return {}
    tables = all(isinstance(manifest.get(name, {}), dict) for name in ("input", "classes"))
    return manifest if manifest.get("made_by") == MAKER and tables else {}


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
    if not (ours := read_manifest(out)):
        raise UsageError(f"'{out}' is not empty and was not built by hvdtrain: name another folder, or remove it")
    strangers = sorted(set(os.listdir(out)) - {MANIFEST, *FOLDERS.values()})
    if ours.get("options", {}).get("flat"):
        strangers = [name for name in strangers if not name.endswith(".png")]
    if strangers:
        raise UsageError(f"'{out}' holds what no build has put there ({', '.join(strangers[:5])}): name another folder")
    if not force:
        if not _is_whole(out):
            raise UsageError(f"'{out}' is not whole any more: build it again with --force")
        raise UsageError(
            f"'{out}' holds data set '{ours.get('name')}', built from another recipe, other images or with other "
            "options: name another folder, or replace it with --force"
        )
