"""Builds of image folders from the recipes in `datasets/`."""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hvdtrain.base.errors import Failure, UsageError
from hvdtrain.data import image
from hvdtrain.data.archive import MAX_HASHED_BYTES, Member, file_digest
from hvdtrain.data.folder import (
    MAKER,
    MANIFEST,
    TEST,
    TRAIN,
    VALIDATION,
    combined_hash,
    read_manifest,
    scan,
)
from hvdtrain.data.identity import sample_hash
from hvdtrain.data.recipe import Recipe
from hvdtrain.data.selection import Generated, Item, by_class, split_class
from hvdtrain.data.sources import Source, open_source
from hvdtrain.data.storage import Progress, atomic_folder, check_replaceable, locked, on_all_cores

FOLDERS = {"train": TRAIN, "validation": VALIDATION, "test": TEST}
SPLIT_NOTES = {
    "by-angle": (
        "An arc of neighbouring views of every object is held out: only those at its two ends have "
        "near duplicates in training."
    ),
    "by-object": (
        "Whole objects are held out: no object of the validation images is seen in training."
    ),
}

Planned = tuple[Item, Path]  # an image, and its path in the folder
ImageCounts = dict[str, dict[str, int]]  # the number of images by class and part


def build(
    name: str,
    out: Path,
    *,
    force: bool = False,
    progress: Progress | None = None,
    images_from: Path | None = None,
    **options: Any,
) -> Path:
    """Builds the data set `name` into the folder `out`, which appears complete or not at all.

    If `out` already holds this data set with these options, nothing is done, unless `force` is
    given. `force` also replaces another data set, but only one that this function has built.

    Args:
        name: The name of the recipe.
        out: The folder.
        force: Whether an earlier build is replaced.
        progress: Called after each image.
        images_from: The user's archive or folder, for sources that read one.
        options: `seed`, and options that the recipe's table [options] has.

    Returns:
        The resolved folder.

    Raises:
        UsageError: The name or an option is unknown, or `out` is in use or cannot be written.
        Failure: The build failed. The files that it had written are removed.
    """
    recipe = Recipe.load(name).request(**options)
    out = Path(os.path.expanduser(out)).resolve()
    if images_from and (out.is_relative_to(images_from) or images_from.is_relative_to(out)):
        raise UsageError(
            f"--out '{out}' and the source of the images, '{images_from}': one of these folders is "
            "inside the other, so choose another folder"
        )
    if not force and images_from is None and is_built(recipe, out):
        return out
    source = open_source(recipe, images_from)
    identity = source.identity if images_from else ""
    if not force and is_built(recipe, out, identity):
        return out
    _check_free(out, force)
    planned, classes = plan_images(recipe, source)
    try:
        with locked(out):
            # Another process may have built it while this one was blocked.
            if not force and is_built(recipe, out, identity):
                return out
            with atomic_folder(out) as folder:
                content = _write(folder, recipe, planned, progress)
                made_from = _describe_input(recipe, images_from, identity)
                _write_manifest(folder, recipe, made_from, classes, content, source.notes)
                # Another program may have written files at `out` meanwhile.
                _check_free(out, force)
    except OSError as error:
        raise Failure(
            f"cannot build '{out}': {error.strerror or error}; nothing of it is left"
        ) from None
    return out


def is_built(recipe: Recipe, out: Path, identity: str = "") -> bool:
    """Returns whether a folder holds what a request asks for, completely.

    Args:
        recipe: The recipe, with the options of the request.
        out: The folder.
        identity: The identity of the user's images; see sources.Source.
    """
    manifest = read_manifest(out)
    made_from = manifest.get("input", {}).get("identity", "")
    if (manifest.get("key"), made_from) != (recipe.key, identity):
        return False
    try:
        for name, parts in manifest["classes"].items():
            for part, count in parts.items():
                if len(os.listdir(out / FOLDERS[part] / name)) < count:
                    return False
    except (OSError, KeyError):
        return False
    return True


def plan_images(recipe: Recipe, source: Source) -> tuple[list[Planned], ImageCounts]:
    """Chooses the images of a data set, and decides on their paths.

    Returns:
        The chosen images with their paths, in the source's order, and their numbers.

    Raises:
        UsageError: Fewer than two classes are left.
        Failure: The images cannot be split; see selection.
    """
    options = recipe.options
    items = source.items()
    items_of = by_class(items, recipe.classes.get(options.get("classes", "")))
    paths: dict[int, Path] = {}
    classes: ImageCounts = {}
    for name, class_items in items_of.items():
        parts = split_class(
            name,
            class_items,
            method=options["split"],
            validation=recipe.validation,
            test=options.get("test_fraction", 0.0),
            seed=options["seed"],
            limits={
                "train": options.get("train_per_class", 0),
                "validation": options.get("val_per_class", 0),
            },
        )
        for part, members in parts.items():
            paths |= {id(item): Path(FOLDERS[part], name, item.name) for item in members}
        classes[name] = {part: len(members) for part, members in parts.items() if members}
    if len(classes) < 2:
        raise UsageError(f"{len(classes)} class would be left: there is nothing to tell apart")
    return [(item, paths[id(item)]) for item in items if id(item) in paths], classes


def _write(
    folder: Path, recipe: Recipe, planned: list[Planned], progress: Progress | None
) -> dict[str, Any]:
    """Writes the images, after checking and shrinking them, on all cores.

    Returns:
        The table `content` of dataset.toml, for data.identity and data.image_side.
    """
    link = recipe.options.get("link", "copy")
    side = recipe.options.get("resize", 0)
    for parent in {path.parent for _, path in planned}:
        (folder / parent).mkdir(parents=True, exist_ok=True)
    if link != "copy" and not all(item.handle.path for item, _ in planned):
        raise UsageError(f"--link {link} needs images that lie in a folder: give --source FOLDER")

    def write(planned_image: tuple[Path, Member | Generated, bytes | None]) -> tuple[bytes, int]:
        """Returns the SHA-256 of the image's file, and its shorter side in pixels."""
        path, original, content = planned_image
        name = f"{path.parent.name}/{path.name}"
        content = original.read_bytes() if content is None else content
        if side:
            content = image.shrink(content, side, name)
        shorter = min(image.check(content, name))
        if link == "copy":
            with (folder / path).open("xb") as file:
                file.write(content)
        else:
            assert original.path
            make_link = Path.hardlink_to if link == "hard" else Path.symlink_to
            make_link(folder / path, original.path.resolve())
        return hashlib.sha256(content).digest(), shorter

    written = {}
    for (path, _, _), result in on_all_cores(write, _originals(planned), len(planned), progress):
        written[path] = result
    data = scan(folder)
    images = [written[path.relative_to(folder)] for path in data.images]
    return {
        "hash": combined_hash(data, (digest for digest, _ in images)),
        "sample": sample_hash(data.train, data.validation),
        "image_size": image.middle_side([side for _, side in images]),
    }


def _originals(
    planned: list[Planned],
) -> Iterator[tuple[Path, Member | Generated, bytes | None]]:
    """Yields each image's path in the folder and its original.

    The contents are with it where an archive can be read in its order only. Other images are read
    by several threads.
    """
    for item, path in planned:
        content = item.handle.read_bytes() if item.handle.is_sequential else None
        yield path, item.handle, content


def _describe_input(recipe: Recipe, images_from: Path | None, identity: str) -> dict[str, Any]:
    """Returns the table `input` of dataset.toml: which archive or folder the images come from."""
    made_from: dict[str, Any] = {"identity": identity}
    if not images_from:
        return made_from | recipe.origin
    made_from["name"] = images_from.name
    if images_from.is_file() and images_from.stat().st_size <= MAX_HASHED_BYTES:
        made_from["sha256"] = file_digest(images_from).hex()
    return made_from


def _write_manifest(
    folder: Path,
    recipe: Recipe,
    made_from: dict[str, Any],
    classes: ImageCounts,
    content: dict[str, Any],
    notes: list[str],
) -> None:
    """Writes `dataset.toml`: the origin and licence of the images, how they were chosen and split.

    Args:
        folder: The data set's folder.
        recipe: The recipe, with the options of the request.
        made_from: The table `input`.
        classes: The table `classes`.
        content: The table `content`.
        notes: The lines under `notes`.
    """
    import tomli_w

    options = recipe.options
    percent = round(100 * recipe.validation)
    method = options["split"]
    split = (
        f"{100 - percent} % training, {percent} % validation, drawn {method} within each class "
        f"where the source has no parts of its own. {SPLIT_NOTES.get(method, recipe.note)}"
    )
    manifest = {
        "made_by": MAKER,
        "key": recipe.key,
        "name": recipe.name,
        "title": recipe.title,
        "source": recipe.source,
        "licence": options.get("licence") or recipe.licence,
        "citation": recipe.citation,
        "split": split.strip(),
        "images": sum(sum(parts.values()) for parts in classes.values()),
        "seed": options["seed"],
        "options": {name: value for name, value in options.items() if name != "seed"},
        "notes": notes,
        "content": content,
        "input": made_from,
        "classes": classes,
    }
    (folder / MANIFEST).write_text(tomli_w.dumps(manifest), encoding="utf-8")


def _check_free(out: Path, force: bool) -> None:
    """Raises UsageError unless a folder may be put at `out`."""
    manifest = read_manifest(out)
    has_results = check_replaceable(out, {MANIFEST, *FOLDERS.values()}, bool(manifest), MAKER)
    if has_results and not force:
        raise UsageError(
            f"'{out}' holds data set '{manifest.get('name')}', which is not whole, or built from "
            "another recipe, other images or with other options: name another folder, or replace "
            "it with --force"
        )
