"""A user's own data: `--dataset ./my_data.py:build`, a function that returns map-style datasets.

The function returns (train, validation) or (train, validation, test). A dataset has `__len__` and
`__getitem__`, which returns (tensor, label). All tensors have one shape. The model takes them as
they are, except that float64 becomes float32. Labels are classes, from 0, since the loss is
cross-entropy; `train.classes` names them, if it is there. A sample has to be the same whenever it
is read: with random changes each mode would train on other samples.
"""

import hashlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import torch

from hvdtrain.base.errors import UsageError
from hvdtrain.base.system import own_code
from hvdtrain.base.system.own_code import told
from hvdtrain.data.folder import ImageFolder, lacking_by_labels

MAX_COUNTED = 20_000  # samples that are read to count classes, if the data does not name them
MAX_HASHED = 1_000  # samples of a part that are hashed; of a larger part so many, evenly over it
KEPT_BYTES = 512 * 2**20  # bytes of a part that is kept in memory
PARTS = ("training", "validation", "test")
# One thread at a time reads from a user's dataset, which may not be thread-safe: it may share one
# open file, for example.
_READING = threading.Lock()


@dataclass(frozen=True)
class OwnSample:
    """The name of a sample, for a table of wrong predictions."""

    name: str


class OwnSamples(Sequence[tuple[Any, int]]):
    """One part of a user's data, as a sequence of pairs (OwnSample, class).

    Args:
        name: The value of `--dataset`.
        part: One of PARTS.
        dataset: The user's dataset.

    Attributes:
        classes: The number of classes; 0 until it is known.
        first: The first tensor.
        tensors: The tensors that have been read, [samples, …]; None if they have more than
            KEPT_BYTES.
        labels: The classes of the samples that have been read, and -1 for others, [samples] int64.

    Raises:
        UsageError: This is no map-style dataset, it is empty, or its first sample is not usable.
    """

    def __init__(self, name: str, part: str, dataset: Any) -> None:
        self.name = name
        self.part = part
        self.dataset = dataset
        self.classes = 0
        if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
            self._refuse(
                f"is a {type(dataset).__name__}: a map-style dataset has __len__ and __getitem__"
            )
        with told("--dataset", name, f"failed in __len__ of its {part} data"):
            self.length = len(dataset)
        if not self.length:
            self._refuse("has no samples")
        self.first, _ = self._read(0)
        self.tensors: torch.Tensor | None = None
        if self.length * self.first.nbytes <= KEPT_BYTES:
            self.tensors = torch.empty(self.length, *self.first.shape, dtype=self.first.dtype)
        self.labels = torch.full([self.length], -1)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return tuple(self[i] for i in range(*index.indices(len(self))))
        index = range(len(self))[index]
        return OwnSample(f"{self.part} {index}"), int(self.batch([index])[1])

    def batch(self, indices: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns samples, [n, …], and their labels, [n] int64."""
        read: list[torch.Tensor] = []
        for index in indices:
            if self.tensors is None or self.labels[index] < 0:
                tensor, self.labels[index] = self._read(index)
                if self.tensors is None:
                    read.append(tensor)
                else:
                    self.tensors[index] = tensor
        tensors = torch.stack(read) if self.tensors is None else self.tensors[indices]
        return tensors, self.labels[indices]

    def keeps(self, indices: Sequence[int]) -> bool:
        """Returns whether all these samples are in memory."""
        return self.tensors is not None and bool((self.labels[indices] >= 0).all())

    def check_repeats(self) -> None:
        """Raises UsageError if one of three samples changes when it is read again."""
        for index in {0, self.length // 2, self.length - 1}:
            reads = [self._read(index)[0] for _ in range(3)]
            if any(not torch.equal(reads[0], other) for other in reads[1:]):
                self._refuse(
                    f"has another sample {index} each time it is read: leave random changes out, "
                    "which would be other ones in each mode"
                )

    def _read(self, index: int) -> tuple[torch.Tensor, int]:
        """Reads a sample and checks it. Raises UsageError if it is not usable."""
        failure = f"failed to read sample {index} of its {self.part} data"
        with told("--dataset", self.name, failure), _READING:
            pair = self.dataset[index]
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            self._refuse(f"has {type(pair).__name__} as sample {index}, and not (tensor, label)")
        return self._tensor(pair[0], index), self._label(pair[1], index)

    def _tensor(self, value: Any, index: int) -> torch.Tensor:
        if not isinstance(value, torch.Tensor | np.ndarray):
            self._refuse(
                f"has a {type(value).__name__} in sample {index}: make a tensor of it, such as by "
                "a transform"
            )
        failure = f"failed to make a tensor of sample {index} of its {self.part} data"
        with told("--dataset", self.name, failure):
            tensor = torch.as_tensor(value).detach()
        tensor = tensor.float() if tensor.is_floating_point() else tensor
        first = getattr(self, "first", tensor)
        if (tensor.shape, tensor.dtype) != (first.shape, first.dtype):
            self._refuse(
                f"has {tensor.dtype} of shape {list(tensor.shape)} in sample {index}, and "
                f"{first.dtype} of {list(first.shape)} in the first: all have one shape, so pad or "
                "crop them"
            )
        if tensor.is_floating_point() and not tensor.isfinite().all():
            self._refuse(f"has NaN or infinity in sample {index}: replace it, or leave it out")
        return tensor

    def _label(self, value: Any, index: int) -> int:
        number = _whole_number(value)
        if number is None:
            self._refuse(
                f"has the label {value!r} in sample {index}: a class, a whole number, is needed, "
                "since the loss is cross-entropy"
            )
        if number < 0 or (self.classes and number >= self.classes):
            among = f"0 to {self.classes - 1}" if self.classes else "0, 1, 2 …"
            self._refuse(f"has the label {number} in sample {index}: classes are {among}")
        return number

    def _refuse(self, why: str) -> NoReturn:
        raise UsageError(f"--dataset {self.name}: its {self.part} data {why}"[:400])


def _whole_number(value: Any) -> int | None:
    """Returns a label's number; None if the label is no whole number."""
    try:
        label = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):  # of a word or None, say
        return None
    if label.numel() != 1 or label.is_floating_point() or label.is_complex():
        return None
    return int(label)


def own_data(name: str) -> ImageFolder:
    """Returns the data that a user's function returns.

    Raises:
        UsageError: The data cannot be trained on. The message names the sample.
    """
    build = own_code.load(name, "--dataset")
    with told("--dataset", name, "failed to build"):
        datasets = build()
    if not isinstance(datasets, tuple | list):
        _refuse_datasets(name, type(datasets).__name__)
    if len(datasets) not in (2, 3):
        _refuse_datasets(name, f"{type(datasets).__name__} of {len(datasets)}")
    named_parts = zip(PARTS, datasets, strict=False)
    parts = [OwnSamples(name, part, dataset) for part, dataset in named_parts]
    train = parts[0]
    for other in parts[1:]:
        if (other.first.shape, other.first.dtype) != (train.first.shape, train.first.dtype):
            raise UsageError(
                f"--dataset {name}: its {other.part} data is {other.first.dtype} of shape "
                f"{list(other.first.shape)}, and the training data {train.first.dtype} of "
                f"{list(train.first.shape)}"
            )
    classes = _classes(parts)
    for part in parts:
        part.classes = len(classes)
        part.check_repeats()
    test = parts[2] if len(parts) > 2 else ()
    dataset_hash = _hash(parts)
    return ImageFolder(
        own_code.short(name),
        classes,
        train,
        parts[1],
        test,
        dataset_hash,
        notes=tuple(_lacking(parts[1], classes)),
    )


def _lacking(validation: OwnSamples, classes: Sequence[str]) -> list[str]:
    """Returns a line about classes without samples to validate on, if the labels are known.

    They are where all samples have been read, or where the dataset has `targets`, as torchvision's
    have.
    """
    labels = validation.labels.numpy()
    if (labels < 0).any():
        targets = getattr(validation.dataset, "targets", None)
        if not isinstance(targets, list | torch.Tensor | np.ndarray):
            return []
        labels = np.array(targets, dtype=object)
        if labels.shape != (len(validation),) or not all(isinstance(x, int) for x in labels):
            return []
    return lacking_by_labels("its validation data", labels, classes, "samples")


def _refuse_datasets(name: str, what: str) -> NoReturn:
    raise UsageError(
        f"--dataset {name} returned a {what}, and not (train, validation) or "
        "(train, validation, test)"
    )


def _classes(parts: Sequence[OwnSamples]) -> tuple[str, ...]:
    """Returns the names of the classes, by default their numbers.

    Raises:
        UsageError: There is only one class, there are too many samples to count classes, or the
            data has no list of their names where it should have one.
    """
    train = parts[0]
    given = getattr(train.dataset, "classes", None)
    if given is not None:
        with told("--dataset", train.name, "has an attribute `classes` that is no list of names"):
            names = tuple(map(str, given))
        if names:
            return names
    samples = sum(map(len, parts))
    if samples > MAX_COUNTED:
        raise UsageError(
            f"--dataset {train.name}: {samples:,} samples are too many to look for their classes: "
            "give the training data an attribute `classes`, a list of names"
        )
    highest = 0
    for part in parts:
        for index in range(len(part)):
            _, label = part.batch([index])
            highest = max(highest, int(label))
    if not highest:
        raise UsageError(
            f"--dataset {train.name} has one class only: there is nothing to tell apart"
        )
    return tuple(map(str, range(highest + 1)))


def _hash(parts: Sequence[OwnSamples]) -> str:
    """Returns the `dataset_hash`, from samples and labels for training and validation.

    It is `sha256:` and 64 hex digits if all samples are hashed, and `sample:` if only MAX_HASHED of
    a part are.
    """
    total = hashlib.sha256()
    hashed_parts = parts[:2]
    for part in hashed_parts:
        count = min(MAX_HASHED, len(part))
        total.update(f"{len(part)} {part.first.dtype} {list(part.first.shape)}\0".encode())
        for i in range(count):
            tensors, labels = part.batch([i * len(part) // count])
            total.update(tensors.numpy().tobytes() + labels.numpy().tobytes())
    kind = "sample" if max(map(len, hashed_parts)) > MAX_HASHED else "sha256"
    return f"{kind}:{total.hexdigest()}"
