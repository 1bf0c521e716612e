"""What the encodings lose, send and make good."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.base.config.run_config import RunConfig
from hvdtrain.base.errors import UsageError
from hvdtrain.base.numerics import compression
from hvdtrain.base.numerics.compression import Compressor
from hvdtrain.runs.request import check

NAMES = ["none", "fp16", "bf16", "int8", "topk:0.05", "2bit:0.5"]
LOSSY = ["int8", "topk:0.05", "2bit:0.5"]


def vector(n, seed=0):
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("name", "share"),
    [
        ("none", 1),
        ("fp16", 1 / 2),
        ("bf16", 1 / 2),
        ("int8", 1 / 4),
        ("topk:0.01", 0.02),
        ("2bit:0.5", 1 / 16),
    ],
)
def test_how_much_is_sent(name, share):
    parts = Compressor(name).encode(vector(100_000))
    assert sum(part.nbytes for part in parts) == pytest.approx(400_000 * share, rel=0.01)


def test_none_loses_nothing_and_half_precision_what_it_must():
    x = vector(1000)
    for name, error in [("none", 0), ("fp16", 2**-11), ("bf16", 2**-8)]:
        read = Compressor(name).decode(Compressor(name).encode(x.clone()))
        assert ((read - x).abs() <= error * x.abs() + 1e-7).all()


def test_int8_is_within_half_a_step_of_the_largest():
    x = vector(1000)
    read = Compressor("int8").decode(Compressor("int8").encode(x.clone()))
    assert (read - x).abs().max() <= x.abs().max() / 127 / 2 * 1.001


def test_topk_sends_the_largest():
    x = vector(1000)
    read = Compressor("topk:0.05").decode(Compressor("topk:0.05").encode(x.clone()))
    kept = read != 0
    assert kept.sum() == 50
    assert torch.equal(read[kept], x[kept])
    assert x[kept].abs().min() >= x[~kept].abs().max()


def test_two_bits_by_hand():
    """As MXNet does: at or beyond the threshold it is sent, and taken off; what stays waits."""
    encoder = Compressor("2bit:0.5")
    sent = [
        encoder.decode(encoder.encode(torch.tensor([0.3, -0.6, 0.5, 0.0, -0.2]))).tolist()
        for _ in range(3)
    ]
    assert sent == [[0, -0.5, 0.5, 0, 0], [0.5, -0.5, 0.5, 0, 0], [0, -0.5, 0.5, 0, -0.5]]


@pytest.mark.parametrize("name", LOSSY)
def test_what_was_left_out_is_sent_later(name):
    """Sums of what is sent follow the sums of the gradients: what is missing does not grow."""
    encoder, total, sent = Compressor(name), torch.zeros(200), torch.zeros(200)
    missing = []
    for step in range(300):
        x = vector(200, step) * 0.1 + 0.02
        total += x
        sent += encoder.decode(encoder.encode(x.clone()))
        missing.append((total - sent).abs().max().item())
    assert max(missing[200:]) <= 1.5 * max(missing[50:200]) + 1e-5
    assert (sent / total).mean() > 0.8


@given(
    st.sampled_from(NAMES),
    st.lists(st.integers(1, 200), min_size=1, max_size=5),
    st.integers(0, 99),
)
def test_a_parameter_is_sent_alike_whatever_else_is_in_its_bucket(name, lengths, seed):
    """Of layers whose gradients are a thousand times as large, too."""
    together, alone = Compressor(name, lengths), [Compressor(name) for _ in lengths]
    for step in range(2):
        own = [vector(n, seed + step + i) * 1000**i for i, n in enumerate(lengths)]
        expected = [
            encoder.decode(encoder.encode(x.clone())) for encoder, x in zip(alone, own, strict=True)
        ]
        read = Compressor(name).decode(together.encode(torch.cat(own)))
        assert torch.equal(read, torch.cat(expected))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_no_number_does_not_hide(name, value):
    """Nor in the gradients after it, where what was not sent is kept."""
    encoder = Compressor(name, [100, 150])
    x = vector(250)
    x[120] = value
    for gradient in (x, vector(250, 1)) if name in LOSSY else (x,):
        read = Compressor(name).decode(encoder.encode(gradient.clone()))
        assert not read[120].isfinite()
        assert read[:100].isfinite().all()


def test_a_gradient_of_zeros_stays_one():
    for name in NAMES:
        assert not Compressor(name).decode(Compressor(name).encode(torch.zeros(10))).any()


@pytest.mark.parametrize(
    "name",
    ["", "nosuch", "topk", "topk:0", "topk:2", "topk:x", "2bit", "2bit:-1", "2bit:nan", "fp16:1"],
)
def test_unknown_names_are_refused_with_the_known(name):
    with pytest.raises(UsageError, match="choose from " + ", ".join(compression.names())):
        compression.parse(name)


def test_modes_take_what_they_can_send():
    for name in NAMES:
        check(RunConfig(mode="ps-ssp", servers=1, compression=name))
    check(RunConfig(mode="allreduce", compression="fp16"))
    for mode, name in [("allreduce", "int8"), ("ddp", "fp16"), ("single", "fp16")]:
        with pytest.raises(UsageError, match="which takes none"):
            check(RunConfig(mode=mode, compression=name))
