"""Chooses a data set's classes and images, and splits them into parts: pure functions of names and a seed."""

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from hvdtrain.errors import Failure, UsageError, unknown
from hvdtrain.formatting import some_of

SPLIT_METHODS = ["random", "by-angle", "by-object"]
PARTS = ("train", "validation", "test")


@dataclass(frozen=True)
class Generated:
    """An image that this program makes, in place of a file of an archive (archive.Member)."""

    read: Callable[[], bytes]
    path: None = None
    is_sequential: bool = False


@dataclass(frozen=True)
class Item:
    """One image of a source.

    Attributes:
        label: its class in the source.
        name: its file name.
        part: `train`, `validation` or `test` where the source decides; else empty, and it is drawn.
        group, angle: the object that it is a view of, and the angle in degrees, where known.
        handle: reads its contents: an archive.Member, or Generated.
    """

    label: str
    name: str
    part: str = ""
    group: str = ""
    angle: int = 0
    handle: Any = None


def choose_labels(
    labels: Set[str], titles: Mapping[str, str], wanted: Sequence[str], number: int, seed: int
) -> Set[str]:
    """The wanted ones, or `number` of them drawn by seed, or all.

    Args:
        titles: names for people by label, comma-separated; may be empty.
        wanted: labels, or names in a title.

    Raises:
        UsageError: a wanted class does not exist, a name fits several, or `number` is larger than there are classes.
    """
    if wanted:
        named: dict[str, set[str]] = {}
        for label in labels:
            for name in titles.get(label, "").lower().split(","):
                named.setdefault(name.strip(), set()).add(label)
        return {name if name in labels else _label_of(name, labels, named) for name in wanted}
    if not number:
        return labels
    if number > len(labels):
        raise UsageError(f"{number} classes were asked for, and there are {len(labels)}")
    return set(sorted(labels, key=lambda label: _draw(seed, label))[:number])


def _label_of(name: str, labels: Set[str], named: Mapping[str, Set[str]]) -> str:
    fitting = sorted(named.get(name.lower(), ()))
    if not fitting:
        raise unknown("class", name, some_of(sorted(labels), 12).split(", "))
    if len(fitting) > 1:
        raise UsageError(f"'{name}' may be {' or '.join(fitting)}: name the one you mean")
    return fitting[0]


def by_class(items: Iterable[Item], classes: Mapping[str, Any] | None) -> dict[str, list[Item]]:
    """Items by class.

    Args:
        classes: a recipe's: the labels of each class, or "rest" for all other labels; or {"each": "obj{label}"}: every
            label is a class of that name. None: every label is a class.

    Raises:
        UsageError: a class cannot have its name.
        Failure: two classes' names differ in case only.
    """
    classes = {"each": "{label}"} if classes is None else classes
    each = classes.get("each", "")
    class_of = {str(label): name for name, labels in classes.items() if isinstance(labels, list) for label in labels}
    rest = next((name for name, labels in classes.items() if labels == "rest"), "")
    found: dict[str, list[Item]] = {}
    for item in items:
        name = each.replace("{label}", item.label) if each else class_of.get(item.label, rest)
        if name:
            found.setdefault(name, []).append(item)
    folded: dict[str, str] = {}
    for name in found:
        check_class_name(name)
        if (other := folded.setdefault(name.casefold(), name)) != name:
            raise Failure(f"classes '{other}' and '{name}' are one folder where case does not count")
    return {name: found[name] for name in sorted(found)}


def check_class_name(name: str) -> None:
    """UsageError where a folder cannot have this name on every system."""
    undecodable = any("\ud800" <= letter <= "\udfff" for letter in name)
    if (
        not name
        or undecodable
        or name[0] == "."
        or len(name.encode(errors="replace")) > 200
        or re.search(r"[/\\\x00-\x1f\x7f]", name)
    ):
        raise UsageError(f"{name!a} cannot be a class: its name is to be the name of a folder")


def split_class(
    name: str, items: Sequence[Item], *, method: str, validation: float, test: float, seed: int,
    limits: Mapping[str, int] | None = None,
) -> dict[str, list[Item]]:  # fmt: skip
    """A class's images by part, each sorted by file name.

    The source's validation and test images stay what they are. Of its training images and those without a part, the
    fraction `test` is held out for testing first; then, where the source has no validation images, the fraction
    `validation`. Which images these are depends on seed, class and file names alone.

    Args:
        method: one of SPLIT_METHODS: `random` holds out single images, `by-angle` an arc of neighbouring views of every
            object, `by-object` whole objects.
        limits: how many images a part keeps at most, by part; 0 is all.

    Raises:
        Failure: two files have the same name, or a part would be empty.
        UsageError: the images have no angles or objects to split by.
    """
    own = sorted((item for item in items if item.part in ("", "train")), key=lambda item: item.name)
    _check_names(name, own)
    parts = {part: [item for item in items if item.part == part] for part in ("validation", "test")}
    if test:
        held, own = _hold_out(name, own, method, test, seed, "/test")
        parts["test"] += held
    if not parts["validation"]:
        parts["validation"], own = _hold_out(name, own, method, validation, seed, "")
    if not own:
        raise Failure(f"class '{name}' has no training images")
    parts = {"train": own} | parts
    for files in parts.values():
        _check_names(name, files)
    for part, limit in (limits or {}).items():
        if limit and len(parts[part]) > limit:
            parts[part] = sorted(parts[part], key=lambda item: _draw(seed, f"{name}/{item.name}"))[:limit]
    return {part: sorted(parts[part], key=lambda item: item.name) for part in PARTS}


def _check_names(name: str, items: Iterable[Item]) -> None:
    """Failure where two files have the same name, or would have on a system that ignores case."""
    folded: set[str] = set()
    for item in items:
        if item.name.casefold() in folded:
            raise Failure(f"class '{name}' has two files that are one where case does not count: '{item.name}'")
        folded.add(item.name.casefold())


def _hold_out(
    name: str, items: Sequence[Item], method: str, fraction: float, seed: int, salt: str
) -> tuple[list[Item], list[Item]]:
    """(held out, left): round(fraction * n) of n are held out, and at least one is in each."""
    if method == "random":
        if len(items) < 2:
            raise Failure(f"class '{name}' has {len(items)} image: a split needs at least two")
        drawn = sorted(items, key=lambda item: _draw(seed, f"{name}/{item.name}{salt}"))
        count = _held_out_count(fraction, len(items))
        return drawn[:count], drawn[count:]
    objects: dict[str, list[Item]] = {}
    for item in items:
        objects.setdefault(item.group, []).append(item)
    if "" in objects:
        raise UsageError(f"--split {method} needs images that are views of objects, and these are not")
    if method == "by-object":
        if len(objects) < 2:
            raise UsageError(f"--split by-object: class '{name}' has one object only; use classes of several")
        drawn_objects = sorted(objects, key=lambda group: _draw(seed, f"{name}/{group}{salt}"))
        held = set(drawn_objects[: _held_out_count(fraction, len(objects))])
        return [i for i in items if i.group in held], [i for i in items if i.group not in held]
    arcs: list[Item] = []
    for group, views in objects.items():
        if len(views) < 2:
            raise Failure(f"class '{name}' has one view of '{group}': a split by angle needs at least two")
        around = sorted(views, key=lambda item: (item.angle, item.name))
        first = int.from_bytes(_draw(seed, f"{name}/{group}{salt}")[:8]) % len(around)
        arcs += [around[(first + k) % len(around)] for k in range(_held_out_count(fraction, len(around)))]
    held_names = {item.name for item in arcs}
    return arcs, [item for item in items if item.name not in held_names]


def hold_out_copies_together(images: Sequence[tuple[str, bytes]], fraction: float, seed: int) -> set[int]:
    """Which images are held out: about the fraction of each class, drawn by their contents, and of equal ones all or
    none. An image that has several classes is never held out.

    Args:
        images: class, and hash of the contents, of each.

    Raises:
        Failure: a class has fewer than two different images, or none that it alone has.
    """
    classes_of: dict[bytes, set[str]] = {}
    of_class: dict[str, dict[bytes, list[int]]] = {}
    for number, (name, digest) in enumerate(images):
        classes_of.setdefault(digest, set()).add(name)
        of_class.setdefault(name, {}).setdefault(digest, []).append(number)
    held: set[int] = set()
    for name, copies in of_class.items():
        alone = [digest for digest in copies if len(classes_of[digest]) == 1]
        if len(copies) < 2 or not alone:
            raise Failure(f"class '{name}' has {len(copies)} image that differs from others: a split needs two")
        wanted = _held_out_count(fraction, sum(map(len, copies.values())))
        drawn = sorted(alone, key=lambda digest: _draw(seed, f"{name}/{digest.hex()}"))
        drawn.sort(key=lambda digest: max(0, len(copies[digest]) - wanted))  # those with too many copies come last
        taken: list[int] = []
        for digest in drawn:
            if not taken or len(taken) + len(copies[digest]) <= wanted:
                taken += copies[digest]
        held |= set(taken)
    return held


def _held_out_count(fraction: float, total: int) -> int:
    return min(max(round(fraction * total), 1), total - 1)


def _draw(seed: int, name: str) -> bytes:
    """A random sort key. It depends on seed and name alone, not on the order of names or a library's generator."""
    return hashlib.sha256(f"{seed}/{name}".encode(errors="surrogatepass")).digest()
