"""Checks every image of a data set: that it can be decoded, is in one part only, and that no image is missing."""

import hashlib
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from hvdtrain.data import image
from hvdtrain.data.folder import MANIFEST, ImageFolder, combined_hash, not_used, read_manifest
from hvdtrain.data.identity import keep_content_hash, look
from hvdtrain.data.selection import PARTS
from hvdtrain.errors import Failure

IMBALANCED = 3.0  # ratio of the largest class to the smallest from which there is a note


@dataclass
class Findings:
    """What was found.

    Attributes:
        counts: {class: {part: images}}.
        problems: what makes results wrong, a line each.
        notes: what is worth knowing, a line each.
    """

    counts: dict[str, dict[str, int]]
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def check(data: ImageFolder, threads: int, progress: Callable[[int, int], None]) -> Findings:
    """Decode and hash every image."""
    samples_of = {part: getattr(data, part) for part in PARTS}
    label_counts = {part: Counter(label for _, label in samples) for part, samples in samples_of.items() if samples}
    images = [(part, sample) for part, samples in samples_of.items() for sample, _ in samples]
    findings = Findings(
        {name: {part: count[label] for part, count in label_counts.items()} for label, name in enumerate(data.classes)}
    )
    listing, began = look(data) if isinstance(data.root, Path) else None, time.time()
    by_digest: defaultdict[bytes, list[tuple[str, str]]] = defaultdict(list)
    digests: list[bytes] = []  # of the images for training and validation
    sizes: Counter[tuple[int, int]] = Counter()

    def inspect(sample: Path) -> tuple[bytes, tuple[int, int]] | str:
        """The digest and the size of an image, or what is wrong with it."""
        try:
            content = image.read(sample)
            return hashlib.sha256(content).digest(), image.decode(content, str(sample)).size
        except Failure as error:
            return str(error)

    with ThreadPoolExecutor(threads) as pool:
        results = pool.map(inspect, [sample for _, sample in images])
        for done, ((part, sample), result) in enumerate(zip(images, results, strict=True), 1):
            if isinstance(result, str):
                findings.problems.append(result)
            else:
                digest, size = result
                by_digest[digest].append((part, str(sample)))
                digests += [digest] if part != "test" else []
                sizes[size] += 1
            progress(done, len(images))
    _check_duplicates(by_digest, findings)
    _check_balance(findings)
    if isinstance(data.root, Path):
        _check_manifest(data.root, findings)
        findings.notes += not_used(data.root)
    if listing and len(digests) == len(data.train) + len(data.validation):
        found = combined_hash(data, digests)
        keep_content_hash(data, listing, began, found)
        built = read_manifest(data.root).get("content", {}).get("hash", found)
        if built != found:
            findings.problems.append(
                f"the images are not those that it was built with: {found}, and in {MANIFEST} {built}"
            )
    smallest, largest = min(sizes, default=(0, 0)), max(sizes, default=(0, 0))
    if len(sizes) > 1:
        findings.notes.append(
            f"images of {len(sizes)} sizes, from {smallest[0]}x{smallest[1]} to {largest[0]}x{largest[1]}"
        )
    return findings


def _check_duplicates(by_digest: dict[bytes, list[tuple[str, str]]], findings: Findings) -> None:
    """Compare digests; by_digest: the (part, name) of all images with the same digest."""
    across_parts = [copies for copies in by_digest.values() if len({part for part, _ in copies}) > 1]
    for copies in across_parts[:5]:
        findings.problems.append("the same image is in two parts: " + " and ".join(name for _, name in copies[:3]))
    if len(across_parts) > 5:
        findings.problems.append(f"and {len(across_parts) - 5} more images are in two parts")
    within_part = sum(len(copies) - 1 for copies in by_digest.values() if len({part for part, _ in copies}) == 1)
    if within_part:
        findings.notes.append(f"{within_part} image(s) are copies of another in the same part")


def _check_balance(findings: Findings) -> None:
    train = {name: parts.get("train", 0) for name, parts in findings.counts.items()}
    smallest, largest = min(train, key=lambda name: train[name]), max(train, key=lambda name: train[name])
    if train[largest] >= IMBALANCED * train[smallest]:
        fraction = train[largest] / sum(train.values())
        findings.notes.append(
            f"imbalanced: class '{largest}' has {train[largest]:,} training images, '{smallest}' {train[smallest]:,}; "
            f"always answering '{largest}' is right for {fraction:.1%} of them"
        )


def _check_manifest(root: Path, findings: Findings) -> None:
    """Compare with the numbers of images in `dataset.toml`."""
    built = read_manifest(root).get("classes", {})
    for name in sorted(set(built) | set(findings.counts)) if built else []:
        before, now = built.get(name, {}), {part: n for part, n in findings.counts.get(name, {}).items() if n}
        if before != now:
            findings.problems.append(
                f"class '{name}' was built with {_count_text(before)} images, and has {_count_text(now)}"
            )


def _count_text(parts: dict[str, int]) -> str:
    return " + ".join(f"{n:,} {part}" for part, n in parts.items()) or "no"
