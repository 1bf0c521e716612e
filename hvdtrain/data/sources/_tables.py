"""Tables that tell the classes of validation images that lie in no class folders.

- Kaggle's ILSVRC tree has `LOC_val_solution.csv`: lines `ImageId,PredictionString`, of which the
  first word of the latter is the class, and the former the name of a file without its ending.
- Tiny ImageNet has `val_annotations.txt` beside its images or above them: lines of a file's name,
  its class and a box, with tabs between.
"""

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from hvdtrain.base.errors import Failure
from hvdtrain.data.archive import Member, Tree
from hvdtrain.data.folder import ANNOTATIONS, PART_NAMES, VALIDATION

SOLUTION = "LOC_val_solution.csv"
TABLES = (SOLUTION, ANNOTATIONS)


@dataclass(frozen=True)
class Labels:
    """What the tables of a tree tell.

    Attributes:
        names: The paths of the tables in the tree; empty if there are none.
        of: The class of each image that a table names, by the image's path.
    """

    names: list[str]
    of: dict[str, str]


def labels_of_validation(tree: Tree, images: Sequence[Member]) -> Labels:
    """Returns the classes that tables in a tree tell.

    Raises:
        Failure: A table cannot be read.
    """
    found: dict[str, str] = {}
    tables = []
    solution = tree.find(SOLUTION)
    if solution:
        tables.append(solution.name)
        class_of = _read_solution(solution)
        for member in images:
            path = PurePosixPath(member.name)
            if path.parent.name.lower() in PART_NAMES[VALIDATION] and path.stem in class_of:
                found[member.name] = class_of[path.stem]
    annotations = tree.find(ANNOTATIONS)
    if annotations:
        tables.append(annotations.name)
        class_of = _read_annotations(annotations)
        below = annotations.name.removesuffix(ANNOTATIONS)
        for member in images:
            name = PurePosixPath(member.name).name
            if member.name.startswith(below) and name in class_of:
                found[member.name] = class_of[name]
    return Labels(tables, found)


def _read_solution(table: Member) -> dict[str, str]:
    """Returns the class of each image by the stem of its name."""
    text = _text_of(table)
    try:
        rows = csv.DictReader(io.StringIO(text))
        return {row["ImageId"]: row["PredictionString"].split()[0] for row in rows}
    except (ValueError, KeyError, IndexError, AttributeError, csv.Error) as error:
        raise Failure(f"{table.name} cannot be read: {error!r}") from None


def _read_annotations(table: Member) -> dict[str, str]:
    """Returns the class of each image by its name."""
    class_of = {}
    for number, line in enumerate(_text_of(table).splitlines(), 1):
        name, _, others = line.partition("\t")
        label = others.split("\t")[0].strip()
        if line.strip() and not label:
            raise Failure(
                f"{table.name} cannot be read: line {number}, {line[:80]!a}, is not a name and a "
                "class with a tab between"
            )
        class_of[name] = label
    class_of.pop("", None)
    return class_of


def _text_of(table: Member) -> str:
    """Returns the text of a table.

    Raises:
        Failure: it is not UTF-8. The message has the line.
    """
    content = table.read_bytes()
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise Failure(f"{table.name}, line {line}, is not UTF-8: save it as UTF-8") from None
