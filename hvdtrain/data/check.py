"""Checks of a data set: every image can be decoded, is in one part only, and none is missing."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from hvdtrain.base.formatting import some_of, with_noun
from hvdtrain.data import image
from hvdtrain.data.folder import MANIFEST, ImageFolder, combined_hash, read_manifest
from hvdtrain.data.row_groups import ParquetImage
from hvdtrain.data.selection import PARTS
from hvdtrain.data.storage import Progress, on_all_cores

Counts = dict[str, Counter[str]]  # images by class and part


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
    by_digest: defaultdict[bytes, list[tuple[str, str]]] = defaultdict(list)
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
            by_digest[result].append((part, str(sample)))
            if part != "test":
                digests.append(result)
    problems = _in_few_lines(bad)
    repeated = _in_several_parts(by_digest.values())
    if repeated:
        problems.append(f"the same image is in two parts: {some_of(repeated)}")
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


def _in_several_parts(groups: Iterable[list[tuple[str, str]]]) -> list[str]:
    """Returns a text with the names of copies, for each image that is in several parts.

    Args:
        groups: For each image the part and the name of all copies.
    """
    texts = []
    for copies in groups:
        parts = {part for part, _ in copies}
        if len(parts) > 1:
            texts.append(" and ".join(name for _, name in copies[:3]))
    return texts
