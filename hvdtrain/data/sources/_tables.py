"""Tables that tell the classes of validation images that lie in no class folders.

- Kaggle's ILSVRC tree has `LOC_val_solution.csv`: lines `ImageId,PredictionString`, of which the
  first word of the latter is the class, and the former the name of a file without its ending.
- Tiny ImageNet has `val_annotations.txt` beside its images or above them: lines of a file's name,
  its class and a box, with tabs between.
"""

import csv
import io
from collections.abc import Sequence
from pathlib import PurePosixPath

from hvdtrain.base.errors import Failure
from hvdtrain.data.archive import Member, Tree
from hvdtrain.data.folder import ANNOTATIONS, PART_NAMES, VALIDATION

SOLUTION = "LOC_val_solution.csv"
TABLES = (SOLUTION, ANNOTATIONS)


def labels_of_validation(tree: Tree, images: Sequence[Member]) -> dict[str, str]:
    """Returns the class of each image that a table names, by the image's path in the tree.

    Raises:
        Failure: A table cannot be read.
    """
    found: dict[str, str] = {}
    solution = tree.find(SOLUTION)
    if solution:
        class_of = _read_solution(solution)
        for member in images:
            path = PurePosixPath(member.name)
            if path.parent.name.lower() in PART_NAMES[VALIDATION] and path.stem in class_of:
                found[member.name] = class_of[path.stem]
    annotations = tree.find(ANNOTATIONS)
    if annotations:
        class_of = _read_annotations(annotations)
        below = annotations.name.removesuffix(ANNOTATIONS)
        for member in images:
            name = PurePosixPath(member.name).name
            if member.name.startswith(below) and name in class_of:
                found[member.name] = class_of[name]
    return found


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
    lines = _text_of(table).splitlines()
    rows = [line.split("\t") for line in lines if line.strip()]
    short = [row for row in rows if len(row) < 2]
    if short:
        raise Failure(f"{table.name} cannot be read: {short[0]!a} is not a name and a class")
    return {row[0]: row[1] for row in rows}


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
