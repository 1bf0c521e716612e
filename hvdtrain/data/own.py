"""A user's own data: `--dataset ./my_data.py:build`, a function that returns map-style datasets of (tensor, label).

It returns (train, validation) or (train, validation, test). A dataset has `__len__` and `__getitem__`. Tensors are of
one shape, of images, tokens or a table's rows, and the model takes them as they are, but that float64 becomes float32.
Labels are classes, from 0, since the loss is cross-entropy; `train.classes` names them, if it is there. A sample is the
same whenever it is read: what changes at random would be another sample in each mode.
"""

import hashlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import torch

from hvdtrain.data.folder import ImageFolder
from hvdtrain.errors import UsageError
from hvdtrain.system import own_code
from hvdtrain.system.own_code import told

COUNTED = 20_000  # samples of which all are read to count the classes, where nobody names them
HASHED = 1_000  # samples of a part that are all hashed; of a larger one so many, evenly over it
KEPT_BYTES = 512 * 2**20  # a part of no more is read once
PARTS = ("training", "validation", "test")
_READING = threading.Lock()  # a user's dataset may have one file open, or worse: it is asked by one thread at a time


@dataclass(frozen=True)
class OwnSample:
    """One sample, as a table of mistakes names it."""

    name: str


class OwnSamples(Sequence[tuple[Any, int]]):
    """One part of a user's data: (sample, class) each.

    Args:
        name: what `--dataset` has.
        part: of PARTS.
        dataset: the user's.

    Attributes:
        classes: how many there are; 0 while they are counted.
    """

    def __init__(self, name: str, part: str, dataset: Any) -> None:
        self.name, self.part, self.dataset, self.classes = name, part, dataset, 0
        if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
            self._refuse(f"is a {type(dataset).__name__}: a map-style dataset has __len__ and __getitem__")
        self.length = len(dataset)
        if not self.length:
            self._refuse("has no samples")
        self.first, _ = self._read(0)
        is_small = self.length * self.first.nbytes <= KEPT_BYTES
        self.tensors = torch.empty(self.length, *self.first.shape, dtype=self.first.dtype) if is_small else None
        self.labels = torch.full([self.length], -1)  # of those that have been read

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return tuple(self[i] for i in range(*index.indices(len(self))))
        index = range(len(self))[index]
        return OwnSample(f"{self.part} {index}"), int(self.batch([index])[1])

    def batch(self, indices: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """These samples, [n, …], and their labels, [n] int64."""
        read: list[torch.Tensor] = []
        for index in indices:
            if self.tensors is None or self.labels[index] < 0:
                tensor, self.labels[index] = self._read(index)
                if self.tensors is None:
                    read.append(tensor)
                else:
                    self.tensors[index] = tensor
        return (torch.stack(read) if self.tensors is None else self.tensors[indices]), self.labels[indices]

    def keeps(self, indices: Sequence[int]) -> bool:
        """Whether all these samples have been read, and are there."""
        return self.tensors is not None and bool((self.labels[indices] >= 0).all())

    def check_repeats(self) -> None:
        """UsageError where a sample is another one when it is read again."""
        for index in {0, self.length // 2, self.length - 1}:
            reads = [self._read(index)[0] for _ in range(3)]
            if any(not torch.equal(reads[0], other) for other in reads[1:]):
                self._refuse(
                    f"has another sample {index} each time it is read: leave random changes out, which would be other "
                    "ones in each mode"
                )

    def _read(self, index: int) -> tuple[torch.Tensor, int]:
        with told("--dataset", self.name, f"failed to read sample {index} of its {self.part} data"), _READING:
            pair = self.dataset[index]
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            self._refuse(f"has {type(pair).__name__} as sample {index}, and not (tensor, label)")
        return self._tensor(pair[0], index), self._label(pair[1], index)

    def _tensor(self, value: Any, index: int) -> torch.Tensor:
        if not isinstance(value, torch.Tensor | np.ndarray):
            self._refuse(f"has a {type(value).__name__} in sample {index}: make a tensor of it, such as by a transform")
        tensor = torch.as_tensor(value).detach()
        tensor = tensor.float() if tensor.is_floating_point() else tensor
        first = getattr(self, "first", tensor)
        if (tensor.shape, tensor.dtype) != (first.shape, first.dtype):
            self._refuse(
                f"has {tensor.dtype} of shape {list(tensor.shape)} in sample {index}, and {first.dtype} of "
                f"{list(first.shape)} in the first: all have one shape, so pad or crop them"
            )
        return tensor

    def _label(self, value: Any, index: int) -> int:
        label = torch.as_tensor(value)
        if label.numel() != 1 or label.is_floating_point() or label.is_complex():
            self._refuse(
                f"has the label {value!r} in sample {index}: a class, a whole number, is needed, since the loss is "
                "cross-entropy"
            )
        number = int(label)
        if number < 0 or (self.classes and number >= self.classes):
            among = f"0 to {self.classes - 1}" if self.classes else "0, 1, 2 …"
            self._refuse(f"has the label {number} in sample {index}: classes are {among}")
        return number

    def _refuse(self, why: str) -> NoReturn:
        raise UsageError(f"--dataset {self.name}: its {self.part} data {why}"[:400])


def own_data(name: str) -> ImageFolder:
    """The data that a user's function returns.

    Raises:
        UsageError: it is none that can be trained on; the line names the sample.
    """
    build = own_code.load(name, "--dataset")
    with told("--dataset", name, "failed to build"):
        made = build()
    if not isinstance(made, tuple | list) or len(made) not in (2, 3):
        what = f"{type(made).__name__} of {len(made)}" if isinstance(made, tuple | list) else type(made).__name__
        raise UsageError(
            f"--dataset {name} returned a {what}, and not (train, validation) or (train, validation, test)"
        )
    parts = [OwnSamples(name, part, dataset) for part, dataset in zip(PARTS, made, strict=False)]
    train = parts[0]
    for other in parts[1:]:
        if (other.first.shape, other.first.dtype) != (train.first.shape, train.first.dtype):
            raise UsageError(
                f"--dataset {name}: its {other.part} data is {other.first.dtype} of shape {list(other.first.shape)}, "
                f"and the training data {train.first.dtype} of {list(train.first.shape)}"
            )
    classes = _classes(parts)
    for part in parts:
        part.classes = len(classes)
        part.check_repeats()
    test = parts[2] if len(parts) > 2 else ()
    return ImageFolder(own_code.short(name), classes, train, parts[1], test, _hash(parts))


def _classes(parts: Sequence[OwnSamples]) -> tuple[str, ...]:
    """The names of the classes, by default their numbers."""
    train = parts[0]
    if named := getattr(train.dataset, "classes", None):
        return tuple(map(str, named))
    if (samples := sum(map(len, parts))) > COUNTED:
        raise UsageError(
            f"--dataset {train.name}: {samples:,} samples are too many to look for their classes: give the training "
            "data an attribute `classes`, a list of names"
        )
    highest = max(int(part.batch([index])[1]) for part in parts for index in range(len(part)))
    if not highest:
        raise UsageError(f"--dataset {train.name} has one class only: there is nothing to tell apart")
    return tuple(map(str, range(highest + 1)))


def _hash(parts: Sequence[OwnSamples]) -> str:
    """`sha256:`, of all samples and labels, or where there are many `sample:`, of some; and 64 hex digits."""
    total = hashlib.sha256()
    for part in parts[:2]:  # as of images: those that are trained and validated on
        count = min(HASHED, len(part))
        total.update(f"{len(part)} {part.first.dtype} {list(part.first.shape)}\0".encode())
        for index in (i * len(part) // count for i in range(count)):
            tensors, labels = part.batch([index])
            total.update(tensors.numpy().tobytes() + labels.numpy().tobytes())
    return f"{'sample' if max(map(len, parts[:2])) > HASHED else 'sha256'}:{total.hexdigest()}"
