"""Which classes and which images a data set takes, and into which part each goes: pure arithmetic on names."""

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hvdtrain.errors import Failure, UsageError, unknown

SPLITS = ["random", "by-angle", "by-object"]
PARTS = ("train", "validation", "test")


@dataclass(frozen=True)
class Item:
    """One image of a source.

    Attributes:
        label: its class there.
        name: its file name.
        part: `train`, `validation` or `test` where the source says so, else empty: it is drawn.
        group, angle: what it is a view of, and from where (degrees), where that is known.
        handle: the source's own.
    """

    label: str
    name: str
    part: str = ""
    group: str = ""
    angle: int = 0
    handle: Any = None


def choose_labels(
    labels: Sequence[str], titles: Mapping[str, str], wanted: Sequence[str], number: int, seed: int
) -> list[str]:
    """The classes asked for, by label or by one of the comma-separated names in its title; or so many, drawn by seed.

    Args:
        titles: names for people, by label; may be empty.
    Raises:
        UsageError: a class that is not there or is meant by two labels, or more than there are.
    """
    if wanted:
        return sorted({_label(want.strip(), labels, titles) for want in wanted})
    if not number:
        return sorted(labels)
    if number > len(labels):
        raise UsageError(f"{number} classes were asked for, and there are {len(labels)}")
    return sorted(sorted(labels, key=lambda label: _draw(seed, label))[:number])


def _label(want: str, labels: Sequence[str], titles: Mapping[str, str]) -> str:
    if want in labels:
        return want
    known = set(labels)
    meant = [
        label
        for label, title in titles.items()
        if label in known and want.lower() in [name.strip().lower() for name in title.split(",")]
    ]
    if len(meant) > 1:
        raise UsageError(f"'{want}' may be {' or '.join(sorted(meant))}: name the one you mean")
    if not meant:
        shown = sorted(labels)
        raise unknown("class", want, shown if len(shown) <= 12 else [*shown[:12], f"… {len(shown)} in all"])
    return meant[0]


def by_class(items: Iterable[Item], classes: Mapping[str, Any] | None) -> dict[str, list[Item]]:
    """Items by the class that they get.

    Args:
        classes: from the name of a class to the labels in it, or to "rest"; or {"each": "obj{label}"}, a class of
            every label with that name; None is a class of every label with the label's own.
    Raises:
        UsageError: a label in two classes, or one that there is not; a class name that is none.
        Failure: a class without images.
    """
    found: dict[str, list[Item]] = {}
    each = "{label}" if classes is None else classes.get("each")
    alone = isinstance(each, str) and len(classes or {}) < 2
    class_of, rest = ({}, "") if alone else _grouping(classes or {})
    for item in items:
        name = each.replace("{label}", item.label) if isinstance(each, str) else class_of.get(item.label, rest)
        if name:
            found.setdefault(name, []).append(item)
    if missing := set(class_of) - {item.label for own in found.values() for item in own}:
        raise UsageError(f"classes name what there is no image of: {', '.join(sorted(missing)[:5])}")
    for name in found:
        check_class_name(name)
    folded: dict[str, str] = {}
    for name in found:
        if (other := folded.setdefault(name.casefold(), name)) != name:
            raise Failure(f"classes '{other}' and '{name}' are one folder where case does not count")
    return {name: found[name] for name in sorted(found)}


def _grouping(classes: Mapping[str, Any]) -> tuple[dict[str, str], str]:
    class_of: dict[str, str] = {}
    rest = ""
    if isinstance(classes.get("each"), str):
        raise UsageError("`each = …` makes a class of every label: nothing goes beside it")
    for name, labels in classes.items():
        check_class_name(name)
        if not labels:
            raise UsageError(f"class '{name}' has no labels")
        if labels == "rest":
            if rest:
                raise UsageError(f"classes '{rest}' and '{name}' cannot both be the rest")
            rest = name
            continue
        if not isinstance(labels, list) or not all(isinstance(label, int | str) for label in labels):
            raise UsageError(f"class '{name}' should be a list of labels, or \"rest\"")
        for label in map(str, labels):
            if other := class_of.get(label):
                raise UsageError(f"'{label}' is in two classes, '{other}' and '{name}'")
            class_of[label] = name
    return class_of, rest


def check_class_name(name: str) -> None:
    """UsageError for what cannot be the name of a folder everywhere."""
    undecodable = any("\ud800" <= letter <= "\udfff" for letter in name)
    if (
        not name
        or undecodable
        or name[0] == "."
        or len(name.encode(errors="replace")) > 200
        or re.search(r"[/\\\x00-\x1f\x7f]", name)
    ):
        raise UsageError(f"{name!a} cannot be a class: its name is to be the name of a folder")


def divide(
    name: str, items: Sequence[Item], *, how: str, validation: float, test: float, seed: int,
    most: Mapping[str, int] | None = None,
) -> dict[str, list[Item]]:  # fmt: skip
    """A class's images by part, each sorted by file name.

    Images that the source has put into a part stay there. Of the others, and of the source's own training images,
    the share `test` is held out first; then, where the source has no validation images, the share `validation` is
    drawn. What is drawn depends on seed, class and names alone.

    Args:
        how: one of SPLITS: `random` draws images; `by-angle` holds out an arc of neighbouring views of every object;
            `by-object` holds out whole objects.
        most: how many images a part keeps at most, by part; 0 is all.

    Raises:
        Failure: two files of one name, or a part would be left empty.
        UsageError: the images have no angles or objects to split by.
    """
    own = sorted((item for item in items if item.part in ("", "train")), key=lambda item: item.name)
    _check_names(name, own)
    parts = {part: [item for item in items if item.part == part] for part in ("validation", "test")}
    if test:
        held, own = _hold_out(name, own, how, test, seed, "/test")
        parts["test"] += held
    if not parts["validation"]:
        parts["validation"], own = _hold_out(name, own, how, validation, seed, "")
    if not own:
        raise Failure(f"class '{name}' has no training images")
    parts = {"train": own} | parts
    for files in parts.values():
        _check_names(name, files)
    for part, limit in (most or {}).items():
        if limit and len(parts[part]) > limit:
            parts[part] = sorted(parts[part], key=lambda item: _draw(seed, f"{name}/{item.name}"))[:limit]
    return {part: sorted(parts[part], key=lambda item: item.name) for part in PARTS}


def _check_names(name: str, items: Iterable[Item]) -> None:
    """Failure where two files would be one, here or on a system where case does not count."""
    folded: set[str] = set()
    for item in items:
        if item.name.casefold() in folded:
            raise Failure(f"class '{name}' has two files that are one where case does not count: '{item.name}'")
        folded.add(item.name.casefold())


def _hold_out(
    name: str, items: Sequence[Item], how: str, share: float, seed: int, salt: str
) -> tuple[list[Item], list[Item]]:
    """(held out, left): round(share * n) of n, at least one in each."""
    if how == "random":
        if len(items) < 2:
            raise Failure(f"class '{name}' has {len(items)} image: a split needs at least two")
        drawn = sorted(items, key=lambda item: _draw(seed, f"{name}/{item.name}{salt}"))
        count = _count(share, len(items))
        return drawn[:count], drawn[count:]
    objects: dict[str, list[Item]] = {}
    for item in items:
        objects.setdefault(item.group, []).append(item)
    if "" in objects:
        raise UsageError(f"--split {how} needs images that are views of objects, and these are not")
    if how == "by-object":
        if len(objects) < 2:
            raise UsageError(f"--split by-object: class '{name}' has one object only; use classes of several")
        drawn_objects = sorted(objects, key=lambda group: _draw(seed, f"{name}/{group}{salt}"))
        held = set(drawn_objects[: _count(share, len(objects))])
        return [i for i in items if i.group in held], [i for i in items if i.group not in held]
    arcs: list[Item] = []
    for group, views in objects.items():
        if len(views) < 2:
            raise Failure(f"class '{name}' has one view of '{group}': a split by angle needs at least two")
        around = sorted(views, key=lambda item: (item.angle, item.name))
        first = int.from_bytes(_draw(seed, f"{name}/{group}{salt}")[:8]) % len(around)
        arcs += [around[(first + k) % len(around)] for k in range(_count(share, len(around)))]
    held_names = {item.name for item in arcs}
    return arcs, [item for item in items if item.name not in held_names]


def _count(share: float, total: int) -> int:
    return min(max(round(share * total), 1), total - 1)


def _draw(seed: int, name: str) -> bytes:
    """Sorting by this draws, whatever the order of the names; no random generator's stream can change it."""
    return hashlib.sha256(f"{seed}/{name}".encode(errors="surrogatepass")).digest()
