"""Checks every image of a data set: that it can be decoded, is in one part only, and that no image is missing."""

from collections import Counter, defaultdict
from pathlib import Path

from hvdtrain.data import image
from hvdtrain.data.folder import MANIFEST, ImageFolder, combined_hash, read_manifest
from hvdtrain.data.selection import PARTS
from hvdtrain.data.storage import Progress, on_all_cores
from hvdtrain.formatting import some_of

Counts = dict[str, Counter[str]]  # images by class and part


def check(data: ImageFolder, progress: Progress | None = None) -> tuple[Counts, list[str], list[str]]:
    """Decode and hash every image: the counts; what makes results wrong, and what is worth knowing, a line each."""
    images = [(part, sample, label) for part in PARTS for sample, label in getattr(data, part)]
    counts: Counts = {name: Counter() for name in data.classes}
    problems: list[str] = []
    notes: list[str] = []
    by_digest: defaultdict[bytes, list[tuple[str, str]]] = defaultdict(list)
    digests: list[bytes] = []  # of the images for training and validation

    decoded = on_all_cores(lambda one: image.digest_or_problem(one[1]), images, len(images), progress)
    for (part, sample, label), result in decoded:
        counts[data.classes[label]][part] += 1
        if isinstance(result, str):
            problems.append(result)
        else:
            by_digest[result].append((part, str(sample)))
            digests += [result] if part != "test" else []
    across_parts = [copies for copies in by_digest.values() if len({part for part, _ in copies}) > 1]
    if across_parts:
        names = some_of(" and ".join(name for _, name in copies[:3]) for copies in across_parts)
        problems.append(f"the same image is in two parts: {names}")
    if data.passed_over:
        build = "`hvdtrain data build folder --source … --out NEW` takes images in deeper folders"
        notes.append(f"not used: {data.passed_over} ({build})")
    if isinstance(data.root, Path) and len(digests) == len(data.train) + len(data.validation):
        now = combined_hash(data, digests)
        built = read_manifest(data.root).get("content", {}).get("hash", now)
        if built != now:
            problems.append(f"the images are not those that it was built with: {now}, and in {MANIFEST} {built}")
    return counts, problems, notes
