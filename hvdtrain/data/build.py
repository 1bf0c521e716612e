"""Builds image folders from the recipes in `datasets/`."""

import hashlib
import os
from pathlib import Path
from typing import Any

from hvdtrain.data import image
from hvdtrain.data.archive import MAX_HASHED_BYTES, Member, file_digest
from hvdtrain.data.folder import MAKER, MANIFEST, TEST, TRAIN, VALIDATION, combined_hash, read_manifest, scan
from hvdtrain.data.identity import sample_hash
from hvdtrain.data.recipe import Recipe
from hvdtrain.data.selection import Generated, Item, by_class, split_class
from hvdtrain.data.sources import Source, open_source
from hvdtrain.data.storage import Progress, atomic_folder, check_replaceable, locked, on_all_cores
from hvdtrain.errors import Failure, UsageError

FOLDERS = {"train": TRAIN, "validation": VALIDATION, "test": TEST}
SPLIT_NOTES = {
    "by-angle": "An arc of neighbouring views of every object is held out: only those at its two ends have near "
    "duplicates in training.",
    "by-object": "Whole objects are held out: no object of the validation images is seen in training.",
}

Planned = tuple[Item, Path]  # an image, and its path in the folder


def build(
    name: str, out: Path, *, force: bool = False, progress: Progress | None = None, images_from: Path | None = None,
    **options: Any,
) -> Path:  # fmt: skip
    """Build the data set `name` into the folder `out`, which appears complete or not at all.

    If `out` already holds this data set with these options, nothing is done, unless `force` is given. `force` also
    replaces another data set, but only one that this function built.

    Args:
        images_from: the user's archive or folder to take the images from, for sources that read one.
        options: `seed`, and options of the recipe's table [options], which has their default values.

    Returns:
        the folder, resolved.

    Raises:
        UsageError: unknown name or option, or `out` is in use or cannot be written.
        Failure: the build failed; what it had written is removed.
    """
    recipe = Recipe.load(name).request(**options)
    out = out.expanduser().resolve()
    if images_from and (out == images_from or out in images_from.parents or images_from in out.parents):
        raise UsageError(
            f"--out '{out}' and what the images come from, '{images_from}', lie in each other: name another folder"
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
            if not force and is_built(recipe, out, identity):  # by another process, while this one waited
                return out
            with atomic_folder(out) as folder:
                content = _write(folder, recipe, planned, progress)
                _write_manifest(folder, recipe, images_from, identity, classes, content, source.notes)
                _check_free(out, force)  # others may have put something in its place meanwhile
    except OSError as error:
        raise Failure(f"cannot build '{out}': {error.strerror or error}; nothing of it is left") from None
    return out


def is_built(recipe: Recipe, out: Path, identity: str = "") -> bool:
    """Whether the folder holds what is requested, completely, and made of the images with this identity."""
    manifest = read_manifest(out)
    made_from = manifest.get("input", {}).get("identity", "")
    if (manifest.get("key"), made_from) != (recipe.key, identity):
        return False
    try:
        return all(
            len(os.listdir(out / FOLDERS[part] / name)) >= count
            for name, parts in manifest["classes"].items()
            for part, count in parts.items()
        )
    except (OSError, KeyError):
        return False


def plan_images(recipe: Recipe, source: Source) -> tuple[list[Planned], dict[str, dict[str, int]]]:
    """The chosen images with their paths, in the source's order, and {class: {part: number of images}}."""
    options = recipe.options
    items = source.items()
    paths: dict[int, Path] = {}
    classes = {}
    for name, class_items in by_class(items, recipe.classes.get(options.get("classes", ""))).items():
        parts = split_class(
            name, class_items, method=options["split"], validation=recipe.validation,
            test=options.get("test_fraction", 0.0), seed=options["seed"],
            limits={"train": options.get("train_per_class", 0), "validation": options.get("val_per_class", 0)},
        )  # fmt: skip
        for part, members in parts.items():
            paths |= {id(item): Path(FOLDERS[part], name, item.name) for item in members}
        classes[name] = {part: len(members) for part, members in parts.items() if members}
    if len(classes) < 2:
        raise UsageError(f"{len(classes)} class would be left: there is nothing to tell apart")
    return [(item, paths[id(item)]) for item in items if id(item) in paths], classes


def _write(folder: Path, recipe: Recipe, planned: list[Planned], progress: Progress | None) -> dict[str, Any]:
    """Read one image after the other; check, shrink and write them on all cores.

    Returns:
        what is in the folder, for who wants to know without reading it: see data.identity and image.native_side.
    """
    link, side = recipe.options.get("link", "copy"), recipe.options.get("resize", 0)
    for parent in {path.parent for _, path in planned}:
        (folder / parent).mkdir(parents=True, exist_ok=True)
    if link != "copy" and not all(item.handle.path for item, _ in planned):
        raise UsageError(f"--link {link} needs images that lie in a folder: give --source FOLDER")
    # Of an archive that is read in its order only, images are read as they are handed out.
    originals = (
        (path, item.handle, item.handle.read_bytes() if item.handle.is_sequential else None) for item, path in planned
    )

    def write(one: tuple[Path, Member | Generated, bytes | None]) -> tuple[bytes, int]:
        """The SHA-256 of an image's file, and the shorter of its sides in pixels."""
        path, original, content = one
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

    written = {one[0]: result for one, result in on_all_cores(write, originals, len(planned), progress)}
    data = scan(folder)
    images = [written[path.relative_to(folder)] for path in data.images]
    return {
        "hash": combined_hash(data, (digest for digest, _ in images)),
        "sample": sample_hash(data.train, data.validation),
        "image_size": image.middle_side([side for _, side in images]),
    }


def _write_manifest(
    folder: Path, recipe: Recipe, images_from: Path | None, identity: str, classes: dict[str, dict[str, int]],
    content: dict[str, Any], notes: list[str],
) -> None:  # fmt: skip
    """`dataset.toml`: where the images come from, under which licence, how they were chosen and split."""
    import tomli_w

    options = recipe.options
    percent, method = round(100 * recipe.validation), options["split"]
    split = f"{100 - percent} % training, {percent} % validation, drawn {method} within each class where the source has"
    split = f"{split} no parts of its own. {SPLIT_NOTES.get(method, recipe.note)}".strip()
    made_from: dict[str, Any] = {"identity": identity}
    if images_from:
        made_from["name"] = images_from.name
        if images_from.is_file() and images_from.stat().st_size <= MAX_HASHED_BYTES:
            made_from["sha256"] = file_digest(images_from).hex()
    else:
        made_from |= recipe.origin
    manifest = {
        "made_by": MAKER,
        "key": recipe.key,
        "name": recipe.name,
        "title": recipe.title,
        "source": recipe.source,
        "licence": options.get("licence") or recipe.licence,
        "citation": recipe.citation,
        "split": split,
        "images": sum(sum(parts.values()) for parts in classes.values()),
        "seed": options["seed"],
        "options": {name: value for name, value in options.items() if name != "seed"},
        "notes": notes,
        "content": content,
        "input": made_from,
        "classes": classes,
    }
    (folder / MANIFEST).write_text(tomli_w.dumps(manifest))


def _check_free(out: Path, force: bool) -> None:
    """UsageError unless a folder may be put at `out`."""
    manifest = read_manifest(out)
    if check_replaceable(out, {MANIFEST, *FOLDERS.values()}, bool(manifest), MAKER) and not force:
        raise UsageError(
            f"'{out}' holds data set '{manifest.get('name')}', which is not whole, or built from another recipe, other "
            "images or with other options: name another folder, or replace it with --force"
        )
