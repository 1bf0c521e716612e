"""Checks of a data set: every image can be decoded, is in one part only, and none is missing.

Images that several classes have are noted: training sees them with contradicting labels.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hvdtrain.base.formatting import some_of, with_noun
from hvdtrain.data import image
from hvdtrain.data.folder import MANIFEST, ImageFolder, combined_hash, read_manifest
from hvdtrain.data.row_groups import ParquetImage
from hvdtrain.data.selection import PARTS
from hvdtrain.data.storage import Progress, on_all_cores

Counts = dict[str, Counter[str]]  # images by class and part


class _Copy(NamedTuple):
    """An image that others may be equal to: its name, its part, and its class."""

    name: str
    part: str
    label: str


def check(
    data: ImageFolder, progress: Progress | None = None
) -> tuple[Counts, list[str], list[str]]:
    """Decodes and hashes every image.

    Returns:
        The number of images by class and part; the problems, which make results wrong; and notes
        that are worth knowing. Problems and notes are a line each.
    """
    images = []
    for part in PARTS:
        images += [(part, sample, label) for sample, label in getattr(data, part)]
    counts: Counts = {name: Counter() for name in data.classes}
    bad: list[tuple[Any, str]] = []  # an image, and what is wrong with it
    notes = list(data.notes)
    by_digest: defaultdict[bytes, list[_Copy]] = defaultdict(list)
    digests: list[bytes] = []  # of the images for training and validation

    def look(listed: tuple[str, Any, int]) -> bytes | str:
        _, sample, _ = listed
        return image.digest_or_problem(sample)

    decoded = on_all_cores(look, images, len(images), progress)
    for (part, sample, label), result in decoded:
        counts[data.classes[label]][part] += 1
        if isinstance(result, str):
            bad.append((sample, result))
        else:
            by_digest[result].append(_Copy(str(sample), part, data.classes[label]))
            if part != "test":
                digests.append(result)
    problems = _in_few_lines(bad)
    repeated = _in_several(by_digest.values(), lambda copy: copy.part)
    if repeated:
        problems.append(f"the same image is in two parts: {some_of(repeated)}")
    contradicting = _in_several(by_digest.values(), lambda copy: copy.label)
    if contradicting:
        notes.append(
            f"the same image is in two classes, {with_noun(len(contradicting), 'time')}: "
            f"{some_of(contradicting)}"
        )
    if isinstance(data.root, Path) and len(digests) == len(data.train) + len(data.validation):
        now = combined_hash(data, digests)
        built = read_manifest(data.root).get("content", {}).get("hash", now)
        if built != now:
            problems.append(
                f"the images are not those that it was built with: {now}, and in {MANIFEST} {built}"
            )
    return counts, problems, notes


def _in_few_lines(bad: Sequence[tuple[Any, str]]) -> list[str]:
    """Returns a line for each bad image, but one for all images of a row group of which none can be
    read.

    Args:
        bad: images, and what is wrong with each.
    """
    groups: defaultdict[tuple[str, int], list[str]] = defaultdict(list)
    for sample, problem in bad:
        of_all, rows = problem, 1
        if isinstance(sample, ParquetImage):
            name, rows = sample.row_group
            of_all = problem.replace(str(sample), f"the {with_noun(rows, 'image')} of {name}")
        groups[of_all, rows].append(problem)
    lines = []
    for (of_all, rows), problems in groups.items():
        lines += [of_all] if len(problems) == rows else problems
    return lines


def _in_several(groups: Iterable[list[_Copy]], place: Callable[[_Copy], str]) -> list[str]:
    """Returns a text with the names of copies, for each image that is in several places.

    Args:
        groups: For each image all copies.
        place: Returns the part or class of a copy.
    """
    texts = []
    for copies in groups:
        one_of_each = {place(copy): copy.name for copy in reversed(copies)}
        if len(one_of_each) > 1:
            names = [copy.name for copy in copies if copy.name in one_of_each.values()]
            texts.append(" and ".join(names[:3]))
    return texts
