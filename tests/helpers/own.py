"""A user's own files: models and data, as they come."""

from pathlib import Path

HEADER = """
import warnings
import torch
from torch import nn
from torch.utils.data import TensorDataset
"""
MODELS = (
    HEADER
    + """
class Net(nn.Module):
    def __init__(self, classes, **more):
        super().__init__()
        self.first, self.out = nn.Linear(12, 8), nn.Linear(8, classes)
        for name, value in more.items():
            setattr(self, name, value)

    def forward(self, x):
        return self.out(self.first(x).relu())

def plain(classes): return Net(classes)
def frozen(classes):
    net = Net(classes)
    net.first.requires_grad_(False)
    return net
def lazy(classes): return nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.Linear(8, classes))
def integers(classes):
    net = Net(classes)
    net.register_buffer("calls", torch.tensor(7))
    net.register_buffer("mask", torch.ones(12, dtype=torch.bool))
    return net
def shared(classes):
    net = nn.Sequential(nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 12), nn.Linear(12, classes))
    net[2].weight = net[0].weight
    return net
def scalar(classes):
    class Scaled(Net):
        def forward(self, x): return super().forward(x) * self.scale
    return Scaled(classes, scale=nn.Parameter(torch.tensor(1.5)))
def sized(classes, image_size, channels):
    return nn.Sequential(nn.Flatten(), nn.Linear(channels * image_size**2, classes))
def attention(classes):
    class Attending(nn.Module):
        def __init__(self):
            super().__init__()
            self.heads, self.out = nn.MultiheadAttention(12, 2, batch_first=True), nn.Linear(12, classes)
        def forward(self, x): return self.out(self.heads(x[:, None], x[:, None], x[:, None])[0][:, 0])
    return Attending()

def scripted(classes):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.Sequential(torch.jit.script(nn.Linear(12, classes)))
def two_outputs(classes):
    class Two(Net):
        def forward(self, x): return super().forward(x), x
    return Two(classes)
def in_training(classes):
    class Two(Net):
        def forward(self, x): return (super().forward(x), x) if self.training else super().forward(x)
    return Two(classes)
def too_few(classes): return Net(classes - 1)
def nothing(classes): return nn.Flatten()
def unused(classes): return Net(classes, spare=nn.Linear(3, 3))
def half(classes):
    net = Net(classes)
    net.out.bfloat16()
    return net
def halves(classes):
    net = Net(classes)
    net.register_buffer("table", torch.ones(3, dtype=torch.bfloat16))
    return net
def one_memory(classes):
    net = nn.Sequential(nn.Linear(12, 12), nn.Linear(12, 12), nn.Linear(12, classes))
    net[1].weight.data = net[0].weight.data
    return net
def sparse(classes):
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.words = nn.Embedding(50, classes, sparse=True)
        def forward(self, x): return self.words(x.long().clamp(0, 49)).mean(1)
    return Words()
def raises(classes):
    class Wrong(Net):
        def forward(self, x): return self.out(x)
    return Wrong(classes)
def fails(classes): raise KeyError("weights.pt")
def number(classes): return classes
"""
)
TEXT = (
    HEADER
    + """
def data():
    g = torch.Generator().manual_seed(0)
    x = torch.randint(0, 50, (300, 12), generator=g)
    y = (x < 10).sum(1).clamp(max=2)
    return TensorDataset(x[:250], y[:250]), TensorDataset(x[250:], y[250:])

class Text(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.words, self.out = nn.EmbeddingBag(50, 16), nn.Linear(16, classes)

    def forward(self, x):
        return self.out(self.words(x))

def build(classes): return Text(classes)
"""
)


def written(folder: Path, source: str, name: str = "mine.py") -> Path:
    path = folder / name
    path.write_text(source)
    return path


# Data is TEXT's. `last` has no gradient from the fourth call in training on, on the ranks that
# SKIPS names.
SKIPS = (
    TEXT
    + """
import os

class Skips(Text):
    def __init__(self, classes):
        super().__init__(classes)
        self.last, self.calls = nn.Linear(classes, classes), 0

    def forward(self, x):
        self.calls += self.training
        scores = super().forward(x)
        skips = self.calls > 3 and os.environ["RANK"] in os.environ["SKIPS"]
        return scores if skips else self.last(scores)

def skips(classes): return Skips(classes)
"""
)
