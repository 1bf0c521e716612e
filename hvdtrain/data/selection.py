"""Chooses a data set's classes and images, and splits them into parts: pure functions of names and a seed."""

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from hvdtrain.errors import Failure, UsageError, unknown
from hvdtrain.formatting import some_of

SPLIT_METHODS = ["random", "by-angle", "by-object"]  # a user's own images are split `by-content`
UNITS = {"random": "image", "by-object": "object", "by-content": "image that differs from others"}
PARTS = ("train", "validation", "test")


@dataclass(frozen=True)
class Generated:
    """An image that this program makes, in place of a file of an archive (archive.Member)."""

    read_bytes: Callable[[], bytes]
    path: None = None
    is_sequential: bool = False


@dataclass(frozen=True)
class Item:
    """One image of a source.

    Attributes:
        label: its class in the source.
        name: its file name.
        part: `train`, `validation` or `test` where the source decides; else empty, and it is drawn.
        group: the object that it is a view of, or a hash of its file, where known.
        angle: of the view, in degrees, where known.
        handle: reads its contents: an archive.Member, or Generated.
    """

    label: str
    name: str
    part: str = ""
    group: str = ""
    angle: int = 0
    handle: Any = None


def choose_labels(labels: Set[str], titles: Mapping[str, str], options: Mapping[str, Any]) -> Set[str]:
    """The wanted classes, or so many of them drawn by seed, or all.

    Args:
        titles: names for people by label, comma-separated; may be empty.
        options: `classes` (labels, or names in a title, comma-separated), `num_classes` and `seed`.

    Raises:
        UsageError: a wanted class does not exist, a name fits several, or more are to be drawn than there are.
    """
    number = options.get("num_classes", 0)
    if wanted := [name.strip() for name in options.get("classes", "").split(",") if name.strip()]:
        named: dict[str, set[str]] = {}
        for label in labels:
            for name in titles.get(label, "").lower().split(","):
                named.setdefault(name.strip(), set()).add(label)
        chosen = set()
        for name in wanted:
            fitting = [name] if name in labels else sorted(named.get(name.lower(), ()))
            if not fitting:
                raise unknown("class", name, some_of(sorted(labels), 12).split(", "))
            if len(fitting) > 1:
                raise UsageError(f"'{name}' may be {' or '.join(fitting)}: name the one you mean")
            chosen.add(fitting[0])
        return chosen
    if not number:
        return labels
    if number > len(labels):
        raise UsageError(f"{number} classes were asked for, and there are {len(labels)}")
    return set(sorted(labels, key=lambda label: _draw(options["seed"], label))[:number])


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
    items_of: dict[str, list[Item]] = {}
    for item in items:
        name = each.replace("{label}", item.label) if each else class_of.get(item.label, rest)
        if name:
            items_of.setdefault(name, []).append(item)
    folded: dict[str, str] = {}
    for name in items_of:
        check_class_name(name)
        if (other := folded.setdefault(name.casefold(), name)) != name:
            raise Failure(f"classes '{other}' and '{name}' are one folder where case does not count")
    return {name: items_of[name] for name in sorted(items_of)}


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
    `validation`. Which images these are depends on seed, class, file names and groups alone.

    Args:
        method: `random` holds out single images, `by-object` and `by-content` whole groups, `by-angle` an arc of
            neighbouring views of every group. In the last three an image without a group is never held out.
        limits: how many images a part keeps at most, by part; 0 is all.

    Raises:
        Failure: two files have the same name, or a part would be empty.
    """
    parts = {part: [item for item in items if (item.part or "train") == part] for part in PARTS}
    if test:
        held_out, parts["train"] = _hold_out(name, parts["train"], method, test, seed, "/test")
        parts["test"] += held_out
    if not parts["validation"]:
        parts["validation"], parts["train"] = _hold_out(name, parts["train"], method, validation, seed, "")
    if not parts["train"]:
        raise Failure(f"class '{name}' has no training images")
    for part, members in parts.items():
        _check_names(name, members)
        if (limit := (limits or {}).get(part, 0)) and len(members) > limit:
            members = sorted(members, key=lambda item: _draw(seed, f"{name}/{item.name}"))[:limit]
        parts[part] = sorted(members, key=lambda item: item.name)
    return parts


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
    """(held out, left): round(fraction * n) of n units are held out, and at least one is in each."""
    _check_names(name, items)
    units: dict[str, list[Item]] = {}
    for item in items:
        units.setdefault(item.name if method == "random" else item.group, []).append(item)
    stay = units.pop("", [])
    held_out: set[str] = set()
    if method == "by-angle":
        for group, views in units.items():
            around = sorted(views, key=lambda item: (item.angle, item.name))
            count = _count(fraction, len(around), f"class '{name}' has {len(around)} view of '{group}'")
            first = int.from_bytes(_draw(seed, f"{name}/{group}{salt}")[:8]) % len(around)
            held_out |= {around[(first + k) % len(around)].name for k in range(count)}
    else:
        total = len(units) + bool(stay) if units else 0
        count = _count(fraction, total, f"class '{name}' has {total} {UNITS[method]}")
        for unit in sorted(units, key=lambda unit: _draw(seed, f"{name}/{unit}{salt}"))[:count]:
            held_out |= {item.name for item in units[unit]}
    return [i for i in items if i.name in held_out], [i for i in items if i.name not in held_out]


def _count(fraction: float, total: int, what: str) -> int:
    """How many of so many are held out. Failure, which says what there is, where a part would be empty."""
    if total < 2:
        raise Failure(f"{what}: a split needs at least two")
    return min(max(round(fraction * total), 1), total - 1)


def _draw(seed: int, name: str) -> bytes:
    """A random sort key. It depends on seed and name alone, not on the order of names or a library's generator."""
    return hashlib.sha256(f"{seed}/{name}".encode(errors="surrogatepass")).digest()
