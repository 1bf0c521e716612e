"""A user's own data: tensors and labels as they come, each sample once an epoch; what cannot be
used is refused.
"""

import pytest
import torch
from helpers.own import TEXT, written
from torch.utils.data import TensorDataset

from hvdtrain.base.config.run_config import RunConfig
from hvdtrain.base.errors import UsageError
from hvdtrain.data import own
from hvdtrain.data.find import find_dataset
from hvdtrain.data.identity import identity
from hvdtrain.data.loader import OwnLoader, example, open_loader
from hvdtrain.data.sampling import BatchSampler
from hvdtrain.runs.request import check

WRONG = """
import numpy as np
import torch
from torch.utils.data import Dataset, TensorDataset
x, y = torch.rand(6, 4), torch.tensor([0, 1, 2, 0, 1, 2])
good = TensorDataset(x, y)

class Pairs(Dataset):
    def __init__(self, item): self.item = item
    def __len__(self): return 6
    def __getitem__(self, i): return self.item(i)

class Long(Pairs):
    def __init__(self, length): self.length = length
    def __len__(self): return self.length()

class Mute(Exception):
    def __str__(self): raise RuntimeError("no words")

def one_part(): return good
def stream(): return iter(good), good
def empty(): return TensorDataset(x[:0], y[:0]), good
def regression(): return TensorDataset(x, y.float()), good
def words(): return Pairs(lambda i: (x[i], "cat")), good
def no_labels(): return Pairs(lambda i: (x[i], None)), good
def array_of_words(): return Pairs(lambda i: (np.array(["cat"]), 0)), good
def number_of_classes():
    few = TensorDataset(x, y)
    few.classes = 3
    return few, good
def several_labels(): return TensorDataset(x, torch.ones(6, 3, dtype=torch.long)), good
def triples(): return TensorDataset(x, y, y), good
def pictures(): return Pairs(lambda i: ("a picture", 0)), good
def lengths(): return [Pairs(lambda i: (torch.ones(i + 1), 0))] * 2
def not_a_number(): return Pairs(lambda i: (torch.tensor([1.0, float("nan")]), i % 3)), good
def random(): return Pairs(lambda i: (torch.rand(4), i % 3)), good
def other_shape(): return good, TensorDataset(torch.rand(6, 5), y)
def one_class(): return TensorDataset(x, 0 * y), TensorDataset(x, 0 * y)
def negative(): return TensorDataset(x, y - 1), good
def named():
    few = TensorDataset(x, y)
    few.classes = ["a", "b"]
    return few, good
def broken(): return Pairs(lambda i: {}["pixels"]), good
def fails(): raise OSError("no disk")
def mute(): raise Mute
def no_length(): return Long(lambda: {}["length"]), good
def below_zero(): return Long(lambda: -1), good
def half_a_sample(): return Long(lambda: 2.5), good
"""


def test_tokens_are_batches_as_they_are_and_each_sample_comes_once(tmp_path):
    name = f"{written(tmp_path, TEXT)}:data"
    data = find_dataset(name)
    assert (len(data.train), len(data.validation), data.test) == (250, 50, ()) and data.classes == (
        "0",
        "1",
        "2",
    )
    loader, sampler = open_loader(data.train, 0, 1), BatchSampler(250, 32, 0, 1, 2)
    assert isinstance(loader, OwnLoader)
    seen = []
    for share, (tokens, labels) in loader.batches(sampler.epoch(1)):
        assert tokens.dtype == torch.int64 and torch.equal(
            tokens, data.train.dataset.tensors[0][share.indices]
        )
        assert torch.equal(labels, data.train.dataset.tensors[1][share.indices])
        seen += share.indices[: share.counted]
    assert len(set(seen)) == len(seen) == 7 * 16 + 13
    assert data.validation[3][0].name == "validation 3" and data.validation[3][1] == int(
        data.validation.labels[3]
    )
    assert example(data.train, 0, 2).shape == (2, 12)


def test_what_is_not_kept_is_read_anew(tmp_path, monkeypatch):
    monkeypatch.setattr(own, "KEPT_BYTES", 1000)
    data = find_dataset(f"{written(tmp_path, TEXT)}:data")
    assert data.train.tensors is None
    plan = BatchSampler(250, 32, 0, 0, 1)
    batches = list(open_loader(data.train, 0, 1).batches(plan.epoch(2)))
    assert sorted(index for share, _ in batches for index in share.indices) == list(range(250))
    assert all(
        torch.equal(rows, data.train.dataset.tensors[0][share.indices])
        for share, (rows, _) in batches
    )


def test_its_hash_is_of_what_is_in_it(tmp_path):
    one, same = (
        identity(find_dataset(f"{written(tmp_path, TEXT, name)}:data")) for name in ("a.py", "b.py")
    )
    other = identity(
        find_dataset(f"{written(tmp_path, TEXT.replace('x < 10', 'x < 11'), 'c.py')}:data")
    )
    assert one == same != other and one.startswith("sha256:")


def test_floats_are_float32_and_labels_may_be_numbers_of_any_kind(tmp_path):
    import numpy as np

    rows = [(np.full(3, i / 7), np.int32(i % 2)) for i in range(4)]
    samples = own.OwnSamples("mine.py:data", "training", rows)
    values, labels = samples.batch([3, 0])
    assert (
        values.dtype == torch.float32
        and values[0, 0] == pytest.approx(3 / 7)
        and labels.tolist() == [1, 0]
    )
    assert (
        len(
            own.OwnSamples(
                "mine.py:data", "training", TensorDataset(torch.rand(3, 2), torch.zeros(3).long())
            )
        )
        == 3
    )


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("one_part", "returned a TensorDataset, and not (train, validation)"),
        ("stream", "a map-style dataset has __len__ and __getitem__"),
        ("empty", "its training data has no samples"),
        ("regression", "has the label tensor(0.) in sample 0: a class, a whole number, is needed"),
        ("words", "has the label 'cat' in sample 0: a class, a whole number, is needed"),
        ("no_labels", "has the label None in sample 0: a class"),
        ("array_of_words", "failed to make a tensor of sample 0 of its training data: TypeError: "),
        ("number_of_classes", "has an attribute `classes` that is no list of names: TypeError: "),
        ("several_labels", "since the loss is cross-entropy"),
        ("triples", "has tuple as sample 0, and not (tensor, label)"),
        ("pictures", "has a str in sample 0: make a tensor of it"),
        (
            "lengths",
            "has torch.float32 of shape [2] in sample 1, and torch.float32 of [1] in the first",
        ),
        ("not_a_number", "has NaN or infinity in sample 0: replace it"),
        ("random", "each time it is read: leave random changes out"),
        (
            "other_shape",
            "validation data is torch.float32 of shape [5], and the training data torch.float32 of [4]",
        ),
        ("one_class", "has one class only"),
        ("negative", "has the label -1 in sample 0: classes are 0, 1, 2 …"),
        ("named", "has the label 2 in sample 5: classes are 0 to 1"),
        ("broken", "failed to read sample 0 of its training data: KeyError: 'pixels' (line "),
        ("fails", "failed to build: OSError: no disk"),
        ("mute", "failed to build: Mute: its __str__ raises RuntimeError (line "),
        ("no_length", "failed in __len__ of its training data: KeyError: 'length' (line "),
        ("below_zero", "ValueError: __len__() should return >= 0"),
        ("half_a_sample", "TypeError: 'float' object cannot be interpreted as an integer"),
    ],
)
def test_what_cannot_be_trained_on_is_refused_in_a_line(function, words, tmp_path):
    with pytest.raises(UsageError) as refusal:
        find_dataset(f"{written(tmp_path, WRONG)}:{function}")
    assert words in str(refusal.value) and "\n" not in str(refusal.value)


LACKING = """
import torch
from torch.utils.data import TensorDataset
x = torch.rand(6, 4)

def named(labels):
    few = TensorDataset(x[: len(labels)], torch.tensor(labels))
    few.classes = ["a", "b", "c"]
    return few

def data(): return named([0, 1, 2, 0, 1, 2]), named([0, 1, 1])

def many():
    train, validation = data()
    validation.targets = [0, 1, 1]
    return train, validation
"""


def test_classes_without_samples_to_validate_on_are_told_where_labels_are_known(
    tmp_path, monkeypatch
):
    path = written(tmp_path, LACKING)
    told = (
        "its validation data has no samples of 1 of the 3 classes: c; accuracy is that of the "
        "others",
    )
    assert find_dataset(f"{path}:data").notes == told
    monkeypatch.setattr(own, "MAX_HASHED", 1)  # so that not all samples are read
    assert find_dataset(f"{path}:many").notes == told
    assert find_dataset(f"{path}:data").notes == ()


def test_a_file_without_a_function_is_refused():
    with pytest.raises(UsageError, match="names no function: give ./mine.py:data, say"):
        find_dataset("./mine.py")


@pytest.mark.parametrize("option", [{"augment": "flip"}, {"image_size": 64}, {"skip_bad": True}])
def test_options_of_images_are_not_for_it(option):
    with pytest.raises(UsageError, match="does nothing in mine.py:data"):
        check(RunConfig(dataset="mine.py:data", **option))
