"""Looks at every image of a data set: can it be decoded, is it in one part only, are the classes whole."""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from hvdtrain.data import image
from hvdtrain.data.build import read_manifest
from hvdtrain.data.folder import ImageFolder
from hvdtrain.data.select import PARTS
from hvdtrain.errors import Failure

IMBALANCED = 3.0  # largest class over smallest, from which it is worth a note


@dataclass
class Findings:
    """What was found.

    Attributes:
        counts: {class: {part: images}}.
        problems: what makes results wrong, a line each; notes: what is worth knowing.
    """

    counts: dict[str, dict[str, int]]
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def check(data: ImageFolder, threads: int, progress: Callable[[int, int], None]) -> Findings:
    """Decode and hash every image."""
    parts = {part: getattr(data, part) for part in PARTS}
    numbers = {part: Counter(label for _, label in own) for part, own in parts.items() if own}
    named = [(part, sample, label) for part, own in parts.items() for sample, label in own]
    findings = Findings(
        {name: {part: count[label] for part, count in numbers.items()} for label, name in enumerate(data.classes)}
    )
    where: defaultdict[bytes, list[tuple[str, str]]] = defaultdict(list)
    sizes: Counter[tuple[int, int]] = Counter()

    def look(sample: Path) -> tuple[bytes, tuple[int, int]] | str:
        try:
            content = sample.read_bytes()
            return hashlib.sha256(content).digest(), image.decode(content, str(sample)).size
        except OSError as error:
            return f"{sample} cannot be read: {error.strerror or error}"
        except Failure as error:
            return str(error)

    with ThreadPoolExecutor(threads) as pool:
        seen = pool.map(look, [sample for _, sample, _ in named])
        for done, ((part, sample, _), found) in enumerate(zip(named, seen, strict=True), 1):
            if isinstance(found, str):
                findings.problems.append(found)
            else:
                where[found[0]].append((part, str(sample)))
                sizes[found[1]] += 1
            progress(done, len(named))
    _duplicates(where, findings)
    _balance(findings)
    if isinstance(data.root, Path):
        _against_manifest(data.root, findings)
    smallest, largest = min(sizes, default=(0, 0)), max(sizes, default=(0, 0))
    if len(sizes) > 1:
        findings.notes.append(
            f"images of {len(sizes)} sizes, from {smallest[0]}x{smallest[1]} to {largest[0]}x{largest[1]}"
        )
    return findings


def _duplicates(where: dict[bytes, list[tuple[str, str]]], findings: Findings) -> None:
    across = [places for places in where.values() if len({part for part, _ in places}) > 1]
    for places in across[:5]:
        findings.problems.append("the same image is in two parts: " + " and ".join(name for _, name in places[:3]))
    if len(across) > 5:
        findings.problems.append(f"and {len(across) - 5} more images are in two parts")
    within = sum(len(places) - 1 for places in where.values() if len({part for part, _ in places}) == 1)
    if within:
        findings.notes.append(f"{within} image(s) are copies of another in the same part")


def _balance(findings: Findings) -> None:
    train = {name: parts.get("train", 0) for name, parts in findings.counts.items()}
    least, most = min(train, key=lambda name: train[name]), max(train, key=lambda name: train[name])
    if train[most] >= IMBALANCED * train[least]:
        share = train[most] / sum(train.values())
        findings.notes.append(
            f"imbalanced: class '{most}' has {train[most]:,} training images, '{least}' {train[least]:,}; "
            f"always answering '{most}' is right for {share:.1%} of them"
        )


def _against_manifest(root: Path, findings: Findings) -> None:
    """What `dataset.toml` promised."""
    promised = read_manifest(root).get("classes", {})
    for name in sorted(set(promised) | set(findings.counts)) if promised else []:
        was, now = promised.get(name, {}), {part: n for part, n in findings.counts.get(name, {}).items() if n}
        if was != now:
            findings.problems.append(f"class '{name}' was built with {_said(was)} images, and has {_said(now)}")


def _said(parts: dict[str, int]) -> str:
    return " + ".join(f"{n:,} {part}" for part, n in parts.items()) or "no"
