"""Selection of a data set's classes and images, and their split into parts.

All functions are pure: they depend on names and a seed alone.
"""

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from hvdtrain.base.config.untrusted import is_utf8
from hvdtrain.base.errors import Failure, UsageError, unknown
from hvdtrain.base.formatting import some_of
from hvdtrain.data.names import not_utf8

SPLIT_METHODS = ["random", "by-angle", "by-object"]  # class folders are split `by-content`
UNITS = {"random": "image", "by-object": "object", "by-content": "image that differs from others"}
PARTS = ("train", "validation", "test")
MAX_CLASS_BYTES = 200  # of a class's name


@dataclass(frozen=True)
class Generated:
    """An image that this program makes, in place of an archive.Member."""

    read_bytes: Callable[[], bytes]
    path: None = None
    is_sequential: bool = False


@dataclass(frozen=True)
class Item:
    """One image of a source.

    Attributes:
        label: The class in the source.
        name: The file name.
        part: `train`, `validation` or `test` where the source has parts; else empty.
        group: The object that the image is a view of, or a hash of its file, where known.
        angle: The angle of the view in degrees, where known.
        handle: The archive.Member or Generated that reads the contents.
    """

    label: str
    name: str
    part: str = ""
    group: str = ""
    angle: int = 0
    handle: Any = None


def choose_labels(
    labels: Set[str], titles: Mapping[str, str], options: Mapping[str, Any]
) -> Set[str]:
    """Returns the classes that a request names, or so many classes drawn by seed, or all.

    Args:
        labels: The classes that there are.
        titles: Names of classes by label, comma-separated; may be empty.
        options: `classes` (labels, or names in a title, comma-separated), `num_classes` and `seed`.

    Raises:
        UsageError: A class does not exist, a name fits several, or more classes are to be drawn
            than there are.
    """
    wanted = [name.strip() for name in options.get("classes", "").split(",") if name.strip()]
    if wanted:
        return _find_labels(wanted, labels, titles)
    number = options.get("num_classes", 0)
    if not number:
        return labels
    if number > len(labels):
        raise UsageError(f"{number} classes were asked for, and there are {len(labels)}")
    return set(sorted(labels, key=lambda label: _draw(options["seed"], label))[:number])


def _find_labels(wanted: Iterable[str], labels: Set[str], titles: Mapping[str, str]) -> Set[str]:
    """Returns the label of each wanted class, which is a label or a name in a title."""
    labels_of_name: dict[str, set[str]] = {}
    for label in labels:
        for name in titles.get(label, "").lower().split(","):
            labels_of_name.setdefault(name.strip(), set()).add(label)
    found = set()
    for name in wanted:
        fitting = [name] if name in labels else sorted(labels_of_name.get(name.lower(), ()))
        if not fitting:
            raise unknown("class", name, some_of(sorted(labels), 12).split(", "))
        if len(fitting) > 1:
            raise UsageError(f"'{name}' may be {' or '.join(fitting)}: name the one you mean")
        found.add(fitting[0])
    return found


def by_class(items: Iterable[Item], classes: Mapping[str, Any] | None) -> dict[str, list[Item]]:
    """Groups items by class.

    Args:
        items: The images.
        classes: A table of a recipe: the labels of each class, or "rest" for all other labels; or
            {"each": "obj{label}"}, a class of that name for every label. None: every label is a
            class.

    Returns:
        The items of each class, sorted by the class's name.

    Raises:
        UsageError: A class cannot have its name.
        Failure: Two classes' names differ in case only.
    """
    classes = {"each": "{label}"} if classes is None else classes
    each = classes.get("each", "")
    rest = ""
    class_of: dict[str, str] = {}
    for name, labels in classes.items():
        if labels == "rest":
            rest = rest or name
        elif isinstance(labels, list):
            class_of.update((str(label), name) for label in labels)
    items_of: dict[str, list[Item]] = {}
    for item in items:
        name = each.replace("{label}", item.label) if each else class_of.get(item.label, rest)
        if name:
            items_of.setdefault(name, []).append(item)
    folded: dict[str, str] = {}
    for name in items_of:
        check_class_name(name)
        other = folded.setdefault(name.casefold(), name)
        if other != name:
            raise Failure(
                f"classes '{other}' and '{name}' are one folder where case does not count"
            )
    return {name: items_of[name] for name in sorted(items_of)}


def check_class_name(name: str) -> None:
    """Raises UsageError if a folder cannot have this name on every system."""
    if not is_utf8(name):
        raise UsageError(not_utf8(name))
    problem = ""
    if not name or name[0] == ".":
        problem = "it is empty or begins with a dot"
    elif len(name.encode()) > MAX_CLASS_BYTES:
        problem = f"it has more than {MAX_CLASS_BYTES} bytes"
    elif re.search(r"[/\\\x00-\x1f\x7f]", name):
        problem = "it has a slash, a backslash or a control character"
    if problem:
        raise UsageError(
            f"{name!a} cannot be a class, whose name a folder has on every system: {problem}. "
            "Rename it"
        )


def split_class(
    name: str,
    items: Sequence[Item],
    *,
    method: str,
    validation: float,
    test: float,
    seed: int,
    limits: Mapping[str, int] | None = None,
) -> dict[str, list[Item]]:
    """Splits a class's images into parts, each sorted by file name.

    The source's validation and test images keep their parts. Of the other images the fraction
    `test` is held out for testing first; then, if the source has no validation images, the fraction
    `validation`. The split depends on seed, class, file names and groups alone.

    Args:
        name: The class.
        items: The images of the class.
        method: `random` holds out single images, `by-object` and `by-content` whole groups,
            `by-angle` an arc of neighbouring views of every group. In the last three an image
            without a group is never held out.
        validation: The fraction to validate on.
        test: The fraction to test on; 0 for none.
        seed: The seed of the split.
        limits: For each part the number of images that it keeps at most; 0 for all.

    Raises:
        Failure: Two files have the same name, or a part would be empty.
    """
    parts: dict[str, list[Item]] = {part: [] for part in PARTS}
    for item in items:
        parts[item.part or "train"].append(item)
    if test:
        held_out, parts["train"] = _hold_out(name, parts["train"], method, test, seed, "/test")
        parts["test"] += held_out
    if not parts["validation"]:
        parts["validation"], parts["train"] = _hold_out(
            name, parts["train"], method, validation, seed, ""
        )
    if not parts["train"]:
        raise Failure(f"class '{name}' has no training images")
    for part, members in parts.items():
        _check_names(name, members)
        limit = (limits or {}).get(part, 0)
        if limit and len(members) > limit:
            members = sorted(members, key=lambda item: _draw(seed, f"{name}/{item.name}"))[:limit]
        parts[part] = sorted(members, key=lambda item: item.name)
    return parts


def _check_names(name: str, items: Iterable[Item]) -> None:
    """Raises Failure if two files have the same name on a system that ignores case."""
    folded: set[str] = set()
    for item in items:
        key = item.name.casefold()
        if key in folded:
            raise Failure(
                f"class '{name}' has two files that are one where case does not count: "
                f"'{item.name}'"
            )
        folded.add(key)


def _hold_out(
    name: str, items: Sequence[Item], method: str, fraction: float, seed: int, salt: str
) -> tuple[list[Item], list[Item]]:
    """Holds out round(fraction * n) of n units, but at least one, and not all.

    Args:
        name: The class.
        items: The images of the class.
        method: See split_class.
        fraction: The fraction of units, or of each group's views, to hold out.
        seed: The seed of the split.
        salt: Text that makes two splits of the same images independent.

    Returns:
        The images that are held out, and the others, both in the order of `items`.
    """
    _check_names(name, items)
    units: dict[str, list[Item]] = {}
    for item in items:
        units.setdefault(item.name if method == "random" else item.group, []).append(item)
    ungrouped = units.pop("", [])
    held_out: set[str] = set()
    if method == "by-angle":
        for group, views in units.items():
            around = sorted(views, key=lambda item: (item.angle, item.name))
            what = f"class '{name}' has {len(around)} view of '{group}'"
            count = _count(fraction, len(around), what)
            first = int.from_bytes(_draw(seed, f"{name}/{group}{salt}")[:8]) % len(around)
            held_out |= {around[(first + k) % len(around)].name for k in range(count)}
    else:
        total = len(units) + bool(ungrouped) if units else 0
        count = _count(fraction, total, f"class '{name}' has {total} {UNITS[method]}")
        for unit in sorted(units, key=lambda unit: _draw(seed, f"{name}/{unit}{salt}"))[:count]:
            held_out |= {item.name for item in units[unit]}
    chosen = [item for item in items if item.name in held_out]
    left = [item for item in items if item.name not in held_out]
    return chosen, left


def _count(fraction: float, total: int, what: str) -> int:
    """Returns how many of so many units are held out.

    Args:
        fraction: The fraction to hold out.
        total: The number of units.
        what: What there is, for the message.

    Raises:
        Failure: A part would be empty.
    """
    if total < 2:
        raise Failure(f"{what}: a split needs at least two")
    return min(max(round(fraction * total), 1), total - 1)


def _draw(seed: int, name: str) -> bytes:
    """Returns a random sort key of 32 bytes, which depends on the seed and the name alone.

    It does not depend on the order of names, nor on a library's generator.
    """
    return hashlib.sha256(f"{seed}/{name}".encode(errors="surrogatepass")).digest()
